"""A client that keeps no rules, for who wants to know what a server makes of that.

What is not as docs/protocol.md says raises RemoteProtocolError, as in every client.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from gymnasium.vector.utils import batch_space

from envserve.client.link.connection import Connection
from envserve.errors import RemoteProtocolError
from envserve.slab import Rows
from envserve.spaces.action_checks import check_actions
from envserve.wire.bodies import Attach, Granted, ResetBody
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.handshake import ErrorBody, Hello, Welcome
from envserve.wire.message import Buffer, Message, decode, encode
from envserve.wire.result_report import ResultReport
from envserve.wire.rows import BlockParts, RowCodec

_ANSWER_SECONDS: Final = 5.0
_QUIET_SECONDS: Final = 0.05
_BUILD_COPIES: Final = 60  # a second each
_LONGEST_FRAME: Final = 1 << 30
_HELLO: Final = Hello(client="envserve check").encode()
#: What a lease asks for, but for changes; and how long its episodes are followed.
_ASKED: Final = {"num_envs": 4, "num_splits": 2, "seed": 11}
_NUM_FOLLOWED: Final = 12


class SkipRule(Exception):
    """The server does not offer what this rule needs; skip the rule."""


def expect(is_right: object, expected: str, got: object) -> None:
    """Raises RemoteProtocolError unless it is right."""
    if not is_right:
        raise RemoteProtocolError(f"expected {expected}; got {got}")


def describe(message: Message) -> str:
    """Return a message's type, and the text of an ERROR, for a report."""
    if message.type is not MessageType.ERROR:
        return str(getattr(message.type, "name", message.type))
    body = ErrorBody.decode(message.body)
    return f"ERROR {body.code.name}: {body.text}"


class SocketLink:
    """A way to a server and back."""

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        """Connects; see `Connection`."""
        self._connection = Connection(address, insecure=insecure)
        self._connection.renew(_LONGEST_FRAME)
        self.close = self._connection.close

    def send(self, frames: Sequence[Buffer]) -> None:
        """Sends a message."""
        self._connection.wait(_ANSWER_SECONDS, for_writing=True)
        expect(self._connection.send([*frames]), "a connection", "none")

    def receive(self, seconds: float) -> Sequence[Buffer] | None:
        """Returns the next message; None if none comes within so many seconds."""
        if (frames := self._connection.receive()) is None:
            self._connection.wait(seconds, for_writing=False)
            frames = self._connection.receive()
        return frames


class ServerUnderTest:
    """The server to check, and what all rules need to know about it."""

    def __init__(self, open_link: Callable[[], SocketLink], env_name: str = "") -> None:
        """Says HELLO, to find out the boot id and, unless it is given, an env."""
        self.open_link, self.boot = open_link, 0
        self._clients: list[ProbeClient] = []
        answer = self.client().hello()
        self.boot, self.welcome = answer.boot, Welcome.decode(answer.body)
        expect(env_name or self.welcome.env_names, "an env on offer", "none")
        self.env_name = env_name or self.welcome.env_names[0]

    def client(self) -> ProbeClient:
        """Returns a client under a session of its own."""
        self._clients.append(ProbeClient(self))
        return self._clients[-1]

    def close_clients(self) -> None:
        """Gives all envs back, and waits until they are free."""
        clients, self._clients = self._clients, []
        with contextlib.ExitStack() as stack:
            for client in clients:
                stack.callback(client.link.close)
            for client in filter(lambda client: client.epoch, clients):
                client.ask(client.message(MessageType.DETACH), MessageType.DETACHED)

    @cached_property
    def reference(self) -> list[bytes]:
        """What equal leases give, if nothing disturbs them; raises SkipRule."""
        leases = [self.client().attach() for _ in range(2)]
        results = [[c.step().raw for _ in range(_NUM_FOLLOWED)] for c in leases]
        if results[0] != results[1]:
            raise SkipRule("envs of equal seeds do not do the same")
        return results[0]


class ProbeResult(NamedTuple):
    """A RESULT, as raw bytes to compare with an equal episode's, and as rows."""

    raw: bytes
    rows: Rows


class ProbeClient:
    """One session, which can send any message, valid or not."""

    def __init__(self, subject: ServerUnderTest) -> None:
        self.subject, self.link = subject, subject.open_link()
        self.session = secrets.randbits(62) + 1
        self.epoch = self.num_requests = self.num_steps = 0

    def message(self, kind: int, body: bytes = b"", **changes: Any) -> Message:
        """Returns a message with the numbers that it should have, but for changes."""
        self.num_requests += 1
        own = {"session": self.session, "boot": self.subject.boot, "epoch": self.epoch}
        own |= {"request": self.num_requests}
        return Message(kind, body=body, **own | changes)

    def send(self, *messages: Message) -> None:
        """Send messages without waiting for answers."""
        for message in messages:
            self.link.send(encode(message))

    def receive(self, seconds: float = _ANSWER_SECONDS) -> Message | None:
        """Return the next message; None if none arrives in time."""
        if (frames := self.link.receive(seconds)) is None:
            return None
        message = decode(frames)
        expect(message.type >= 128, "a type from 128 on", message.type)
        expect(message.session == self.session, "the session again", message.session)
        expect(message.boot, "a boot id", message.boot)
        return message

    def answer(self, *copies: Message) -> Message:
        """Waits for the answer to a message, or to its copies."""
        while (answer := self.receive()) is not None:
            if answer.request == copies[0].request:
                sent = [copy.attempt for copy in copies]
                expect(answer.attempt in sent, f"attempt {sent}", answer.attempt)
                return answer
        name = getattr(copies[0].type, "name", copies[0].type)
        raise RemoteProtocolError(f"expected an answer to {name}; got none")

    def ask(self, message: Message, *kinds: MessageType) -> Message:
        """Sends a message; returns its answer, which is to be of one of these types."""
        self.send(message)
        answer = self.answer(message)
        names = " or ".join(kind.name for kind in kinds)
        expect(not kinds or answer.type in kinds, names, describe(answer))
        return answer

    def expect_error(
        self, message: Message, *codes: ErrorCode, sent: Sequence[Buffer] = ()
    ) -> None:
        """Send a message that must be answered by an ERROR with one of these codes."""
        self.link.send(sent or encode(message))
        answer, names = self.answer(message), " or ".join(code.name for code in codes)
        expect(answer.type is MessageType.ERROR, f"ERROR {names}", describe(answer))
        expect(answer.version == message.version, "its version", answer.version)
        body = ErrorBody.decode(answer.body)
        expect(body.code in codes, f"ERROR {names}", describe(answer))
        may_be = message.attempt or body.code is ErrorCode.LEASE_LOST
        expect(may_be or not body.executed, "executed 0", body.executed)

    def hello(self, **changes: Any) -> Message:
        """Asks who the server is."""
        hello = self.message(MessageType.HELLO, _HELLO, **changes)
        return self.ask(hello, MessageType.WELCOME)

    def receive_all(self) -> list[Message]:
        """Return what has arrived once the server has read all of our messages."""
        asked = self.message(MessageType.HELLO, _HELLO)
        self.send(asked)
        came, seconds = [], _ANSWER_SECONDS
        while (message := self.receive(seconds)) is not None:
            came.append(message)
            if message.request == asked.request:
                seconds = _QUIET_SECONDS
        expect(seconds == _QUIET_SECONDS, "the server to go on", "silence")
        return [message for message in came if message.request != asked.request]

    # Envs.

    def attach(self, **changes: Any) -> ProbeClient:
        """Gets envs, and resets them; raises SkipRule if there are none such."""
        given = {**_ASKED, "env_name": self.subject.env_name, **changes}
        self.attached = self.message(2, Attach(**given).encode(), epoch=0)
        self.granted = self.grant(self.attached)
        granted = Granted.decode(self.granted, given["num_envs"])
        self.spec, self.blocks = granted.spec, granted.blocks
        self.epoch, self.seqs = granted.epoch, [0] * len(granted.blocks)
        self._rows = Rows.allocate(self.spec, given["num_envs"])
        self._parts = BlockParts(RowCodec(self._rows), self.blocks)
        self._actions = batch_space(self.spec.action_space, given["num_envs"])
        self.first = self.reset(dict.fromkeys(range(len(self.blocks)), (None, None)))
        return self

    def grant(self, asked: Message) -> bytes:
        """Sends an ATTACH until it is granted; returns the body of GRANTED."""
        answer: Message | None = self.ask(asked)
        while answer is None or answer.type is MessageType.BUILDING:
            expect(asked.attempt < _BUILD_COPIES, "GRANTED", "BUILDING only")
            if (answer := self.receive(1.0)) is None:
                asked.attempt += 1
                self.send(asked)
        if (text := describe(answer)).startswith("ERROR REFUSED: "):
            raise SkipRule(text)
        expect(answer.type is MessageType.GRANTED, "GRANTED", text)
        return answer.body

    def operation(self, kind: int, blocks: Sequence[int], body: bytes = b"") -> Message:
        """Returns a STEP, RESET or CALL with the next seqs."""
        entries = tuple((block, self.seqs[block] + 1) for block in blocks)
        return self.message(kind, body, entries=entries)

    def execute(self, message: Message, *copies: Message) -> ProbeResult:
        """Send a STEP or RESET, with copies; return its result."""
        self.send(message, *copies)
        for block, seq in message.entries:
            self.seqs[block] = seq
        self.num_steps += message.type is MessageType.STEP
        self.last = message
        return self.read(self.answer(message, *copies))

    def read(self, answer: Message) -> ProbeResult:
        """Reads the RESULT of the last operation."""
        expect(answer.type is MessageType.RESULT, "RESULT", describe(answer))
        expect(answer.entries == self.last.entries, "the entries", answer.entries)
        expect(answer.epoch == self.epoch, f"epoch {self.epoch}", answer.epoch)
        blocks = tuple(block for block, _ in answer.entries)
        self._parts[blocks].unpack_results(answer.body, answer.payload)
        report, rows = ResultReport.decode(answer.report), self._rows
        expect(not report.errors, "no errors", report.errors)
        faults = sorted(fault.env_index for fault in report.faults)
        expect(faults == np.flatnonzero(rows.status).tolist(), "a fault a row", faults)
        raw = answer.body + bytes(answer.payload)
        return ProbeResult(raw, rows.at(np.arange(len(rows.reward))))

    def reset(self, resets: Mapping[int, Any]) -> ProbeResult:
        """Resets blocks, each with rows and seeds or None."""
        body = ResetBody(resets=tuple(resets.values())).encode()
        return self.execute(self.operation(MessageType.RESET, [*resets], body))

    def next_step(self, first: Any = None) -> Message:
        """Returns a STEP of all blocks.

        Its actions follow from how many there were, but for the first leaf if given.
        """
        self._actions.seed(self.num_steps)
        num_rows = len(self._rows.reward)
        drawn = check_actions(self.spec, self._actions.sample(), None, num_rows)
        for target, array in zip(self._rows.action, drawn, strict=True):
            target[...] = array
        self._rows.action[0][...] = self._rows.action[0] if first is None else first
        blocks = tuple(range(len(self.blocks)))
        message = self.operation(MessageType.STEP, blocks)
        message.body, message.payload = self._parts[blocks].pack_actions()
        return message

    def step(self) -> ProbeResult:
        """Steps all blocks."""
        return self.execute(self.next_step())

    def begin(self) -> None:
        """Gets envs whose episodes are known, and takes a few steps."""
        _ = self.subject.reference
        self.attach()
        self.last_result = [self.step() for _ in range(3)][-1]

    def follow(self) -> None:
        """Goes on; all has to be as if nothing had been said between."""
        for raw in self.subject.reference[self.num_steps :]:
            is_same = self.step().raw == raw
            expect(is_same, "the rows of an equal lease", "others: it has had effect")
