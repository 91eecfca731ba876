"""A client that can break any rule of the protocol, to test how a server reacts.

Its methods raise RemoteProtocolError if a reply of the server violates the protocol.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from gymnasium.vector.utils import batch_space

from envserve.client.link.connection import Connection
from envserve.errors import RemoteProtocolError
from envserve.slab import Rows
from envserve.spaces.action_checks import check_actions
from envserve.wire.bodies import Attach, Granted, Pong, ResetBody
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Hello, Welcome
from envserve.wire.message import Buffer, Message, decode, encode
from envserve.wire.result_report import ResultReport
from envserve.wire.rows import BlockParts, RowCodec

_REPLY_SECONDS: Final = 5.0
#: Maximum time to wait for a reply while PONG lists the operation as running, or
#: while the server sends other messages.
_MAX_WAIT_SECONDS: Final = 60.0
#: Time to wait for further messages after the reply that should be the last one.
_LAST_WAIT_SECONDS: Final = 0.05
#: Maximum number of resends of an ATTACH, one per second, while the server builds envs.
_MAX_ATTACH_RESENDS: Final = 60
_MAX_FRAME_BYTES: Final = 1 << 30
_HELLO: Final = Hello(client="envserve check").encode()
#: Default fields of ATTACH.
_ATTACH_FIELDS: Final = {"num_envs": 4, "num_splits": 2, "seed": 11}
#: Number of steps in `ServerUnderTest.reference`.
_NUM_REFERENCE_STEPS: Final = 12


class SkipRule(Exception):
    """Raised if the server lacks a feature or setting that a rule needs."""


def expect(is_met: object, expected: str, actual: object) -> None:
    """Raise RemoteProtocolError("expected ...; got ...") unless `is_met`."""
    if not is_met:
        raise RemoteProtocolError(f"expected {expected}; got {actual}")


def describe(message: Message) -> str:
    """Return the type of a message, followed by its text if it is an ERROR."""
    if message.type is not MessageType.ERROR:
        return str(getattr(message.type, "name", message.type))
    body = ErrorBody.decode(message.body)
    return f"ERROR {body.code.name}: {body.text}"


class SocketLink:
    """A connection that sends and receives raw messages."""

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        """Connect to a server; see `Connection` for the arguments and errors."""
        self._connection = Connection(address, insecure=insecure)
        self._connection.renew(_MAX_FRAME_BYTES)
        self.close = self._connection.close

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send the frames of a message."""
        self._connection.wait(_REPLY_SECONDS, for_writing=True)
        expect(self._connection.send([*frames]), "a connection", "none")

    def receive(self, seconds: float) -> Sequence[Buffer] | None:
        """Return the frames of the next message, or None if none arrives in time."""
        if (frames := self._connection.receive()) is None:
            self._connection.wait(seconds, for_writing=False)
            frames = self._connection.receive()
        return frames


class ServerUnderTest:
    """The server to check, with its boot id, its WELCOME and the env to lease."""

    def __init__(self, open_link: Callable[[], SocketLink], env_name: str = "") -> None:
        """Send HELLO; if `env_name` is empty, choose the first env that is offered."""
        self.open_link, self.boot = open_link, 0
        self._clients: list[ProbeClient] = []
        reply = self.client().hello()
        self.boot, self.welcome = reply.boot, Welcome.decode(reply.body)
        expect(env_name or self.welcome.env_names, "an env on offer", "none")
        self.env_name = env_name or self.welcome.env_names[0]

    def client(self) -> ProbeClient:
        """Return a new client with a separate session."""
        self._clients.append(ProbeClient(self))
        return self._clients[-1]

    def close_clients(self) -> None:
        """Release all leases and close all clients."""
        clients, self._clients = self._clients, []
        with contextlib.ExitStack() as stack:
            for client in clients:
                stack.callback(client.link.close)
                if client.epoch:
                    stack.callback(client.detach)

    @cached_property
    def reference(self) -> list[bytes]:
        """The raw results of the first steps in a lease that no check has disturbed.

        Raises:
          SkipRule: Two leases with equal seeds return different results.
        """
        leases = [self.client().attach() for _ in range(2)]
        steps = range(_NUM_REFERENCE_STEPS)
        results = [[lease.step().raw for _ in steps] for lease in leases]
        for lease in leases:
            lease.detach()
        if results[0] != results[1]:
            raise SkipRule(
                "the env is not deterministic: equal seeds give different results"
            )
        return results[0]


class ProbeResult(NamedTuple):
    """A RESULT message from the server, with its decoded rows."""

    raw: bytes
    """Body and payload; they are identical for leases with equal seeds and actions."""
    rows: Rows
    """The decoded values."""


class ProbeClient:
    """One session, which can send any message, valid or not."""

    def __init__(self, subject: ServerUnderTest) -> None:
        self.subject, self.link = subject, subject.open_link()
        self.session = secrets.randbits(62) + 1
        self.epoch = self.num_requests = self.num_steps = 0
        self._sent_at = time.monotonic()

    def message(self, kind: int, body: bytes = b"", **changes: Any) -> Message:
        """Return a message of this session, in which `changes` replace some fields."""
        self.num_requests += 1
        ids = {"session": self.session, "boot": self.subject.boot, "epoch": self.epoch}
        ids |= {"request": self.num_requests}
        return Message(kind, body=body, **ids | changes)

    def send(self, *messages: Message) -> None:
        """Send messages without waiting for replies."""
        self._sent_at = time.monotonic()
        for message in messages:
            self.link.send(encode(message))

    def receive(self, seconds: float = _REPLY_SECONDS) -> Message | None:
        """Return the next message; None if none arrives in time."""
        if (frames := self.link.receive(seconds)) is None:
            return None
        waited = time.monotonic() - self._sent_at
        expect(waited < _MAX_WAIT_SECONDS, "a reply", f"only others for {waited:.0f} s")
        message = decode(frames)
        expect(message.type >= 128, "a type from 128 on", message.type)
        is_same = message.session == self.session
        expect(is_same, f"session {self.session}", message.session)
        expect(message.boot, "a boot id", message.boot)
        return message

    def reply(self, *copies: Message) -> Message:
        """Return the reply to a message that was sent once or several times.

        If the message is an operation, the timeout is extended while PONG lists one of
        its blocks as running.

        Args:
          copies: The message and its copies, in the order in which they were sent.
        """
        first, num_silent, num_waits = copies[0], 0, 0
        name = getattr(first.type, "name", first.type)
        while num_silent < _REPLY_SECONDS and num_waits < _MAX_WAIT_SECONDS:
            if (reply := self.receive(1.0)) is None:
                num_silent, num_waits = num_silent + 1, num_waits + 1
                if first.entries:
                    self.send(self.message(MessageType.PING))
            elif reply.request == first.request:
                sent = [copy.attempt for copy in copies]
                expect(reply.attempt in sent, f"attempt {sent}", reply.attempt)
                return reply
            elif reply.type is MessageType.PONG and reply.request > first.request:
                running, num_silent = Pong.decode(reply.body).running, 0
                is_running = any(block in running for block, _ in first.entries)
                text = f"a reply to {name}, or one of its blocks in PONG"
                expect(is_running, text, f"PONG with running {running}")
        raise RemoteProtocolError(f"expected a reply to {name}; got none")

    def request(self, message: Message, *kinds: MessageType) -> Message:
        """Send a message; return its reply, which must have one of these types."""
        self.send(message)
        reply = self.reply(message)
        names = " or ".join(kind.name for kind in kinds)
        expect(not kinds or reply.type in kinds, names, describe(reply))
        return reply

    def expect_error(
        self, message: Message, *codes: ErrorCode, sent: Sequence[Buffer] = ()
    ) -> None:
        """Send a message, or other frames, and expect an ERROR with one of these codes.

        `sent` are the frames to send instead of the encoded message, if any.
        """
        self._sent_at = time.monotonic()
        self.link.send(sent or encode(message))
        reply, names = self.reply(message), " or ".join(code.name for code in codes)
        expect(reply.type is MessageType.ERROR, f"ERROR {names}", describe(reply))
        expect(reply.version == message.version, "the request's version", reply.version)
        body = ErrorBody.decode(reply.body)
        expect(body.code in codes, f"ERROR {names}", describe(reply))
        may_have_run = message.attempt or body.code is ErrorCode.LEASE_LOST
        expect(may_have_run or not body.executed, "executed 0", body.executed)

    def hello(self, **changes: Any) -> Message:
        """Send HELLO; return the WELCOME."""
        hello = self.message(MessageType.HELLO, _HELLO, **changes)
        return self.request(hello, MessageType.WELCOME)

    def receive_all(self) -> list[Message]:
        """Return all messages that the server sends in reply to earlier messages.

        The server reads messages in order. Therefore, once it replies to the HELLO that
        this method sends, it has read all earlier messages.
        """
        hello = self.message(MessageType.HELLO, _HELLO)
        self.send(hello)
        received, seconds = [], _REPLY_SECONDS
        while (message := self.receive(seconds)) is not None:
            received.append(message)
            if message.request == hello.request:
                seconds = _LAST_WAIT_SECONDS
        expect(seconds == _LAST_WAIT_SECONDS, "a reply to HELLO", "none")
        return [message for message in received if message.request != hello.request]

    # Envs.

    def attach(self, **changes: Any) -> ProbeClient:
        """Lease and reset envs; return this client. `changes` replace fields of ATTACH.

        Raises:
          SkipRule: The server rejects the request.
        """
        fields = {**_ATTACH_FIELDS, "env_name": self.subject.env_name, **changes}
        body = Attach(**fields).encode()
        self.attached = self.message(MessageType.ATTACH, body, epoch=0)
        self.granted = self.grant(self.attached)
        granted = Granted.decode(self.granted, fields["num_envs"])
        self.spec, self.blocks = granted.spec, granted.blocks
        self.epoch, self.seqs = granted.epoch, [0] * len(granted.blocks)
        self._rows = Rows.allocate(self.spec, fields["num_envs"])
        self._parts = BlockParts(RowCodec(self._rows), self.blocks)
        self._actions = batch_space(self.spec.action_space, fields["num_envs"])
        self.first = self.reset(dict.fromkeys(range(len(self.blocks)), (None, None)))
        return self

    def grant(self, attach: Message) -> bytes:
        """Send ATTACH repeatedly until it is granted; return the body of GRANTED."""
        reply: Message | None = self.request(attach)
        while reply is None or reply.type is MessageType.BUILDING:
            expect(attach.attempt < _MAX_ATTACH_RESENDS, "GRANTED", "BUILDING only")
            if (reply := self.receive(1.0)) is None:
                attach.attempt += 1
                self.send(attach)
        if (text := describe(reply)).startswith("ERROR REFUSED: "):
            raise SkipRule(text)
        expect(reply.type is MessageType.GRANTED, "GRANTED", text)
        return reply.body

    def detach(self) -> None:
        """Release the lease."""
        self.request(self.message(MessageType.DETACH), MessageType.DETACHED)
        self.epoch = 0

    def operation(self, kind: int, blocks: Sequence[int], body: bytes = b"") -> Message:
        """Return a STEP, RESET or CALL with the next seq of each block."""
        entries = tuple((block, self.seqs[block] + 1) for block in blocks)
        return self.message(kind, body, entries=entries)

    def execute(self, message: Message, *copies: Message) -> ProbeResult:
        """Send a STEP or RESET, followed by copies of it; return its result."""
        self.send(message, *copies)
        for block, seq in message.entries:
            self.seqs[block] = seq
        self.num_steps += message.type is MessageType.STEP
        self.last = message
        return self.read(self.reply(message, *copies))

    def read(self, reply: Message) -> ProbeResult:
        """Check the RESULT of the last operation, and return its bytes and rows."""
        expect(reply.type is MessageType.RESULT, "RESULT", describe(reply))
        expect(
            reply.entries == self.last.entries, "the request's entries", reply.entries
        )
        expect(reply.epoch == self.epoch, f"epoch {self.epoch}", reply.epoch)
        blocks = tuple(block for block, _ in reply.entries)
        self._parts[blocks].unpack_results(reply.body, reply.payload)
        report, rows = ResultReport.decode(reply.report), self._rows
        expect(not report.errors, "no errors", report.errors)
        faults = sorted(fault.env_index for fault in report.faults)
        invalid = np.flatnonzero(rows.status).tolist()
        expect(faults == invalid, f"faults of the invalid rows {invalid}", faults)
        raw = reply.body + bytes(reply.payload)
        return ProbeResult(raw, rows.at(np.arange(len(rows.reward))))

    def reset(self, resets: Mapping[int, Any]) -> ProbeResult:
        """Reset blocks.

        Args:
          resets: For each block index, the rows to reset (None: all), and their seeds
            or None.
        """
        body = ResetBody(resets=tuple(resets.values())).encode()
        return self.execute(self.operation(MessageType.RESET, [*resets], body))

    def next_step(self, first: Any = None) -> Message:
        """Return a STEP of all blocks.

        The actions depend only on the number of earlier steps, so that equal leases
        get equal actions. `first`, if given, replaces all values of the first leaf of
        the actions.
        """
        self._actions.seed(self.num_steps)
        num_rows = len(self._rows.reward)
        actions = check_actions(self.spec, self._actions.sample(), None, num_rows)
        for target, array in zip(self._rows.action, actions, strict=True):
            target[...] = array
        self._rows.action[0][...] = self._rows.action[0] if first is None else first
        blocks = tuple(range(len(self.blocks)))
        message = self.operation(MessageType.STEP, blocks)
        message.body, message.payload = self._parts[blocks].pack_actions()
        return message

    def step(self) -> ProbeResult:
        """Step all blocks."""
        return self.execute(self.next_step())

    def attach_and_step(self) -> None:
        """Lease envs like those of `ServerUnderTest.reference`; take a few steps."""
        _ = self.subject.reference
        self.attach()
        self.last_result = [self.step() for _ in range(3)][-1]

    def expect_unaffected(self) -> None:
        """Take further steps; expect the same results as in an undisturbed lease."""
        for raw in self.subject.reference[self.num_steps :]:
            is_same = self.step().raw == raw
            expect(is_same, "rows like those of an undisturbed lease", "different rows")
