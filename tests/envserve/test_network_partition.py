"""The cable between client and server is pulled, which neither host detects.

Run as a program with a server's address and its envs' journal folder, this file steps
the envs and checks every row until its stdin is closed. It prints a line when it has
started, and the ledger's counters at the end.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv
from tests.envserve.server_process import LEDGER, LEDGER_OPTIONS, ServerProcess
from tests.network_hosts import Hosts, needs_namespaces
from tests.oracle.batch_driver import BatchDriver
from tests.oracle.ledger import Ledger

pytestmark = needs_namespaces

#: Longer than it takes to detect a broken connection.
PULLED_SECONDS = 4.0
NUM_ENVS = 4
#: A step that takes longer is reported as a pause.
PAUSE_SECONDS = 0.2


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(["sim", "trainer"]).created() as hosts:
        yield hosts


def play(
    hosts: Hosts, folder: Path, options: Mapping[str, Sequence[str]]
) -> tuple[float, dict[str, dict[str, Any]]]:
    """Run one player per server before, while and after the cable is pulled.

    Args:
      hosts: The hosts that the cable connects.
      folder: Folder for the files of servers and envs.
      options: Each server's options, by server name.

    Returns:
      The time just before the cable is plugged in again, and each player's counters.
    """
    with contextlib.ExitStack() as stack:
        players = {
            name: start_player(stack, hosts, folder / name, 5555 + index, options[name])
            for index, name in enumerate(options)
        }
        for player in players.values():
            assert player.stdout is not None
            assert player.stdout.readline() == "playing\n"
        threading.Event().wait(0.5)
        hosts.pull_cable()
        threading.Event().wait(PULLED_SECONDS)
        plugged_at = time.monotonic()
        hosts.plug_cable()
        outputs = {
            name: player.communicate(timeout=60)[0] for name, player in players.items()
        }
        assert [player.returncode for player in players.values()] == [0] * len(players)
    return plugged_at, {name: json.loads(text) for name, text in outputs.items()}


def start_player(
    stack: contextlib.ExitStack,
    hosts: Hosts,
    folder: Path,
    port: int,
    options: Sequence[str],
) -> subprocess.Popen[str]:
    """Start a server on one host, and its player on the other."""
    folder.mkdir()
    address = f"tcp://{hosts.addresses['sim']}:{port}"
    stack.enter_context(
        ServerProcess(
            folder,
            *(*LEDGER_OPTIONS, "--insecure-no-auth", *options),
            bind=(address,),
            prefix=hosts.command("sim"),
        )
    )
    journal = str(folder / "journal")
    command = [
        sys.executable,
        "-m",
        "tests.envserve.test_network_partition",
        address,
        journal,
    ]
    player = stack.enter_context(
        subprocess.Popen(
            hosts.command("trainer", *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(player.kill)
    return player


def test_a_pulled_cable_costs_an_episode_only_if_the_lease_expires(
    hosts: Hosts, tmp_path: Path
) -> None:
    options = {"patient": [], "impatient": ["--lease-seconds", "2"]}
    plugged_at, results = play(hosts, tmp_path, options)
    for counts in results.values():
        pauses = [p for p in counts["pauses"] if p[1] - p[0] > 1]
        # One step has waited for the cable; a busy machine may cause other pauses.
        assert sum(began < plugged_at < ended for began, ended in pauses) == 1
        assert counts["padding"] == 0  # because all rows were absent at once
    patient, impatient = results["patient"], results["impatient"]
    assert patient["valid"] == patient["rows"]
    assert patient["unseen"] == 0
    num_lost = impatient["losses"].pop("SERVER_LOST")
    assert not impatient["losses"]
    # If the machine stalls for longer than the lease, each row loses another episode.
    assert num_lost in [NUM_ENVS * number for number in range(1, 1 + len(pauses))]
    assert impatient["valid"] == impatient["rows"] - num_lost


def main(address: str, journal: str) -> None:
    pauses = []
    with BatchEnv.connect(
        LEDGER, [address], NUM_ENVS, env_kwargs={"journal": journal}, insecure=True
    ) as batch:
        # No root seed: a new lease skips more incarnations than the ledger tries.
        player = BatchDriver(batch, Ledger(NUM_ENVS, None), np.random.default_rng())
        print("playing", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            time.sleep(0.002)  # leave the cores to the other player
            began = time.monotonic()
            player.step()
            ended = time.monotonic()
            if ended - began > PAUSE_SECONDS:
                pauses.append((began, ended))
    ledger = player.ledger
    ledger.finish(journal)
    counts = {
        "rows": ledger.num_rows,
        "valid": ledger.num_valid,
        "padding": ledger.num_padding,
        "unseen": ledger.num_unseen,
        "losses": {status.name: count for status, count in ledger.losses.items()},
        "pauses": pauses,  # monotonic seconds, which both hosts share
    }
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
