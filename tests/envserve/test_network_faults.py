"""Real processes and sockets, a network that fails: the user sees nothing of it.

Every row is valid, every action was applied once, and no call is in doubt.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from envserve.chaos.proxy import Proxy
from envserve.chaos.toxics import Toxics
from envserve.client import BatchEnv
from tests.envserve.ledger_player import LEDGER_OPENINGS, SEED, Player
from tests.envserve.server_process import LEDGER, ServerProcess

NUM_ENVS = 32
CALM = Toxics()


class BadNetwork(NamedTuple):
    to_server: Toxics
    to_client: Toxics
    #: How often what has to happen.
    least: dict[str, int]
    #: Connections that fail side by side.
    num_proxies: int = 1


COPIES = Toxics(duplicate=0.3, stale_copy=0.3)
SWAPS = Toxics(reorder=0.3)
SINGLE_BYTES = Toxics(slice_bytes=1)
LATENCY = Toxics(latency_seconds=0.1, jitter_seconds=0.05)
LOSSES = Toxics(drop=0.04)
RESETS = Toxics(bytes_until_reset=2000.0)

BAD_NETWORKS = {
    "copies": BadNetwork(COPIES, COPIES, {"duplicate": 200, "stale_copy": 200}),
    "in-flight retries": BadNetwork(Toxics(retry=0.7), CALM, {"retry": 300}),
    "reordering": BadNetwork(SWAPS, SWAPS, {"reorder": 200}),
    "single bytes": BadNetwork(SINGLE_BYTES, SINGLE_BYTES, {"messages": 300}),
    "latency": BadNetwork(LATENCY, LATENCY, {"messages": 100}),
    "losses": BadNetwork(LOSSES, LOSSES, {"drop": 10}),
    "resets": BadNetwork(RESETS, RESETS, {"reset": 200}, num_proxies=8),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, *LEDGER_OPENINGS) as server:
        yield server


def set_toxics(
    proxies: Sequence[Proxy], to_server: Toxics, to_client: Toxics
) -> Counter[str]:
    """Replaces all toxics; returns what has happened before."""
    counts: Counter[str] = Counter()
    for proxy in proxies:
        proxy.change(to_server=to_server, to_client=to_client)
        counts += proxy.to_server.counts + proxy.to_client.counts
    return counts


@pytest.mark.parametrize("name", BAD_NETWORKS)
def test_nothing_is_seen_of_a_bad_network(
    name: str,
    server: ServerProcess,
    tmp_path: Path,
    random_seed: int,
    random_generator: np.random.Generator,
) -> None:
    network = BAD_NETWORKS[name]
    with contextlib.ExitStack() as stack:
        proxies = [
            stack.enter_context(Proxy(server.address, seed=random_seed + i))
            for i in range(network.num_proxies)
        ]
        batch = stack.enter_context(
            BatchEnv.connect(
                LEDGER,
                [proxy.address for proxy in proxies],
                NUM_ENVS,
                seed=SEED,
                num_splits=8 // network.num_proxies,
                env_kwargs={"journal": str(tmp_path)},
            )
        )
        player = Player(batch, random_generator)
        counts = set_toxics(proxies, network.to_server, network.to_client)
        before = counts
        while not counts - before >= Counter(network.least):
            player.send_and_receive(5)
            counts = set_toxics(proxies, network.to_server, network.to_client)
        set_toxics(proxies, CALM, CALM)
    player.check_nothing_was_seen(tmp_path)
