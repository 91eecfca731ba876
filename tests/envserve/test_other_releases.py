"""A version mismatch between client and server is reported, whichever is newer."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import envserve
from envserve.client import BatchEnv
from envserve.errors import ProtocolMismatch
from envserve.wire.constants import VERSION

from .server_process import ServerProcess

OTHER = VERSION + 1


@pytest.fixture(scope="module")
def other_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package that supports only the next version."""
    folder = tmp_path_factory.mktemp("other")
    package = folder / "envserve"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(envserve.__file__).parent, package, ignore=ignored)
    constants = package / "wire" / "constants.py"
    text, count = re.subn(
        r"(VERSION: Final) = \d+", rf"\1 = {OTHER}", constants.read_text()
    )
    assert count == 2
    constants.write_text(text)
    return folder


@pytest.fixture
def other_server(other_release: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        other_release, cwd=other_release, environment={"PYTHONPATH": ""}, imports=()
    ) as server:
        yield server


def health(address: str, folder: Path | None = None) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-m", "envserve", "health", address, "--timeout", "20"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stderr


def test_an_older_client_gets_an_error_with_both_versions(
    other_server: ServerProcess,
) -> None:
    address = other_server.address
    text = (
        f"{address}: the server speaks protocol {OTHER} to {OTHER}, this client "
        f"{VERSION} to {VERSION}; install the same release"
    )
    with pytest.raises(ProtocolMismatch, match=f"^{re.escape(text)}$"):
        BatchEnv.connect("CartPole-v1", [address], 1)
    code, error = health(address)
    assert code == 7
    assert f"ProtocolMismatch: {text}" in error


def test_a_newer_client_gets_an_error_with_both_versions(
    other_release: Path, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path, imports=()) as server:
        code, error = health(server.address, other_release)
    assert code == 7
    assert (
        f"speaks protocol {VERSION} to {VERSION}, this client {OTHER} to {OTHER}"
        in error
    )


def step_until_an_error(env: BatchEnv) -> None:
    while True:
        env.step(np.zeros(1, int))


def test_a_batch_fails_if_its_server_returns_with_another_protocol_version(
    other_release: Path, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path, imports=()) as server:
        bind = (server.address,)
        env = BatchEnv.connect("CartPole-v1", bind, 1, on_server_lost="pad")
        env.reset()
    other: dict[str, Any] = {"cwd": other_release, "environment": {"PYTHONPATH": ""}}
    with (
        contextlib.closing(env),
        ServerProcess(other_release, bind=bind, imports=(), **other),
        pytest.raises(ProtocolMismatch, match="install the same release"),
    ):
        step_until_an_error(env)
