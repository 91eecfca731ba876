"""Try to crash a server, or to exhaust its memory, as an authorised client.

    python scripts/fill_server.py [--seconds 10]                       about a minute

The attacker first connects with the routing ids that the server would assign next if it
did not set libzmq's counter to a random value. The attacker then sends large messages
over four connections with the same id, and finally a message that never ends. A normal
client steps at the same time. Exits with 1 if the server exits or does not release the
memory, if a step takes too long, or if a row is wrong or lost. Linux only.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lab.processes import own_keys
from benchmarks.lab.siege import Cores, Goals
from envserve.keys.grant import Grant
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import CurveKeys
from envserve.wire.sockets import raise_file_limit, use_keys
from tests.envserve.server_process import ServerProcess
from tests.envserve.strangers import HELLO, KeyedStranger, honest_client, predicted_ids

OPTIONS: Final = ("--allow-kwarg", "length", "--drain-grace", "0")
MAX_GROWTH_MIB: Final = 300.0
MAX_STEP_MS: Final = 500.0
SETTLE_SECONDS: Final = 3.0
_MIB: Final = bytes(1 << 20)
#: Number of 1 MiB frames of a message. Together, they exceed the memory of the server,
#: so the message never ends.
_ENDLESS: Final = 20_000
_CHUNK_SIZE: Final = 250
_CLIENTS_WITHOUT_ID: Final = 20


def keys_of(home: Path, address: str) -> CurveKeys:
    """Return the keys that the client with this key folder uses for an address."""
    keys = KeyFolder(home).keys_for(address)
    assert keys is not None
    return keys


def let_in(home: Path, address: str) -> CurveKeys:
    """Authorise a new client whose key folder is `home`; return its keys."""
    public, _ = keys_of(KeyFolder().path, address)
    KeyFolder(home).add_pin([address], public, home.name)
    keys = keys_of(home, address)
    grant = Grant(name=home.name, public=keys[1].public)
    KeyFolder().clients.add(grant, time.time())
    return keys


def send_with_one_id(address: str, home: Path) -> None:
    """Send endlessly over four connections with one id; the server reads just one."""
    with zmq.Context() as context:
        peers = [context.socket(zmq.DEALER) for _ in range(4)]
        for peer in peers:
            peer.setsockopt(zmq.ROUTING_ID, b"taken")
            peer.setsockopt(zmq.SNDHWM, 8)
            use_keys(peer, *keys_of(home, address))
            peer.connect(address)
        for peer in itertools.cycle(peers):
            try:
                peer.send_multipart([_MIB] * 3, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                time.sleep(0.001)


def send_endless(address: str, home: Path) -> None:
    """Send a message that does not end before this process is killed."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        use_keys(peer, *keys_of(home, address))
        peer.connect(address)
        while True:  # start again if the server disconnects, which discards unsent data
            peer.send_multipart([_MIB] * _ENDLESS, copy=False)
            peer.poll(1000)


def announce(address: str, keys: CurveKeys, count: int) -> int:
    """Connect clients with predicted routing ids, and some clients without an id.

    Return the number of clients that the server rejected.
    """
    predicted, num_rejected = predicted_ids(count), 0
    for start in range(0, count, _CHUNK_SIZE):
        with contextlib.ExitStack() as stack:
            ids = predicted[start : start + _CHUNK_SIZE]
            for routing_id in (*ids, *[b""] * _CLIENTS_WITHOUT_ID):
                peer = KeyedStranger(address, *keys, HELLO, routing_id)
                num_rejected += not stack.enter_context(peer).is_admitted()
        # Wait until the sockets are closed, because their number is limited.
        zmq.Context.instance().term()
    return num_rejected


def fill(
    server: ServerProcess,
    send: Callable[[str, Path], None],
    home: Path,
    seconds: float,
    cores: Cores,
) -> tuple[float, float]:
    """Run `send` in a process; return the server's peak and final memory in MiB.

    The final value is measured some seconds after SIGSTOP has paused the process, which
    remains connected.
    """
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=send, args=(server.address, home))
    with cores.of("attacker"):
        process.start()
    try:
        peak, deadline = 0, time.monotonic() + seconds
        while time.monotonic() < deadline:
            peak = max(peak, server.resident_bytes)
            time.sleep(0.02)
        assert process.is_alive(), "expected the attacker to run; it has exited"
        os.kill(process.pid or 0, signal.SIGSTOP)
        time.sleep(SETTLE_SECONDS)
        after = server.resident_bytes
    finally:
        process.kill()
        process.join()
    return peak / 2**20, after / 2**20


def main(
    seconds: Annotated[
        float, typer.Option(help="Duration of each attack on the memory.")
    ] = 10.0,
    announced: Annotated[
        int, typer.Option(help="Number of routing ids to announce.")
    ] = 10_000,
) -> None:
    """Attack a server."""
    raise_file_limit()
    cores, goals = Cores(), Goals()
    print(cores, flush=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(own_keys())
        with cores.of("server"):
            server = stack.enter_context(ServerProcess(folder, *OPTIONS))
        stack.enter_context(cores.of("client"))
        with honest_client(server) as client:
            before = server.resident_bytes / 2**20
            keys = let_in(folder / "announces", server.address)
            num_rejected = announce(server.address, keys, announced)
        goals.at_most(f"{announced:,} routing ids: rejected clients", num_rejected, 0)
        longest = 1e3 * max(client.seconds)
        goals.at_most("routing ids: longest honest step (ms)", longest, MAX_STEP_MS)
        for name, send in (("one-id", send_with_one_id), ("endless", send_endless)):
            # Use a new client, because the previous client is blocked.
            let_in(home := folder / name, server.address)
            num_closed = server.log.count("connections are closed")
            with honest_client(server) as client:
                peak, after = fill(server, send, home, seconds, cores)
            num_closed = server.log.count("connections are closed") - num_closed
            steps, longest = len(client.seconds), 1e3 * max(client.seconds)
            print(f"{name}: closed {num_closed} times, {steps:,} correct honest steps")
            goals.at_least(f"{name}: largest growth (MiB)", peak - before, 100)
            goals.at_most(
                f"{name}: growth at the end (MiB)", after - before, MAX_GROWTH_MIB
            )
            goals.at_most(f"{name}: longest honest step (ms)", longest, MAX_STEP_MS)
        has_ended = server.process.poll() is not None or not server.welcome().num_names
        goals.at_most("servers that have exited", has_ended, 0)
    sys.exit(goals.report())


if __name__ == "__main__":
    typer.run(main)
