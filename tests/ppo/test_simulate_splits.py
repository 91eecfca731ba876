"""Rollouts with several splits have the same contents as with one split."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from envserve.client import BatchEnv
from ppo.errors import DivergedError
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.simulate import Simulation
from tests.ppo.runs import copy, two_lanes

pytestmark = pytest.mark.usefixtures("one_launcher")

HORIZON = 30
NUM_ENVS = 6


def local(num_splits: int) -> BatchEnv:
    return BatchEnv.local("CartPole-v1", NUM_ENVS, 2, seed=3, num_splits=num_splits)


def lanes() -> BatchEnv:
    return two_lanes("CartPole-v1", NUM_ENVS)


def act_by_row(observation: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return actions that depend only on their row, bit for bit."""
    score = tf.cast(observation[:, 2], tf.float32) + noise[:, 0]
    return tf.cast(score > 0.0, tf.int64), score


def draw(num_rows: int, seed: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_normal([num_rows, 1], seed)


def collect(
    batch: BatchEnv, on_step: Any = lambda: None, **named: Any
) -> list[list[np.ndarray]]:
    with batch:
        simulation = Simulation(
            InGraphBatchEnv(batch), act_by_row, HORIZON, on_step, noise=draw, **named
        )
        rollouts = [copy(simulation.run((1, seed))) for seed in range(3)]
    return [tf.nest.flatten(tuple(rollout)) for rollout in rollouts]


@pytest.mark.parametrize("make_batch", [lambda: local(2), lambda: local(3), lanes])
def test_splits_do_not_change_a_rollout(make_batch: Any) -> None:
    expected = collect(local(1))
    for ours, theirs in zip(collect(make_batch()), expected, strict=True):
        ended = theirs[4] | theirs[5]
        assert ended.any()
        for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            if index == 7:  # final observations only matter where an episode ended
                left, right = left[ended], right[ended]
            np.testing.assert_array_equal(left, right)


def test_on_step_is_called_once_per_batch_step_with_splits() -> None:
    calls: list[int] = []
    collect(local(2), lambda: calls.append(1))
    assert len(calls) == 3 * HORIZON


@pytest.mark.parametrize(("num_splits", "act_on"), [(2, 1.0), (1, 0.5)])
def test_rollout_after_an_interrupted_one_is_complete(
    num_splits: int, act_on: float
) -> None:
    calls: list[int] = []

    def on_step() -> None:
        calls.append(1)
        if len(calls) == 5:
            raise InterruptedError("enough")

    with local(num_splits) as batch:
        env = InGraphBatchEnv(batch)
        simulation = Simulation(
            env, act_by_row, HORIZON, on_step, noise=draw, act_on=act_on
        )
        with pytest.raises(InterruptedError, match="enough"):
            simulation.run((0, 0))
        rollout = simulation.run((0, 1))
        assert rollout.valid.all()
        assert batch.num_in_flight == 0
        # All envs began new episodes: CartPole starts close to upright.
        assert (np.abs(rollout.observation[0]) <= 0.05).all()


def test_errors_name_the_env_index_in_the_batch() -> None:
    def nan_policy(observation: Any, noise: Any) -> tuple[tf.Tensor, tf.Tensor]:
        log_prob = tf.where(tf.abs(noise[:, 0]) < 1e9, 0.0, np.nan)
        return tf.zeros([observation.shape[0]], tf.int64), log_prob

    def draw_one_bad(num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        return 1e12 * tf.one_hot([NUM_ENVS + 4], num_rows)[0][:, None]

    with local(2) as batch:
        simulation = Simulation(
            InGraphBatchEnv(batch), nan_policy, HORIZON, noise=draw_one_bad
        )
        with pytest.raises(DivergedError, match="Env 4 "):
            simulation.run((0, 0))


@pytest.mark.parametrize(
    ("num_splits", "act_on"), [(1, 1.0), (2, 1.0), (1, 0.5)], ids=str
)
@pytest.mark.parametrize("is_in_numpy", [False, True])
def test_envs_do_not_take_actions_that_are_not_finite(
    num_splits: int, act_on: float, is_in_numpy: bool
) -> None:
    def nan_policy(observation: Any, noise: Any) -> tuple[tf.Tensor, tf.Tensor]:
        action = tf.where(noise > 0.0, np.nan, 0.0)
        return action, action[:, 0]

    def in_numpy(snapshot: Any, num_rows: int) -> Any:
        def act(leaves: list[np.ndarray], noise: np.ndarray) -> tuple[Any, ...]:
            action = np.where(noise > 0.0, np.float32(np.nan), np.float32(0.0))
            return action, action, action[:, 0]

        return act if is_in_numpy else None

    def draw_one_bad(num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        return tf.one_hot([NUM_ENVS + 4], num_rows)[0][:, None]

    with BatchEnv.local(
        "Pendulum-v1", NUM_ENVS, 2, seed=3, num_splits=num_splits
    ) as batch:
        simulation = Simulation(
            InGraphBatchEnv(batch),
            nan_policy,
            HORIZON,
            noise=draw_one_bad,
            in_numpy=in_numpy,
            act_on=act_on,
        )
        with pytest.raises(DivergedError, match=r"Env 4 .* finite action, got .*nan"):
            simulation.run((0, 0))
        # Env 4 and the others of its worker have not taken their second step. With
        # act_on 0.5, the envs of the other worker do not wait for them.
        num_other_steps = 1 if act_on == 1.0 else HORIZON
        assert batch.stats().rows <= NUM_ENVS // 2 * (1 + num_other_steps)


def test_policy_gets_the_rows_of_one_split() -> None:
    shapes = []

    def policy(observation: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        shapes.append((observation.shape.as_list(), noise.shape.as_list()))
        return act_by_row(observation, noise)

    with local(2) as batch:
        Simulation(InGraphBatchEnv(batch), policy, HORIZON, noise=draw).run((0, 0))
    assert set(map(str, shapes)) == {"([3, 4], [3, 1])"}
