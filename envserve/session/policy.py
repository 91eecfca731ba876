"""What a server allows its clients: how many envs, which arguments and attributes.

Everything that is not named here, or by the server's operator, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from envserve.settings import HostSettings
from envserve.wire import ErrorBody, ErrorCode

__all__ = ["Health", "Refusal", "check_call", "check_kwargs"]

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
        super().__init__(text)
        self.body = ErrorBody(code=code, text=text, **fields)


@dataclass(frozen=True, kw_only=True)
class Health:
    """How the process that serves is, as far as its clients are told.

    Attributes:
      is_starting: Whether workers cannot be started yet.
      loop_lag_seconds: How late the serving loop was lately, at worst.
    """

    is_starting: bool = False
    loop_lag_seconds: float = 0.0


def check_kwargs(host: HostSettings, kwargs: Mapping[str, Any]) -> None:
    """Raises Refusal for an argument of env constructors that clients may not set."""
    for name, value in kwargs.items():
        is_rgb = isinstance(value, str) and value == "rgb_array"
        if name in host.allowed_kwargs or (name == "render_mode" and is_rgb):
            continue
        allowed = ", ".join(sorted(host.allowed_kwargs)) or "none"
        raise Refusal(
            ErrorCode.REFUSED,
            f"env argument {name[:64]!r} is not allowed (allowed: {allowed}, and "
            f"render_mode='rgb_array'); start the server with --allow-kwarg NAME",
        )


def check_call(host: HostSettings, kind: str, name: str, env_index: int) -> None:
    """Raises Refusal for an attribute that clients may not use in this way."""
    is_exposed = name in host.exposed or kind in _ALWAYS_EXPOSED.get(name, ())
    if _ATTRIBUTE_NAME.fullmatch(name) and is_exposed:
        return
    exposed = ", ".join(sorted(host.exposed | _ALWAYS_EXPOSED.keys()))
    raise Refusal(
        ErrorCode.REFUSED,
        f"Env {env_index}: {kind} of {name[:64]!r} is not allowed (exposed: "
        f"{exposed}); start the server with --expose NAME",
        env_index=env_index,
    )
