"""Clients of many servers raise their limit on open files, or report that it is low.

Tests that lower the limit run in a process of their own, because it cannot be raised
again.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from envserve.wire.sockets import raise_file_limit

#: Connects to 100 servers, which nobody serves, with a hard limit for 50 of them.
CONNECT = """
import resource
from envserve.client import BatchEnv
from envserve.client.link.server_pool import live_servers
from envserve.errors import ConnectError

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
addresses = [f"tcp://127.0.0.1:{port}" for port in range(1, 101)]
for connect in (
    lambda: BatchEnv.connect("CartPole-v1", addresses, 100),
    lambda: live_servers(addresses),
):
    try:
        connect()
    except ConnectError as error:
        print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
try:
    BatchEnv.connect("CartPole-v1", addresses[:20], 20, connect_timeout=0.2)
except ConnectError as error:
    print("no server replied" in str(error) or "refused" in str(error))
"""
#: Reads a key file and connects to a server when all descriptors are in use.
WITHOUT_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from envserve.client.link.connection import Connection
from envserve.errors import ConnectError, KeyFileError
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair

folder, keys = KeyFolder(Path(sys.argv[1])), KeyPair.generate()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
used = []
try:
    while True:
        used.append(os.dup(0))
except OSError:
    pass
try:
    folder.keys_for("tcp://sim:5555")
except KeyFileError as error:
    print(error)
try:
    Connection("tcp://127.0.0.1:1", (keys.public, keys))
except ConnectError as error:
    print(error)
"""


def run(code: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_limit_is_raised_and_too_low_a_hard_limit_is_an_error() -> None:
    *errors, limits, few = run(CONNECT)
    text = (
        "100 servers need about 500 open files, but this process may open at most 256; "
        "raise the hard limit (ulimit -n), or connect to fewer servers"
    )
    assert errors == [text, text]
    assert limits == "(256, 256)"
    assert few == "True"


def test_missing_descriptors_are_not_reported_as_another_error(tmp_path: Path) -> None:
    lines = run(WITHOUT_DESCRIPTORS, str(tmp_path))
    assert len(lines) == 2
    for line in lines:
        assert line.endswith(
            "Too many open files; raise the limit on open files (ulimit -n)"
        )


def test_an_unlimited_number_of_files_is_a_large_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlimited = resource.RLIM_INFINITY  # -1 on Linux
    monkeypatch.setattr(resource, "getrlimit", lambda _: (unlimited, unlimited))
    assert raise_file_limit() == sys.maxsize


def test_the_limit_is_raised_if_the_system_rejects_its_own_hard_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def set_limit(_: int, limits: tuple[int, int]) -> None:  # as macOS does
        if limits[0] > 10240:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, sys.maxsize))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert raise_file_limit() == 10240
