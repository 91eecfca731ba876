"""A server that grants envs correctly, and then breaks the protocol.

A script, which is selected by name, computes the replies without I/O. `HostileServer`
is a process that sends these replies over a ROUTER as fast as it can.
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
#: The bytes of a row: reward, terminated, truncated, status and an observation.
_ROW_BYTES: Final = 11 + 16
_BOOT: Final = 66
_MIB: Final = 1 << 20

Frames = list[Buffer]
Replies = Iterable[Frames]


def reply(request: Message, kind: MessageType, /, **changes: Any) -> Frames:
    """Return a reply with its request's numbers, except for changed fields."""
    fields = {
        "type_": kind,
        "numbers": (request.session, _BOOT, 1),
        "request": request.request,
        "entries": request.entries,
        "attempt": request.attempt,
    }
    return pack(**{**fields, **changes})


def granted(request: Message, spec: EnvSpec = SPEC) -> Frames:
    """Return a GRANTED message, with one block for each requested row."""
    rows = range(Attach.decode(request.body).num_envs)
    blocks = [Block(row, row, row + 1, row, 0) for row in rows]
    body = Granted(epoch=1, lease_seconds=60.0, spec=spec, blocks=tuple(blocks))
    return reply(request, MessageType.GRANTED, body=body.encode())


def result(request: Message, num_rows: int, /, **changes: Any) -> Frames:
    """Return a RESULT message whose rows are all zero."""
    rows = bytes(_ROW_BYTES * num_rows)
    is_short = len(rows) <= MAX_INLINE_BYTES
    content = {"body": rows} if is_short else {"payload": rows}
    return reply(request, MessageType.RESULT, **{**content, **changes})


def correct_replies(request: Message, num_rows: int) -> Replies:
    """Yield the replies that a correct server with endless episodes would send."""
    if request.type is MessageType.HELLO:
        welcome = Welcome(
            max_message_bytes=1 << 30,
            lease_seconds=60.0,
            env_names=("Hostile-v0",),
            num_names=1,
            total_envs=1 << 16,
            free_envs=1 << 16,
        )
        yield reply(request, MessageType.WELCOME, body=welcome.encode())
    elif request.type is MessageType.ATTACH:
        yield granted(request)
    elif request.type in (MessageType.RESET, MessageType.STEP):
        yield result(request, len(request.entries))  # one row per block
    elif request.type is MessageType.PING:
        yield reply(request, MessageType.PONG, body=Pong(running={}).encode())
    elif request.type is MessageType.DETACH:
        yield reply(request, MessageType.DETACHED)


def _endless(frames: Frames) -> Replies:
    return itertools.repeat(frames)


def _large_rows(request: Message) -> Frames:
    image = spaces.Box(0, 255, (20, 1024, 1024), np.uint8)
    return granted(request, EnvSpec("Hostile-v0", image, spaces.Discrete(2)))


def _error(request: Message, text: str) -> Frames:
    body = {"code": int(ErrorCode.INTERNAL), "text": text}
    return reply(request, MessageType.ERROR, body=codec.encode(body))


def report_of(*rows: bytes | list[int]) -> bytes:
    """Return a report with one fault for each set of rows."""
    faults = [[1, False, f"fault {index}", rows] for index, rows in enumerate(rows)]
    return codec.encode({"infos": {}, "faults": faults, "errors": []})


#: Seven faults, each of more rows than exist: 57 KB.
LONG_REPORT: Final = report_of(*[b"\xff" * (1 << 13)] * 7)
#: 700 KiB exceed the maximum length of a text, but not that of a body.
_LONG_TEXT: Final = "\x1b]0;" * (MAX_BODY_BYTES // 5)

#: Scripts by name: each takes a request and its number of rows, and yields replies.
SCRIPTS: Final[dict[str, Callable[[Message, int], Replies]]] = {
    "nothing": lambda request, rows: (),
    "running": lambda request, rows: (),
    "pongs": lambda request, rows: _endless(
        reply(request, MessageType.PONG, entries=(), body=Pong(running={}).encode())
    ),
    "late results": lambda request, rows: _endless(
        result(request, rows, request=request.request + 1000)
    ),
    "others' results": lambda request, rows: _endless(
        result(request, rows, numbers=(request.session + 1, _BOOT, 1))
    ),
    "no messages": lambda request, rows: _endless([b"x" * 100, b"", b""]),
    "building": lambda request, rows: _endless(
        reply(request, MessageType.BUILDING, body=codec.encode({"elapsed_ms": 1}))
    ),
    "drains": lambda request, rows: _endless(
        reply(request, MessageType.DRAIN, body=codec.encode({"grace_ms": 1}))
    ),
    "absent": lambda request, rows: _endless(reply(request, MessageType.ABSENT)),
    "long results": lambda request, rows: _endless(
        result(request, rows, request=request.request + 1000, payload=bytes(16 * _MIB))
    ),
    "results of long frames": lambda request, rows: _endless(
        result(request, rows, payload=bytes(_MIB), report=bytes(_MIB))
    ),
    "long report": lambda request, rows: [result(request, rows, report=LONG_REPORT)],
    "large rows": lambda request, rows: [_large_rows(request)],
    "long text": lambda request, rows: [_error(request, _LONG_TEXT)],
    "half of the rows": lambda request, rows: [result(request, rows // 2)],
    "half of the blocks": lambda request, rows: [
        result(request, 1, entries=request.entries[:1])
    ],
}


class Script:
    """Replies correctly, except to one type of request, which the script handles."""

    def __init__(self, name: str, scripted_type: MessageType) -> None:
        self._script, self._scripted_type = SCRIPTS[name], scripted_type
        self._num_rows, self._is_running = 0, name == "running"

    def replies_to(self, request: Message) -> Replies:
        """Return the replies to a request, possibly an endless stream."""
        if request.type is MessageType.ATTACH:
            self._num_rows = Attach.decode(request.body).num_envs
        if request.type is self._scripted_type:
            return self._script(request, self._num_rows)
        if request.type is MessageType.PING and self._is_running:
            pong = Pong(running=dict.fromkeys(range(self._num_rows), 1))
            return [reply(request, MessageType.PONG, body=pong.encode())]
        return correct_replies(request, self._num_rows)


def serve(name: str, scripted_type: str) -> None:
    """Bind a ROUTER, print its address, and serve until the process is killed."""
    script = Script(name, MessageType[scripted_type])
    router = zmq.Context().socket(zmq.ROUTER)
    keys = KeyFolder().ensure_key("server")  # clients expect this key
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    router.setsockopt(zmq.SNDHWM, 64)
    router.setsockopt(zmq.SNDTIMEO, 50)
    # A send blocks while a client's queue is full.
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
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
                except (StopIteration, zmq.ZMQError):  # end of script, or no client
                    del streams[route]
                    break


class HostileServer:
    """A process that runs a script, and listens at `address`."""

    def __init__(
        self, script: str, scripted_type: MessageType = MessageType.STEP
    ) -> None:
        """Start the process, and wait until it prints its address."""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.envserve.hostile_server",
                script,
                scripted_type.name,
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
