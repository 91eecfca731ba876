"""Step envs on a server while many unauthorised clients connect to it.

    python scripts/flood_connections.py [--seconds 30]                about 2 minutes

Some clients send nothing, some begin a greeting or a handshake and do not finish it,
and some use unknown keys. A worker is killed during the attack. The server first runs
without a limit on file descriptors, then with a low limit. Exits with 1 if a goal is
missed, or if a row is wrong or lost. Requires the extra `dev` (psutil).
"""

import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import numpy as np
import typer
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.attacks import Cores, Goals
from benchmarks.support.processes import temporary_keys
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair
from envserve.wire.sockets import raise_file_limit, use_keys
from tests.envserve.pool_driver import attach_lane, step
from tests.envserve.server_process import ServerProcess
from tests.envserve.zmtp_peers import HonestClient, ZmtpPeer, honest_client

OPTIONS: Final = ("--allow-kwarg", "length", "--drain-grace", "0", "--workers", "3")
#: Maximum time to connect: without a limit on file descriptors, and with a low limit.
MAX_CONNECT_SECONDS: Final = (1.0, 3.0)
MAX_P99_RATIO: Final = 1.5
MAX_GROWTH_MIB: Final = 64.0
MAX_ABSENCE_SECONDS: Final = 3.0


class Measured(NamedTuple):
    """99th percentiles of step and connection times, and the server's memory."""

    step_ms: float
    connect_seconds: float
    mib: float


class UnknownKeyClient:
    """A client with a new, unknown key."""

    def __init__(self, address: str, server_public: bytes) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        use_keys(self.socket, server_public, KeyPair.generate())
        self.socket.connect(address)
        self._until = time.monotonic() + 1.0

    def is_disconnected(self) -> bool:
        """Return whether the time has passed in which the server must disconnect."""
        return time.monotonic() > self._until


def flood(address: str, counts: tuple[int, int, int, int]) -> None:
    """Keep connections of unauthorised clients open, and replace those that are closed.

    `counts` is the number of clients of each kind, in the order of the options of
    `main`.
    """
    raise_file_limit()
    server = KeyFolder().key("server")
    assert server is not None
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    peers: list[ZmtpPeer | UnknownKeyClient | None] = [None] * len(kinds)
    for index, kind in itertools.cycle(enumerate(kinds)):
        peer = peers[index]
        if peer is not None and not peer.is_disconnected():
            time.sleep(1 / len(kinds))
            continue
        if peer is not None:
            peer.socket.close()
        peers[index] = None
        with contextlib.suppress(OSError):
            if kind == 3:
                peers[index] = UnknownKeyClient(address, server.public)
                continue
            peers[index] = peer = ZmtpPeer(address, None, 1.0)
            if kind == 1:
                peer.send_half()
            elif kind == 2:
                peer.begin_handshake()


def measure(server: ServerProcess, client: HonestClient, seconds: float) -> Measured:
    """Measure steps and new connections for a number of seconds."""
    first, until = len(client.seconds), time.monotonic() + seconds
    connections, most_bytes = [], 0
    while (started := time.monotonic()) < until:
        attach_lane(server, "CartPole-v1", 1).close()
        connections.append(time.monotonic() - started)
        most_bytes = max(most_bytes, server.resident_bytes)
        time.sleep(0.2)
    steps = np.array(client.seconds[first:]) * 1e3
    print(
        f"{len(steps) / seconds:.0f} steps/s, ms: p50 {np.median(steps):.2f}, longest "
        f"{steps.max():.1f}; {len(connections)} connections with envs, s: p50 "
        f"{np.median(connections):.3f}",
        flush=True,
    )
    return Measured(
        float(np.quantile(steps, 0.99)),
        float(np.quantile(connections, 0.99)),
        most_bytes / 2**20,
    )


def kill_worker(server: ServerProcess) -> float:
    """Kill the worker of a lease; return the seconds until the env steps again."""
    others = set(server.worker_pids)
    with contextlib.closing(attach_lane(server, "CartPole-v1", 1)) as lane:
        (pid,) = set(server.worker_pids) - others
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        has_failed = False
        while True:
            (outcome,) = step(lane, 0)
            if has_failed and not outcome.faults:
                return time.monotonic() - killed_at
            has_failed = has_failed or bool(outcome.faults)


def run(
    seconds: float, counts: tuple[int, int, int, int], descriptors: int, cores: Cores
) -> tuple[Measured, Measured, float]:
    """Attack a new server.

    Returns:
      Measurements before and during the attack, and the seconds until the env of a
      killed worker steps again.
    """
    limit = ("sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(temporary_keys())
        with cores.of("server"):
            prefix = limit if descriptors else ()
            server = ServerProcess(folder, *OPTIONS, prefix=prefix)
        stack.enter_context(server)
        stack.enter_context(cores.of("client"))
        client = stack.enter_context(honest_client(server))
        before = measure(server, client, min(10.0, seconds))
        with cores.attack(flood, server.address, counts):
            time.sleep(5.0)  # time to start and to connect all clients
            absence = kill_worker(server)
            during = measure(server, client, seconds)
        print("all connections closed:", server.log.count("closed all connections"))
    return before, during, absence


def main(
    seconds: Annotated[
        float, typer.Option(help="Duration of each of the two attacks.")
    ] = 30.0,
    silent: Annotated[int, typer.Option(help="Clients that send nothing.")] = 500,
    greetings: Annotated[
        int, typer.Option(help="Clients that begin a greeting.")
    ] = 100,
    handshakes: Annotated[
        int, typer.Option(help="Clients that begin a handshake.")
    ] = 500,
    unknown_keys: Annotated[int, typer.Option(help="Clients with unknown keys.")] = 100,
    descriptors: Annotated[
        int,
        typer.Option(help="Limit on the server's descriptors in the second attack."),
    ] = 400,
) -> None:
    """Attack a server with connections of unauthorised clients."""
    raise_file_limit()
    cores, goals = Cores(), Goals()
    print(cores, flush=True)
    for count in (0, descriptors):
        counts = (silent, greetings, handshakes, unknown_keys)
        before, during, absence = run(seconds, counts, count, cores)
        name = f"{count} descriptors: " if count else ""
        ratio = during.step_ms / before.step_ms
        goals.at_most(f"{name}step p99, relative to before", ratio, MAX_P99_RATIO)
        goals.at_most(
            f"{name}connect with an env, p99 (s)",
            during.connect_seconds,
            MAX_CONNECT_SECONDS[count > 0],
        )
        growth = during.mib - before.mib
        goals.at_most(f"{name}growth of the server (MiB)", growth, MAX_GROWTH_MIB)
        goals.at_most(
            f"{name}a killed worker is replaced (s)", absence, MAX_ABSENCE_SECONDS
        )
    sys.exit(goals.report())


if __name__ == "__main__":
    typer.run(main)
