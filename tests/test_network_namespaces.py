"""The commands of docker-compose.yml on four hosts: network namespaces of our own.

The very words of the file are run, names like `sim1` included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.network_hosts import Hosts, needs_namespaces

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())[
    "services"
]

pytestmark = needs_namespaces


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts(list(SERVICES))
    try:
        hosts.create()
        yield hosts
    finally:
        hosts.remove()


def environment(name: str, folder: Path) -> dict[str, str]:
    """A service's, with a folder in the place of the volumes."""
    home = SERVICES[name].get("environment", {}).get("ENVSERVE_HOME", "/nowhere")
    return os.environ | {"ENVSERVE_HOME": home.replace("/keys", str(folder))}


def wait_until_healthy(hosts: Hosts, name: str, folder: Path) -> None:
    _, program, *words = SERVICES[name]["healthcheck"]["test"]
    give_up_at = time.monotonic() + 30
    while True:
        health = subprocess.run(
            hosts.command(name, str(BIN / program), *words),
            env=environment(name, folder),
            capture_output=True,
        )
        if health.returncode == 0:
            return
        assert time.monotonic() < give_up_at, health.stdout + health.stderr


def test_a_trainer_trains_on_the_envs_of_two_other_hosts(
    hosts: Hosts, tmp_path: Path
) -> None:
    run_folder, folder = tmp_path / "run", tmp_path / "keys"
    made = [str(folder) if w == "/keys" else w for w in SERVICES["keys"]["command"]]
    words = hosts.command("keys", str(BIN / "envserve"), *made)
    subprocess.run(words, check=True, capture_output=True, timeout=30)
    servers = []
    try:
        for name in ("sim1", "sim2"):
            words = [str(BIN / "envserve"), *SERVICES[name]["command"]]
            servers.append(
                subprocess.Popen(
                    hosts.command(name, *words),
                    env=environment(name, folder),
                    stdout=subprocess.DEVNULL,
                )
            )
        for name in ("sim1", "sim2"):
            wait_until_healthy(hosts, name, folder)
        trainer = subprocess.run(
            hosts.command(
                "trainer",
                *(str(BIN / "ppo"), *SERVICES["trainer"]["command"]),
                *("--set", "total_steps=4096", "--run-dir", str(run_folder)),
            ),
            env=environment("trainer", folder),
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert trainer.returncode == 0, trainer.stdout + trainer.stderr
        lines = (run_folder / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["steps"] >= 4096
    finally:
        for server in servers:
            server.terminate()
        assert [server.wait(timeout=10) for server in servers] == [0, 0]
