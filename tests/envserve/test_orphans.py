"""Workers reap adopted processes, but not an env's direct children."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.envserve.pool_driver import PoolMaker, launcher_with, step
from tests.envserve.pool_driver import reset as reset_all

ENV = '''
import os, subprocess
import gymnasium, numpy as np
from envserve.worker import orphans


def states():
    """Return the state of each child process, by pid."""
    return {pid: state for pid, state, _ in orphans.child_processes()}


class LeavingEnv(gymnasium.Env):
    """Leaves a process behind at each step; observes ended processes and exit codes."""

    observation_space = gymnasium.spaces.Box(0, 1000, (2,), np.int64)
    action_space = gymnasium.spaces.Discrete(2)
    num_steps = 0

    def reset(self, *, seed=None, options=None):
        self.own = subprocess.Popen(["sh", "-c", "exit 7"])
        os.waitid(os.P_PID, self.own.pid, os.WEXITED | os.WNOWAIT)
        return np.zeros(2, np.int64), {}

    def step(self, action):
        line = ["setsid", "sh", "-c", "sh -c true & echo $!"]
        found = subprocess.run(line, stdout=subprocess.PIPE, text=True)
        self.num_steps += 1
        pid = int(found.stdout)
        while states().get(pid, b"Z") != b"Z":
            pass
        ended = [p for p, s in states().items() if s == b"Z" and p != self.own.pid]
        code = self.own.wait() if self.num_steps == 20 else 0
        return np.array([len(ended), code]), 0.0, False, False, {}

gymnasium.register("leaving/Leaving-v0", "leaving:LeavingEnv")
'''


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not adopt")
def test_adopted_processes_are_reaped_and_an_envs_own_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    quick = "from envserve.worker import orphans; orphans._REAP_INTERVAL = 4\n"
    with launcher_with(tmp_path, leaving=quick + ENV) as launcher:
        make = PoolMaker(launcher)
        try:
            pool = make("leaving/Leaving-v0", 1, 1)
            reset_all(pool)
            seen = []
            for _ in range(20):
                step(pool, 0)
                seen.append(pool.rows.observation[0][0].tolist())
        finally:
            make.close()
    assert max(count for count, _ in seen) <= 5
    assert max(count for count, _ in seen) > 0
    assert seen[-1][1] == 7
