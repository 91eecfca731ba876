"""`envserve check` against `envserve start`, both run as commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.envserve.server_process import ServerProcess


def test_envserve_start_passes_all_checks(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--lease-seconds", "4") as server:
        args = ("check", server.address, "--env", "CartPole-v1")
        run = subprocess.run(
            [sys.executable, "-m", "envserve", *args], capture_output=True, text=True
        )
    assert run.returncode == 0, run.stdout
    assert re.search(r"\n[1-9]\d* ok, 0 fail, 0 skipped\n$", run.stdout)
    assert run.stderr == ""


def test_a_missing_server_is_reported(tmp_path: Path) -> None:
    args = ("check", "127.0.0.1:1")
    run = subprocess.run(
        [sys.executable, "-m", "envserve", *args], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert run.stderr.startswith("Error: tcp://127.0.0.1:1: connection refused")
