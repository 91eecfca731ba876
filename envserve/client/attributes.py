"""Attributes of a batch's envs: called, read and set one env at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from envserve import codec
from envserve.client.lane_group import LaneGroup
from envserve.client.row_set import check_rows
from envserve.errors import CallError
from envserve.lane import Call
from envserve.text import printable

__all__ = ["Attributes"]

_MAX_TEXT: Final = 16 << 10


class Attributes:
    """What `BatchEnv` has for them.

    Attributes:
      num_envs: Number of rows.
    """

    num_envs: int
    _group: LaneGroup

    _begin: Callable[[], None]

    def call(self, env_index: int, name: str, *arguments: Any) -> Any:
        """Calls a method of one env, or reads an attribute that is not callable.

        Args:
          env_index: Row of the env.
          name: Name of the attribute; servers allow only those they expose.
          arguments: Plain values: numbers, strings, bytes, lists, dicts, arrays.

        Raises:
          CallError: With the traceback from the worker, if the method raised.
        """
        return self._call(env_index, "call", name, arguments)

    def get_attr(self, name: str) -> list[Any]:
        """Returns an attribute of every env, in row order."""
        return [self._call(row, "get", name, ()) for row in range(self.num_envs)]

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Sets an attribute of every env to its own value."""
        if len(values) != self.num_envs:
            raise ValueError(f"expected {self.num_envs} values; got {len(values)}")
        for row, value in enumerate(values):
            self._call(row, "set", name, (value,))

    def render(self, env_index: int) -> Any:
        """Returns what one env renders; see the env's `render_mode`."""
        return self.call(env_index, "render")

    def _call(
        self,
        env_index: int,
        kind: Literal["call", "get", "set"],
        name: str,
        arguments: tuple[Any, ...],
    ) -> Any:
        self._begin()
        check_rows([env_index], self.num_envs)
        if name.startswith("_"):
            raise CallError(f"expected the name of a public attribute; got {name!r}")
        result = self._group.call(Call(env_index, kind, name, arguments))
        answer = codec.decode(result, max_bytes=len(result))
        if "error" in answer:
            where = self._group.block_of(env_index).lane.name
            error, traceback = (
                printable(str(answer[key])[-_MAX_TEXT:])
                for key in ("error", "traceback")
            )
            raise CallError(
                f"Env {env_index} ({where}): {name}: {error}",
                env_index=env_index,
                remote_traceback=traceback,
            )
        return answer["value"]
