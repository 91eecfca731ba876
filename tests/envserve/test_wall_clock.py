"""A wall clock that jumps by a day between any two readings has no effect."""

from __future__ import annotations

import os
import re
import signal
import time
from itertools import cycle
from pathlib import Path

import pytest

from tests.envserve.conftest import Join, Serve

#: Code that every interpreter of a server runs first.
_JUMPING = """
import itertools, time
def jumping(read, day):
    jumps = itertools.cycle((0, day, -day))
    return lambda: read() + next(jumps)
time.time = jumping(time.time, 86400.0)
time.time_ns = jumping(time.time_ns, 86400 * 10**9)
"""


def test_a_wall_clock_that_jumps_disturbs_neither_side(
    tmp_path: Path, serve: Serve, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_JUMPING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    real_time, jumps = time.time, cycle((0.0, 86400.0, -86400.0))
    monkeypatch.setattr(time, "time", lambda: real_time() + next(jumps))
    options = ("--lease-seconds", "20", "--step-timeout", "10", "--reset-timeout", "20")
    client = join(server := serve(*options))
    client.reset()
    for action in range(200):
        for outcome in client.step(action):
            assert outcome.error is None
            assert not outcome.faults
    assert server.welcome().loop_lag_ms < 20_000
    client.close()
    log = server.end(signal.SIGTERM)
    assert "WARNING" not in log
    days = set(re.findall(r"^(\d{4}-\d\d-\d\d) ", log, re.MULTILINE))
    assert len(days) > 1, "the server's clock did not jump"
