"""The checker counts every kind of wrong result, and no correct results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

from envserve.client import BatchEnv, StepResult
from envserve.demo.learner import Learner
from envserve.demo.replay_check import ReplayCheck
from envserve.envs.registry import make_env
from envserve.envs.seeding import INCARNATIONS_PER_LEASE, env_seed
from envserve.slab import Status

Array = np.ndarray[Any, Any]

ROOT_SEED = 7
NUM_ENVS = 3
ROWS = np.arange(NUM_ENVS)


def make() -> gymnasium.Env[Any, Any]:
    return make_env("CartPole-v1", {})


class CorrectBatch:
    """A correct batch without processes; on request, row 1 has a fault."""

    def __init__(self) -> None:
        self.envs = [make() for _ in ROWS]
        self.incarnation = 0
        self.late_action: Any = None
        self.observation = np.array([self.begin(row, 0) for row in range(NUM_ENVS)])

    def begin(self, row: int, incarnation: int) -> Array:
        seed = env_seed(ROOT_SEED, row, incarnation)
        return np.asarray(self.envs[row].reset(seed=seed)[0])

    def step(self, actions: Array, status: Status = Status.OK) -> StepResult:
        """Step all rows; row 1 gets the given status."""
        reward, ended = np.zeros(NUM_ENVS), np.zeros((2, NUM_ENVS), np.bool_)
        final, statuses = np.zeros_like(self.observation), np.zeros(NUM_ENVS, np.uint8)
        statuses[1] = status
        for row in range(NUM_ENVS):
            if statuses[row] == Status.PENDING:
                self.late_action = (
                    actions[row] if self.late_action is None else self.late_action
                )
            elif statuses[row] in (Status.OK, Status.LATE):
                action = (
                    self.late_action if statuses[row] == Status.LATE else actions[row]
                )
                observation, reward[row], *ended[:, row], _ = self.envs[row].step(
                    action
                )
                if ended[:, row].any():
                    final[row], (observation, _) = observation, self.envs[row].reset()
                self.observation[row] = observation
            else:
                self.incarnation += 2  # one more rebuild than the caller has observed
                final[row], ended[1, row] = self.observation[row], True
                self.observation[row] = self.begin(row, self.incarnation)
        if status != Status.PENDING:
            self.late_action = None
        valid = statuses == Status.OK
        seen = self.observation.copy()
        return StepResult(seen, reward, ended[0], ended[1], valid, final, statuses, {})


#: Row 1's status at each step: faults, padding, and the results after padding.
COURSE = [Status.OK] * 30
COURSE[4], COURSE[14], COURSE[20] = Status.WORKER_DIED, Status.TIMEOUT, Status.ENV_ERROR
COURSE[7:10] = [Status.PENDING, Status.PENDING, Status.LATE]
COURSE[24:27] = [Status.PENDING, Status.PENDING, Status.SERVER_LOST]


def play(
    spoil: Callable[[int, StepResult], object] = lambda step, result: None,
    sent: Callable[[int, Array], Array] = lambda step, actions: actions,
) -> ReplayCheck:
    """Play the course, and return the checker.

    Args:
      spoil: Modifies a step's result.
      sent: Returns the actions that the envs get; the checker gets the original ones.
    """
    random, batch = np.random.default_rng(3), CorrectBatch()
    checker = ReplayCheck(make, NUM_ENVS, ROOT_SEED)
    checker.reset(batch.observation)
    for step, status in enumerate(COURSE):
        actions = random.integers(0, 2, NUM_ENVS)
        result = batch.step(sent(step, actions), status)
        spoil(step, result)
        checker.step(ROWS, actions, result)
    return checker


def test_correct_results_are_not_counted() -> None:
    checker = play()
    assert checker.num_wrong == 0
    assert checker.num_checked == (len(COURSE) + 1) * NUM_ENVS


def add_one_bit(array: Array, row: int) -> None:
    array[row] = np.nextafter(array[row], np.inf)


#: For each kind of wrong result: the step, and a function that spoils its result.
WRONG_RESULTS: dict[str, tuple[int, Callable[[StepResult], object]]] = {
    "observation": (2, lambda r: add_one_bit(r.observation, 1)),
    "reward": (2, lambda r: add_one_bit(r.reward, 1)),
    "terminated": (2, lambda r: r.terminated.__setitem__(1, True)),
    "truncated": (2, lambda r: r.truncated.__setitem__(1, True)),
    "final of none": (2, lambda r: add_one_bit(r.final_observation, 1)),
    "not valid": (2, lambda r: r.valid.__setitem__(1, False)),
    "lost is valid": (4, lambda r: r.valid.__setitem__(1, True)),
    "lost ends": (4, lambda r: r.terminated.__setitem__(1, True)),
    "lost goes on": (4, lambda r: r.truncated.__setitem__(1, False)),
    "lost pays": (14, lambda r: add_one_bit(r.reward, 1)),
    "lost final": (14, lambda r: add_one_bit(r.final_observation, 1)),
    "padding is valid": (7, lambda r: r.valid.__setitem__(1, True)),
    "padding pays": (7, lambda r: add_one_bit(r.reward, 1)),
    "padding ends": (8, lambda r: r.truncated.__setitem__(1, True)),
    "padding shows": (8, lambda r: add_one_bit(r.observation, 1)),
    "late": (9, lambda r: add_one_bit(r.observation, 1)),
    "late is valid": (9, lambda r: r.valid.__setitem__(1, True)),
}


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_one_wrong_row_is_counted_once(name: str) -> None:
    at, spoil = WRONG_RESULTS[name]
    checker = play(lambda step, result: spoil(result) if step == at else None)
    assert checker.num_wrong == 1


def test_results_of_other_rows_and_steps_are_wrong() -> None:
    def swap(step: int, result: StepResult) -> None:
        if step == 2:
            for array in result[:-1]:
                array[[0, 2]] = array[[2, 0]]

    assert play(swap).num_wrong == 2
    before: list[Array] = []

    def show_again(step: int, result: StepResult) -> None:
        before.append(result.observation.copy())
        if step == 2:
            result.observation[0] = before[1][0]

    assert play(show_again).num_wrong == 1


def test_another_action_or_one_applied_twice_is_wrong() -> None:
    def other(step: int, actions: Array) -> Array:
        return np.where(ROWS == 0, 1 - actions, actions) if step == 2 else actions

    assert play(sent=other).num_wrong >= 1


def test_an_episode_of_another_env_is_wrong_after_a_loss() -> None:
    def foreign(step: int, result: StepResult) -> None:
        if step == 4:
            result.observation[1] = make().reset(seed=env_seed(ROOT_SEED, 0, 1))[0]

    assert play(foreign).num_wrong >= 1


@pytest.mark.parametrize(
    ("at", "status"), [(2, Status.LATE), (7, Status.LATE), (9, Status.OK)]
)
def test_a_step_out_of_order_is_wrong(at: int, status: Status) -> None:
    def rename(step: int, result: StepResult) -> None:
        if step == at:
            result.status[1], result.valid[1] = status, status == Status.OK

    assert play(rename).num_wrong >= 1


def test_envs_of_a_later_lease_are_known() -> None:
    checker = ReplayCheck(make, 1, ROOT_SEED)
    seed = env_seed(ROOT_SEED, 0, 3 * INCARNATIONS_PER_LEASE + 2)
    checker.reset(make().reset(seed=seed)[0][None])
    assert checker.num_wrong == 0


def test_it_agrees_with_workers_about_continuous_actions() -> None:
    name, random = "Pendulum-v1", np.random.default_rng(1)
    with BatchEnv.local(name, 2, 1, seed=ROOT_SEED) as batch:
        checker = ReplayCheck(lambda: make_env(name, {}), 2, ROOT_SEED)
        checker.reset(batch.reset())
        learner = Learner(name, make_env(name, {}), 2, 0)
        observation = random.normal(size=(2, 3))
        for _ in range(210):  # longer than one episode
            actions = learner.act(observation, np.arange(2))
            result = batch.step(actions)
            checker.step(np.arange(2), actions, result)
            learner.learn(np.arange(2), result)
            observation = result.observation
        assert (checker.num_wrong, checker.num_checked) == (0, 2 * 211)
        assert len(learner.returns) == 2


def test_the_learner_balances_a_pole() -> None:
    envs, rows = [make() for _ in range(16)], np.arange(16)
    learner = Learner("CartPole-v1", make(), len(rows), seed=0)
    observation = np.array([env.reset(seed=row)[0] for row, env in enumerate(envs)])
    best = 0.0
    for _ in range(3000):
        reward, ended = np.ones(16), np.zeros((2, 16), np.bool_)
        for row, action in enumerate(learner.act(observation, rows)):
            observation[row], _, *ended[:, row], _ = envs[row].step(action)
            if ended[:, row].any():
                observation[row], _ = envs[row].reset()
        ok, none = np.zeros(16, np.uint8), observation
        flags = ended[0], ended[1], ok == Status.OK
        learner.learn(rows, StepResult(none, reward, *flags, none, ok, {}))
        best = max(best, float(np.mean(learner.returns or [0.0])))
        if best > 150:
            return
    pytest.fail(f"expected a mean return above 150; got {best}")
