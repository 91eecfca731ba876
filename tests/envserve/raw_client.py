"""A client that can send arbitrary messages to a FakeServer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from envserve.lane import Outcome
from envserve.wire.bodies import CallBody, ResetBody
from envserve.wire.constants import MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.message import Buffer, Message, decode, encode
from tests.envserve.session_fakes import FakePool, FakeServer, make_attach, make_call

SESSION = 11
Entries = tuple[tuple[int, int], ...]


class RawClient:
    """A client with a lease, by default on four envs in two blocks."""

    def __init__(self, server: FakeServer, **changes: Any) -> None:
        self.server = server
        self.now = 0.0
        self._num_requests = 1
        attach = self.frames(
            MessageType.ATTACH, (), make_attach(**changes).encode(), epoch=0
        )
        assert MessageType.GRANTED in [reply.type for reply in self.send(attach)]
        self.num_blocks = len(self.pool.blocks)

    @property
    def pool(self) -> FakePool:
        return self.server.pools["", SESSION]

    def frames(
        self, kind: MessageType, entries: Entries, body: bytes = b"", **changes: Any
    ) -> list[Buffer]:
        """Return the frames of a request with a new request number."""
        self._num_requests += 1
        numbers = {"session": SESSION, "boot": self.server.boot, "epoch": 1}
        fields = {"request": self._num_requests, **numbers, **changes}
        return encode(Message(type=kind, entries=entries, body=body, **fields))

    def step(
        self, action: int, seq: int = 1, blocks: Sequence[int] = ()
    ) -> list[Buffer]:
        """Return a STEP for some blocks (default: all) with one action for all rows."""
        listed = blocks or range(self.num_blocks)
        rows = sum(b.stop - b.start for b in self.pool.blocks if b.index in listed)
        entries = tuple((block, seq) for block in listed)
        body = action.to_bytes(8, "little", signed=True) * rows
        return self.frames(MessageType.STEP, entries, body)

    def reset(self, resets: dict[int, Any], seq: int = 1) -> list[Buffer]:
        """Return a RESET; `resets` holds each block's rows and seeds."""
        body = ResetBody(resets=tuple(resets.values())).encode()
        entries = tuple((block, seq) for block in resets)
        return self.frames(MessageType.RESET, entries, body)

    def call(
        self, row: int, kind: Any, name: str, arguments: Any = (), seq: int = 1
    ) -> list[Buffer]:
        """Return a CALL for one row."""
        body = CallBody.from_calls([make_call([row], kind, name, *arguments)])
        (block,) = (b.index for b in self.pool.blocks if b.start <= row < b.stop)
        return self.frames(MessageType.CALL, ((block, seq),), body.encode())

    def send(
        self, frames: Sequence[Buffer], route: bytes = b"r", after: float = 1.0
    ) -> list[Message]:
        """Deliver a message after `after` seconds; return the server's replies."""
        self.now += after
        self.server.receive((route, ""), frames, self.now)
        return self.take_replies()

    def deliver_outcomes(
        self, outcomes: Sequence[Outcome], absent: Sequence[int] = ()
    ) -> list[Message]:
        """Deliver outcomes from the pool; return the server's replies."""
        protocol = self.server.protocol
        self.server.carry_out(
            protocol.pool_finished(("", SESSION), outcomes, absent), 0.0
        )
        return self.take_replies()

    def finish(self, *blocks: int, absent: Sequence[int] = ()) -> list[Message]:
        """Finish the operations of some blocks (default: all); return the replies."""
        if not blocks and not absent:
            blocks = tuple(self.pool.running)
        return self.deliver_outcomes(
            [self.pool.finish(block) for block in blocks], absent
        )

    def take_replies(self) -> list[Message]:
        return [decode(frames) for frames in self.server.take_replies()]


def changed(frames: Sequence[Buffer], **fields: Any) -> list[Buffer]:
    return encode(dataclasses.replace(decode(frames), **fields))


def blocks_of(message: Message) -> list[int]:
    return [block for block, _ in message.entries]


def errors_in(messages: Sequence[Message]) -> list[ErrorBody]:
    return [ErrorBody.decode(m.body) for m in messages if m.type is MessageType.ERROR]
