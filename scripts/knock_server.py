"""Connect to a server many times as clients that it must reject.

    python scripts/knock_server.py [--tries 10000]                      about a minute

There are eight kinds of such clients: three use ZMTP without keys, three have keys that
were valid before, one has an unknown key, and one expects the key of another server. An
authorised client steps at the same time. Exits with 1 if the server accepts or answers
a client of these kinds or reads a message from it, or if a row of the authorised client
is wrong or lost.
"""

import contextlib
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final
from unittest import mock

import typer
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lab.processes import own_keys
from benchmarks.lab.siege import Cores, Goals
from envserve.client.link.connection import Connection
from envserve.keys.grant import Grant
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair
from envserve.wire.constants import MessageType
from envserve.wire.handshake import Join
from envserve.wire.message import Message, encode
from tests.envserve.server_process import ServerProcess
from tests.envserve.strangers import (
    HELLO,
    KEYLESS_COMMANDS,
    KeyedStranger,
    Stranger,
    honest_client,
)
from tests.envserve.test_metrics_port import read_with_retries, samples

OPTIONS: Final = ("--allow-kwarg", "length", "--metrics-port", "0")
JOIN: Final = Message(MessageType.JOIN, body=Join(public=bytes(32)).encode())
_CHUNK_SIZE: Final = 50
_TIMEOUT_MS: Final = 20_000
#: Maximum age of the server's metrics in seconds.
_METRICS_SECONDS: Final = 1.5


def without_keys(address: str, mechanism: str) -> Stranger:
    """Return a client that uses a ZMTP mechanism without keys."""
    peer = Stranger(address, None)
    peer.greet_with(mechanism)
    return peer


def use_up_keys(server: ServerProcess, public: bytes) -> dict[str, tuple[Any, ...]]:
    """Connect three clients, then invalidate their keys.

    Returns:
      A dict from the kind of each client's key to the arguments of `KeyedStranger`.
    """
    clients, now = KeyFolder().clients, time.time()
    arguments: dict[str, tuple[Any, ...]] = {}
    for name in ("revoked", "expired", "used"):
        until, message = (now + 99, encode(JOIN)) if name == "used" else (None, HELLO)
        pair = KeyPair.generate()
        arguments[name] = server.address, public, pair, message
        grant = Grant(name=name, public=pair.public, until=until)
        clients.add(grant, now)
        with KeyedStranger(*arguments[name]) as peer:
            assert peer.is_admitted(), f"expected a valid key: {name}"
            assert peer.socket.poll(_TIMEOUT_MS), "expected an answer"
        if name == "expired":
            clients.add(replace(grant, expires=now), now)
    clients.remove("revoked")
    names = "expired", "revoked"
    while not all(re.search(f"keys were taken .*{n}", server.log) for n in names):
        assert time.time() < now + _TIMEOUT_MS / 1000, server.log
        time.sleep(0.1)
    return arguments


def count_accepted(make: Callable[..., Stranger | KeyedStranger], tries: int) -> int:
    """Connect `tries` clients; return the number that the server accepted."""
    count = 0
    for start in range(0, tries, _CHUNK_SIZE):
        peers = [make() for _ in range(min(_CHUNK_SIZE, tries - start))]
        for peer in peers:
            with peer:
                count += peer.is_admitted()
        # Wait until the sockets are closed, because their number is limited.
        zmq.Context.instance().term()
    return count


def main(
    tries: Annotated[int, typer.Option(help="Connections of each kind.")] = 10_000,
) -> None:
    """Connect to a server as clients that it must reject."""
    cores, goals, sent = Cores(), Goals(), Counter[str]()
    print(cores, flush=True)
    original_send = Connection.send

    def send(connection: Connection, frames: Any) -> bool:
        is_sent = original_send(connection, frames)
        sent["client"] += is_sent
        return is_sent

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(own_keys())
        stack.enter_context(mock.patch.object(Connection, "send", send))
        with cores.of("server"):
            server = stack.enter_context(ServerProcess(folder, *OPTIONS))
        metrics = server.log.rpartition("metrics are at ")[2].split()[0]

        def count(name: str) -> int:
            return int(samples(read_with_retries(metrics))[f"envserve_{name}"])

        address, other = server.address, KeyPair.generate()
        keys = KeyFolder().keys_for(address)
        assert keys is not None
        public, client_keys = keys
        arguments = use_up_keys(server, public)
        arguments |= {"another server's": (address, other.public, client_keys, HELLO)}
        arguments |= {"unknown": (address, public, other, HELLO)}
        kinds: dict[str, Callable[..., Stranger | KeyedStranger]] = {}
        for name in KEYLESS_COMMANDS:
            kinds[f"{name} greeting"] = partial(without_keys, address, name)
        for name, peer in arguments.items():
            kinds[f"{name} key"] = partial(KeyedStranger, *peer)
        steps, read_before = 0, count("received_messages_total")
        rejected_before = count("refused_keys_total")
        goals.at_least("messages read while three keys were valid", read_before, 3)
        for name, make in kinds.items():
            started = time.monotonic()
            with honest_client(server) as client:
                num_accepted = count_accepted(make, tries)
                num_steps, seconds = len(client.seconds), time.monotonic() - started
            time.sleep(_METRICS_SECONDS)
            num_read = count("received_messages_total") - read_before - sent["client"]
            print(f"{name}: {tries:,} in {seconds:.0f} s; client: {num_steps:,} steps")
            goals.at_most(f"{name}: accepted", num_accepted, 0)
            goals.at_most(f"{name}: messages read", abs(num_read), 0)
            steps, read_before = steps + num_steps, read_before + num_read
        rejected = count("refused_keys_total") - rejected_before
        goals.at_least("rejected keys, of four kinds", rejected, 4 * tries)
        goals.at_least("correct steps of the authorised client", steps, 1)
        goals.at_most("leases left", count("leases"), 0)
    sys.exit(goals.report())


if __name__ == "__main__":
    typer.run(main)
