"""Evaluation: exact numbers of complete episodes, no favour to short ones."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from ppo.agent import Agent
from ppo.config import Config
from ppo.errors import EnvDataError, EnvsLostError
from ppo.evaluate import evaluate
from tests.ppo.fakes import ACTIONS, BOX, CountingBatchEnv, as_batch_env

CONFIG = Config(env_name="fake", policy_layers=(4,), value_layers=(4,))


def agent(action_space: gymnasium.Space[Any] = ACTIONS) -> Agent:
    return Agent(BOX, action_space, CONFIG)


def test_every_env_plays_its_quota_however_long_its_episodes() -> None:
    fake = CountingBatchEnv([2, 130, 7])
    evaluation = evaluate(agent(), as_batch_env(fake), episodes=7)
    # Whichever seven ended first would be of lengths 2 and 7 only.
    assert evaluation.lengths.tolist() == [2, 2, 2, 130, 130, 7, 7]
    assert evaluation.returns.tolist() == [2, 2, 2, 130, 130, 7, 7]
    assert evaluation.mean_return == pytest.approx(280 / 7)


def test_fewer_episodes_than_envs() -> None:
    fake = CountingBatchEnv([5, 4, 3])
    evaluation = evaluate(agent(), as_batch_env(fake), episodes=2)
    assert evaluation.lengths.tolist() == [5, 4]


def test_a_lost_episode_is_played_again() -> None:
    fake = CountingBatchEnv([4, 4], lost=frozenset({(1, 0)}))
    evaluation = evaluate(agent(), as_batch_env(fake), episodes=4)
    assert evaluation.lengths.tolist() == [4, 4, 4, 4]


def test_actions_are_modes_and_statistics_stay() -> None:
    subject = agent()
    subject.preprocess.update(np.arange(8.0).reshape(4, 2), tf.ones([4], tf.bool))
    before = subject.preprocess(tf.constant([[1.0, 2.0]], tf.float64)).numpy()
    fake = CountingBatchEnv([3])
    evaluate(subject, as_batch_env(fake), episodes=1)
    after = subject.preprocess(tf.constant([[1.0, 2.0]], tf.float64)).numpy()
    np.testing.assert_array_equal(before, after)
    mode, _ = subject.mode(tf.constant([[0.0, 0.0]], tf.float64), tf.constant([0, 0]))
    np.testing.assert_allclose(fake.actions[0], mode.numpy(), atol=1e-7)
    np.testing.assert_array_equal(fake.actions[0], fake.actions[3])


def test_a_recurrent_policy_remembers_until_its_episode_ends() -> None:
    subject = Agent(BOX, ACTIONS, CONFIG.replace(recurrent_size=3, minibatch_size=128))
    for variable in subject.trainable_variables:
        variable.assign(variable + 0.3)
    fake = CountingBatchEnv([3])
    evaluate(subject, as_batch_env(fake), episodes=2)
    state = tf.zeros([1, 3])
    for step in range(6):
        if step % 3 == 0:
            state = tf.zeros([1, 3])
        observation = tf.constant([[0.0, step % 3]], tf.float64)
        action, _, state = subject.mode(observation, tf.constant([0, 0]), state)
        wanted = np.clip(action.numpy(), -1.0, 1.0)
        np.testing.assert_allclose(fake.actions[step], wanted, atol=1e-6)


def test_episodes_without_end_are_an_error() -> None:
    fake = CountingBatchEnv([3, 10**9])
    with pytest.raises(EnvDataError, match="1 have not ended; give the env a time lim"):
        evaluate(agent(), as_batch_env(fake), episodes=2, max_batch_steps=300)


def test_an_env_that_always_fails_is_an_error() -> None:
    lost = frozenset((step, 1) for step in range(1000) if step % 3 == 2)
    fake = CountingBatchEnv([4, 4], lost=lost)
    with pytest.raises(EnvsLostError, match=r"Env 1 .* the last 33 were lost in a row"):
        evaluate(agent(), as_batch_env(fake), episodes=2)


def test_failures_of_an_env_that_has_played_its_quota_do_not_matter() -> None:
    lost = frozenset((step, 1) for step in range(4, 1000))
    fake = CountingBatchEnv([130, 4], lost=lost)
    assert evaluate(agent(), as_batch_env(fake), 2).lengths.tolist() == [130, 4]
