"""What a server allows its clients: how many envs, which arguments and attributes.

Everything that is not named here, or by the server's operator, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from envserve.keys.grant import Grant
from envserve.settings import ExposeRule, HostSettings, KwargRule
from envserve.wire.constants import ErrorCode
from envserve.wire.handshake import ErrorBody

_ATTRIBUTE_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ALWAYS_EXPOSED: Final = {
    "render": frozenset({"call"}),
    "render_mode": frozenset({"call", "get"}),
    "metadata": frozenset({"call", "get"}),
    "np_random_seed": frozenset({"get"}),
}


class Refusal(Exception):
    """A request that is answered with an ERROR, and not executed.

    Attributes:
      body: The ERROR's body.
      event: What an audit calls it.
      asked: The env that was asked for, and how many; "" and 0 for anything else.
    """

    event = "refused"
    requested: tuple[str, int] = ("", 0)

    def __init__(self, code: ErrorCode, text: str, **fields: Any) -> None:
        super().__init__(text)
        self.body = ErrorBody(code=code, text=text, **fields)


class OverQuota(Refusal):
    """More than a user may have."""

    event = "over quota"


class RateLimited(OverQuota):
    """More than a user may have now, and not in a moment."""


def check_kwargs(rules: Collection[KwargRule], kwargs: Mapping[str, Any]) -> None:
    """Raises Refusal for an argument of env constructors that clients may not set.

    A str may name any file of the host's: so it has to be one that a rule lists.
    """
    for name, value in kwargs.items():
        if name == "render_mode" and isinstance(value, str) and value == "rgb_array":
            continue
        named = (rule.partition(":") for rule in rules)
        if any(known == name and _matches(rule, value) for known, _, rule in named):
            continue
        allowed = ", ".join(sorted(rules)) or "none"
        raise Refusal(
            ErrorCode.REFUSED,
            f"env argument {name[:64]!r} is not allowed to be {value!r:.64} (allowed: "
            f"{allowed}, and render_mode='rgb_array'; a name alone stands for numbers "
            f"and bools); the operator can allow more by --allow-kwarg, or for a key "
            f"by kwargs= in the file clients",
        )


def _matches(rule: str, value: Any) -> bool:
    """Tells whether a value is as a rule says, which is without its name here."""
    kind, _, bounds = rule.partition("[")
    if kind == "any":
        return True
    if isinstance(value, bool) and kind in ("", "bool"):
        return True
    if kind in ("", "int", "float"):
        types = int if kind == "int" else (int, float)
        low, high = (bounds[:-1] or "-inf,inf").split(",")
        is_number = isinstance(value, types) and not isinstance(value, bool)
        return is_number and (not bounds or float(low) <= value <= float(high))
    is_word = isinstance(value, str | int) and not isinstance(value, bool)
    return kind != "bool" and is_word and str(value) in rule.split("|")


def check_call(host: HostSettings, kind: str, name: str, env_index: int) -> None:
    """Raises Refusal for an attribute that clients may not use in this way."""
    is_exposed = f"{kind}:{name}" in _with_kinds(host.exposed)
    if _ATTRIBUTE_NAME.fullmatch(name) and (
        is_exposed or kind in _ALWAYS_EXPOSED.get(name, ())
    ):
        return
    exposed = ", ".join(sorted(host.exposed | _ALWAYS_EXPOSED.keys()))
    raise Refusal(
        ErrorCode.REFUSED,
        f"Env {env_index}: {kind} of {name[:64]!r} is not allowed (exposed: {exposed}; "
        f"a name alone stands for get and call); the operator can allow it by --expose "
        f"{kind}:NAME, or for a key by expose= in the file clients",
        env_index=env_index,
    )


def _with_kinds(rules: Collection[ExposeRule]) -> frozenset[ExposeRule]:
    named = {rule for rule in rules if ":" not in rule}
    both = {f"{kind}:{name}" for name in named for kind in ("get", "call")}
    return frozenset(both | set(rules) - named)


@lru_cache(maxsize=64)
def restrict(host: HostSettings, grant: Grant) -> HostSettings:
    """Returns what a host allows to a key, which is never more than to anybody."""
    exposed = host.exposed
    if grant.exposed is not None:
        exposed = _with_kinds(exposed) & _with_kinds(grant.exposed)
    workers = min(host.num_workers, grant.max_processes or host.num_workers)
    limits = [m for m in (host.max_row_mib, grant.max_row_mib) if m is not None]
    most = min(limits, default=None)
    return replace(host, exposed=exposed, num_workers=workers, max_row_mib=most)
