"""Attributes of a batch's envs: called, read and set, of many at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np

from envserve.client.lane_group import LaneGroup
from envserve.client.row_set import check_rows
from envserve.errors import CallError, RemoteProtocolError
from envserve.lane import Call, CallKind
from envserve.spaces import codec
from envserve.worker.attribute_calls import MAX_RESULT_VALUES

__all__ = ["Attributes"]

_Rows = Sequence[int] | np.ndarray[Any, Any] | None

#: Values to set for more rows of a block than that holds, are set one after the other:
#: a server does not take more at once.
_MAX_SET_BYTES: Final = 1 << 10


class Attributes:
    """What `BatchEnv` has for them.

    All envs are asked at once, in one round trip to each server, unless what they say
    is longer than a few MiB. An error is raised once all have answered.

    Attributes:
      num_envs: Number of rows.
    """

    num_envs: int
    _group: LaneGroup

    _begin: Callable[[], None]

    def call(self, env_index: int, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Calls a method of one env, or reads an attribute that is not callable.

        Args:
          env_index: Row of the env.
          name: Name of the attribute; servers allow only those they expose.
          *arguments: Plain values: numbers, strings, bytes, lists, dicts, arrays.
          **named: The same, by name.

        Raises:
          CallError: With the traceback from the worker, if the method raised.
        """
        return self._use([env_index], "call", name, arguments, named)[0]

    def call_each(
        self, name: str, /, *arguments: Any, env_indices: _Rows = None, **named: Any
    ) -> list[Any]:
        """Does the same with some envs, or all; returns what each has given."""
        return self._use(env_indices, "call", name, arguments, named)

    def get_attr(self, name: str, env_indices: _Rows = None) -> list[Any]:
        """Returns an attribute of some envs, or all."""
        return self._use(env_indices, "get", name)

    def set_attr(
        self, name: str, values: Sequence[Any], env_indices: _Rows = None
    ) -> None:
        """Sets an attribute of some envs, or all, of each to its own value.

        An env that is replaced after a fault of its own gets it again; one whose worker
        or server was lost, and a vector env, does not.
        """
        rows = check_rows(env_indices, self.num_envs).tolist()
        if len(values) != len(rows):
            raise ValueError(f"expected {len(rows)} values; got {len(values)}")
        self._use(rows, "set", name, dict(zip(rows, values, strict=True)))

    def render(self, env_index: int | _Rows = None) -> Any:
        """Returns what an env renders; of several, or by default all, a list.

        See the envs' `render_mode`.
        """
        if isinstance(env_index, int | np.integer):
            return self.call(int(env_index), "render")
        return self.call_each("render", env_indices=env_index)

    def _use(
        self,
        env_indices: _Rows,
        kind: CallKind,
        name: str,
        arguments: Sequence[Any] | Mapping[int, Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        self._begin()
        rows = check_rows(env_indices, self.num_envs).tolist()
        if name.startswith("_"):
            raise CallError(f"expected the name of a public attribute; got {name!r}")

        def pack(asked: Sequence[int]) -> bytes:
            own = [arguments[row] for row in asked] if kind == "set" else arguments
            try:
                return codec.encode([list(own), named or {}])
            except codec.CodecError as error:
                raise CallError(
                    f"Env {asked[0]}: {name}: {error}", env_index=asked[0]
                ) from None

        found: dict[int, Any] = {}
        of_all = pack(rows) if kind != "set" else b""
        while missing := sorted({*rows} - found.keys()):
            calls, listed = {}, []
            for block, group in groupby(missing, self._group.blocks.block_of):
                asked = [*group]
                packed = of_all or pack(asked)
                while kind == "set" and len(asked) > 1 and len(packed) > _MAX_SET_BYTES:
                    asked = asked[: len(asked) // 2]
                    packed = pack(asked)
                here = tuple([row - block.offset for row in asked])
                calls[block.position] = Call(block.lane_block, here, kind, name, packed)
                listed.append((block, asked))
            for (block, asked), outcome in zip(
                listed, self._group.call(calls), strict=True
            ):
                faults = {f.env_index + block.offset: f for f in outcome.faults}
                failed = next((row for row in asked if row in faults), None)
                if failed is not None:
                    fault = faults[failed]
                    raise CallError(
                        f"Env {failed} ({block.lane.name}): {name}: {fault.cause}",
                        env_index=failed,
                        remote_traceback=fault.detail,
                    )
                found.update(zip(asked, _values_in(outcome.result), strict=False))
        return [found[row] for row in rows]


def _values_in(result: bytes) -> list[Any]:
    most = 2 * MAX_RESULT_VALUES
    values = codec.decode(result, max_bytes=len(result), max_values=most)
    if not isinstance(values, list) or not values:
        raise RemoteProtocolError("expected a value for at least one env; got none")
    return values
