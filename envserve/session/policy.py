"""What a server allows its clients: how many envs, which arguments and attributes.

Everything that is not named here, or by the server's operator, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from envserve.wire import ErrorBody, ErrorCode

__all__ = ["Policy", "Refusal"]

_ATTRIBUTE_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ALWAYS_EXPOSED: Final = {
    "render": frozenset({"call"}),
    "render_mode": frozenset({"call", "get"}),
    "metadata": frozenset({"call", "get"}),
}


class Refusal(Exception):
    """A request that is answered with an ERROR, and not executed.

    Attributes:
      body: The ERROR's body.
    """

    def __init__(self, code: ErrorCode, text: str, **fields: Any) -> None:
        """Builds the body, with further fields of it."""
        super().__init__(text)
        self.body = ErrorBody(code=code, text=text, **fields)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits of a server. Durations are in seconds."""

    #: Most processes that one lease gets.
    num_workers: int
    #: Together with `num_workers`, how many envs all leases may have.
    envs_per_worker: int = 64
    #: Arguments of env constructors that clients may set.
    allowed_kwargs: frozenset[str] = frozenset()
    #: Attributes of envs that clients may get, set and call.
    exposed: frozenset[str] = frozenset()
    #: Silence after which a client's envs are given up.
    lease_seconds: float = 60.0
    step_timeout_seconds: float = 30.0
    reset_timeout_seconds: float = 120.0
    padding_after_seconds: float = 0.1
    max_restarts: int = 5
    crash_dir: str | None = ""
    #: Longest frame that the server accepts.
    max_message_bytes: int = 1 << 20
    #: Modules that register envs when workers import them.
    import_modules: tuple[str, ...] = ()

    @property
    def total_envs(self) -> int:
        """How many envs all leases may have together."""
        return self.num_workers * self.envs_per_worker

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raises Refusal for an argument that clients may not set."""
        for name, value in kwargs.items():
            is_rgb = isinstance(value, str) and value == "rgb_array"
            if name in self.allowed_kwargs or (name == "render_mode" and is_rgb):
                continue
            allowed = ", ".join(sorted(self.allowed_kwargs)) or "none"
            raise Refusal(
                ErrorCode.REFUSED,
                f"env argument {name[:64]!r} is not allowed (allowed: {allowed}, and "
                f"render_mode='rgb_array'); start the server with --allow-kwarg NAME",
            )

    def check_call(self, kind: str, name: str, env_index: int) -> None:
        """Raises Refusal for an attribute that clients may not use in this way."""
        is_exposed = name in self.exposed or kind in _ALWAYS_EXPOSED.get(name, ())
        if _ATTRIBUTE_NAME.fullmatch(name) and is_exposed:
            return
        exposed = ", ".join(sorted(self.exposed | _ALWAYS_EXPOSED.keys()))
        raise Refusal(
            ErrorCode.REFUSED,
            f"Env {env_index}: {kind} of {name[:64]!r} is not allowed (exposed: "
            f"{exposed}); start the server with --expose NAME",
            env_index=env_index,
        )
