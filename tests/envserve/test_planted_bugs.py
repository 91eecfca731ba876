"""The oracle detects bugs planted in real pools and workers, and no others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.settings import PoolSettings
from envserve.slab import Status
from tests.envserve import planted_worker_bugs
from tests.envserve.planted_worker_bugs import PLANTED, POOL_BUGS, WORKER_BUGS
from tests.oracle.batch_driver import BatchDriver
from tests.oracle.ledger import Ledger
from tests.oracle.result import LedgerError

LENGTH = 5
SEED = 7
KILL, RAISE = 998, 999


class Fatal(BatchDriver):
    """A player that does not draw fatal actions itself."""

    num_actions = KILL


@pytest.fixture(scope="module")
def planted_launcher() -> Iterator[Launcher]:
    launcher = Launcher(["tests.oracle.probe_envs", planted_worker_bugs.__name__])
    yield launcher
    launcher.close()


def run_pool(launcher: Launcher, folder: Path, bug: str = "") -> Ledger:
    """Step a pool while its workers and envs fail; verify every row."""
    env_kwargs = {
        "bug": bug,
        "length": LENGTH,
        "journal": str(folder),
        "failures": {
            "kill": {"actions": [KILL], "when": "after"},
            "raise": {"actions": [RAISE]},
        },
    }
    settings = PoolSettings(
        env_name=PLANTED,
        num_envs=8,
        num_workers=2,
        num_splits=2,
        seed=SEED,
        env_kwargs=env_kwargs,
    )
    ledger = Ledger(8, SEED, length=LENGTH)
    pool = Pool(settings, launcher=launcher)
    pool.finish_start(time.monotonic() + 60.0)
    with BatchEnv([pool], padding_after=0.0) as batch:
        driver = Fatal(batch, ledger, np.random.default_rng(0))
        for number in range(48):
            actions = driver.draw()
            if number % 12 == 7:
                actions[number % 8] = KILL
            if number % 12 == 2:
                actions[number % 8] = RAISE
            result = driver.step(actions)
            while (result.status == Status.PENDING).any():
                result = driver.step()
    ledger.finish(folder)
    return ledger


def test_without_a_bug_no_row_is_wrong_while_workers_and_envs_fail(
    planted_launcher: Launcher, tmp_path: Path
) -> None:
    ledger = run_pool(planted_launcher, tmp_path)
    assert ledger.losses == {Status.WORKER_DIED: 4 * 4, Status.ENV_ERROR: 4}
    assert ledger.num_padding > 0
    assert ledger.num_unseen > 0


@pytest.mark.parametrize("name", WORKER_BUGS)
def test_a_bug_in_workers_is_detected(
    planted_launcher: Launcher, tmp_path: Path, name: str
) -> None:
    with pytest.raises(LedgerError):
        run_pool(planted_launcher, tmp_path, name)


@pytest.mark.parametrize("name", POOL_BUGS)
def test_a_bug_in_the_pool_is_detected(
    planted_launcher: Launcher,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    POOL_BUGS[name](monkeypatch)
    with pytest.raises(LedgerError):
        run_pool(planted_launcher, tmp_path)
