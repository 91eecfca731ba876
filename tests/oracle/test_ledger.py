"""The oracle on constructed rows: the rows that it accepts, and those it rejects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.client import StepResult
from envserve.envs.seeding import env_seed
from envserve.slab import Status
from tests.oracle.journal import Array
from tests.oracle.ledger import LOSSES, Ledger
from tests.oracle.result import LedgerError
from tests.oracle.simulated_batch import LENGTH, ROOT_SEED, CheckedRun, SimulatedBatch


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_terminated_and_truncated_episodes_are_accepted(
    autoreset: str, random_seed: int
) -> None:
    run = CheckedRun(random_seed, autoreset=autoreset)
    results = [run.step() for _ in range(20)]
    assert any(result.terminated.any() for result in results)
    assert any(result.truncated.any() for result in results)
    assert (run.ledger.num_rows, run.ledger.num_valid) == (60, 60)


def test_rows_that_their_caller_resets_are_accepted() -> None:
    run = CheckedRun(autoreset="disabled")
    for _ in range(LENGTH):
        result = run.step()
    assert result.terminated.all()
    for row in range(3):
        run.ledger.reset(run.batch.reset_row(row), [row])
    run.step()


def test_a_step_of_an_ended_row_without_reset_raises() -> None:
    run = CheckedRun(autoreset="disabled")
    for _ in range(LENGTH):
        run.step()
    with pytest.raises(LedgerError, match="env 0: its episode has ended"):
        run.step()


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_lost_pending_and_late_rows_are_accepted_and_counted(
    autoreset: str, random_seed: int
) -> None:
    run = CheckedRun(random_seed, autoreset=autoreset)
    ledger = run.ledger
    for _ in range(5):  # past the end of an episode
        run.step()
        run.step(pending=[0], in_flight=[1])
        run.step(pending=[0, 1], lost={2: Status.ENV_ERROR})
        run.step(lost={0: Status.WORKER_DIED}, late=[1])
        run.step(lost={0: Status.TIMEOUT, 1: Status.SERVER_LOST})
    assert ledger.num_rows == 75
    assert (ledger.num_padding, ledger.num_late) == (20, 5)
    assert ledger.losses == dict.fromkeys(LOSSES, 5)
    assert ledger.num_valid == 75 - 20 - 5 - 20


def test_rows_may_arrive_in_any_order_and_number() -> None:
    run = CheckedRun()
    given = run.make_result()
    run.check_rows(*given, 2)
    run.check_rows(*given, 1, 0)
    assert run.ledger.num_valid == 3
    run.step()


def test_a_first_reset_may_have_a_later_incarnation_but_no_other_row() -> None:
    seeds = [env_seed(ROOT_SEED, 0, 4), env_seed(ROOT_SEED, 0, 0)]
    observation = np.array([[seed, 0, 0, 0] for seed in seeds])
    Ledger(1, ROOT_SEED).reset(observation[:1])
    with pytest.raises(LedgerError, match=r"env 1.*first reset"):
        Ledger(2, ROOT_SEED).reset(observation)


@pytest.mark.parametrize("incarnation", [2, 17, 999, 1 << 18, (5 << 18) + 3])
def test_an_env_may_have_been_rebuilt_several_times_before_its_result(
    incarnation: int,
) -> None:
    run = CheckedRun()
    actions, result = run.make_result(lost={1: Status.SERVER_LOST})
    result.observation[1, 0] = env_seed(ROOT_SEED, 1, incarnation)
    run.ledger.step(actions, result)
    assert run.ledger.losses == {Status.SERVER_LOST: 1}


def test_a_reset_must_use_the_specified_seeds() -> None:
    ledger = Ledger(2, None)
    observation = np.array([[7, 0, 0, 0], [8, 0, 0, 0]])
    ledger.reset(observation, seeds=[7, 8])
    ledger.reset(observation[:1], [0], seeds=[7])
    with pytest.raises(LedgerError, match="env 1"):
        ledger.reset(observation, seeds=[7, 9])


# Rejected rows.

Change = Callable[[dict[str, Array]], None]


def setting(name: str, value: Any) -> Change:
    def change(arrays: dict[str, Array]) -> None:
        arrays[name][1] = value

    return change


def adding(name: str, column: int, value: int) -> Change:
    def change(arrays: dict[str, Array]) -> None:
        arrays[name][1, column] += value

    return change


def seeding(row: int, incarnation: int) -> Change:
    seed = env_seed(ROOT_SEED, row, incarnation)
    return setting("observation", [seed, 0, 0, 0])


def swapping(*names: str) -> Change:
    def change(arrays: dict[str, Array]) -> None:
        for name in names:
            arrays[name][[0, 1]] = arrays[name][[1, 0]]

    return change


LOST: dict[str, Any] = {"lost": {1: Status.WORKER_DIED}}
PENDING: dict[str, Any] = {"in_flight": [1]}
STILL: dict[str, Any] = {"pending": [1]}
LATE: dict[str, Any] = {"late": [1]}

#: By name: the faults of the previous steps and of the altered step, and the change.
WRONG: dict[str, tuple[list[dict[str, Any]], dict[str, Any], Change]] = {
    "reward": ([], {}, setting("reward", -1.0)),
    "an action twice": ([], {}, adding("observation", 2, 1)),
    "another action": ([], {}, adding("observation", 3, 1)),
    "another episode": ([], {}, adding("observation", 1, 1)),
    "rows swapped": ([], {}, swapping(*StepResult._fields[:-1])),
    "observations swapped": ([], {}, swapping("observation")),
    "the old rows": ([], {}, seeding(1, 0)),
    "terminated too early": ([], {}, setting("terminated", True)),
    "truncated too early": ([], {}, setting("truncated", True)),
    "end not reported": ([{}, {}], {}, setting("terminated", False)),
    "end of the other kind": ([{}] * 5, {}, setting("terminated", True)),
    "wrong final observation": ([{}, {}], {}, adding("final_observation", 2, -1)),
    "not valid": ([], {}, setting("valid", False)),
    "unknown status": ([], LOST, setting("status", 99)),
    "loss that is valid": ([], LOST, setting("valid", True)),
    "loss not truncated": ([], LOST, setting("truncated", False)),
    "loss terminated": ([], LOST, setting("terminated", True)),
    "loss with a reward": ([], LOST, setting("reward", 1.0)),
    "loss with the same seed": ([], LOST, seeding(1, 0)),
    "loss with an earlier seed": ([LOST, LOST, {}], LOST, seeding(1, 1)),
    "loss with the seed of another row": ([], LOST, seeding(2, 1)),
    "loss in the middle of an episode": ([], LOST, adding("observation", 2, 1)),
    "loss with another final one": ([{}], LOST, adding("final_observation", 3, 1)),
    "loss that is reported as OK": ([], LOST, setting("status", 0)),
    "padding truncated": ([], PENDING, setting("truncated", True)),
    "padding terminated": ([], PENDING, setting("terminated", True)),
    "padding with a reward": ([], PENDING, setting("reward", 1.0)),
    "padding that advances": ([{}, PENDING], STILL, adding("observation", 2, 2)),
    "late without padding": ([PENDING, LATE, PENDING], LATE, setting("status", 0)),
    "late, not pending before": ([PENDING, LATE], {}, setting("status", Status.LATE)),
    "observation of two actions": ([PENDING], {}, adding("observation", 0, 0)),
    "late with another action": ([PENDING], LATE, adding("observation", 3, 1)),
    "late with the last reward": ([PENDING], LATE, setting("reward", 1.0)),
    "late that has a wrong end": ([{}, PENDING], LATE, setting("terminated", True)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_raises_an_error_that_names_the_row(name: str) -> None:
    before, faults, change = WRONG[name]
    run = CheckedRun()
    for each in before:
        run.step(**each)
    actions, result = run.make_result(**faults)
    arrays = dict(zip(StepResult._fields[:-1], result[:-1], strict=True))
    change(arrays)
    if "status" not in name and "valid" not in name:
        arrays["valid"][:] = arrays["status"] == Status.OK
    with pytest.raises(LedgerError, match=r"env [01]") as caught:
        run.ledger.step(actions, result)
    assert caught.value.env_index == (0 if "swapped" in name else 1)
    expected_texts = {
        "observations swapped": "this is the seed of env 1",
        "late, not pending before": "pending before",
        "observation of two actions": "observation",
    }
    assert expected_texts.get(name, "expected") in str(caught.value)


def test_a_loss_must_not_be_reported_twice() -> None:
    run = CheckedRun()
    actions, result = run.make_result(lost={1: Status.WORKER_DIED})
    run.ledger.step(actions, result)
    with pytest.raises(LedgerError, match=r"env 1.*this env had this seed before"):
        run.check_rows(actions, result, 1)


def test_an_env_without_actions_may_be_reported_lost_again() -> None:
    """Such a report occurs if a single row is reset while its block is lost."""
    run = CheckedRun()
    actions, result = run.make_result(lost={1: Status.WORKER_DIED})
    run.ledger.step(actions, result)
    result.final_observation[1] = result.observation[1]
    result.observation[1, 1] += 1
    run.check_rows(actions, result, 1)
    result.final_observation[1] = result.observation[1]
    with pytest.raises(LedgerError, match="incarnation above 1"):
        run.check_rows(actions, result, 1)


def test_infos_belong_to_their_rows() -> None:
    run = CheckedRun()
    actions, result = run.make_result(lost={1: Status.TIMEOUT})
    wrong: list[dict[int, dict[str, Any]]] = [
        {0: {"step": 2}},
        {1: {"fault": {"status": "ENV_ERROR"}}},
        {3: {}},
    ]
    for infos in wrong:
        ledger = Ledger(3, ROOT_SEED, length=LENGTH)
        ledger.reset(SimulatedBatch(length=LENGTH).reset())
        with pytest.raises(LedgerError, match=f"env {next(iter(infos))}.*info"):
            ledger.step(actions, result._replace(infos=infos))
    right: dict[int, dict[str, Any]] = {0: {"step": 1}}
    right[1] = {"fault": {"status": "TIMEOUT"}}
    run.ledger.step(actions, result._replace(infos=right))


# Discarded results.


def test_an_interrupted_step_may_have_been_applied_or_not() -> None:
    for is_applied in (False, True):
        run = CheckedRun()
        run.step()
        for _ in range(2 * LENGTH):
            run.interrupt(is_applied=is_applied)
            run.step()


def test_the_result_of_an_interrupted_action_is_not_accepted_for_the_next() -> None:
    run = CheckedRun()
    cut, actions = run.draw_actions(), run.draw_actions()
    late_result = run.batch.step(cut)
    run.ledger.mark_unanswered(cut)
    with pytest.raises(LedgerError, match="env 0"):
        run.ledger.step(actions, late_result)


def test_an_interrupt_may_discard_a_loss() -> None:
    run = CheckedRun()
    run.interrupt(lost={1: Status.WORKER_DIED})
    run.step()
    run.step()


def test_a_loss_may_follow_an_interrupt() -> None:
    run = CheckedRun()
    run.interrupt()
    run.step(lost={0: Status.WORKER_DIED}, pending=[1])
    run.step(lost={1: Status.WORKER_DIED})
    run.step()


def test_a_late_row_may_follow_a_discarded_pending_row() -> None:
    run = CheckedRun()
    for _ in range(LENGTH):
        run.interrupt(in_flight=[1])
        run.step(late=[1])
        run.interrupt(is_applied=False)
        run.step(in_flight=[1])
        run.step(late=[1])
    assert run.ledger.num_late == 2 * LENGTH


def test_the_action_of_a_pending_row_after_an_interrupt_may_be_applied(
    tmp_path: Path,
) -> None:
    run = CheckedRun(journal=str(tmp_path))
    run.step(in_flight=[1])
    run.interrupt(late=[1])
    run.step(in_flight=[1])
    run.step(lost={1: Status.SERVER_LOST})
    run.ledger.finish(tmp_path)


# Resets while other rows of the block are lost or late.


def test_a_row_reset_during_padding_may_be_late_with_a_later_action() -> None:
    for is_reset in (True, False):
        run = CheckedRun()
        run.step()
        if is_reset:
            run.ledger.reset(run.batch.reset_row(1), [1])
        run.step(pending=[1])
        run.step(in_flight=[1])
        if is_reset:
            run.step(late=[1])
            continue
        actions, result = run.make_result(late=[1])
        with pytest.raises(LedgerError, match="expected reward"):
            run.ledger.step(actions, result)


def test_a_row_reset_during_padding_may_be_lost_with_a_later_action(
    tmp_path: Path,
) -> None:
    for number, is_reset in enumerate((True, False)):
        folder = tmp_path / str(number)
        run = CheckedRun(journal=str(folder))
        run.step()
        if is_reset:
            run.ledger.reset(run.batch.reset_row(1), [1])
        run.step(pending=[1])
        actions = run.draw_actions()
        run.batch.step(actions, in_flight=[1])
        result = run.batch.step(actions, lost={1: Status.SERVER_LOST})
        run.check_rows(actions, result, 1)
        run.ledger.mark_unanswered(actions[[0, 2]], [0, 2])
        run.ledger.mark_unanswered(actions[[0, 2]], [0, 2])
        if is_reset:
            run.ledger.finish(folder)
            continue
        with pytest.raises(LedgerError, match="env 1"):
            run.ledger.finish(folder)


def test_a_step_that_takes_too_long_raises() -> None:
    ledger = Ledger(1, ROOT_SEED)
    with ledger.within(60.0):
        pass
    assert ledger.longest_seconds > 0.0
    with pytest.raises(LedgerError, match="at most 0 s"), ledger.within(0.0):
        pass
