"""Pool bugs, and worker bugs that an env plants when it is built."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from envserve.client.absence import Absence
from envserve.pool import block_operations
from envserve.pool.pool import Pool
from envserve.pool.supervisor import SupervisedWorker
from envserve.slab import Status, write_lost
from envserve.worker import env_block, process
from envserve.worker.channel import MessageKind, pack_message
from envserve.worker.env_row import EnvRow
from tests.envserve.planted_bugs import around
from tests.oracle.ledger_env import LedgerEnv

PLANTED = "tests/PlantedLedger-v0"

Patch = pytest.MonkeyPatch
WORKER_BUGS: dict[str, Callable[[Patch], None]] = {}
POOL_BUGS: dict[str, Callable[[Patch], None]] = {}


def plant_in(
    bugs: dict[str, Callable[[Patch], None]],
) -> Callable[[Callable[[Patch], None]], None]:
    return lambda plant: bugs.update({plant.__name__.replace("_", " "): plant})


class PlantedLedger(LedgerEnv):
    """A ledger env that plants a bug in its worker."""

    planted: ClassVar[set[str]] = set()

    def __init__(self, bug: str = "", **options: Any) -> None:
        if bug and bug not in self.planted:
            self.planted.add(bug)
            WORKER_BUGS[bug](Patch())
        super().__init__(**options)


gymnasium.register(PLANTED, f"{__name__}:PlantedLedger")


# Worker bugs.


@plant_in(WORKER_BUGS)
def an_env_is_stepped_twice(patch: Patch) -> None:
    def step(real: Any, self: EnvRow, action: Any) -> Any:
        real(self, action)
        return real(self, action)

    around(patch, EnvRow, "step", step)


@plant_in(WORKER_BUGS)
def actions_are_swapped(patch: Patch) -> None:
    def swap(real: Any, *args: Any) -> Any:
        return list(real(*args))[::-1]

    around(patch, env_block, "decode_actions", swap)


@plant_in(WORKER_BUGS)
def the_reward_belongs_to_the_previous_step(patch: Patch) -> None:
    last: dict[EnvRow, float] = {}

    def step(real: Any, self: EnvRow, action: Any) -> Any:
        reward, *others = real(self, action)
        before = last.get(self, 0.0)
        last[self] = reward
        return before, *others

    around(patch, EnvRow, "step", step)


@plant_in(WORKER_BUGS)
def a_step_is_answered_before_it_finishes(patch: Patch) -> None:
    def handle(real: Any, self: Any, message: Any) -> None:
        send = self._send
        if message.kind is MessageKind.STEP:
            send(pack_message(MessageKind.DONE, message.block, message.sequence))
            time.sleep(0.01)
            self._send = lambda _: None
        real(self, message)
        self._send = send

    around(patch, process._Worker, "handle", handle)


@plant_in(WORKER_BUGS)
def termination_and_truncation_are_swapped(patch: Patch) -> None:
    def step(real: Any, self: EnvRow, action: Any) -> Any:
        reward, terminated, truncated, info = real(self, action)
        return reward, truncated, terminated, info

    around(patch, EnvRow, "step", step)


@plant_in(WORKER_BUGS)
def a_failed_env_reuses_its_seed(patch: Patch) -> None:
    patch.setattr(EnvRow, "rebuild", EnvRow.build)


@plant_in(WORKER_BUGS)
def a_failed_env_continues(patch: Patch) -> None:
    patch.setattr(EnvRow, "rebuild", lambda self: None)


@plant_in(WORKER_BUGS)
def a_fresh_env_gets_a_lost_action(patch: Patch) -> None:
    def reset(real: Any, self: EnvRow, *arguments: Any) -> Any:
        info = real(self, *arguments)
        self.inner_env.step(np.int64(5))
        return info

    around(patch, EnvRow, "reset", reset)


@plant_in(WORKER_BUGS)
def an_action_is_applied_at_close(patch: Patch) -> None:
    def close(real: Any, self: EnvRow) -> None:
        self.inner_env.step(np.int64(5))
        real(self)

    around(patch, EnvRow, "close", close)


# Pool bugs.


@plant_in(POOL_BUGS)
def a_replaced_env_reuses_its_seed(patch: Patch) -> None:
    def start(real: Any, self: Any, incarnations: Any, now: float) -> Any:
        return real(self, [0] * len(incarnations), now)

    around(patch, SupervisedWorker, "start", start)


@plant_in(POOL_BUGS)
def a_loss_is_reported_twice(patch: Patch) -> None:
    reported: dict[int, Any] = {}

    def collect(real: Any, self: Pool, *arguments: Any) -> Any:
        outcomes = real(self, *arguments)
        for at, outcome in enumerate(outcomes):
            faults = reported.pop(outcome.block, ())
            if faults:
                outcomes[at] = outcome._replace(faults=faults)
                block = self.blocks[outcome.block]
                part = slice(block.start, block.stop)
                write_lost(self.rows, part, Status.WORKER_DIED)
            elif len(outcome.faults) > 1:
                reported[outcome.block] = outcome.faults
        return outcomes

    around(patch, Pool, "collect", collect)


def lost_rows(patch: Patch, alter: Callable[[Any], None]) -> None:
    def write(real: Any, rows: Any, part: slice, status: Status) -> None:
        real(rows, part, status)
        alter(rows.at(part))

    around(patch, block_operations, "write_lost", write)


@plant_in(POOL_BUGS)
def a_loss_is_not_reported(patch: Patch) -> None:
    patch.setattr(block_operations, "write_lost", lambda rows, part, status: None)


@plant_in(POOL_BUGS)
def a_lost_row_is_not_truncated(patch: Patch) -> None:
    lost_rows(patch, lambda rows: rows.truncated.fill(False))


@plant_in(POOL_BUGS)
def a_lost_row_is_terminated(patch: Patch) -> None:
    lost_rows(patch, lambda rows: rows.terminated.fill(True))


@plant_in(POOL_BUGS)
def a_lost_row_is_late(patch: Patch) -> None:
    lost_rows(patch, lambda rows: rows.status.fill(Status.LATE))


@plant_in(POOL_BUGS)
def the_final_observation_of_a_lost_row_belongs_to_the_next_episode(
    patch: Patch,
) -> None:
    lost_rows(patch, lambda r: np.copyto(r.final_observation[0], r.observation[0]))


@plant_in(POOL_BUGS)
def padding_is_truncated(patch: Patch) -> None:
    def show(real: Any, self: Absence, spec: Any, row_set: Any, result: Any) -> None:
        real(self, spec, row_set, result)
        result.truncated[result.status == Status.PENDING] = True

    around(patch, Absence, "mark_rows", show)
