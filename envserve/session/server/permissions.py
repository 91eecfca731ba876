"""Checks clients' permissions: to pass arguments to envs, and to access attributes.

A request is rejected unless a rule of this module or of the operator allows it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from envserve.keys.grant import Grant
from envserve.settings import ExposeRule, HostSettings, KwargRule
from envserve.wire.constants import ErrorCode
from envserve.wire.error_body import ErrorBody

_ATTRIBUTE_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
#: Attributes that every client may access, and the allowed kinds of access.
_ALWAYS_EXPOSED: Final = {
    "render": frozenset({"call"}),
    "render_mode": frozenset({"call", "get"}),
    "metadata": frozenset({"call", "get"}),
    "action_space": frozenset({"get"}),
    "np_random": frozenset({"get"}),
    "np_random_seed": frozenset({"get"}),
    "observation_space": frozenset({"get"}),
    "spec": frozenset({"get"}),
    "wrapper_names": frozenset({"get"}),
}


class Rejection(Exception):
    """A request that is answered with an ERROR instead of being executed.

    Attributes:
      body: Body of the ERROR.
      event: Name of the event in the audit log.
      requested: Name and number of the requested envs; "" and 0 unless the request
        was an ATTACH.
    """

    event = "refused"
    requested: tuple[str, int] = ("", 0)

    def __init__(self, code: ErrorCode, text: str, **fields: Any) -> None:
        super().__init__(text)
        self.body = ErrorBody(code=code, text=text, **fields)


class OverQuota(Rejection):
    """A request that exceeds the quota of its user."""

    event = "over quota"


class RateLimited(OverQuota):
    """A request that exceeds a rate limit; it can succeed when it is resent later."""


def check_kwargs(rules: Collection[KwargRule], kwargs: Mapping[str, Any]) -> None:
    """Raise Rejection unless the rules allow all keyword arguments of an env.

    A string could be the path of any file on the server, so it is allowed only if a
    rule lists it or allows any value.
    """
    for name, value in kwargs.items():
        if name == "render_mode" and isinstance(value, str) and value == "rgb_array":
            continue
        value = value.item() if isinstance(value, np.generic) else value
        parts = (rule.partition(":") for rule in rules)
        if any(known == name and _matches(rule, value) for known, _, rule in parts):
            continue
        allowed = ", ".join(sorted(rules)) or "none"
        raise Rejection(
            ErrorCode.REFUSED,
            f"env argument {name[:64]!r} may not be {value!r:.64}; allowed: {allowed}, "
            f"and render_mode='rgb_array' (a name without values allows any number or "
            f"bool). The operator can allow more with --allow-kwarg and, if this "
            f"client's line in the clients file has kwargs=, must add it there too",
        )


def _matches(rule: str, value: Any) -> bool:
    """Return whether a value matches a rule (without the name), like "int[0,9]"."""
    kind, _, bounds = rule.partition("[")
    if isinstance(value, bool):  # although a bool is an int, it is no number here
        return kind in ("", "bool", "any")
    if kind == "any":
        return True
    if kind in ("", "int", "float"):
        types = int if kind == "int" else (int, float)
        low, high = (bounds[:-1] or "-inf,inf").split(",")
        is_number = isinstance(value, types)
        return is_number and (not bounds or float(low) <= value <= float(high))
    is_choice = kind != "bool" and isinstance(value, str | int)
    return is_choice and str(value) in rule.split("|")


def check_call(host: HostSettings, kind: str, name: str, env_index: int) -> None:
    """Raise Rejection unless clients may get, set or call an attribute of an env.

    `host` contains the server's settings, restricted to the client's key. The error
    names the row `env_index`.
    """
    is_exposed = kind in _ALWAYS_EXPOSED.get(name, ())
    is_exposed |= f"{kind}:{name}" in _expand_kinds(host.exposed)
    if is_exposed and _ATTRIBUTE_NAME.fullmatch(name):
        return
    exposed = ", ".join(sorted(host.exposed | _ALWAYS_EXPOSED.keys()))
    advice = (
        f"The operator can allow it with --expose {kind}:NAME and, if this client's "
        f"line in the clients file has expose=, must add it there too"
    )
    if not _ATTRIBUTE_NAME.fullmatch(name):
        advice = (
            "A server allows only names of lower-case letters, digits and underscores "
            "that begin with a letter and have at most 64 characters; add an attribute "
            "with such a name to the env"
        )
    raise Rejection(
        ErrorCode.REFUSED,
        f"{kind} of {name[:64]!r} is not allowed; allowed: {exposed} "
        f"(NAME alone means get:NAME and call:NAME). {advice}",
        env_index=env_index,
    )


def _expand_kinds(rules: Collection[ExposeRule]) -> frozenset[ExposeRule]:
    names = {rule for rule in rules if ":" not in rule}
    expanded = {f"{kind}:{name}" for name in names for kind in ("get", "call")}
    return frozenset(expanded | set(rules) - names)


@lru_cache(maxsize=64)
def restrict(host: HostSettings, grant: Grant) -> HostSettings:
    """Return the host's settings, restricted to the grant of a key."""
    exposed = host.exposed
    if grant.exposed is not None:
        exposed = _expand_kinds(exposed) & _expand_kinds(grant.exposed)
    workers = min(host.num_workers, grant.max_processes or host.num_workers)
    limits = [m for m in (host.max_row_mib, grant.max_row_mib) if m is not None]
    max_row_mib = min(limits, default=None)
    return replace(host, exposed=exposed, num_workers=workers, max_row_mib=max_row_mib)
