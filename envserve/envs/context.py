"""The place of an env in its batch.

The env can query its place while it is being built, for example to choose a port, a
folder or a GPU that no other env uses.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: A placeholder, such as `{row}`, or an escaped one, such as `{{row}}`.
_PLACEHOLDER: Final = re.compile(r"\{(\{(?:row|worker)\})\}|\{(row|worker)\}")


@dataclass(frozen=True)
class EnvContext:
    """The place of an env in its batch.

    Attributes:
      row: Row of the env in the whole batch, even if the batch uses several servers;
        the first row of the block if the env is a vector env.
      num_envs: Number of rows of the whole batch.
      worker: Index of the worker process among those that serve the batch on this host.
      num_workers: Number of worker processes that serve the batch on this host.
    """

    row: int
    num_envs: int
    worker: int = 0
    num_workers: int = 1

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of constructor arguments, with placeholders replaced.

        Envs may change their arguments, but each env gets the original ones. Arguments
        that cannot be copied, such as modules, are shared by the envs of a worker.
        """
        try:
            copies = copy.deepcopy({**kwargs})
        except Exception:  # from Python, or from the user's class
            copies = {name: _copy(value) for name, value in kwargs.items()}
        return {name: self.fill(value) for name, value in copies.items()}

    def fill(self, value: Any) -> Any:
        """Return a value, with `{row}` and `{worker}` replaced in strings.

        Strings in lists, tuples and dicts are also replaced, in copies of them. Other
        braces remain unchanged. `{{row}}` becomes a literal `{row}`.
        """
        if isinstance(value, str) and _PLACEHOLDER.search(value):
            numbers = vars(self)
            return _PLACEHOLDER.sub(lambda m: m[1] or str(numbers[m[2]]), value)
        if type(value) is dict:
            return {key: self.fill(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self.fill, value))
        return value

    def run(self, build: Callable[[], T]) -> T:
        """Call a function while `env_context` returns this object in this thread."""
        token = _context.set(self)
        try:
            return build()
        finally:
            _context.reset(token)


def _copy(value: Any) -> Any:
    """Return a deep copy of a value; if it cannot be copied, return the value."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


_context: ContextVar[EnvContext | None] = ContextVar("env_context", default=None)


def env_context() -> EnvContext | None:
    """Return the batch position of the env that this worker is building.

    Call this function in the constructor of an env or wrapper, and store the result if
    you need it later. Everywhere else, for example in an env that `gymnasium.make`
    builds, the function returns None.
    """
    return _context.get()
