"""Step envs of a server that strangers connect to, who have no key that it knows.

    python scripts/besiege_server.py [--seconds 30]                about 2 minutes

Some stay silent, some begin a greeting or a handshake and do not end it, some knock
with keys of their own; and a worker is killed meanwhile. First the server has all the
descriptors that there are, then few. Exits with 1 if a goal is missed, or a row is
wrong or lost. Needs the extra `dev`, for psutil.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import numpy as np
import typer
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lab.processes import own_keys
from benchmarks.lab.siege import Cores, Goals
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair
from envserve.wire.sockets import raise_file_limit, use_keys
from tests.envserve.pool_driver import attach_lane, step
from tests.envserve.server_process import ServerProcess
from tests.envserve.strangers import HonestClient, Stranger, honest_client

OPENINGS: Final = ("--allow-kwarg", "length", "--drain-grace", "0", "--workers", "3")
#: Without and with few descriptors.
MAX_CONNECT_SECONDS: Final = (1.0, 3.0)
MAX_P99_RATIO: Final = 1.5
MAX_GROWTH_MIB: Final = 64.0
MAX_ABSENCE_SECONDS: Final = 3.0


class Measured(NamedTuple):
    """What steps and new connections took: quantiles of 0.99, in ms and s; and MiB."""

    step_ms: float
    connect_seconds: float
    mib: float


class Knocker:
    """Connects with a key that nobody knows; refused for good, unless it is new."""

    def __init__(self, address: str, server_public: bytes) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        use_keys(self.socket, server_public, KeyPair.generate())
        self.socket.connect(address)
        self._until = time.monotonic() + 1.0

    def is_cut_off(self) -> bool:
        """Tells whether it has been refused by now."""
        return time.monotonic() > self._until


def besiege(address: str, public: bytes, counts: tuple[int, int, int, int]) -> None:
    """Keeps up so many connections of each kind; whoever was cut off comes again."""
    raise_file_limit()
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    peers: list[Stranger | Knocker | None] = [None] * len(kinds)
    for place, kind in itertools.cycle(enumerate(kinds)):
        peer = peers[place]
        if peer is not None and not peer.is_cut_off():
            time.sleep(1 / len(kinds))
            continue
        if peer is not None:
            peer.socket.close()
        peers[place] = None
        with contextlib.suppress(OSError):
            if kind == 3:
                peers[place] = Knocker(address, public)
                continue
            peers[place] = peer = Stranger(address, None, 1.0)
            if kind == 1:
                peer.send_half()
            elif kind == 2:
                peer.begin_handshake()


@contextlib.contextmanager
def strangers(
    server: ServerProcess, counts: tuple[int, int, int, int], cores: Cores
) -> Iterator[None]:
    """Has a process of its own besiege the server."""
    keys = KeyFolder().key("server")
    assert keys is not None
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=besiege, args=(server.address, keys.public, counts))
    with cores.of("attacker"):
        process.start()
    try:
        time.sleep(5.0)  # it starts, and all of them connect
        yield
        assert process.is_alive(), "expected strangers; they have ended"
    finally:
        process.kill()
        process.join()


def measure(server: ServerProcess, client: HonestClient, seconds: float) -> Measured:
    """Returns what steps and new connections take for so long."""
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


def kill_a_worker(server: ServerProcess) -> float:
    """Kills the worker of a lease; returns the seconds until its env steps again."""
    others = set(server.worker_pids)
    with contextlib.closing(attach_lane(server, "CartPole-v1", 1)) as lane:
        (pid,) = set(server.worker_pids) - others
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        has_lost = False
        while True:
            (outcome,) = step(lane, 0)
            if has_lost and not outcome.faults:
                return time.monotonic() - killed_at
            has_lost = has_lost or bool(outcome.faults)


def run(
    seconds: float, counts: tuple[int, int, int, int], descriptors: int, cores: Cores
) -> tuple[Measured, Measured, float]:
    """Returns what was measured before and meanwhile, and a worker's absence in s."""
    limit = ("sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(own_keys())
        with cores.of("server"):
            prefix = limit if descriptors else ()
            server = ServerProcess(folder, *OPENINGS, prefix=prefix)
        stack.enter_context(server)
        stack.enter_context(cores.of("client"))
        client = stack.enter_context(honest_client(server))
        before = measure(server, client, min(10.0, seconds))
        with strangers(server, counts, cores):
            absence = kill_a_worker(server)
            meanwhile = measure(server, client, seconds)
        print(server.log.count("all connections are closed"), "times all were cut off")
    return before, meanwhile, absence


def main(
    seconds: Annotated[float, typer.Option(help="Of each of the two sieges.")] = 30.0,
    silent: int = 500,
    greeters: Annotated[int, typer.Option(help="Begin a greeting.")] = 100,
    dawdlers: Annotated[int, typer.Option(help="Begin a handshake with keys.")] = 500,
    knockers: Annotated[int, typer.Option(help="Have keys that nobody knows.")] = 100,
    descriptors: Annotated[
        int, typer.Option(help="That the server has, the second time.")
    ] = 400,
) -> None:
    """Besieges a server."""
    raise_file_limit()
    cores, goals = Cores(), Goals()
    print(cores, flush=True)
    for count in (0, descriptors):
        counts = (silent, greeters, dawdlers, knockers)
        before, meanwhile, absence = run(seconds, counts, count, cores)
        name = f"{count} descriptors: " if count else ""
        ratio = meanwhile.step_ms / before.step_ms
        goals.at_most(f"{name}step p99, against before", ratio, MAX_P99_RATIO)
        goals.at_most(
            f"{name}connect with an env, p99 (s)",
            meanwhile.connect_seconds,
            MAX_CONNECT_SECONDS[count > 0],
        )
        growth = meanwhile.mib - before.mib
        goals.at_most(f"{name}memory of the server (MiB more)", growth, MAX_GROWTH_MIB)
        goals.at_most(
            f"{name}a killed worker is replaced (s)", absence, MAX_ABSENCE_SECONDS
        )
    sys.exit(goals.report())


if __name__ == "__main__":
    typer.run(main)
