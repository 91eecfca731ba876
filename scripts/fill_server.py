"""Have a client with a key end or fill a server, and see who is left.

    python scripts/fill_server.py [--seconds 10]                       about a minute

It announces routing ids that the server would give next, did it begin where others do;
sends large messages by four connections of one id; and one that does not end. An honest
client steps beside it. Exits with 1 if the server ends, or keeps the memory, or a step
takes too long, or a row is wrong or lost. On Linux only.
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
from tests.envserve.strangers import HELLO, KeyedStranger, foreseen_ids, honest_client

OPENINGS: Final = ("--allow-kwarg", "length", "--drain-grace", "0")
MAX_GROWTH_MIB: Final = 300.0
MAX_STEP_MS: Final = 500.0
SETTLE_SECONDS: Final = 3.0
_MIB: Final = bytes(1 << 20)
#: As many frames as no client that ends them could keep in memory by then.
_ENDLESS: Final = 20_000
_AT_ONCE: Final = 250
_NEWCOMERS: Final = 20


def keys_of(home: Path, address: str) -> CurveKeys:
    """Returns what the client has whose folder that is."""
    keys = KeyFolder(home).keys_for(address)
    assert keys is not None
    return keys


def let_in(home: Path, address: str) -> CurveKeys:
    """Makes a client in that folder whom the server knows; returns what it has."""
    public, _ = keys_of(KeyFolder().path, address)
    KeyFolder(home).add_pin([address], public, home.name)
    keys = keys_of(home, address)
    grant = Grant(name=home.name, public=keys[1].public)
    KeyFolder().clients.add(grant, time.time())
    return keys


def send_as_one(address: str, home: Path) -> None:
    """Sends without end: of all but the first nothing is read."""
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
    """Sends a message of frames that will not have ended when this is killed."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        use_keys(peer, *keys_of(home, address))
        peer.connect(address)
        while True:  # whose rest is thrown away once it is cut off
            peer.send_multipart([_MIB] * _ENDLESS, copy=False)
            peer.poll(1000)


def announce(address: str, keys: CurveKeys, count: int) -> int:
    """Announces so many routing ids; returns how many were shut out."""
    foreseen, num_shut_out = foreseen_ids(count), 0
    for start in range(0, count, _AT_ONCE):
        with contextlib.ExitStack() as stack:
            ids = foreseen[start : start + _AT_ONCE]
            for routing_id in (*ids, *[b""] * _NEWCOMERS):
                peer = KeyedStranger(address, *keys, HELLO, routing_id)
                num_shut_out += not stack.enter_context(peer).gets_in()
        zmq.Context.instance().term()  # until all are closed: there is room for few
    return num_shut_out


def fill(
    server: ServerProcess,
    send: Callable[[str, Path], None],
    home: Path,
    seconds: float,
    cores: Cores,
) -> tuple[float, float]:
    """Has a process send; returns how many MiB the server has, at most and after.

    After is when it has said no more for a while, and has not hung up.
    """
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=send, args=(server.address, home))
    with cores.of("attacker"):
        process.start()
    try:
        most, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            most = max(most, server.resident_bytes)
            time.sleep(0.02)
        assert process.is_alive(), "expected it to go on; it has ended"
        os.kill(process.pid or 0, signal.SIGSTOP)
        time.sleep(SETTLE_SECONDS)
        after = server.resident_bytes
    finally:
        process.kill()
        process.join()
    return most / 2**20, after / 2**20


def main(
    seconds: Annotated[float, typer.Option(help="Of each filling.")] = 10.0,
    announced: Annotated[int, typer.Option(help="Routing ids.")] = 10_000,
) -> None:
    """Fills a server."""
    raise_file_limit()
    cores, goals = Cores(), Goals()
    print(cores, flush=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(own_keys())
        with cores.of("server"):
            server = stack.enter_context(ServerProcess(folder, *OPENINGS))
        stack.enter_context(cores.of("client"))
        with honest_client(server) as client:
            before = server.resident_bytes / 2**20
            keys = let_in(folder / "announces", server.address)
            num_shut_out = announce(server.address, keys, announced)
        goals.at_most(f"of {announced:,} who announce, shut out", num_shut_out, 0)
        longest = 1e3 * max(client.seconds)
        goals.at_most("announced: longest step beside them (ms)", longest, MAX_STEP_MS)
        for name, send in (("one-id", send_as_one), ("endless", send_endless)):
            let_in(home := folder / name, server.address)  # the one before is shut out
            num_closed = server.log.count("connections are closed")
            with honest_client(server) as client:
                most, after = fill(server, send, home, seconds, cores)
            num_closed = server.log.count("connections are closed") - num_closed
            steps, longest = len(client.seconds), 1e3 * max(client.seconds)
            print(f"{name}: {num_closed} times cut off, {steps:,} right steps beside")
            goals.at_least(f"{name}: MiB more, at most", most - before, 100)
            goals.at_most(
                f"{name}: MiB more in the end", after - before, MAX_GROWTH_MIB
            )
            goals.at_most(f"{name}: longest step beside it (ms)", longest, MAX_STEP_MS)
        has_ended = server.process.poll() is not None or not server.welcome().num_names
        goals.at_most("servers that have ended", has_ended, 0)
    sys.exit(goals.report())


if __name__ == "__main__":
    typer.run(main)
