"""The commands in docker-compose.yml, run on hosts in network namespaces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.network_hosts import needs_namespaces

ROOT = Path(__file__).resolve().parents[2]


@needs_namespaces
@pytest.mark.timeout(420)
def test_page_metrics_and_training_continue_when_a_host_dies() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/run_compose.py", "--servers", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training continues without sim-2" in done.stdout
