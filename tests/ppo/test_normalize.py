"""Running statistics are compared with NumPy on all valid rows."""

import numpy as np
import pytest
import tensorflow as tf

from ppo.agent.normalize import ReturnScale, RunningMoments
from ppo.algorithms.sac.replay_buffer import ReplayBuffer
from ppo.evaluation.evaluate import Evaluation
from ppo.rollout import EpisodeTracker
from tests.ppo.runs import rollout_of


def test_statistics_of_batches_are_those_of_their_concatenation(
    random_generator: np.random.Generator,
) -> None:
    moments = RunningMoments((3,))
    seen = []
    for size in (1, 50, 7, 0, 300):
        # With this offset, sums in float32 would have no correct digits.
        values = 1e6 + random_generator.normal(size=(size, 3))
        mask = random_generator.random(size) < 0.7
        moments.update(tf.constant(values), tf.constant(mask))
        seen.append(values[mask])
    everything = np.concatenate(seen)
    assert moments.trackables["count"].numpy() == len(everything)
    np.testing.assert_allclose(moments.mean.numpy(), everything.mean(axis=0))
    np.testing.assert_allclose(
        moments.variance.numpy(), everything.var(axis=0), rtol=1e-7
    )


def test_batch_without_valid_rows_changes_nothing() -> None:
    moments = RunningMoments((2,))
    moments.update(tf.ones([4, 2]), tf.zeros([4], tf.bool))
    assert moments.trackables["count"].numpy() == 0
    assert moments.mean.numpy().tolist() == [0.0, 0.0]
    assert moments.variance.numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("garbage", [1e9, np.nan, np.inf])
def test_masked_rows_change_nothing(garbage: float) -> None:
    values = np.arange(8.0).reshape(4, 2)
    mask = tf.constant([True, False, True, True])
    clean, dirty = RunningMoments((2,)), RunningMoments((2,))
    clean.update(tf.constant(values), mask)
    values[1] = garbage
    dirty.update(tf.constant(values), mask)
    assert clean.mean.numpy().tolist() == dirty.mean.numpy().tolist()
    assert clean.variance.numpy().tolist() == dirty.variance.numpy().tolist()


def test_normalize_shifts_scales_and_clips() -> None:
    moments = RunningMoments((1,))
    moments.update(tf.constant([[1.0], [3.0]]), tf.constant([True, True]))
    normalized = moments.normalize(tf.constant([[2.0], [4.0], [100.0]]), clip=10.0)
    assert normalized.dtype == tf.float32
    np.testing.assert_allclose(normalized.numpy(), [[0.0], [2.0], [10.0]], atol=1e-6)


def test_return_scale_is_the_inverse_deviation_of_discounted_returns() -> None:
    scale = ReturnScale(num_envs=1, discount=0.5)
    assert scale.factor.numpy() == 1.0
    reward = np.array([[1.0], [2.0], [4.0], [8.0]])
    done = np.array([[False], [True], [False], [False]])
    valid = np.ones((4, 1), np.bool_)
    scale.update(reward, done, valid)
    # The return restarts after the second step, and continues across rollouts.
    scale.update(reward[:1], done[:1], valid[:1])
    returns = [1.0, 2.5, 4.0, 10.0, 6.0]
    assert scale.factor.numpy() == pytest.approx(1 / np.std(returns))


def test_very_large_rewards_cause_no_numpy_warnings() -> None:
    reward, done = np.full((4, 1), 1e308), np.array([[False], [False], [True], [False]])
    rollout = rollout_of(4, reward=reward, terminated=done)
    ReturnScale(num_envs=1, discount=1.0).update(reward, done, rollout.valid)
    (episode,) = EpisodeTracker(1).add(rollout)
    assert episode.total_reward == np.inf
    replay = ReplayBuffer(4)
    replay.add(rollout)  # float32
    assert replay.sample((1, 1), (1, 2))["reward"] == np.inf
    assert Evaluation(np.array([1e200, -1e200]), np.ones(2)).std_return == np.inf
    assert Evaluation(np.array([1e308, 1e308]), np.ones(2)).mean_return == np.inf


@pytest.mark.parametrize("ends_the_episode", [True, False])  # padding does not
def test_invalid_step_resets_the_return_and_is_not_counted(
    ends_the_episode: bool,
) -> None:
    scale = ReturnScale(num_envs=1, discount=0.5)
    reward = np.array([[1.0], [1e9], [4.0]])
    lost = np.array([[False], [True], [False]])
    scale.update(reward, lost & ends_the_episode, ~lost)
    assert scale.factor.numpy() == pytest.approx(1 / np.std([1.0, 4.0]))
