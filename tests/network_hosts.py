"""A network of hosts for tests: network namespaces that a bridge connects.

Each host has an address, and a hosts file with the names of all hosts. This needs root
and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest

#: Skips a test that needs namespaces; if CI is set, the test runs and fails.
needs_namespaces = pytest.mark.skipif(
    (shutil.which("ip") is None or os.geteuid() != 0) and not os.environ.get("CI"),
    reason="needs root and iproute2 (if CI is set, the test fails instead)",
)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Hosts:
    """Hosts in the documentation network 192.0.2.0/24."""

    def __init__(
        self,
        names: Sequence[str],
        aliases: Mapping[str, str] | None = None,
        search: str | None = None,
    ) -> None:
        self.tag = f"es{os.getpid()}"
        self.switch = f"{self.tag}-switch"
        self.names = names
        self.addresses = {name: f"192.0.2.{i}" for i, name in enumerate(names, 1)}
        #: A second name for each host; several hosts may share one.
        self.aliases = aliases or {}
        #: If set, the first host is the name server, and this text is appended to
        #: resolv.conf.
        self.search = search

    def namespace(self, name: str) -> str:
        return f"{self.tag}-{name}"

    def command(self, name: str, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(name), *words]

    @contextlib.contextmanager
    def created(self) -> Iterator[Self]:
        """Create the hosts, and remove them at the end."""
        try:
            self.create()
            yield self
        finally:
            self.remove()

    def create(self) -> None:
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "bridge0", "up")
        hosts = "".join(
            f"{self.addresses[name]} {name} {self.aliases.get(name, '')}\n"
            for name in self.names
        )
        for index, name in enumerate(self.names):
            namespace = self.namespace(name)
            # `ip netns exec` mounts these files over those in /etc.
            folder = Path("/etc/netns") / namespace
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            if self.search is not None:
                (folder / "hosts").write_text("127.0.0.1 localhost\n")
                first = f"nameserver {self.addresses[self.names[0]]}\n{self.search}"
                (folder / "resolv.conf").write_text(first)
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

    def pull_cable(self, name: str = "") -> None:
        """Disconnect all hosts, while their own links stay up.

        Args:
          name: Host to disconnect instead of all; its link goes down.
        """
        self._set_link(name, "down")

    def plug_cable(self, name: str = "") -> None:
        self._set_link(name, "up")

    def _set_link(self, name: str, state: str) -> None:
        link = f"port{self.names.index(name)}" if name else "bridge0"
        run("ip", "-n", self.switch, "link", "set", link, state)

    def remove(self) -> None:
        for name in self.names:
            namespace = self.namespace(name)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
        subprocess.run(["ip", "netns", "del", self.switch], capture_output=True)
