"""Bugs of pools and of workers, planted beside real processes.

Those of workers are planted in the process itself, by the env that it builds: import
this module where the envs are built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

from envserve.lane import Outcome
from envserve.pool import pool as pool_module
from envserve.pool.pool import Pool
from envserve.slab import Rows, Status, write_lost, write_pending
from envserve.spec import action_values
from envserve.testing import LedgerEnv
from envserve.worker import process
from envserve.worker.env_row import EnvRow
from envserve.worker.process import _Worker

__all__ = ["PLANTED", "POOL_BUGS", "WORKER_BUGS"]

PLANTED = "tests/PlantedLedger-v0"

WORKER_BUGS: dict[str, Callable[[], None]] = {}
POOL_BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def worker_bug(plant: Callable[[], None]) -> Callable[[], None]:
    WORKER_BUGS[plant.__name__.replace("_", " ")] = plant
    return plant


def pool_bug(
    plant: Callable[[pytest.MonkeyPatch], None],
) -> Callable[[pytest.MonkeyPatch], None]:
    POOL_BUGS[plant.__name__.replace("_", " ")] = plant
    return plant


class PlantedLedger(LedgerEnv):
    """A ledger that spoils the worker which builds it."""

    def __init__(self, bug: str = "", **options: Any) -> None:
        if bug:
            WORKER_BUGS[bug]()
        super().__init__(**options)


gymnasium.register(PLANTED, f"{__name__}:PlantedLedger")


# In the worker; each is planted once for each env, so none may add up.

_Step = EnvRow.step
_WORKER: dict[str, Any] = {
    name: getattr(_Worker, name)
    for name in ("_step", "_recover", "_mark_lost", "_publish", "close")
}


@worker_bug
def an_env_is_stepped_twice() -> None:
    def step(self: EnvRow, action: Any) -> Any:
        self._step_env(action)
        return _Step(self, action)

    EnvRow.step = step  # type: ignore[method-assign]


@worker_bug
def an_action_goes_to_the_neighbour() -> None:
    def values(*arguments: Any) -> Any:
        return list(action_values(*arguments))[::-1]

    process.action_values = values  # type: ignore[assignment,attr-defined]


@worker_bug
def the_reward_is_that_of_the_step_before() -> None:
    def step(self: Any, envs: Any) -> Any:
        part = slice(envs[0].row, envs[-1].row + 1)
        before = self._rows.reward[part].copy()
        report = _WORKER["_step"](self, envs)
        self._rows.reward[part] = before
        return report

    _Worker._step = step  # type: ignore[method-assign]


@worker_bug
def the_rows_are_answered_before_they_are_written() -> None:
    later: dict[int, Any] = {}

    def step(self: Any, envs: Any) -> Any:
        part = slice(envs[0].row, envs[-1].row + 1)
        report = _WORKER["_step"](self, envs)
        target = self._rows.observation[0]
        written = target[part].copy()
        target[part] = later.get(part.start, written)
        later[part.start] = written
        return report

    _Worker._step = step  # type: ignore[method-assign]


@worker_bug
def termination_and_truncation_are_mixed_up() -> None:
    def step(self: EnvRow, action: Any) -> Any:
        reward, terminated, truncated, info = _Step(self, action)
        return reward, truncated, terminated, info

    EnvRow.step = step  # type: ignore[method-assign]


@worker_bug
def an_env_that_failed_has_its_old_seed() -> None:
    def rebuild(self: EnvRow) -> None:
        self.close()
        self.build()

    EnvRow.rebuild = rebuild  # type: ignore[method-assign]


@worker_bug
def an_env_that_failed_goes_on() -> None:
    def recover(self: Any, env: Any, error: Exception, **options: Any) -> Any:
        return {
            "row": env.row,
            "status": int(Status.ENV_ERROR),
            "text": "x",
            "violation": False,
        }

    _Worker._recover = recover  # type: ignore[method-assign]


@worker_bug
def an_env_that_failed_has_terminated() -> None:
    def mark_lost(self: Any, row: int) -> None:
        _WORKER["_mark_lost"](self, row)
        self._rows.terminated[row] = True

    _Worker._mark_lost = mark_lost  # type: ignore[method-assign]


@worker_bug
def an_env_that_failed_has_no_final_observation() -> None:
    def recover(self: Any, env: Any, error: Exception, **options: Any) -> Any:
        fault = _WORKER["_recover"](self, env, error, **options)
        self._rows.final_observation[0][env.row] = 0
        return fault

    _Worker._recover = recover  # type: ignore[method-assign]


@worker_bug
def a_fresh_env_is_stepped_with_the_action_that_was_lost() -> None:
    def publish(self: Any, envs: Any) -> Any:
        payload = _WORKER["_publish"](self, envs)
        for env in envs:
            env.step(self._rows.action[0][env.row])
        return payload

    _Worker._publish = publish  # type: ignore[method-assign]


@worker_bug
def the_last_action_is_applied_once_more_at_the_end() -> None:
    def close(self: Any) -> None:
        for env in self._envs.values():
            env.step(self._rows.action[0][env.row])
        _WORKER["close"](self)

    _Worker.close = close  # type: ignore[method-assign]


# In the pool.


@pool_bug
def a_replaced_env_has_its_old_seed(patch: pytest.MonkeyPatch) -> None:
    on_lost = Pool.on_lost

    def keep_incarnations(self: Pool, *arguments: Any) -> None:
        before = list(self._incarnations)
        on_lost(self, *arguments)
        self._incarnations[:] = before

    patch.setattr(Pool, "on_lost", keep_incarnations)


@pool_bug
def a_loss_is_reported_twice(patch: pytest.MonkeyPatch) -> None:
    report_lost = Pool._report_lost
    reported: set[int] = set()

    def report_again(self: Pool, block: Any) -> Any:
        loss = self._losses[block.index]
        faults = report_lost(self, block)
        if block.index not in reported:
            reported.add(block.index)
            self._losses[block.index] = loss
        return faults

    patch.setattr(Pool, "_report_lost", report_again)


@pool_bug
def a_loss_is_not_reported(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Pool, block: Any) -> Any:
        del self._losses[block.index]
        return []

    patch.setattr(Pool, "_report_lost", forget)


def lost_rows(patch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    def write(rows: Rows, part: slice, status: Status) -> None:
        write_lost(rows, part, status)
        getattr(rows, name)[part] = value

    patch.setattr(pool_module, "write_lost", write)


@pool_bug
def a_lost_row_is_not_truncated(patch: pytest.MonkeyPatch) -> None:
    lost_rows(patch, "truncated", False)


@pool_bug
def a_lost_row_is_terminated(patch: pytest.MonkeyPatch) -> None:
    lost_rows(patch, "terminated", True)


@pool_bug
def a_lost_row_has_no_status(patch: pytest.MonkeyPatch) -> None:
    lost_rows(patch, "status", Status.OK)


@pool_bug
def a_lost_row_is_only_late(patch: pytest.MonkeyPatch) -> None:
    lost_rows(patch, "status", Status.LATE)


@pool_bug
def a_lost_row_has_the_next_observation_for_its_final_one(
    patch: pytest.MonkeyPatch,
) -> None:
    def write(rows: Rows, part: slice, status: Status) -> None:
        write_lost(rows, part, status)
        rows.final_observation[0][part] = rows.observation[0][part]

    patch.setattr(pool_module, "write_lost", write)


@pool_bug
def padding_is_truncated(patch: pytest.MonkeyPatch) -> None:
    def write(rows: Rows, part: slice) -> None:
        write_pending(rows, part)
        rows.truncated[part] = True

    patch.setattr(pool_module, "write_pending", write)


@pool_bug
def padding_keeps_the_last_reward(patch: pytest.MonkeyPatch) -> None:
    def write(rows: Rows, part: slice) -> None:
        rewards = rows.action[0][part].copy()
        write_pending(rows, part)
        rows.reward[part] = 1.0 + rewards

    patch.setattr(pool_module, "write_pending", write)


@pool_bug
def padding_counts_as_valid(patch: pytest.MonkeyPatch) -> None:
    def write(rows: Rows, part: slice) -> None:
        write_pending(rows, part)
        rows.status[part] = Status.OK

    patch.setattr(pool_module, "write_pending", write)


@pool_bug
def a_padded_action_is_applied(patch: pytest.MonkeyPatch) -> None:
    collect = Pool.collect

    def pad_what_is_done(self: Pool, *arguments: Any) -> list[Outcome]:
        finished = collect(self, *arguments)
        padded = []
        for item in finished:
            block = self.blocks[item.block]
            part = slice(block.start, block.stop)
            if not item.faults and np.all(self.rows.reward[part] > 900):
                write_pending(self.rows, part)
                item = item._replace(is_padding=True)
            padded.append(item)
        return padded

    patch.setattr(Pool, "collect", pad_what_is_done)
