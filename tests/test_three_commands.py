"""The README's three commands start training on two hosts with empty homes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.network_hosts import Hosts, needs_namespaces

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
#: Settings that only make the training short.
SHORT = (
    *("total_steps=512", "num_envs=4", "horizon=64", "minibatch_size=64", "epochs=1"),
    *("evaluation_episodes=2", "jit_compile=false"),
)
COMMAND = re.compile(r"^(sim1|gpu1)\$ (.*?)(?: +#.*)?$", re.MULTILINE)


def commands_of(document: str) -> list[tuple[str, str]]:
    return COMMAND.findall((ROOT / document).read_text())


def test_the_documents_agree_on_the_commands() -> None:
    commands = commands_of("README.md")
    assert [host for host, _ in commands] == ["sim1", "sim1", "gpu1"]
    assert commands_of("docs/security.md") == commands


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(["sim1", "gpu1"]).created() as hosts:
        yield hosts


def on_a_terminal(**words: Any) -> str:
    """Run a command whose stdout is a terminal, and return its output."""
    master, terminal = pty.openpty()
    subprocess.run(**words, stdout=terminal, check=True)
    os.close(terminal)
    output = b""
    with contextlib.suppress(OSError):  # Linux raises it at the end of the output
        while True:
            output += os.read(master, 1000)
    os.close(master)
    return output.decode()


@needs_namespaces
def test_three_commands_start_a_training_on_fresh_hosts(
    hosts: Hosts, tmp_path: Path
) -> None:
    def words(host: str, command: str, home: str = "") -> dict[str, Any]:
        """Return `subprocess` arguments for a shell on a host, with the host's home."""
        folder = tmp_path / (home or host)
        folder.mkdir(exist_ok=True)
        variables = {k: v for k, v in os.environ.items() if k != "ENVSERVE_HOME"}
        variables |= {"HOME": str(folder), "PATH": f"{BIN}:{os.environ['PATH']}"}
        return {
            "args": hosts.command(host, "sh", "-c", command),
            "cwd": folder,
            "env": variables | {"PYTHONPATH": str(ROOT)},
            "text": True,
        }

    (_, invite), (_, start), (_, train) = commands_of("README.md")
    line = on_a_terminal(**words("sim1", invite)).strip() + "\n"
    server = subprocess.Popen(**words("sim1", f"exec {start}"), stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("envserve: ready on tcp://0.0.0.0")
        short = " ".join([train, "--run-dir run", *(f"--set {each}" for each in SHORT)])
        trained = subprocess.run(
            **words("gpu1", short), input=line, capture_output=True
        )
        assert trained.returncode == 0, trained.stdout + trained.stderr
        assert "joined tcp://sim1:5555 as trainer-1" in trained.stdout
        metrics = (tmp_path / "gpu1" / "run" / "metrics.jsonl").read_text()
        assert json.loads(metrics.splitlines()[-1])["steps"] >= 512
        again = subprocess.run(
            **words("gpu1", "envserve join", home="another"),
            input=line,
            capture_output=True,
        )
        assert (again.returncode, again.stdout) == (1, "")
        assert again.stderr == (
            "Error: this invitation was already used, or is older than 15 minutes; "
            "ask for a new one: envserve invite trainer-1\n"
        )
        for text in (trained.stdout, trained.stderr, again.stderr):
            assert line[:60] not in text
    finally:
        server.terminate()
        server.communicate()
    assert server.returncode == 0
