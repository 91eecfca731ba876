"""Tests for the faults of batch-ppo, one per fault, with numbers computed by hand.

The predecessor stored whole episodes, padded to one length, and trained on chunks of
them. Here, rollouts continue across the ends of episodes, and rows can be invalid, so
the same mistakes are possible. The test of fault 6, a KL penalty that cannot rise
again, is in test_schedules.py; that of fault 7, chunks that start with zero states, in
test_sequences.py.
"""

import functools
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ppo.agent.actions.distributions import DiagonalGaussian
from ppo.agent.agent import Agent
from ppo.agent.normalize import ReturnScale, RunningMoments
from ppo.algorithms.ppo.schedules import Schedules
from ppo.algorithms.ppo.update import Updater
from ppo.learning import losses
from ppo.learning.returns import next_values
from ppo.rollout import Rollout
from tests.ppo.fakes import ACTIONS, BOX
from tests.ppo.runs import SMALL, eagerly, parameters, rollout_of
from tests.ppo.test_returns import run

CONFIG = SMALL.replace(
    num_envs=1,
    horizon=50,
    total_steps=100_000,
    minibatch_size=50,
    discount=0.995,
    gae_lambda=1.0,
    scale_rewards=False,
    normalize_observations=False,
)


def make_rollout(agent: Agent, num_rows: int) -> Rollout:
    """Return a rollout of one env with random observations and reward 1."""
    generator = np.random.default_rng(7)
    observation = generator.normal(size=(num_rows + 1, 1, 2))
    action, log_prob = agent.act(
        tf.constant(observation[:-1, 0]), tf.constant([1, 2], tf.int32)
    )
    return rollout_of(
        num_rows,
        observation=observation,
        action=action.numpy()[:, None],
        log_prob=log_prob.numpy()[:, None],
        reward=np.ones((num_rows, 1)),
    )


def padded(rollout: Rollout, num_rows: int) -> Rollout:
    """Extend a rollout with invalid rows of meaningless values."""
    missing = num_rows - len(rollout.valid)

    def extended(rows: np.ndarray) -> np.ndarray:
        padding = np.full((missing, *rows.shape[1:]), 1e9).astype(rows.dtype)
        return np.concatenate([rows, padding])

    longer = Rollout(*tf.nest.map_structure(extended, tuple(rollout)))
    longer.valid[-missing:] = False
    return longer


def compute_advantages(
    reward: list[float], value: list[float], final_value: list[float], **named: Any
) -> tuple[list[float], list[float]]:
    """Return advantages and targets of one env, as the update computes them."""
    ends = [*named.get("terminated", ()), *named.get("truncated", ())]
    done = tf.constant([[step in ends] for step in range(len(reward))])
    values, final_values = (tf.constant(rows)[:, None] for rows in (value, final_value))
    following = next_values(values, final_values, done)[:, 0].numpy().tolist()
    named = {"discount": 0.99, "gae_lambda": 1.0, **named}
    return run(reward, value[:-1], following, **named)


def test_1_value_targets_of_a_part_of_an_episode_include_the_rest() -> None:
    """First 50 of 200 steps, reward 1: targets 126.6 and 106.2, not 44.3 and 1.0."""
    rest = (1 - 0.995**150) / 0.005  # return of the remaining 150 steps
    _, target = compute_advantages(
        [1.0] * 50, [0.0] * 50 + [rest], [0.0] * 50, discount=0.995
    )
    assert target[0] == pytest.approx(126.6, abs=0.05)
    assert target[49] == pytest.approx(106.2, abs=0.05)
    assert sum(0.995**k for k in range(50)) == pytest.approx(44.3, abs=0.05)


@eagerly()
@pytest.mark.parametrize("minibatch_size", [50, 5])
def test_1_value_targets_do_not_depend_on_minibatches(minibatch_size: int) -> None:
    """The value of reward 1 forever is 1 / (1 - 0.995) = 200, so the loss is 0."""
    config = CONFIG.replace(minibatch_size=minibatch_size, learning_rate=0.0)
    agent = Agent(BOX, ACTIONS, config)
    kernel, bias = agent.trainable_variables[-2:]
    kernel.assign(tf.zeros_like(kernel))
    bias.assign([200.0])
    metrics = Updater(agent, config).update(make_rollout(agent, 50), seed=(1, 2))
    assert metrics["value_loss"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("is_valid_after", [True, False])
def test_2_nothing_is_bootstrapped_after_a_terminated_episode(
    is_valid_after: bool,
) -> None:
    """Reward 0, V = 2, V of the next row 3: advantage -2.0, not 0.99 * 3 - 2 = 0.97."""
    advantage, _ = compute_advantages(
        reward=[0.0, 0.0],
        value=[2.0, 3.0, 3.0],
        final_value=[3.0, 3.0],
        terminated=(0,),
        invalid=() if is_valid_after else (1,),
    )
    assert advantage[0] == pytest.approx(-2.0)


def test_3_advantages_are_normalised_over_valid_rows_only() -> None:
    """With 50 valid rows of 1,000, mean and deviation are 0 and 1, not 4.1 and 1.4."""
    valid = np.arange(1000) < 50
    advantage = np.where(valid, 3.08 + (-1.0) ** np.arange(1000), 0.0)
    wrong = (advantage[:50] - advantage.mean()) / advantage.std()
    assert (wrong.mean(), wrong.std()) == pytest.approx((4.1, 1.4), abs=0.05)
    normalized = losses.normalized_advantages(
        tf.constant(advantage, tf.float32), tf.constant(valid, tf.float32)
    ).numpy()[:50]
    assert normalized.mean() == pytest.approx(0.0, abs=1e-6)
    assert normalized.std() == pytest.approx(1.0, abs=1e-6)


def test_4_kl_divergence_is_averaged_over_valid_rows_only() -> None:
    """With 20 valid rows of 1,000, the KL is 0.05, not 0.001, so the penalty rises."""
    zero = tf.zeros([1000, 1])
    old = DiagonalGaussian(zero, tf.zeros([1]))
    # The KL of two Gaussians with variance 1 is half the squared distance of their
    # means.
    new = DiagonalGaussian(tf.where(tf.range(1000)[:, None] < 20, 0.1**0.5, zero), 0.0)
    weight = tf.cast(tf.range(1000) < 20, tf.float32)
    kl = float(losses.masked_mean(old.kl(new), weight))
    assert kl == pytest.approx(0.05, rel=1e-5)
    assert float(tf.reduce_mean(old.kl(new))) == pytest.approx(0.001, rel=1e-5)
    schedules = Schedules(CONFIG.replace(objective="penalty", kl_target=0.01))
    schedules.update(kl)
    assert schedules.at(0.0).kl_penalty == 1.5


@eagerly()
@pytest.mark.parametrize(
    "changes",
    [
        {"objective": "clip", "normalize_advantages": True},
        {"objective": "penalty", "entropy_coefficient": 0.1, "value_clip_range": 0.1},
    ],
)
def test_3_and_4_invalid_rows_change_neither_the_update_nor_its_metrics(
    changes: dict[str, Any],
) -> None:
    """Compare gradient steps on 20 rows, with and without 980 extra invalid rows."""
    outcomes = []
    for num_rows in (20, 1000):
        config = CONFIG.replace(
            horizon=num_rows, minibatch_size=num_rows, max_kl=1.0, **changes
        )
        agent = Agent(BOX, ACTIONS, config)
        rollout = make_rollout(agent, 20)
        rollout.reward[:] = rollout.action[..., 0]
        # The episode ends, so that the added rows do not continue it.
        rollout.terminated[-1] = True
        if num_rows > 20:
            rollout = padded(rollout, num_rows)
        metrics = Updater(agent, config).update(rollout, seed=(1, 2))
        outcomes.append((parameters(agent), list(metrics.values())))
    assert metrics["kl"] > 0
    np.testing.assert_allclose(outcomes[0][0], outcomes[1][0], atol=1e-6)
    np.testing.assert_allclose(outcomes[0][1], outcomes[1][1], rtol=1e-4, atol=1e-6)


def test_4_metrics_of_minibatches_are_averaged_over_valid_rows() -> None:
    """Most of the 200 minibatches of 5 rows contain none of the 20 valid rows."""
    entropy = []
    for num_rows in (20, 1000):
        config = CONFIG.replace(horizon=num_rows, minibatch_size=5, learning_rate=0.0)
        agent = Agent(BOX, ACTIONS, config)
        rollout = make_rollout(agent, 20)
        if num_rows > 20:
            rollout = padded(rollout, num_rows)
        with eagerly(num_rows == 20):
            metrics = Updater(agent, config).update(rollout, seed=(1, 2))
        entropy.append(metrics["entropy"])
    by_hand = 0.5 * (1.0 + math.log(2.0 * math.pi)) + CONFIG.initial_log_std
    assert entropy == pytest.approx([by_hand, by_hand], rel=1e-5)


def test_5_time_limit_is_not_treated_as_termination() -> None:
    """With reward 1, V = 200, and truncation after two steps, the target is 200."""
    compute = functools.partial(
        compute_advantages,
        reward=[1.0, 1.0],
        value=[200.0, 200.0, 0.0],
        final_value=[0.0, 200.0],
        discount=0.995,
    )
    _, truncated = compute(truncated=(1,))
    assert truncated == pytest.approx([200.0, 200.0])
    _, terminated = compute(terminated=(1,))
    assert terminated == pytest.approx([1.995, 1.0], rel=1e-5)


@eagerly()
def test_8_every_epoch_shuffles_all_rows_again() -> None:
    config = CONFIG.replace(minibatch_size=10, epochs=3)
    agent = Agent(BOX, ACTIONS, config)
    seen: list[list[float]] = []

    def recording_loss(**minibatch: Any) -> tf.Tensor:
        seen.append(minibatch["action"][:, 0].numpy().tolist())
        return losses.policy_loss(**minibatch)

    rollout = make_rollout(agent, 50)
    Updater(agent, config, recording_loss).update(rollout, seed=(1, 2))
    rows = rollout.action[:, 0, 0].tolist()
    assert len(set(rows)) == 50
    place = {row: index for index, row in enumerate(rows)}
    minibatches = [[place[row] for row in minibatch] for minibatch in seen]
    epochs = [minibatches[start : start + 5] for start in range(0, 15, 5)]
    orders = [np.concatenate(epoch).tolist() for epoch in epochs]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    # Shuffling within a window could not move the last rows to the front.
    assert max(max(epoch[0]) for epoch in epochs) >= 45
    assert min(min(epoch[-1]) for epoch in epochs) < 5


@eagerly()
def test_9_statistics_updated_after_the_update_do_not_change_ratio_and_kl() -> None:
    config = CONFIG.replace(
        normalize_observations=True, learning_rate=0.0, objective="penalty"
    )
    agent = Agent(BOX, ACTIONS, config)
    updater = Updater(agent, config)
    rollout = make_rollout(agent, 50)
    for _ in range(2):
        metrics = updater.update(rollout, seed=(1, 2))
        assert metrics["ratio_deviation"] < 1e-5
        assert metrics["kl"] == pytest.approx(0.0, abs=1e-7)
        assert metrics["approximate_kl"] == pytest.approx(0.0, abs=1e-6)
        # As in the training loop, the agent is updated before the statistics.
        agent.preprocess.update(
            3.0 + rollout.observation[:-1, 0], tf.ones([50], tf.bool)
        )
        rollout = make_rollout(agent, 50)


def test_10_rare_reward_is_not_clipped() -> None:
    """A reward of 1 in 1,000 steps has a deviation of 0.032, so it would become 31.6.

    The discounted return falls from 1 by a factor of 0.99 per step. Its mean is 0.1,
    the mean of its square (1 / (1 - 0.99**2)) / 1000 = 0.0503, and its deviation
    0.2007.
    """
    reward = np.zeros((1000, 1))
    reward[0] = 1.0
    assert 1 / reward.std() == pytest.approx(31.6, abs=0.05)
    nowhere, everywhere = np.zeros((1000, 1), np.bool_), np.ones((1000, 1), np.bool_)
    scale = ReturnScale(num_envs=1, discount=0.99)
    scale.update(reward, done=nowhere, valid=everywhere)
    assert float(scale.factor) == pytest.approx(1 / 0.2007, rel=1e-3)
    assert float(scale.factor) < CONFIG.reward_clip


def test_11_mean_of_a_gaussian_action_is_not_bounded() -> None:
    agent = Agent(BOX, ACTIONS, CONFIG)
    bias = next(v for v in agent.trainable_variables if v.shape == (1,))
    bias.assign([5.0])
    action, _ = agent.mode(tf.zeros([1, 2], tf.float64), tf.constant([0, 0]))
    assert float(action[0, 0]) == pytest.approx(5.0, abs=0.2)


@pytest.mark.parametrize("count", [2**24, 2**31, 2**40])
def test_12_statistics_are_exact_beyond_16_million_and_2_billion_rows(
    count: int,
) -> None:
    moments = RunningMoments(())
    moments.trackables["count"].assign(float(count))
    moments.trackables["squares"].assign(float(count))
    for _ in range(3):
        moments.update(tf.constant([1000.0]), tf.constant([True]))
    assert int(moments.trackables["count"]) == count + 3
    # Sums in float32 would change by 0, or by twice as much.
    assert float(moments.mean) == pytest.approx(3000.0 / (count + 3), rel=1e-9)
    assert float(moments.variance) == pytest.approx(1 + 3e6 / count, rel=1e-6)
