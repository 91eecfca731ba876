"""The oracle on rows made by hand: what it lets pass, and what it does not."""

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
def test_episodes_of_every_kind_of_end_pass(autoreset: str, random_seed: int) -> None:
    run = CheckedRun(random_seed, autoreset=autoreset)
    results = [run.step() for _ in range(20)]
    assert any(result.terminated.any() for result in results)
    assert any(result.truncated.any() for result in results)
    assert (run.ledger.num_rows, run.ledger.num_valid) == (60, 60)


def test_rows_that_are_reset_by_their_caller_pass() -> None:
    run = CheckedRun(autoreset="disabled")
    for _ in range(LENGTH):
        result = run.step()
    assert result.terminated.all()
    for row in range(3):
        run.ledger.reset(run.rows.reset_row(row), [row])
    run.step()


def test_a_row_that_was_not_reset_after_its_end_cannot_be_stepped() -> None:
    run = CheckedRun(autoreset="disabled")
    for _ in range(LENGTH):
        run.step()
    with pytest.raises(LedgerError, match="env 0: its episode has ended"):
        run.step()


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_losses_padding_and_late_rows_pass_and_are_counted(
    autoreset: str, random_seed: int
) -> None:
    run = CheckedRun(random_seed, autoreset=autoreset)
    ledger = run.ledger
    for _ in range(5):  # over the end of episodes
        run.step()
        run.step(pending=[0], in_flight=[1])
        run.step(pending=[0, 1], lost={2: Status.ENV_ERROR})
        run.step(lost={0: Status.WORKER_DIED}, late=[1])
        run.step(lost={0: Status.TIMEOUT, 1: Status.SERVER_LOST})
    assert ledger.num_rows == 75
    assert (ledger.num_padding, ledger.num_late) == (20, 5)
    assert ledger.losses == dict.fromkeys(LOSSES, 5)
    assert ledger.num_valid == 75 - 20 - 5 - 20


def test_rows_may_come_in_any_order_and_number() -> None:
    run = CheckedRun()
    given = run.give()
    run.step_row(*given, 2)
    run.step_row(*given, 1, 0)
    assert run.ledger.num_valid == 3
    run.step()


def test_first_resets_may_be_of_a_later_incarnation_but_not_of_another_row() -> None:
    seeds = [env_seed(ROOT_SEED, 0, 4), env_seed(ROOT_SEED, 0, 0)]
    observation = np.array([[seed, 0, 0, 0] for seed in seeds])
    Ledger(1, ROOT_SEED).reset(observation[:1])
    with pytest.raises(LedgerError, match=r"env 1.*first reset"):
        Ledger(2, ROOT_SEED).reset(observation)


@pytest.mark.parametrize("incarnation", [2, 17, 999, 1 << 18, (5 << 18) + 3])
def test_an_env_may_have_been_built_more_than_once_before_it_is_seen(
    incarnation: int,
) -> None:
    run = CheckedRun()
    actions, result = run.give(lost={1: Status.SERVER_LOST})
    result.observation[1, 0] = env_seed(ROOT_SEED, 1, incarnation)
    run.ledger.step(actions, result)
    assert run.ledger.losses == {Status.SERVER_LOST: 1}


def test_seeds_that_are_given_must_come_back() -> None:
    ledger = Ledger(2, None)
    observation = np.array([[7, 0, 0, 0], [8, 0, 0, 0]])
    ledger.reset(observation, seeds=[7, 8])
    ledger.reset(observation[:1], [0], seeds=[7])
    with pytest.raises(LedgerError, match="env 1"):
        ledger.reset(observation, seeds=[7, 9])


# What does not pass.

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

#: Steps before, the step that is changed, the change.
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
    "end not told": ([{}, {}], {}, setting("terminated", False)),
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
    "loss not told": ([], LOST, setting("status", 0)),
    "padding truncated": ([], PENDING, setting("truncated", True)),
    "padding terminated": ([], PENDING, setting("terminated", True)),
    "padding with a reward": ([], PENDING, setting("reward", 1.0)),
    "padding that goes on": ([{}, PENDING], STILL, adding("observation", 2, 2)),
    "late without padding": ([PENDING, LATE, PENDING], LATE, setting("status", 0)),
    "late, not pending before": ([PENDING, LATE], {}, setting("status", Status.LATE)),
    "observation of two actions": ([PENDING], {}, adding("observation", 0, 0)),
    "late with another action": ([PENDING], LATE, adding("observation", 3, 1)),
    "late with the last reward": ([PENDING], LATE, setting("reward", 1.0)),
    "late that has a wrong end": ([{}, PENDING], LATE, setting("terminated", True)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_raises_and_names_the_row(name: str) -> None:
    before, faults, change = WRONG[name]
    run = CheckedRun()
    for each in before:
        run.step(**each)
    actions, result = run.give(**faults)
    arrays = dict(zip(StepResult._fields[:-1], result[:-1], strict=True))
    change(arrays)
    if "status" not in name and "valid" not in name:
        arrays["valid"][:] = arrays["status"] == Status.OK
    with pytest.raises(LedgerError, match=r"env [01]") as caught:
        run.ledger.step(actions, result)
    assert caught.value.env_index == (0 if "swapped" in name else 1)
    told = {
        "observations swapped": "which is env 1's",
        "late, not pending before": "pending before",
        "observation of two actions": "observation",
    }
    assert told.get(name, "expected") in str(caught.value)


def test_a_reported_loss_must_not_be_reported_again_with_what_was_before() -> None:
    run = CheckedRun()
    actions, result = run.give(lost={1: Status.WORKER_DIED})
    run.ledger.step(actions, result)
    with pytest.raises(LedgerError, match=r"env 1.*that this env had before"):
        run.step_row(actions, result, 1)


def test_an_env_that_nothing_was_applied_to_may_be_reset_again_as_lost() -> None:
    """As when a row was reset alone while its block was lost."""
    run = CheckedRun()
    actions, result = run.give(lost={1: Status.WORKER_DIED})
    run.ledger.step(actions, result)
    result.final_observation[1] = result.observation[1]
    result.observation[1, 1] += 1
    run.step_row(actions, result, 1)
    result.final_observation[1] = result.observation[1]
    with pytest.raises(LedgerError, match="incarnation above 1"):
        run.step_row(actions, result, 1)


def test_infos_belong_to_their_rows() -> None:
    run = CheckedRun()
    actions, result = run.give(lost={1: Status.TIMEOUT})
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


# Results that nobody saw.


def test_after_an_interrupt_a_row_may_have_been_stepped_or_not() -> None:
    for is_applied in (False, True):
        run = CheckedRun()
        run.step()
        for _ in range(2 * LENGTH):
            run.cut(is_applied=is_applied)
            run.step()


def test_after_an_interrupt_an_older_action_must_not_answer_for_a_new_one() -> None:
    run = CheckedRun()
    cut, actions = run.act(), run.act()
    late_answer = run.rows.step(cut)
    run.ledger.unanswered(cut)
    with pytest.raises(LedgerError, match="env 0"):
        run.ledger.step(actions, late_answer)


def test_a_loss_may_go_unseen_with_an_interrupt() -> None:
    run = CheckedRun()
    run.cut(lost={1: Status.WORKER_DIED})
    run.step()
    run.step()


def test_a_loss_after_an_interrupt_ends_what_the_interrupt_has_left() -> None:
    run = CheckedRun()
    run.cut()
    run.step(lost={0: Status.WORKER_DIED}, pending=[1])
    run.step(lost={1: Status.WORKER_DIED})
    run.step()


def test_a_row_may_be_late_whose_padding_an_interrupt_has_hidden() -> None:
    run = CheckedRun()
    for _ in range(LENGTH):
        run.cut(in_flight=[1])
        run.step(late=[1])
        run.cut(is_applied=False)
        run.step(in_flight=[1])
        run.step(late=[1])
    assert run.ledger.num_late == 2 * LENGTH


def test_after_an_interrupt_the_action_of_the_next_padding_may_be_applied(
    tmp_path: Path,
) -> None:
    run = CheckedRun(journal=str(tmp_path))
    run.step(in_flight=[1])
    run.cut(late=[1])
    run.step(in_flight=[1])
    run.step(lost={1: Status.SERVER_LOST})
    run.ledger.finish(tmp_path)


# Resets while others of the block are lost or late.


def test_a_row_that_was_reset_may_be_late_with_a_later_action_of_its_padding() -> None:
    for is_reset in (True, False):
        run = CheckedRun()
        run.step()
        if is_reset:
            run.ledger.reset(run.rows.reset_row(1), [1])
        run.step(pending=[1])
        run.step(in_flight=[1])
        if is_reset:
            run.step(late=[1])
            continue
        actions, result = run.give(late=[1])
        with pytest.raises(LedgerError, match="expected reward"):
            run.ledger.step(actions, result)


def test_a_row_that_was_reset_may_be_lost_with_a_later_action_of_its_padding(
    tmp_path: Path,
) -> None:
    for number, is_reset in enumerate((True, False)):
        folder = tmp_path / str(number)
        run = CheckedRun(journal=str(folder))
        run.step()
        if is_reset:
            run.ledger.reset(run.rows.reset_row(1), [1])
        run.step(pending=[1])
        actions = run.act()
        run.rows.step(actions, in_flight=[1])
        result = run.rows.step(actions, lost={1: Status.SERVER_LOST})
        run.step_row(actions, result, 1)
        run.ledger.unanswered(actions[[0, 2]], [0, 2])
        run.ledger.unanswered(actions[[0, 2]], [0, 2])
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
    with pytest.raises(LedgerError, match="within 0 s"), ledger.within(0.0):
        pass
