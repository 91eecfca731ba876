"""What the server's half decides, for the shell to carry out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from envserve.errors import RemoteProtocolError
from envserve.lane import Block, Call, Reset
from envserve.settings import PoolSettings
from envserve.wire import Buffer, CallBody, Message, Peer, ResetBody
from envserve.wire.constants import RESET_BYTES, RESET_ROW_BYTES

__all__ = [
    "Decision",
    "EndPool",
    "Reply",
    "RunCall",
    "RunReset",
    "RunStep",
    "SessionId",
    "StartPool",
    "read_call",
    "read_resets",
]


#: A user, and the number that it drew for a session: what one user has under a number,
#: another cannot find there.
SessionId = tuple[str, int]


class Reply(NamedTuple):
    """Send frames to a peer; if that is not possible now, drop them.

    The client asks again, and the answer is still there.
    """

    peer: Peer
    frames: list[Buffer]


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
    """Call an env of a session's pool; report `pool_finished`."""

    session: SessionId
    call: Call


class EndPool(NamedTuple):
    """Close the pool of a session; report `pool_closed`."""

    session: SessionId


Decision = Reply | StartPool | RunStep | RunReset | RunCall | EndPool


def read_resets(message: Message, blocks: Sequence[Block]) -> list[Reset]:
    """Returns what a RESET asks for; raises RemoteProtocolError."""
    listed = [blocks[index] for index, _ in message.entries]
    num_rows = sum(block.stop - block.start for block in listed)
    limit = RESET_BYTES + RESET_ROW_BYTES * num_rows
    if len(message.body) > limit:
        raise RemoteProtocolError(
            f"expected at most {limit} bytes for {num_rows} rows; "
            f"got {len(message.body)}"
        )
    body = ResetBody.decode(message.body)
    if len(body.resets) != len(message.entries):
        raise RemoteProtocolError(
            f"expected a reset for each of {len(message.entries)} blocks; "
            f"got {len(body.resets)}"
        )
    resets = []
    for block, (rows, seeds) in zip(listed, body.resets, strict=True):
        allowed = range(block.start, block.stop)
        if rows is not None and (
            len(set(rows)) < len(rows) or not all(row in allowed for row in rows)
        ):
            raise RemoteProtocolError(f"expected distinct rows in {allowed}")
        count = len(allowed) if rows is None else len(rows)
        if seeds is not None and len(seeds) != count:
            raise RemoteProtocolError(
                f"expected {count} seeds for block {block.index}; got {len(seeds)}"
            )
        resets.append(Reset(block.index, rows, seeds))
    return resets


def read_call(message: Message, blocks: Sequence[Block]) -> Call:
    """Returns what a CALL asks for; raises RemoteProtocolError."""
    body = CallBody.decode(message.body)
    (index, _), *others = message.entries
    block = blocks[index]
    if others or not block.start <= body.env_index < block.stop:
        raise RemoteProtocolError(
            f"expected one block, and an env in rows {block.start} to "
            f"{block.stop - 1}; got env {body.env_index}"
        )
    if body.kind == "set" and len(body.arguments) != 1:
        raise RemoteProtocolError("expected one argument to set")
    return Call(body.env_index, body.kind, body.name, body.arguments)
