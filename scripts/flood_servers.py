"""Flood a server with one key, and see what is left to a client with another.

    python scripts/flood_servers.py --kinds ping attach --connections 1 20

The honest client steps 8 CartPole envs. It does so alone; beside the flood of another
server, which takes the same CPU, but nothing of its own server; and beside the flood of
its own. The ratio is that of the last two.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import zmq

from envserve.client import BatchEnv
from envserve.keys import formats
from envserve.keys.folder import KeyFolder
from envserve.keys.grant import Grant
from envserve.keys.pair import KeyPair
from envserve.wire import (
    Attach,
    Buffer,
    CallBody,
    Hello,
    Message,
    MessageType,
    ResetBody,
    decode,
    encode,
)

_ROOT = Path(__file__).resolve().parents[1]
_NUM_ENVS = 8
_ATTACH_LOOPS = {"attach": ("CartPole-v1", 1), "attach-cheetah": ("HalfCheetah-v5", 8)}
#: Bodies of floods, by type.
_BODIES: dict[str, tuple[MessageType, bytes]] = {
    "ping": (MessageType.PING, b""),
    "hello": (MessageType.HELLO, Hello().encode()),
    "unknown-env": (
        MessageType.ATTACH,
        Attach(env_name="Nothing-v0", num_envs=1, seed=1).encode(),
    ),
    "attach-4k": (
        MessageType.ATTACH,
        Attach(
            env_name="Nothing-v0", num_envs=1, seed=1, env_kwargs={"x": "y" * 3900}
        ).encode(),
    ),
    "reset": (
        MessageType.RESET,
        ResetBody(resets=((tuple(range(8)), tuple(range(2**40, 2**40 + 8))),)).encode(),
    ),
    "call": (
        MessageType.CALL,
        CallBody(
            env_index=0, kind="call", name="step", arguments=([0] * 4000,)
        ).encode(),
    ),
}
_KINDS = (*_BODIES, "bytes", *_ATTACH_LOOPS)


class _Peer:
    """A DEALER that floods."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        secret = formats.decode(formats.SECRET, os.environ["FLOOD_KEY"])
        pair = KeyPair.of(secret)
        keys = KeyFolder().server_key()
        assert keys is not None
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        self._socket.connect(address)
        self._requests = itertools.count(1)
        self._session, self._boot, self.epoch = id(self), 0, 0
        self._boot = self.ask(*_BODIES["hello"]).boot

    def _pack(self, kind: MessageType, body: bytes) -> list[Buffer]:
        has_blocks = kind in (MessageType.RESET, MessageType.CALL)
        return encode(
            Message(
                kind,
                session=self._session,
                boot=self._boot,
                epoch=self.epoch,
                request=next(self._requests),
                entries=((0, 1),) if has_blocks else (),
                body=body,
            )
        )

    def ask(self, kind: MessageType, body: bytes = b"") -> Message:
        """Says something, and waits for what comes of it."""
        self._socket.send_multipart(self._pack(kind, body))
        while True:
            answer = decode(self._socket.recv_multipart())
            if answer.type is not MessageType.BUILDING:
                return answer

    def attach(self, env_name: str, num_envs: int) -> bool:
        """Asks for envs as a new session; tells whether it has got them."""
        self._session += 1
        body = Attach(env_name=env_name, num_envs=num_envs, seed=1).encode()
        answer = self.ask(MessageType.ATTACH, body)
        self.epoch = answer.epoch
        return answer.type is MessageType.GRANTED

    def send_many(self, kind: str) -> None:
        """Sends what fits, and reads what has come."""
        with contextlib.suppress(zmq.Again):
            for _ in range(32):
                frames: Sequence[Buffer] = (
                    [bytes(1 << 20)] if kind == "bytes" else self._pack(*_BODIES[kind])
                )
                self._socket.send_multipart(frames, zmq.NOBLOCK)
        with contextlib.suppress(zmq.Again):
            while True:
                self._socket.recv_multipart(zmq.NOBLOCK)


def _flood(kind: str, address: str, num_connections: int) -> None:
    """Floods a server until it is killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers = [_Peer(context, address) for _ in range(num_connections)]
    if kind in ("reset", "call"):
        for peer in peers[:4]:
            peer.attach("CartPole-v1", 8)
    for peer in itertools.cycle(peers):
        if kind not in _ATTACH_LOOPS:
            peer.send_many(kind)
        elif peer.attach(*_ATTACH_LOOPS[kind]):
            peer.ask(MessageType.DETACH)


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[str]:
    """Starts one; gives its address."""
    file = folder / "address"
    command = [
        *(sys.executable, "-m", "envserve.cli", "start", "--workers", "2"),
        *("--bind", "tcp://127.0.0.1:0", "--address-file", str(file)),
        *("--log-level", "error", "--drain-grace", "0", "--max-processes", "16"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=_ROOT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield file.read_text().strip()
        process.terminate()


@contextlib.contextmanager
def _flooder(kind: str, address: str, num_connections: int) -> Iterator[None]:
    command = [sys.executable, __file__, "--flood", kind, address, str(num_connections)]
    with subprocess.Popen(command, cwd=_ROOT) as process:
        time.sleep(1.5)  # it starts, and gets going
        try:
            yield
            assert process.poll() is None, "expected the flood to go on; it has ended"
        finally:
            process.kill()


def _measure(batch: BatchEnv, seconds: float) -> tuple[float, float]:
    """Returns steps per second, and the longest step in seconds."""
    actions = np.zeros(_NUM_ENVS, np.int64)
    count, longest, before = 0, 0.0, time.perf_counter()
    end = before + seconds
    while before < end:
        assert batch.step(actions).valid.all(), "expected no lost rows"
        now = time.perf_counter()
        longest = max(longest, now - before)
        count, before = count + 1, now
    return count / seconds, longest


def _compare(
    batch: BatchEnv, addresses: tuple[str, str], kind: str, given: argparse.Namespace
) -> None:
    own, other = addresses
    for num_connections in given.connections:
        runs: dict[str, list[tuple[float, float]]] = {own: [], other: [], "": []}
        for _ in range(given.rounds):
            runs[""].append(_measure(batch, given.seconds))
            for address in (other, own):
                with _flooder(kind, address, num_connections):
                    runs[address].append(_measure(batch, given.seconds))
        alone, control, flooded = (
            statistics.median(rate for rate, _ in runs[where])
            for where in ("", other, own)
        )
        print(
            f"{kind:15} {num_connections:11} {alone:8.0f} {control:8.0f} "
            f"{flooded:8.0f} {flooded / control:6.2f} "
            f"{1000 * max(longest for _, longest in runs[other]):15.0f} "
            f"{1000 * max(longest for _, longest in runs[own]):15.0f}",
            flush=True,
        )


def main() -> None:
    """Prints a line for each flood."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flood", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--kinds", nargs="+", default=_KINDS, choices=_KINDS)
    parser.add_argument("--connections", nargs="+", type=int, default=(1, 20))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    if given.flood:
        kind, address, num_connections = given.flood
        _flood(kind, address, int(num_connections))
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["ENVSERVE_HOME"] = str(root / "home")
        folder, pair = KeyFolder(), KeyPair.make()
        folder.client_key(create=True)
        folder.server_key(create=True)
        folder.clients.add(Grant(name="mallory", public=pair.public), time.time())
        os.environ["FLOOD_KEY"] = formats.encode(formats.SECRET, pair.secret)
        homes = [root / name for name in ("own", "other")]
        for home in homes:
            home.mkdir()
        own, other = [stack.enter_context(_server(home)) for home in homes]
        batch = BatchEnv.connect("CartPole-v1", [own], _NUM_ENVS, seed=0)
        with batch:
            batch.reset()
            print(
                "flood           connections    alone  control  flooded  ratio  "
                "longest control  longest flooded (ms)"
            )
            for kind in given.kinds:
                _compare(batch, (own, other), kind, given)


if __name__ == "__main__":
    main()
