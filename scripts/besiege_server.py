"""Step envs of a server that strangers connect to: silent ones, and ones that dawdle.

    python scripts/besiege_server.py [--seconds 60] [--silent 500] [--dawdlers 100]

Prints how long steps and connections of a client take before and meanwhile, and exits
with 1 if a row is wrong or lost. Needs the extra `dev`, for psutil.
"""

import contextlib
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envserve.server.process import raise_file_limit
from tests.envserve.pool_driver import attach_lane
from tests.envserve.server_process import ServerProcess
from tests.envserve.strangers import HonestClient, Stranger, honest_client

OPENINGS = ("--allow-kwarg", "length", "--drain-grace", "0", "--workers", "3")


@contextlib.contextmanager
def strangers(server: ServerProcess, silent: int, dawdlers: int) -> Iterator[None]:
    """Keeps up so many connections; whoever was cut off comes again.

    Dawdlers begin a message and do not end it; with keys, a greeting.
    """
    is_over = threading.Event()

    def besiege() -> None:
        peers: list[Stranger | None] = [None] * (silent + dawdlers)
        for place in itertools.cycle(range(len(peers))):
            if is_over.is_set():
                break
            peer = peers[place]
            if peer is not None and not peer.is_cut_off():
                time.sleep(0.002)  # all of them within about a second
                continue
            if peer is not None:
                peer.socket.close()
            peers[place] = None
            with contextlib.suppress(OSError):
                can_greet = server.is_insecure and place >= silent
                peer = Stranger(server.address, b"" if can_greet else None, 1.0)
                peers[place] = peer
                if place >= silent:
                    peer.send_half()
        for peer in filter(None, peers):
            peer.socket.close()

    thread = threading.Thread(target=besiege)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def measure(
    name: str, server: ServerProcess, client: HonestClient, seconds: float
) -> None:
    """Prints what steps and new connections take for so long."""
    first, until = len(client.seconds), time.monotonic() + seconds
    connections, most_bytes = [], 0
    while (started := time.monotonic()) < until:
        attach_lane(server, "CartPole-v1", 1).close()
        connections.append(time.monotonic() - started)
        most_bytes = max(most_bytes, server.resident_bytes)
        time.sleep(0.2)
    steps = np.array(client.seconds[first:]) * 1e3
    print(
        f"{name}: {len(steps) / seconds:.0f} steps/s, ms: p50 {np.median(steps):.2f}, "
        f"p99 {np.quantile(steps, 0.99):.2f}, longest {steps.max():.1f}; "
        f"{len(connections)} connections with envs, s: p50 {np.median(connections):.3f}"
        f", p99 {np.quantile(connections, 0.99):.3f}; {most_bytes / 2**20:.0f} MiB",
        flush=True,
    )


def main(
    seconds: float = 60.0,
    silent: int = 500,
    dawdlers: int = 100,
    descriptors: Annotated[
        int, typer.Option(help="That the server may have; 0: as many as there are.")
    ] = 0,
    keys: Annotated[bool, typer.Option(help="Whether the server has them.")] = True,
) -> None:
    """Besieges a server."""
    raise_file_limit()
    limit = ("sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh")
    prefix = limit if descriptors else ()
    openness = () if keys else ("--insecure-no-auth",)
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(Path(folder), *OPENINGS, *openness, prefix=prefix) as server,
        honest_client(server) as client,
    ):
        measure("before", server, client, min(10.0, seconds))
        with strangers(server, silent, dawdlers):
            time.sleep(2.0)
            measure("meanwhile", server, client, seconds)
        measure("after", server, client, min(10.0, seconds))
        print(server.log.count("all connections are closed"), "times all were cut off")


if __name__ == "__main__":
    typer.run(main)
