"""What the server's half decides, for the shell to carry out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from envserve.errors import LocalProtocolError, RemoteProtocolError
from envserve.lane import Block, Call, Reset
from envserve.settings import PoolSettings
from envserve.wire.bodies import CallBody, ResetBody
from envserve.wire.constants import (
    MAX_ARGUMENT_BLOCKS,
    MAX_ARGUMENT_BYTES,
    MAX_OPTIONS_BYTES,
    RESET_BYTES,
    RESET_ROW_BYTES,
)
from envserve.wire.message import Buffer, Message, Peer

__all__ = [
    "Decision",
    "EndPool",
    "Repeats",
    "Reply",
    "RunCall",
    "RunReset",
    "RunStep",
    "SessionId",
    "StartPool",
    "read_calls",
    "read_resets",
]


#: A user, and the number that it drew for a session: what one user has under a number,
#: another cannot find there.
SessionId = tuple[str, int]
#: Between copies of an answer: the first ones, and later ones.
_SECONDS: Final = 1.0
_LATER_SECONDS: Final = 60.0
_MAX_REPEATS: Final = 8


@dataclass(slots=True)
class Repeats:
    """How often an answer was given again.

    Whoever reads asks again because an answer was lost, and that happens seldom. What
    nobody reads stays in memory.
    """

    count: int = 0
    given_at: float = -math.inf

    def allow(self, now: float) -> bool:
        """Tells whether to give it again: once a second, after 8 times once a minute.

        It never ends: a client whose answers were all lost must not wait for ever.
        """
        wait = _SECONDS if self.count < _MAX_REPEATS else _LATER_SECONDS
        if now < self.given_at + wait:
            return False
        self.count += 1
        self.given_at = now
        return True


class Reply(NamedTuple):
    """Send frames to a peer; if that is not possible now, drop them.

    The client asks again, and the answer is still there. If it was given before,
    `repeats` has counted it.
    """

    peer: Peer
    frames: list[Buffer]
    repeats: Repeats | None = None


class StartPool(NamedTuple):
    """Start the pool of a session; report `pool_ready` or `pool_failed`."""

    session: SessionId
    config: PoolSettings


class RunStep(NamedTuple):
    """Step blocks of a session's pool; report `pool_finished`."""

    session: SessionId
    blocks: Sequence[int]


class RunReset(NamedTuple):
    """Reset blocks of a session's pool; report `pool_finished`."""

    session: SessionId
    resets: Sequence[Reset]


class RunCall(NamedTuple):
    """Call envs of a session's pool; report `pool_finished`."""

    session: SessionId
    calls: Sequence[Call]


class EndPool(NamedTuple):
    """Close the pool of a session; report `pool_closed`."""

    session: SessionId


Decision = Reply | StartPool | RunStep | RunReset | RunCall | EndPool


def read_resets(message: Message, blocks: Sequence[Block]) -> list[Reset]:
    """Returns what a RESET asks for; raises RemoteProtocolError."""
    listed = [blocks[index] for index, _ in message.entries]
    num_rows = sum(block.stop - block.start for block in listed)
    limit = RESET_BYTES + RESET_ROW_BYTES * num_rows
    body = ResetBody(resets=())
    if len(message.body) <= limit + MAX_OPTIONS_BYTES:
        body = ResetBody.decode(message.body)
    num_bytes = len(message.body) - len(body.options)
    if num_bytes > limit or (body.options and len(listed) > MAX_ARGUMENT_BLOCKS):
        raise RemoteProtocolError(
            f"expected at most {limit} bytes for {num_rows} rows beside options, and "
            f"{MAX_ARGUMENT_BLOCKS} blocks with them; got {num_bytes} bytes, and "
            f"{len(listed)} blocks"
        )
    if len(body.resets) != len(message.entries):
        raise RemoteProtocolError(
            f"expected a reset for each of {len(message.entries)} blocks; "
            f"got {len(body.resets)}"
        )
    resets = []
    for block, (rows, seeds) in zip(listed, body.resets, strict=True):
        resets.append(Reset(block.index, rows, seeds, body.options))
        try:
            resets[-1].check(block)
        except LocalProtocolError as error:
            raise RemoteProtocolError(str(error)) from None
    return resets


def read_calls(message: Message, blocks: Sequence[Block]) -> list[Call]:
    """Returns what a CALL asks for; raises RemoteProtocolError."""
    body = CallBody.decode(message.body)
    if len(body.calls) != len(message.entries):
        raise RemoteProtocolError(
            f"expected a call for each of {len(message.entries)} blocks; "
            f"got {len(body.calls)}"
        )
    calls: list[Call] = []
    num_bytes = 0
    for (index, _), (rows, raw) in zip(message.entries, body.calls, strict=True):
        allowed = range(blocks[index].start, blocks[index].stop)
        if not rows or len({*rows}) < len(rows) or not {*rows} <= {*allowed}:
            raise RemoteProtocolError(f"expected distinct rows in {allowed}")
        arguments = bytes(raw)
        if arguments == b"\xc0" and calls:
            arguments = calls[-1].arguments
        num_bytes += len(arguments)
        if num_bytes > MAX_ARGUMENT_BYTES:
            raise RemoteProtocolError(
                f"expected arguments that are at most {MAX_ARGUMENT_BYTES} bytes, "
                "counted for each block"
            )
        calls.append(Call(index, rows, body.kind, body.name, arguments))
    return calls
