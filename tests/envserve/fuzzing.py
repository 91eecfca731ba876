"""Decoders of untrusted bytes, and mutated input for them.

Each target decodes mutations of valid bytes, within a time limit. It may raise only
its decoder's documented errors.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import numpy as np

from envserve.client.vector_infos import batch_infos
from envserve.errors import CodecError, RemoteProtocolError, WorkerError
from envserve.keys import formats
from envserve.lane import Block, Fault, make_blocks
from envserve.settings import HostSettings
from envserve.slab import Rows, Status
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import leaves_of
from envserve.spaces.variable_length import decode_row, encode_row
from envserve.wire.bodies import (
    Attach,
    Building,
    CallBody,
    Drain,
    Granted,
    Pong,
    ResetBody,
)
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Hello, Welcome
from envserve.wire.message import Message, decode, encode
from envserve.wire.result_report import ResultReport
from envserve.wire.rows import RowCodec, RowPart
from envserve.worker.channel import MessageDecoder, MessageKind, pack_message
from envserve.worker.worker_report import (
    decode_report,
    decode_spaces,
    encode_report,
    encode_spaces,
)
from envserve.wrappers.specs import WrapperSpec
from tests.envserve.raw_client import SESSION, RawClient
from tests.envserve.session_fakes import (
    SPEC,
    FakeServer,
    attach,
    make_call,
    make_welcome,
)
from tests.envserve.space_table import ENCODED
from tests.oracle.probe_envs import SPACES

#: Headers of long and of empty msgpack values, and extreme numbers, in hex.
_HEX_FRAGMENTS: Final = (
    "ddffffffff df0000ffff c97fffffff01 dcffff deffff c702010009 "
    "d6ff00000000 819001 c1 d901ff cb7ff8000000000000 cfffffffffffffffff "
    "d38000000000000000 c0 90 80 a0 d40390 c703039201c0 c706020a000000c07f "
)
_FRAGMENTS: Final = (*map(bytes.fromhex, _HEX_FRAGMENTS.split()), b"\x91" * 40)
BLOCK: Final = Block(0, 0, 2, 0, 0)
#: Time limit in seconds for decoders that build spaces with up to 64 MiB of bounds.
_MAX_SPACE_SECONDS: Final = 0.5


@dataclass
class Target:
    """A decoder with valid input and limits.

    Attributes:
      decode: The decoder.
      valid: Inputs that the decoder accepts.
      expected_errors: Exceptions that the decoder may raise.
      max_seconds: Maximum CPU time for one input, on a busy machine.
      num_rejected: Number of inputs for which the decoder raised.
      slowest: Longest CPU time in seconds, and the input that took it.
    """

    decode: Callable[[bytes], object]
    valid: Sequence[bytes]
    expected_errors: tuple[type[Exception], ...] = (RemoteProtocolError,)
    max_seconds: float = 0.02
    num_rejected: int = 0
    slowest: tuple[float, bytes] = field(default=(0.0, b""))

    def run(self, data: bytes) -> None:
        """Decode bytes, and raise unexpected errors only."""
        seconds = self._seconds_for(data)
        if seconds > self.max_seconds:  # the machine may have stalled
            seconds = min(seconds, *(self._seconds_for(data) for _ in range(3)))
        if seconds > self.slowest[0]:
            self.slowest = seconds, data

    def _seconds_for(self, data: bytes) -> float:
        start = time.thread_time()
        try:
            self.decode(data)
        except self.expected_errors:
            self.num_rejected += 1
        return time.thread_time() - start


def mutants(valid: Sequence[bytes], random: Random) -> Iterator[bytes]:
    """Yield valid bytes with replaced, deleted, repeated or inserted parts."""
    while True:
        data = bytearray(random.choice(valid))
        for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
            kind, at = random.randrange(7), random.randrange(len(data) + 1)
            if kind < 2 and at < len(data):
                data[at] = random.randrange(256)
            elif kind == 2:
                data[at:at] = random.choice(_FRAGMENTS)
            elif kind == 3:
                head = random.choice(_FRAGMENTS)
                data[at : at + len(head)] = head
            elif kind == 4:
                del data[at : at + random.randrange(1, 9)]
            elif kind == 5:
                data[at:at] = data[at : at + random.randrange(1, 40)] * random.choice(
                    (1, 1, 1, 100)
                )
            else:
                other = random.choice(valid)
                data[at:] = other[random.randrange(len(other) + 1) :]
        yield bytes(data[: 1 << 20])


def make_targets() -> dict[str, Target]:
    """Return a target for every decoder of bytes from another process."""
    targets = {kind.__name__: _body_target(kind, bodies) for kind, bodies in _bodies()}
    spec = EnvSpec("A-v0", SPACES["image"], SPACES["image"])
    blocks = make_blocks(4, 2, 1)
    every = [*SPACES.values(), *ENCODED.values()]
    spaces = [EnvSpec("A-v0", space, space) for space in every]
    granted = [
        Granted(epoch=1, lease_seconds=60.0, spec=each, blocks=blocks)
        for each in spaces
    ]
    targets["Granted"] = Target(
        lambda data: Granted.decode(data, 4), [each.encode() for each in granted]
    )
    targets["Granted"].max_seconds = _MAX_SPACE_SECONDS
    rows = Rows.allocate(SPEC, 4)
    part = RowPart(RowCodec(rows), [(0, 2), (2, 4)])
    body, _ = part.pack_results()
    ended = bytearray(body)
    ended[4 * 8] = 1
    targets["results"] = Target(
        lambda data: part.unpack_results(data[:-7], data[-7:]),
        [body, bytes(ended) + bytes(16)],
    )
    targets["actions"] = Target(part.unpack_actions, [part.pack_actions()[0]])
    targets["rows of values"] = _values_target()
    values = [
        {"a": [1, 2.5, None, "x", b"y", {"b": True}], "c": np.arange(6.0)},
        [[[]]],
    ]
    typed = [{"a": (1, (np.float32(2), np.str_("x")))}, [np.array(["é", "z"]), (1, [])]]
    valid = [codec.encode(value, keep_types=True) for value in (*values, *typed)]
    targets["codec"] = Target(codec.decode, valid, (CodecError,))
    frame = pack_message(MessageKind.DONE, 1, 2, b"payload") + pack_message(
        MessageKind.READY
    )
    targets["frames of a worker"] = Target(
        lambda data: MessageDecoder().feed(data), [frame], (WorkerError,)
    )
    faults = [Fault(1, Status.ENV_ERROR, "no")]
    report = encode_report(2, 64, faults, {0: {"a": 1.5}, 1: {}}, rebuilt=[0])
    targets["report of a worker"] = Target(
        lambda data: batch_infos(decode_report(data, BLOCK, 64)[0].infos, 2),
        [report, columns_of_worker()],
        (ValueError,),
    )
    targets["spaces of a worker"] = Target(
        lambda data: decode_spaces(data, "A-v0"),
        [encode_spaces(each) for each in (spec, *spaces)],
        (ValueError,),
        _MAX_SPACE_SECONDS,
    )
    key = formats.encode(formats.PUBLIC, bytes(range(32))).encode()
    targets["key"] = Target(
        lambda data: formats.decode("envserve-public-1.", data.decode("latin-1")),
        [key],
        (CodecError,),
    )
    targets["message"] = Target(lambda data: decode([data]), _messages(1))
    targets["server"] = _server_target()
    targets["client"] = _client_target()
    return targets


def columns_of_worker() -> bytes:
    """Return a report of a worker whose infos are columns."""
    info = {"a": 1.5, "b": np.int8(3), "c": np.arange(3), "d": "text", "e": True}
    for _ in range(2):  # the keys are columns if they occur again
        report = encode_report(2, 64, infos={0: info, 1: info})
    return report


def _values_target() -> Target:
    """Return a target for rows of every encoded leaf; byte 0 selects the leaf."""
    leaves = [leaf for each in ENCODED.values() for leaf in leaves_of(each)]
    leaves = [leaf for leaf in leaves if leaf.is_encoded]
    valid = []
    for number, leaf in enumerate(leaves):
        leaf.space.seed(number)
        row = encode_row(leaf, leaf.space.sample()).tobytes().rstrip(b"\0")
        valid.append(bytes([number]) + row)

    def read(data: bytes) -> None:
        leaf = leaves[data[0] % len(leaves)] if data else leaves[0]
        row = data[1 : 1 + leaf.nbytes].ljust(leaf.nbytes, b"\0")
        leaf.space.contains(decode_row(leaf, np.frombuffer(row, np.uint8)))

    return Target(read, valid, (CodecError,), 0.05)


def _body_target(kind: Any, bodies: Sequence[Any]) -> Target:
    return Target(kind.decode, [body.encode() for body in bodies])


def _bodies() -> list[tuple[type, list[Any]]]:
    wrappers = (WrapperSpec("FrameHistory", {"flatten": True, "past_indices": [0, 2]}),)
    asked: dict[str, Any] = {"env_name": "Fake-v0", "num_envs": 4, "seed": 7}
    error = ErrorBody(
        code=ErrorCode.CALL_FAILED, text="no", traceback="a\nb", env_index=3
    )
    report = ResultReport(
        infos={0: {"a": 1.5}},
        faults=[Fault(1, Status.ENV_ERROR, "no", is_violation=True)],
        errors={0: error},
    ).encode()
    columns = decode_report(columns_of_worker(), BLOCK, 64)[0].infos
    return [
        (Hello, [Hello(client="host:1")]),
        (Welcome, [make_welcome(env_names=("A-v0", "B-v0"), num_names=2)]),
        (Building, [Building(elapsed_ms=5)]),
        (Pong, [Pong(running={0: 12, 3: 4000})]),
        (Drain, [Drain(grace_ms=7)]),
        (ErrorBody, [error]),
        (ResultReport, [_Encoded(report), ResultReport(infos=columns)]),
        (
            Attach,
            [
                Attach(**asked, env_kwargs={"g": 9.8, "s": [1, 2], "a": np.zeros(3)}),
                Attach(**asked, env_kwargs=[{"g": 1}] * asked["num_envs"]),
                Attach(**asked, wrappers=wrappers, infos="all", spare_envs=True),
            ],
        ),
        (ResetBody, [ResetBody(resets=((None, None), ((1, 2), (5, 2**62))))]),
        (
            CallBody,
            [
                CallBody.from_calls([make_call([0], "set", "x", 1.5)]),
                CallBody.from_calls([make_call([1], "call", "x", [1], {"a": {}})] * 2),
            ],
        ),
    ]


class _Encoded(bytes):
    def encode(self) -> bytes:
        return bytes(self)


def _messages(boot: int) -> list[bytes]:
    """Return a message of each client message type, with and without a lease."""
    numbers: dict[str, Any] = {"session": SESSION, "boot": boot, "epoch": 1}
    bodies = {kind.__name__: bodies for kind, bodies in _bodies()}
    entries = ((0, 1), (1, 1))
    messages = [
        Message(MessageType.HELLO, body=bodies["Hello"][0].encode()),
        Message(MessageType.PING, **numbers),
        Message(MessageType.STEP, entries=entries, body=bytes(32), **numbers),
        Message(
            MessageType.RESET,
            entries=entries,
            body=ResetBody(resets=((None, None), ((3,), (5,)))).encode(),
            **numbers,
        ),
        *(
            Message(
                MessageType.CALL, entries=entries[:1], body=body.encode(), **numbers
            )
            for body in bodies["CallBody"]
        ),
        *(
            Message(MessageType.ATTACH, session=12, boot=boot, body=body.encode())
            for body in bodies["Attach"]
        ),
    ]
    return [bytes(encode(message)[0]) for message in messages]


def _server_target() -> Target:
    """Return a target that delivers messages to a server with a lease."""
    policy = HostSettings(num_workers=2, exposed=frozenset({"x"}))
    raw = RawClient(FakeServer(policy))
    server, counter = raw.server, itertools.count(1)

    def read(data: bytes) -> None:
        now = next(counter) / 1000
        lease = server.protocol.leases["", SESSION].lease
        assert lease is not None
        # Mutations rarely produce the next seq, so set the seq explicitly.
        for index, seq in enumerate(lease._last_seq):
            at = 44 + 12 * index
            if data[at : at + 4] == index.to_bytes(4, "little"):
                data = (
                    data[: at + 4] + (seq + 1).to_bytes(8, "little") + data[at + 12 :]
                )
        server.receive((0, b"r", ""), [data], now)
        server.finish_all(now)
        server.replies.clear()
        for session in [s for s in server.pools if s != ("", SESSION)]:
            server.carry_out(
                server.protocol.pool_failed(session, WorkerError("enough")), now
            )
        if ("", SESSION) not in server.pools:
            server.protocol.leases.ended_sessions.clear()
            RawClient(server)

    return Target(read, _messages(server.boot), ())


def _client_target() -> Target:
    """Return a target that delivers messages to a client with a request in flight."""
    clients: list[Any] = []

    def read(data: bytes) -> None:
        is_usable = clients and not clients[-1].state.is_over
        if not is_usable or not clients[-1].requests.unanswered:
            server = FakeServer()
            client = attach(server)
            client.submit_step([0, 1], 0.0)
            clients[:] = [client]
        client = clients[-1]
        client.receive([data], 1.0)
        if client.client_blocks.is_ready(1):
            client.collect()

    numbers: dict[str, Any] = {"session": 11, "boot": 77, "epoch": 1, "request": 3}
    bodies = {kind.__name__: bodies for kind, bodies in _bodies()}
    valid = [
        Message(
            MessageType.RESULT, entries=((0, 1), (1, 1)), body=bytes(4 * 27), **numbers
        ),
        Message(MessageType.ABSENT, entries=((0, 1),), **numbers),
        Message(MessageType.PONG, body=bodies["Pong"][0].encode(), **numbers),
        Message(MessageType.ERROR, body=bodies["ErrorBody"][0].encode(), **numbers),
        Message(MessageType.DRAIN, body=bodies["Drain"][0].encode(), **numbers),
        Message(MessageType.WELCOME, body=bodies["Welcome"][0].encode(), **numbers),
    ]
    return Target(read, [bytes(encode(message)[0]) for message in valid], ())


def fuzz(targets: dict[str, Target], count: int, seed: int) -> None:
    """Run all targets, with `count` inputs in total."""
    for name, target in targets.items():
        for data in target.valid:
            target.run(data)
        target.slowest = 0.0, b""
        random = Random(f"{seed} {name}")
        for data in itertools.islice(
            mutants(target.valid, random), count // len(targets)
        ):
            try:
                target.run(data)
            except Exception as error:
                error.add_note(f"{name}, seed {seed}: {data.hex()}")
                raise
