"""What the server's half of a conversation decides, for the shell to carry out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envserve.lane import Call, PoolConfig, Reset
from envserve.wire import Buffer

__all__ = [
    "Decision",
    "EndPool",
    "Reply",
    "RunCall",
    "RunReset",
    "RunStep",
    "StartPool",
]


@dataclass(frozen=True, slots=True)
class Reply:
    """Send frames to a peer; if that is not possible now, drop them.

    The client asks again, and the answer is still there.
    """

    route: bytes
    frames: list[Buffer]


@dataclass(frozen=True, slots=True)
class StartPool:
    """Start the pool of a session; report `pool_ready` or `pool_failed`."""

    session: int
    config: PoolConfig


@dataclass(frozen=True, slots=True)
class RunStep:
    """Step blocks of a session's pool; report `pool_finished`."""

    session: int
    blocks: Sequence[int]
    is_alone: bool = False


@dataclass(frozen=True, slots=True)
class RunReset:
    """Reset blocks of a session's pool; report `pool_finished`."""

    session: int
    resets: Sequence[Reset]


@dataclass(frozen=True, slots=True)
class RunCall:
    """Call an env of a session's pool; report `pool_finished`."""

    session: int
    call: Call


@dataclass(frozen=True, slots=True)
class EndPool:
    """Close the pool of a session; report `pool_closed`."""

    session: int


Decision = Reply | StartPool | RunStep | RunReset | RunCall | EndPool
