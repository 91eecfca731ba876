"""A server that grants envs as it should, and then does what no server may.

`replies_to` says what it does, and knows no socket: a script per misdeed, by name.
`HostileServer` is a process that sends that over a ROUTER, as fast as it can.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Self

import numpy as np
import zmq
from gymnasium import spaces

from envserve.keys.key_folder import KeyFolder
from envserve.lane import Block
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.bodies import Attach, Granted, Pong
from envserve.wire.constants import (
    MAX_BODY_BYTES,
    MAX_INLINE_BYTES,
    ErrorCode,
    MessageType,
)
from envserve.wire.handshake import Welcome
from envserve.wire.message import Buffer, Message, decode, pack
from tests.envserve.server_process import ROOT

SPEC: Final = EnvSpec(
    "Hostile-v0", spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)
)
#: Reward, terminated, truncated, status and an observation.
_ROW_BYTES: Final = 11 + 16
_BOOT: Final = 66
_MIB: Final = 1 << 20

Frames = list[Buffer]
Replies = Iterable[Frames]


def reply(asked: Message, kind: MessageType, **changes: Any) -> Frames:
    """An answer that repeats the numbers of what it answers, but for changes."""
    fields = {
        "type_": kind,
        "numbers": (asked.session, _BOOT, 1),
        "request": asked.request,
        "entries": asked.entries,
        "attempt": asked.attempt,
    }
    return pack(**{**fields, **changes})


def granted(asked: Message, spec: EnvSpec = SPEC) -> Frames:
    """GRANTED, with a block for each of the rows that were asked for."""
    rows = range(Attach.decode(asked.body).num_envs)
    blocks = [Block(row, row, row + 1, row, 0) for row in rows]
    body = Granted(epoch=1, lease_seconds=60.0, spec=spec, blocks=tuple(blocks))
    return reply(asked, MessageType.GRANTED, body=body.encode())


def result(asked: Message, num_rows: int, **changes: Any) -> Frames:
    """A RESULT in which nothing has happened."""
    rows = bytes(_ROW_BYTES * num_rows)
    is_short = len(rows) <= MAX_INLINE_BYTES
    content = {"body": rows} if is_short else {"payload": rows}
    return reply(asked, MessageType.RESULT, **{**content, **changes})


def honest(asked: Message, num_rows: int) -> Replies:
    """What a server would say whose envs never end an episode."""
    if asked.type is MessageType.HELLO:
        welcome = Welcome(
            max_message_bytes=1 << 30,
            lease_seconds=60.0,
            env_names=("Hostile-v0",),
            num_names=1,
            total_envs=1 << 16,
            free_envs=1 << 16,
        )
        yield reply(asked, MessageType.WELCOME, body=welcome.encode())
    elif asked.type is MessageType.ATTACH:
        yield granted(asked)
    elif asked.type in (MessageType.RESET, MessageType.STEP):
        yield result(asked, len(asked.entries))  # a row each
    elif asked.type is MessageType.PING:
        yield reply(asked, MessageType.PONG, body=Pong(running={}).encode())
    elif asked.type is MessageType.DETACH:
        yield reply(asked, MessageType.DETACHED)


def _without_end(frames: Frames) -> Replies:
    return itertools.repeat(frames)


def _large_rows(asked: Message) -> Frames:
    image = spaces.Box(0, 255, (20, 1024, 1024), np.uint8)
    return granted(asked, EnvSpec("Hostile-v0", image, spaces.Discrete(2)))


def _error(asked: Message, text: str) -> Frames:
    body = {"code": int(ErrorCode.INTERNAL), "text": text}
    return reply(asked, MessageType.ERROR, body=codec.encode(body))


def report_of(*rows: bytes | list[int]) -> bytes:
    """A report with a fault for each set of rows, however often it is named."""
    faults = [[1, False, f"fault {index}", rows] for index, rows in enumerate(rows)]
    return codec.encode({"infos": {}, "faults": faults, "errors": []})


#: Faults of more rows than there are, and of each seven times: 57 KB.
LONG_REPORT: Final = report_of(*[b"\xff" * (1 << 13)] * 7)
#: 700 KiB: longer than any text may be, shorter than a body.
_LONG_TEXT: Final = "\x1b]0;" * (MAX_BODY_BYTES // 5)

#: By name: what a message gets in place of its answer, of so many rows.
SCRIPTS: Final[dict[str, Callable[[Message, int], Replies]]] = {
    "nothing": lambda asked, rows: (),
    "pongs": lambda asked, rows: _without_end(
        reply(asked, MessageType.PONG, entries=(), body=Pong(running={}).encode())
    ),
    "late results": lambda asked, rows: _without_end(
        result(asked, rows, request=asked.request + 1000)
    ),
    "others' results": lambda asked, rows: _without_end(
        result(asked, rows, numbers=(asked.session + 1, _BOOT, 1))
    ),
    "no messages": lambda asked, rows: _without_end([b"x" * 100, b"", b""]),
    "building": lambda asked, rows: _without_end(
        reply(asked, MessageType.BUILDING, body=codec.encode({"elapsed_ms": 1}))
    ),
    "drains": lambda asked, rows: _without_end(
        reply(asked, MessageType.DRAIN, body=codec.encode({"grace_ms": 1}))
    ),
    "absent": lambda asked, rows: _without_end(reply(asked, MessageType.ABSENT)),
    "long results": lambda asked, rows: _without_end(
        result(asked, rows, request=asked.request + 1000, payload=bytes(16 * _MIB))
    ),
    "results of long frames": lambda asked, rows: _without_end(
        result(asked, rows, payload=bytes(_MIB), report=bytes(_MIB))
    ),
    "long report": lambda asked, rows: [result(asked, rows, report=LONG_REPORT)],
    "large rows": lambda asked, rows: [_large_rows(asked)],
    "long text": lambda asked, rows: [_error(asked, _LONG_TEXT)],
    "half of the rows": lambda asked, rows: [result(asked, rows // 2)],
    "half of the blocks": lambda asked, rows: [
        result(asked, 1, entries=asked.entries[:1])
    ],
}


class Script:
    """What a server says: honest, but for the messages that it misuses."""

    def __init__(self, name: str, misused: MessageType) -> None:
        self._misdeed, self._misused = SCRIPTS[name], misused
        self._num_rows = 0

    def replies_to(self, asked: Message) -> Replies:
        """What follows a message, maybe without end."""
        if asked.type is MessageType.ATTACH:
            self._num_rows = Attach.decode(asked.body).num_envs
        if asked.type is self._misused:
            return self._misdeed(asked, self._num_rows)
        return honest(asked, self._num_rows)


def serve(name: str, misused: str) -> None:
    """Binds a ROUTER, says where, and serves until it is killed."""
    script = Script(name, MessageType[misused])
    router = zmq.Context().socket(zmq.ROUTER)
    keys = KeyFolder().ensure_key("server")  # it is who its clients expect
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    router.setsockopt(zmq.SNDHWM, 64)
    router.setsockopt(zmq.SNDTIMEO, 50)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # waits for a client that is full
    print(
        f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}", flush=True
    )
    streams: dict[bytes, Iterator[Frames]] = {}
    while True:
        while router.poll(0 if streams else None):
            route, *frames = router.recv_multipart()
            streams[route] = itertools.chain(
                script.replies_to(decode(frames)), streams.get(route, ())
            )
        for route, stream in list(streams.items()):
            for _ in range(64):
                try:
                    router.send_multipart([route, *next(stream)], copy=False)
                except zmq.Again:
                    break
                except (StopIteration, zmq.ZMQError):  # it has ended, or is gone
                    del streams[route]
                    break


class HostileServer:
    """A process that does what a script says."""

    def __init__(self, script: str, misused: MessageType = MessageType.STEP) -> None:
        """Starts it; it has its `address` then."""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.envserve.hostile_server",
                script,
                misused.name,
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


if __name__ == "__main__":
    serve(*sys.argv[1:])
