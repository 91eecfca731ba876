"""The commands of docker-compose.yml on three hosts: network namespaces of our own.

Each namespace is a host with an address and a hosts file; a bridge joins them. So
the very words of the file are run, names like `sim1` included.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())[
    "services"
]

pytestmark = pytest.mark.skipif(
    (shutil.which("ip") is None or os.geteuid() != 0) and not os.environ.get("CI"),
    reason="needs root and iproute2 (where CI is set, that fails)",
)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


class Hosts:
    """Hosts named as the services, in the documentation network 192.0.2.0/24."""

    def __init__(self, names: list[str]) -> None:
        self.tag = f"es{os.getpid()}"
        self.switch = f"{self.tag}-switch"
        self.names = names
        self.addresses = {name: f"192.0.2.{i}" for i, name in enumerate(names, 1)}

    def namespace(self, name: str) -> str:
        return f"{self.tag}-{name}"

    def command(self, name: str, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(name), *words]

    def create(self) -> None:
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "bridge0", "up")
        hosts = "".join(f"{self.addresses[name]} {name}\n" for name in self.names)
        for index, name in enumerate(self.names):
            namespace = self.namespace(name)
            # `ip netns exec` shows a process this file in place of /etc/hosts.
            folder = Path("/etc/netns") / namespace
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            run("ip", "netns", "add", namespace)
            port = f"port{index}"
            run(
                *("ip", "-n", self.switch, "link", "add", port, "type", "veth"),
                *("peer", "name", "eth0", "netns", namespace),
            )
            run("ip", "-n", self.switch, "link", "set", port, "master", "bridge0", "up")
            address = f"{self.addresses[name]}/24"
            run("ip", "-n", namespace, "address", "add", address, "dev", "eth0")
            run("ip", "-n", namespace, "link", "set", "eth0", "up")
            run("ip", "-n", namespace, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in self.names:
            namespace = self.namespace(name)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
        subprocess.run(["ip", "netns", "del", self.switch], capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts(list(SERVICES))
    try:
        hosts.create()
        yield hosts
    finally:
        hosts.remove()


def wait_until_healthy(hosts: Hosts, name: str) -> None:
    _, program, *words = SERVICES[name]["healthcheck"]["test"]
    give_up_at = time.monotonic() + 30
    while True:
        health = subprocess.run(
            hosts.command(name, str(BIN / program), *words), capture_output=True
        )
        if health.returncode == 0:
            return
        assert time.monotonic() < give_up_at, health.stdout + health.stderr


def test_a_trainer_trains_on_the_envs_of_two_other_hosts(
    hosts: Hosts, tmp_path: Path
) -> None:
    run_folder = tmp_path / "run"
    servers = []
    try:
        for name in ("sim1", "sim2"):
            words = [str(BIN / "envserve"), *SERVICES[name]["command"]]
            servers.append(
                subprocess.Popen(hosts.command(name, *words), stdout=subprocess.DEVNULL)
            )
        for name in ("sim1", "sim2"):
            wait_until_healthy(hosts, name)
        trainer = subprocess.run(
            hosts.command(
                "trainer",
                *(str(BIN / "ppo"), *SERVICES["trainer"]["command"]),
                *("--set", "total_steps=4096", "--run-dir", str(run_folder)),
            ),
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
