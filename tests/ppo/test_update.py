"""The PPO update: ratios, masks, compilation, static shapes, and metrics."""

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from ppo.agent.agent import Agent
from ppo.agent.normalize import ReturnScale
from ppo.agent.observations import ObservationPreprocessor
from ppo.algorithms.ppo.schedules import Coefficients
from ppo.algorithms.ppo.update import Updater
from ppo.config import Config
from ppo.rollout import Rollout
from ppo.simulate import simulate
from tests.ppo.fakes import ACTIONS, BOX, CountingBatchEnv, in_graph
from tests.ppo.runs import (
    SMALL,
    Learner,
    eagerly,
    fill_masked,
    no_retracing,
    parameters,
)

LOST = frozenset({(2, 0), (5, 1), (6, 1)})
CONFIG = SMALL.replace(
    total_steps=160,
    epochs=3,
    minibatch_size=4,
    normalize_advantages=True,
    policy_layers=(8,),
    value_layers=(8,),
)
#: Compiled with XLA, which takes longer than tracing, so the other configs are not.
EVERYTHING = CONFIG.replace(
    jit_compile=True,
    objective="clip_and_penalty",
    learning_rate_schedule="kl_adaptive",
    max_kl=100.0,
    value_clip_range=0.1,
    entropy_coefficient=0.01,
    decay_entropy_coefficient=True,
)


def make(config: Config, action_space: gymnasium.Space[Any] = ACTIONS) -> Agent:
    return Agent(BOX, action_space, config)


def collect(
    agent: Agent,
    action_space: gymnasium.Space[Any] = ACTIONS,
    lost: frozenset[tuple[int, int]] = LOST,
) -> Rollout:
    fake = CountingBatchEnv(
        [3, 4], terminates=[True, False], lost=lost, action_space=action_space
    )
    env = in_graph(fake)
    return simulate(env, agent.act, CONFIG.horizon, (1, 2))


def learn(
    config: Config, action_space: gymnasium.Space[Any] = ACTIONS, **named: Any
) -> Learner:
    agent = make(config, action_space)
    return Learner(agent, config, collect(agent, action_space), **named)


@functools.cache
def learner(kind: str) -> Learner:
    return {
        "gaussian": lambda: learn(CONFIG),
        "categorical": lambda: learn(CONFIG, gymnasium.spaces.Discrete(3)),
        "once": lambda: learn(
            CONFIG.replace(recompute_advantages=False, normalize_advantages=False)
        ),
        "everything": lambda: learn(EVERYTHING),
    }[kind]()


@pytest.mark.parametrize("kind", ["gaussian", "categorical", "once", "everything"])
def test_the_ratio_is_one_before_the_first_gradient_step(kind: str) -> None:
    first = learner(kind).update()
    assert first["ratio_deviation"] < 1e-5
    assert first["approximate_kl"] > 0
    # The policy has changed, so the same rollout now has different ratios.
    again = learner(kind).update_again(seed=(3, 5))
    assert again["ratio_deviation"] > 1e-3


def test_the_ratio_is_one_unless_statistics_change_before_the_update() -> None:
    agent = make(CONFIG.replace(policy_layers=(64,)))
    config = CONFIG.replace(learning_rate=0.0, minibatch_size=16)
    updater = Updater(agent, config)
    agent.preprocess.update(5.0 + np.arange(8.0).reshape(4, 2), tf.ones([4], tf.bool))
    rollout = collect(agent)
    with eagerly():
        assert updater.update(rollout, seed=(3, 4))["ratio_deviation"] < 1e-5
    agent.preprocess.update(50.0 + np.arange(8.0).reshape(4, 2), tf.ones([4], tf.bool))
    with eagerly():
        assert updater.update(rollout, seed=(3, 4))["ratio_deviation"] > 1e-3


GARBAGE = pytest.mark.parametrize("garbage", [1e9, -1e9, np.nan, np.inf])


def filled(rollout: Rollout, garbage: float) -> Rollout:
    """Return a copy with other contents in the invalid rows."""
    assert (~rollout.valid).sum() == len(LOST)
    rollout = fill_masked(rollout, garbage)
    rollout.terminated[~rollout.valid] = True
    return rollout


@GARBAGE
@pytest.mark.parametrize("kind", ["gaussian", "once", "everything"])
def test_the_contents_of_invalid_rows_do_not_matter(garbage: float, kind: str) -> None:
    subject = learner(kind)
    metrics, clean = subject.outcome()
    dirty_metrics, dirty = subject.outcome(filled(subject.rollout, garbage))
    assert np.isfinite([*metrics.values()]).all()
    assert metrics == dirty_metrics
    np.testing.assert_array_equal(clean, dirty)


@GARBAGE
def test_the_contents_of_invalid_rows_do_not_change_statistics(garbage: float) -> None:
    clean = learner("gaussian").rollout
    outcomes = []
    for rollout in (clean, filled(clean, garbage)):
        scale = ReturnScale(CONFIG.num_envs, CONFIG.discount)
        scale.update(rollout.reward, rollout.done, rollout.valid)
        preprocess = ObservationPreprocessor(BOX, normalize=True, clip=10.0)
        preprocess.update(
            rollout.observation[:-1].reshape(-1, 2), tf.reshape(rollout.valid, [-1])
        )
        probe = preprocess(tf.constant([[1.0, 2.0]], tf.float64))
        outcomes.append([float(scale.factor), *probe.numpy().ravel()])
    assert np.isfinite(outcomes[0]).all()
    assert outcomes[0] == outcomes[1]


def test_discrete_actions_of_invalid_rows_do_not_matter() -> None:
    subject = learner("categorical")
    _, clean = subject.outcome()
    _, dirty = subject.outcome(fill_masked(subject.rollout, 10**9))
    np.testing.assert_array_equal(clean, dirty)


def test_the_update_is_deterministic_given_its_seed() -> None:
    outcomes = [
        learner("gaussian").outcome(seed=seed)[1] for seed in ((3, 4), (3, 4), (3, 5))
    ]
    np.testing.assert_array_equal(outcomes[0], outcomes[1])
    assert (outcomes[0] != outcomes[2]).any()


def test_every_row_counts_once_per_epoch() -> None:
    # With learning rate 0, the mean over minibatches is the overall mean.
    losses = []
    for minibatch_size in (4, 16):
        config = CONFIG.replace(
            epochs=1,
            minibatch_size=minibatch_size,
            normalize_advantages=False,
            learning_rate=0.0,
        )
        agent = make(config)
        rollout = collect(agent, lost=frozenset())
        with eagerly():
            metrics = Updater(agent, config).update(rollout, seed=(3, 4))
        losses.append((metrics["policy_loss"], metrics["value_loss"]))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_the_learning_rate_decays_to_zero() -> None:
    subject = learner("gaussian")
    subject.rewind()
    before = parameters(subject.agent)
    _, after = subject.outcome(progress=0.0)
    assert (before != after).any()
    subject.update_again(progress=1.0)
    np.testing.assert_array_equal(parameters(subject.agent), after)


def test_scaled_rewards_are_clipped() -> None:
    outcomes = [
        learner("gaussian").outcome(reward_scale=scale)[1] for scale in (1.0, 1e6, 1e7)
    ]
    assert (outcomes[0] != outcomes[1]).any()
    np.testing.assert_array_equal(outcomes[1], outcomes[2])


@pytest.mark.parametrize("kind", ["gaussian", "everything"])
def test_the_compiled_update_is_traced_once_and_has_static_shapes(kind: str) -> None:
    updater = learner(kind).updater
    learner(kind).update()
    with no_retracing("distribution"):
        learner(kind).update(progress=0.5, seed=(3, 6))
    graph = updater._compiled.get_concrete_function(
        tf.nest.map_structure(tf.convert_to_tensor, learner(kind).rollout),
        tf.constant(1.0),
        Coefficients(*[tf.constant(1.0)] * 4),
        tf.constant([3, 4]),
    ).graph
    unknown = [
        tensor.name
        for operation in graph.get_operations()
        for tensor in operation.outputs
        if tensor.dtype != tf.resource and not tensor.shape.is_fully_defined()
    ]
    assert unknown == []


def test_actions_with_rewards_become_more_likely() -> None:
    """If larger actions earn higher rewards, the most likely action becomes larger."""
    config = CONFIG.replace(epochs=5, learning_rate=1e-2)
    agent = make(config)
    updater = Updater(agent, config)
    probe = tf.constant([[0.0, 1.0]], tf.float64)

    def mode() -> float:
        action, _ = agent.mode(probe, tf.constant([0, 0]))
        return float(action[0, 0])

    before = mode()
    rollout = collect(agent, lost=frozenset())
    rollout.reward[:] = rollout.action[..., 0]
    with eagerly():
        updater.update(rollout, seed=(0, 0))
    assert mode() > before + 0.01


def plain(**changes: Any) -> Learner:
    """Return a learner that is run eagerly, with few gradient steps.

    That takes less time than tracing and compiling.
    """
    few = {"minibatch_size": 16, **changes}
    return learn(CONFIG.replace(**few), is_eager=True)


def test_the_reported_kl_is_between_the_policies_before_and_after() -> None:
    subject = plain(learning_rate=1e-2, max_kl=0.0)
    rollout = subject.rollout
    rows = rollout.observation[:-1].reshape(-1, 2)[rollout.valid.ravel()]
    features = subject.agent.preprocess(tf.constant(rows))
    before = subject.agent.distribution(features).parameters
    metrics = subject.update()
    after = subject.agent.distribution(features)
    by_hand = tf.reduce_mean(subject.agent.distribution_from(before).kl(after))
    assert metrics["kl"] == pytest.approx(float(by_hand), rel=1e-4)
    assert metrics["kl"] > 1e-4
    assert metrics["epochs_run"] == 3


def test_the_adaptive_learning_rate_is_used_and_reported() -> None:
    subject = plain(learning_rate_schedule="kl_adaptive", kl_target=1e-9)
    assert subject.update()["learning_rate"] == pytest.approx(3e-4)
    again = subject.update_again(seed=(3, 5))
    assert again["learning_rate"] == pytest.approx(3e-4 / 1.5)
    used = float(subject.updater.optimizer.learning_rate)
    assert used == pytest.approx(3e-4 / 1.5)


def test_a_decayed_entropy_bonus_has_no_effect() -> None:
    outcomes = []
    for coefficient in (0.0, 1.0):
        subject = plain(
            entropy_coefficient=coefficient,
            decay_entropy_coefficient=True,
            learning_rate_schedule="constant",
            epochs=1,
        )
        outcomes += [subject.outcome(progress=progress)[1] for progress in (0.0, 1.0)]
    without, also_without, with_bonus, decayed = outcomes
    np.testing.assert_array_equal(without, also_without)
    np.testing.assert_array_equal(without, decayed)
    assert (without != with_bonus).any()
