"""Combinations of features: every row has the right action, result and transition."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from envserve.client import BatchEnv, Status
from ppo.algorithms.algorithm import Algorithm
from ppo.algorithms.sac.replay_buffer import ReplayBuffer
from ppo.rollout import Rollout
from ppo.run_folder.checkpoint import Counters
from ppo.training_run import TrainingRun
from tests.ppo.echo_env import EchoEnv
from tests.ppo.runs import SMALL, copy

pytestmark = pytest.mark.usefixtures("one_launcher")

NUM_ENVS, HORIZON = 4, 8
CONFIG = SMALL.replace(num_envs=NUM_ENVS, horizon=HORIZON, total_steps=10_000)
OVERLAP: dict[str, Any] = {"overlap": True}
RECURRENT: dict[str, Any] = {"recurrent_size": 4, "sequence_length": 4}
#: Two policies that exist only in TensorFlow.
GELU: dict[str, Any] = {"num_splits": 2, "activation": "gelu"}
CUSTOM = {"num_splits": 2, "network": "tests.ppo.custom_networks:subclass"}


class Store(Algorithm):
    """Stores all transitions, and changes the parameters without learning."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.replay_buffer = ReplayBuffer(10_000)

    def learn(self, rollout: Rollout, **_: Any) -> dict[str, float]:
        self.replay_buffer.add(rollout)
        for variable in self.agent.trainable_variables:
            variable.assign(variable.value * 0.9 + 0.03)
        return {}


@pytest.mark.parametrize(
    ("settings", "env_kwargs"),
    [
        (OVERLAP, {"masks": True}),
        (OVERLAP | {"act_on": 0.3, "activation": "gelu"}, {"fails": True}),
        (OVERLAP | GELU | RECURRENT, {"fails": True, "masks": True}),
        (OVERLAP | {"act_on": 0.3} | RECURRENT, {"fails": True}),
        ({"num_splits": 4} | RECURRENT, {"fails": True}),
        (OVERLAP | CUSTOM, {"fails": True}),
    ],
    ids=str,
)
def test_rollouts_and_replay_buffer(
    settings: dict[str, Any], env_kwargs: dict[str, Any]
) -> None:
    config = CONFIG.replace(**settings)
    rewards: list[np.ndarray] = []

    def before_update(run: TrainingRun) -> dict[str, float]:
        rewards.append(run.rollout.reward.copy())
        run.rollout.reward[:] *= 2
        return {}

    with BatchEnv.local(
        EchoEnv,
        NUM_ENVS,
        num_workers=2,
        seed=3,
        num_splits=config.num_splits,
        env_kwargs=env_kwargs,
    ) as batch:
        run = TrainingRun(config, batch, Counters(), Store, lambda: None)
        run.before_update = before_update
        snapshots, rollouts = [], []
        state = tuple(
            tf.zeros([NUM_ENVS, units], tf.float32) for units in run.agent.state_sizes
        )
        for iteration in range(4):
            snapshots.append(run.agent.snapshot())
            run.iterate()
            rollouts.append(copy(run.rollout))
            acting = snapshots[max(iteration - config.overlap, 0)]
            state = check_policy(run, iteration, acting, state)
        for rollout, reward in zip(rollouts, rewards, strict=True):
            check_results(run, rollout, reward)
    valid = np.concatenate([rollout.valid for rollout in rollouts])
    assert valid.all() != env_kwargs.get("fails", False)
    rows = [rows_of(rollout)[:-1][rollout.valid] for rollout in rollouts]
    statistics = run.agent.preprocess.statistics()
    deviation = np.concatenate(rows).std(axis=0)
    assert statistics["observation_std_max"] == pytest.approx(deviation.max())
    assert statistics["observation_std_min"] == pytest.approx(deviation.min())
    assert isinstance(run.algorithm, Store)
    check_replay(run.algorithm.replay_buffer, rollouts)


def rows_of(rollout: Rollout) -> np.ndarray:
    """Return the observations without the masks, `[T + 1, B, 6]`."""
    return tf.nest.flatten(rollout.observation)[-1]


def next_rows(rollout: Rollout) -> np.ndarray:
    """Return the observation that each step returned before a reset, `[T, B, 6]`."""
    final = tf.nest.flatten(rollout.final_observation)[-1]
    return np.where(rollout.done[..., None], final, rows_of(rollout)[1:])


def check_policy(
    run: TrainingRun, iteration: int, snapshot: Any, state: Any
) -> tuple[Any, ...]:
    """Repeat the policy's steps in TensorFlow; return the state after the rollout."""
    seeds = np.random.SeedSequence(CONFIG.seed, spawn_key=(iteration,))
    seed = (seeds.generate_state(4) >> 1).astype(np.int32)[:2]
    agent, rollout = run.agent, run.rollout
    noise = np.asarray(agent.actions.noise(HORIZON * NUM_ENVS, tf.constant(seed)))
    noise = noise.reshape(HORIZON, NUM_ENVS, -1)
    for step in range(HORIZON):
        if step % 4 == 0:
            for ours, stored in zip(state, rollout.state, strict=True):
                np.testing.assert_allclose(stored[step // 4], ours, atol=1e-5)
        observation = tf.nest.map_structure(
            lambda leaf, step=step: tf.constant(leaf[step]), rollout.observation
        )
        action, policy_params, *after = agent.act_from(
            snapshot, observation, tf.constant(noise[step]), *state
        )
        np.testing.assert_allclose(rollout.action[step], action, atol=1e-5)
        log_prob = agent.log_prob(action, policy_params)
        np.testing.assert_allclose(rollout.log_prob[step], log_prob, atol=1e-4)
        pending = (rollout.status[step] == Status.PENDING)[:, None]
        state = tuple(
            tf.where(rollout.done[step][:, None], 0.0, tf.where(pending, *pair))
            for pair in zip(state, after, strict=True)
        )
    return state


def check_results(run: TrainingRun, rollout: Rollout, reward: np.ndarray) -> None:
    """Compare results with what the next observation contains."""
    valid, before, after = rollout.valid, rows_of(rollout)[:-1], next_rows(rollout)
    action = rollout.action.reshape(HORIZON * NUM_ENVS, *rollout.action.shape[2:])
    env_action = np.asarray(run.agent.actions.to_env_action(tf.constant(action)))
    env_action = env_action.reshape(HORIZON, NUM_ENVS)
    columns = before[..., 0], before[..., 1] + 1, env_action, reward, rollout.terminated
    expected = np.stack(columns, axis=-1)
    np.testing.assert_allclose(after[..., :5][valid], expected[valid], rtol=1e-6)
    np.testing.assert_array_equal(rollout.reward, 2 * reward)
    assert (rows_of(rollout)[1:][rollout.done][:, 1] == 0).all()


def check_replay(replay: ReplayBuffer, rollouts: list[Rollout]) -> None:
    """Check that the replay buffer has the valid transitions of the rollouts."""
    known = {
        after.tobytes(): (before.tobytes(), action.tobytes(), np.float32(reward))
        for rollout in rollouts
        for before, after, action, reward in zip(
            rows_of(rollout)[:-1][rollout.valid],
            next_rows(rollout)[rollout.valid],
            rollout.action[rollout.valid],
            rollout.reward[rollout.valid],
            strict=True,
        )
    }
    assert replay.size == len(known)
    sample = replay.sample((1, 200), (1, 2))
    names = ("observation", "next_observation", "action", "reward")
    columns = [tf.nest.flatten(sample[name])[-1][0] for name in names]
    for before, after, action, reward in zip(*columns, strict=True):
        expected = before.tobytes(), action.tobytes(), reward
        assert known[after.tobytes()] == expected
