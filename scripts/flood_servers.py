"""Flood a server as one user, and measure the speed for another user.

    python scripts/flood_servers.py                                    about 4 minutes
    python scripts/flood_servers.py --kinds ping attach --connections 1 20

A client steps 8 CartPole envs: without a flood, while another server is flooded, and
while its own server is flooded. The goals are the ratio of the last two speeds, and the
longest step. The flood `unknown-keys` consists of 500 handshakes a second with unknown
keys. The server's file of authorised clients has 5,000 lines. Exits with 1 if a goal is
missed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.attacks import Cores, Goals
from envserve.client import BatchEnv
from envserve.keys import private_files
from envserve.keys.grant import Grant, format_line
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair
from envserve.lane import Call
from envserve.spaces import codec
from envserve.wire.bodies import Attach, CallBody, FrameRequest, ResetBody
from envserve.wire.constants import MessageType
from envserve.wire.handshake import Hello
from envserve.wire.message import Buffer, Message, decode, encode
from envserve.wire.sockets import use_keys
from envserve.wire.status import ServerStatus
from tests.envserve.server_process import ServerProcess
from tests.envserve.test_metrics_port import current_samples

_NUM_ENVS = 8
_MIN_RATIO = 0.9
_MAX_STEP_MS = 100.0
_OPTIONS = ("--drain-grace", "0", "--max-processes", "16", "--metrics-port", "0")
#: Number of lines in the file `clients` of the server's key folder.
_NUM_CLIENTS = 5_000
#: Handshakes with unknown keys per second, and number of their sockets that stay open.
_HANDSHAKES_PER_SECOND = 500
_NUM_OPEN = 100
_ATTACH_LOOPS = {"attach": ("CartPole-v1", 1), "attach-cheetah": ("HalfCheetah-v5", 8)}
#: Maps kinds of floods to the type and the body of their messages.
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
            env_name="Nothing-v0", num_envs=1, seed=1, env_kwargs={"x": "y" * 3700}
        ).encode(),
    ),
    "reset": (
        MessageType.RESET,
        ResetBody(resets=((tuple(range(8)), tuple(range(2**40, 2**40 + 8))),)).encode(),
    ),
    "call": (
        MessageType.CALL,
        CallBody.from_calls(
            [Call(0, (0,), "call", "step", codec.encode([[[0] * 4000], {}]))]
        ).encode(),
    ),
}
_KINDS = (*_BODIES, "record", "bytes", *_ATTACH_LOOPS, "unknown-keys")


class _Peer:
    """A client that floods a server over one DEALER socket."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, pair: KeyPair
    ) -> None:
        keys = KeyFolder().key("server")
        assert keys is not None
        self._socket = context.socket(zmq.DEALER)
        use_keys(self._socket, keys.public, pair)
        self._socket.setsockopt(zmq.RCVTIMEO, 1000)
        self._socket.connect(address)
        self._requests = itertools.count(1)
        self._session, self._boot, self.epoch = id(self), 0, 0
        self._boot = self.request(*_BODIES["hello"]).boot

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

    def request(self, kind: MessageType, body: bytes = b"") -> Message:
        """Resend a request until it is answered; a flooded server drops messages."""
        while True:
            self._socket.send_multipart(self._pack(kind, body))
            with contextlib.suppress(zmq.Again):
                while True:
                    reply = decode(self._socket.recv_multipart())
                    if reply.type is not MessageType.BUILDING:
                        return reply

    def attach(self, env_name: str, num_envs: int) -> bool:
        """Request envs in a new session; return whether they were granted."""
        self._session += 1
        body = Attach(env_name=env_name, num_envs=num_envs, seed=1).encode()
        reply = self.request(MessageType.ATTACH, body)
        self.epoch = reply.epoch
        return reply.type is MessageType.GRANTED

    def record_request(self) -> tuple[MessageType, bytes]:
        """Attach and reset envs; return a FRAME request for one env's flight record.

        The request is returned as a message type and a body.
        """
        # The leases of an earlier flood expire only some seconds after the flood.
        while not self.attach("CartPole-v1", _NUM_ENVS):
            time.sleep(0.1)
        self.request(*_BODIES["reset"])
        status = ServerStatus.decode(self.request(MessageType.STATUS).body)
        lease = status.leases[0].number
        body = FrameRequest(lease=lease, rows=(0,), record=True).encode()
        return MessageType.FRAME, body

    def send_many(self, kind: str) -> None:
        """Send up to 32 messages without blocking, and read all replies."""
        with contextlib.suppress(zmq.Again):
            for _ in range(32):
                frames: Sequence[Buffer] = (
                    [bytes(1 << 20)] if kind == "bytes" else self._pack(*_BODIES[kind])
                )
                self._socket.send_multipart(frames, zmq.NOBLOCK)
        with contextlib.suppress(zmq.Again):
            while True:
                self._socket.recv_multipart(zmq.NOBLOCK)


def _flood(
    kind: str, address: str, num_connections: int, secret: bytes, started: Event
) -> None:
    """Flood a server until this process is killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if kind == "unknown-keys":
        started.set()
        _connect_with_unknown_keys(context, address)
    pair = KeyPair.from_secret(secret)
    peers = [_Peer(context, address, pair) for _ in range(num_connections)]
    if kind == "record":
        _BODIES[kind] = peers[0].record_request()
    if kind in ("reset", "call"):
        for peer in peers[:4]:
            peer.attach("CartPole-v1", 8)
    started.set()
    for peer in itertools.cycle(peers):
        if kind not in _ATTACH_LOOPS:
            peer.send_many(kind)
        elif peer.attach(*_ATTACH_LOOPS[kind]):
            peer.request(MessageType.DETACH)


def _connect_with_unknown_keys(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    """Connect with an unknown key at a constant rate until this process is killed."""
    server, unknown = KeyFolder().key("server"), KeyPair.generate()
    assert server is not None
    sockets: collections.deque[zmq.Socket[bytes]] = collections.deque()
    next_at = time.monotonic()
    while True:
        socket = context.socket(zmq.DEALER)
        sockets.append(socket)
        use_keys(socket, server.public, unknown)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(address)
        if len(sockets) > _NUM_OPEN:
            sockets.popleft().close(linger=0)
        next_at += 1.0 / _HANDSHAKES_PER_SECOND
        time.sleep(max(0.0, next_at - time.monotonic()))


def _measure(batch: BatchEnv, seconds: float) -> tuple[float, float]:
    """Return steps per second, and the longest step in seconds."""
    actions = np.zeros(_NUM_ENVS, np.int64)
    count, longest, before = 0, 0.0, time.perf_counter()
    end = before + seconds
    while before < end:
        assert batch.step(actions).valid.all(), "expected no lost rows"
        now = time.perf_counter()
        longest = max(longest, now - before)
        count, before = count + 1, now
    return count / seconds, longest


def _metric(server: ServerProcess, name: str) -> float:
    return current_samples(server.metrics_address)[f"envserve_{name}"]


def _compare(
    batch: BatchEnv,
    servers: tuple[ServerProcess, ServerProcess],
    flood: tuple[str, int],
    secrets: Iterator[bytes],
    args: argparse.Namespace,
    cores: Cores,
    goals: Goals,
) -> None:
    """Measure without a flood, then while each of the two servers is flooded."""
    flooded, other = (server.address for server in servers)
    kind, num_connections = flood
    rejected_before = _metric(servers[0], "refused_keys_total")
    runs: dict[str, list[tuple[float, float]]] = {flooded: [], other: []}
    alone, _ = _measure(batch, args.seconds)
    for _ in range(args.rounds):
        for address in (other, flooded):
            started = multiprocessing.get_context("spawn").Event()
            arguments = (kind, address, num_connections, next(secrets), started)
            with cores.attack(_flood, *arguments):
                assert started.wait(60.0), "expected the flood to start within 60 s"
                runs[address].append(_measure(batch, args.seconds))
    control_rate, flooded_rate = (
        statistics.median(rate for rate, _ in runs[x]) for x in (other, flooded)
    )
    print(
        f"{kind} x{num_connections}: {alone:.0f} steps/s without a flood, "
        f"{control_rate:.0f} during a flood of another server (longest step "
        f"{1e3 * max(longest for _, longest in runs[other]):.0f} ms), "
        f"{flooded_rate:.0f} during a flood of its server"
    )
    if kind == "unknown-keys":
        lag = 1e3 * _metric(servers[0], "loop_lag_seconds")
        goals.at_most("unknown-keys: delay of the event loop (ms)", lag, _MAX_STEP_MS)
        count = _metric(servers[0], "refused_keys_total") - rejected_before
        print(f"rejected {count:.0f} handshakes in {args.rounds * args.seconds:.1f} s")
    name = f"{kind}, {num_connections} connections: "
    goals.at_least(f"{name}ratio of steps/s", flooded_rate / control_rate, _MIN_RATIO)
    longest = 1e3 * max(longest for _, longest in runs[flooded])
    goals.at_most(f"{name}longest step (ms)", longest, _MAX_STEP_MS)


def main() -> int:
    """Print a table of goals; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=_KINDS, choices=_KINDS)
    parser.add_argument("--connections", nargs="+", type=int, default=(1, 20))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="duration of each measurement"
    )
    args = parser.parse_args()
    # End the servers and the flood after SIGTERM, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cores, goals = Cores(), Goals()
    print(cores, flush=True)
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["ENVSERVE_HOME"] = str(root / "home")
        folder = KeyFolder()
        folder.ensure_key("client")
        folder.ensure_key("server")
        floods = list(itertools.product(args.kinds, args.connections))
        # The flood `unknown-keys` does not depend on the number of connections.
        for connections in args.connections[1:]:
            if "unknown-keys" in args.kinds:
                floods.remove(("unknown-keys", connections))
        # Each flood has its own key, because a blocked user stays blocked for a minute.
        pairs = [KeyPair.generate() for _ in range(2 * args.rounds * len(floods))]
        publics = [pair.public for pair in pairs]
        publics += [os.urandom(32) for _ in range(_NUM_CLIENTS - len(pairs))]
        grants = [Grant(name=f"mallory-{n}", public=p) for n, p in enumerate(publics)]
        text = "".join(f"{format_line(grant)}\n" for grant in grants)
        private_files.write_private(folder.path / "clients", text)
        secrets = iter([pair.secret for pair in pairs])
        servers: list[ServerProcess] = []
        for side in ("server", "control"):
            (root / side).mkdir()
            with cores.of(side):
                server = ServerProcess(root / side, *_OPTIONS, imports=())
            servers.append(stack.enter_context(server))
        stack.enter_context(cores.of("client"))
        flooded, control = servers
        addresses = [flooded.address]
        with BatchEnv.connect("CartPole-v1", addresses, _NUM_ENVS, seed=0) as batch:
            batch.reset()
            for flood in floods:
                _compare(batch, (flooded, control), flood, secrets, args, cores, goals)
    return goals.report()


if __name__ == "__main__":
    sys.exit(main())
