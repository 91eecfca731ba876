"""The ledger env: its hash, its journal, and its failures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracle.env_failures import FAILURES
from tests.oracle.journal import Journal, read_journal
from tests.oracle.ledger_env import LedgerEnv, ledger_hash
from tests.oracle.simulated_batch import SimulatedBatch


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Record failures instead of executing them."""
    calls: list[tuple[str, float]] = []
    recorders = {
        name: lambda seconds, name=name: calls.append((name, seconds))
        for name in FAILURES
    }
    monkeypatch.setattr("tests.oracle.env_failures.FAILURES", recorders)
    return calls


def test_the_hash_equals_numpys_and_depends_on_order_and_length() -> None:
    hashes = np.zeros(1, np.int64)
    value = 0
    for action in (0, 999, 5):
        hashes = hashes * 6364136223846793005 + action + 1442695040888963407
        value = ledger_hash(value, action)
        assert value == hashes[0]
    assert value != ledger_hash(ledger_hash(ledger_hash(0, 5), 999), 0)
    assert value != ledger_hash(value, 0)


def test_each_applied_action_is_written_to_the_journal(tmp_path: Path) -> None:
    env = LedgerEnv(2, journal=str(tmp_path / "new"))
    env.reset(seed=2**63 - 1)
    for action in (7, 8):
        env.step(np.int64(action))
    env.reset()
    env.step(np.int64(9))
    env.close()
    env.close()
    records = read_journal(tmp_path / "new")
    assert records.tolist() == [
        (2**63 - 1, 0, 1, 7, os.getpid()),
        (2**63 - 1, 0, 2, 8, os.getpid()),
        (2**63 - 1, 1, 1, 9, os.getpid()),
    ]


def test_envs_of_one_process_share_a_journal(tmp_path: Path) -> None:
    rows = SimulatedBatch(3, journal=str(tmp_path))
    rows.reset()
    rows.step(np.array([1, 2, 3]))
    assert len(list(tmp_path.iterdir())) == 1
    assert read_journal(tmp_path)["action"].tolist() == [1, 2, 3]


def test_a_journal_without_records_is_empty(tmp_path: Path) -> None:
    assert len(read_journal(tmp_path)) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full device")
def test_a_journal_that_is_full_raises(tmp_path: Path) -> None:
    (tmp_path / f"{os.getpid()}.journal").symlink_to("/dev/full")
    journal = Journal(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        journal.write(1, 0, 1, 1)
    journal.close()


def test_an_env_breaks_down_at_the_specified_actions_and_steps(
    broken: list[tuple[str, float]],
) -> None:
    env = LedgerEnv(
        10,
        failures={"kill": {"actions": [7, 9]}, "hang": {"steps": [2], "seconds": 0.5}},
    )
    env.reset(seed=1)
    broken_at = []
    for action in (5, 6, 7, 8, 9):
        env.step(np.int64(action))
        broken_at.append([name for name, _ in broken])
        broken.clear()
    assert broken_at == [[], ["hang"], ["kill"], [], ["kill"]]
    env.reset(seed=2)
    for _ in range(2):
        env.step(np.int64(0))
    assert broken == [("hang", 0.5)], "steps are counted since the seed was set"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_happens_before_or_after_the_action_is_applied(
    tmp_path: Path, when: str
) -> None:
    failures = {"raise": {"actions": [7], "when": when}}
    env = LedgerEnv(journal=str(tmp_path), failures=failures)
    env.reset(seed=1)
    env.step(np.int64(1))
    with pytest.raises(RuntimeError, match="lost its balance"):
        env.step(np.int64(7))
    env.close()
    expected = [1] if when == "before" else [1, 7]
    assert read_journal(tmp_path)["action"].tolist() == expected


def test_random_failures_are_deterministic_for_a_seed(
    broken: list[tuple[str, float]],
) -> None:
    env = LedgerEnv(failures={"exit": {"probability": 0.3}})
    patterns = []
    for seed in (1, 1, 2):
        env.reset(seed=seed)
        broken.clear()
        pattern = []
        for _ in range(100):
            env.step(np.int64(0))
            pattern.append(len(broken))
        patterns.append(pattern)
    assert patterns[0] == patterns[1] != patterns[2]
    assert 10 < patterns[0][-1] < 60


def test_a_failure_can_happen_in_a_reset(broken: list[tuple[str, float]]) -> None:
    env = LedgerEnv(failures={"abort": {"probability": 1.0, "when": "reset"}})
    env.reset(seed=1)
    env.step(np.int64(0))
    assert [name for name, _ in broken] == ["abort"]


@pytest.mark.parametrize("name", ["hang", "spin"])
def test_a_hang_ends_after_its_seconds(name: str) -> None:
    FAILURES[name](0.001)


@pytest.mark.parametrize(
    "failures",
    [{"explode": {}}, {"kill": {"chance": 0.5}}, {"kill": {"when": "never"}}],
)
def test_unknown_failures_are_rejected(failures: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected failures from"):
        LedgerEnv(failures=failures)
