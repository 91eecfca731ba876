"""The comparison of the journal with the results that a run received."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from envserve.envs.seeding import env_seed
from envserve.slab import Status
from tests.oracle.journal import Journal
from tests.oracle.result import LedgerError
from tests.oracle.simulated_batch import ROOT_SEED, CheckedRun


def journaled_run(folder: Path, random_seed: int) -> CheckedRun:
    run = CheckedRun(random_seed, journal=str(folder))
    for _ in range(4):
        run.step()
        run.step(in_flight=[0, 1])
        run.step(pending=[0], lost={1: Status.WORKER_DIED})
        run.step(late=[0])
        run.step(lost={2: Status.ENV_ERROR})
    run.step(in_flight=[0])
    run.ledger.mark_unanswered(run.draw_actions())
    return run


def test_a_journal_may_contain_one_more_action_for_each_loss(
    tmp_path: Path, random_seed: int
) -> None:
    run = journaled_run(tmp_path, random_seed)
    run.ledger.finish(tmp_path)
    assert run.ledger.num_unseen == 4 + 1  # each loss of row 1, and row 0 at the end


def append(folder: Path, *records: tuple[int, int, int, int]) -> None:
    """Append actions that no result reports to a journal."""
    with contextlib.closing(Journal(folder)) as journal:
        for record in records:
            journal.write(*record)


@pytest.mark.parametrize("count", [1, 2])
def test_an_applied_action_without_a_result_raises(
    tmp_path: Path, random_seed: int, count: int
) -> None:
    run = journaled_run(tmp_path, random_seed)
    seed, episode, step, _ = run.batch.observation[2].tolist()
    append(tmp_path, *((seed, episode, step + 1 + k, 1001) for k in range(count)))
    with pytest.raises(LedgerError, match=f"env 2 .*seed {seed}"):
        run.ledger.finish(tmp_path)


def test_a_pending_action_that_was_applied_twice_raises(tmp_path: Path) -> None:
    run = CheckedRun(journal=str(tmp_path))
    seed = env_seed(ROOT_SEED, 1, 0)
    actions, result = run.make_result(in_flight=[1])
    run.ledger.step(actions, result)
    append(tmp_path, (seed, 0, 2, int(actions[1])))
    run.step(lost={1: Status.WORKER_DIED})
    with pytest.raises(LedgerError, match=f"seed {seed}"):
        run.ledger.finish(tmp_path)


def test_an_incarnation_in_two_processes_raises(
    tmp_path: Path, random_seed: int
) -> None:
    run = journaled_run(tmp_path, random_seed)
    append(tmp_path, (env_seed(ROOT_SEED, 0, 0), 0, 1, 1001))
    with pytest.raises(LedgerError, match="belongs to no incarnation"):
        run.ledger.finish(tmp_path)


def test_an_action_missing_from_the_journal_raises(
    tmp_path: Path, random_seed: int
) -> None:
    run = journaled_run(tmp_path, random_seed)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    file.write_bytes(data[24:])
    with pytest.raises(LedgerError, match=r"1 contradictions:\nenv 0"):
        run.ledger.finish(tmp_path)
    file.unlink()
    with pytest.raises(LedgerError, match="actions in the journal; got none"):
        run.ledger.finish(tmp_path)


def test_an_altered_action_in_the_journal_raises(
    tmp_path: Path, random_seed: int
) -> None:
    run = journaled_run(tmp_path, random_seed)
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[16] ^= 1
    file.write_bytes(data)
    with pytest.raises(LedgerError, match="actions, but not those sent"):
        run.ledger.finish(tmp_path)


def test_a_truncated_journal_raises_value_error(tmp_path: Path) -> None:
    run = CheckedRun(journal=str(tmp_path))
    run.step()
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="the last record is incomplete"):
        run.ledger.finish(tmp_path)
