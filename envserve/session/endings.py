"""Why leases end by the server's will, and why there are no new ones, as ERRORs."""

from __future__ import annotations

from envserve.session.policy import Refusal
from envserve.wire import ErrorBody, ErrorCode, Executed

__all__ = ["drained", "lease_lost", "refusal_while_ending"]


def lease_lost(text: str) -> ErrorBody:
    """Says why a client's envs are gone."""
    return ErrorBody(code=ErrorCode.LEASE_LOST, executed=Executed.UNKNOWN, text=text)


def drained(why: str) -> ErrorBody:
    """Says the same while, or after, the server is drained."""
    return lease_lost(f"the server was drained: {why}")


def refusal_while_ending() -> Refusal:
    """Says that there are no new leases."""
    return Refusal(
        ErrorCode.ENVS_BUSY,
        "the server is draining: it gives out no envs any more, and is about to stop; "
        "attach to another, or again once it was restarted",
        is_draining=True,
    )
