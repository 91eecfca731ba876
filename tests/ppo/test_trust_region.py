"""The trust region: a bad batch, rollback of epochs, and gradient clipping."""

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ppo.algorithms.ppo.trust_region import (
    EpochRollback,
    clip_by_network,
    make_optimizer,
)
from ppo.algorithms.ppo.update import Updater
from ppo.config import Config
from ppo.errors import ConfigError, DivergedError
from ppo.learning import losses
from tests.ppo.runs import Learner, eagerly, parameters
from tests.ppo.test_update import CONFIG, collect, make

#: A policy with a small standard deviation: small changes of its mean cause a large KL.
NARROW = CONFIG.replace(
    initial_log_std=-5.0,
    learning_rate=3e-3,
    learning_rate_schedule="constant",
    normalize_advantages=False,
    scale_rewards=False,
    minibatch_size=1,
    jit_compile=False,
)


def kl_of_bad_batch(config: Config) -> float:
    """Return the KL, in nats, of a bad batch after 250 steps with small gradients."""
    agent = make(config)
    updater = Updater(agent, config)
    rollout = collect(agent, lost=frozenset())
    noise = np.random.default_rng(0)
    for number in range(250 // (config.epochs * rollout.reward.size) + 1):
        rollout.reward[:] = 1e-3 * noise.standard_normal(rollout.reward.shape)
        updater.update(rollout, seed=(number, 1))
    rollout = collect(agent, lost=frozenset())
    rollout.reward[:] = -10.0
    return updater.update(rollout, seed=(5, 5))["kl"]


def test_max_kl_limits_the_policy_change_of_a_bad_batch() -> None:
    assert kl_of_bad_batch(NARROW.replace(max_kl=0.0)) > 1.0
    assert kl_of_bad_batch(NARROW.replace(max_kl=0.05)) < 0.1


def learner_with_rollback(**changes: Any) -> Learner:
    """Return a learner whose first epoch exceeds `max_kl`."""
    named = {"learning_rate": 1e-2, "max_kl": 1e-7, "minibatch_size": 8}
    config = CONFIG.replace(jit_compile=False, **{**named, **changes})
    agent = make(config)
    return Learner(agent, config, collect(agent), is_eager=True)


def values_of(variables: list[Any]) -> list[np.ndarray]:
    return [variable.numpy().copy() for variable in variables]


def test_an_epoch_beyond_max_kl_is_rolled_back_while_the_value_keeps_learning() -> None:
    subject = learner_with_rollback()
    agent = subject.agent
    policy = agent.policy_variables
    value = [
        each
        for each in agent.trainable_variables
        if not any(each is other for other in policy)
    ]
    adam = subject.updater.optimizer.variables
    first, second = (
        [each for each in adam if kind in each.path] for kind in ("momentum", "veloc")
    )
    before = values_of(policy), values_of(value)
    metrics = subject.update()
    assert metrics["kl"] == metrics["epochs_run"] == 0.0
    assert metrics["undone_epochs"] == 1.0
    assert metrics["approximate_kl"] > 0.0  # of the epoch that was rolled back
    for old, new in zip(before[0], policy, strict=True):
        np.testing.assert_array_equal(old, new)
    assert all(
        (old != new.numpy()).any() for old, new in zip(before[1], value, strict=True)
    )
    indices = [subject.updater.optimizer._get_variable_index(each) for each in policy]
    assert len(first) == len(second) == len(agent.trainable_variables)
    assert all((first[index].numpy() == 0.0).all() for index in indices)
    assert all((second[index].numpy() > 0.0).any() for index in indices)
    assert subject.updater.optimizer.iterations == 3 * 2


@pytest.mark.parametrize(
    ("changes", "name", "factor"),
    [
        ({"objective": "penalty"}, "kl_penalty", 1.5),
        ({"learning_rate_schedule": "kl_adaptive"}, "learning_rate", 1 / 1.5),
    ],
)
def test_coefficients_adapt_when_the_first_epoch_is_rolled_back(
    changes: dict[str, Any], name: str, factor: float
) -> None:
    subject = learner_with_rollback(**changes)
    first, second = (subject.update_again() for _ in range(2))
    assert first["undone_epochs"] == 1.0
    assert second[name] == pytest.approx(factor * first[name])


def test_only_the_epoch_that_exceeds_max_kl_is_rolled_back() -> None:
    single = learner_with_rollback(max_kl=0.0, epochs=1)
    limit = 1.001 * single.update()["kl"]
    subject = learner_with_rollback(max_kl=limit)
    metrics = subject.update()
    assert (metrics["epochs_run"], metrics["undone_epochs"]) == (1.0, 1.0)
    assert 0.0 < metrics["kl"] <= limit
    for one, other in zip(
        single.agent.policy_variables, subject.agent.policy_variables, strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_a_shared_torso_ends_the_update_at_the_first_rollback() -> None:
    subject = learner_with_rollback(network="tests/ppo/custom_networks.py:plain_object")
    before = parameters(subject.agent)
    assert subject.update()["epochs_run"] == 0.0
    np.testing.assert_array_equal(before, parameters(subject.agent))
    assert subject.updater.optimizer.iterations == 2


@eagerly()
def test_gradients_that_are_not_finite_in_an_undone_epoch_are_an_error() -> None:
    """With one minibatch per epoch, the gradients of the next epoch are finite."""
    epochs = itertools.count()

    def policy_loss(**terms: Any) -> tf.Tensor:
        return losses.policy_loss(**terms) * (np.nan if next(epochs) == 1 else 1.0)

    config = CONFIG.replace(minibatch_size=16)
    agent = make(config)
    with pytest.raises(DivergedError, match="finite gradient norm, got nan"):
        Updater(agent, config, policy_loss).update(collect(agent), seed=(3, 4))


def test_gradients_are_clipped_per_network() -> None:
    gradients = [tf.constant([each]) for each in (6.0, 0.1, 8.0)]
    clipped, norm = clip_by_network(gradients, [[0, 2], [1]], 5.0)
    assert [float(each[0]) for each in clipped] == pytest.approx([3.0, 0.1, 4.0])
    assert float(norm) == pytest.approx(np.sqrt(100.01))


def heavy_ball(config: Config) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(9.0, momentum=0.9)


def scaled_adamax(config: Config) -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adamax())


def plain_sgd(config: Config) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD()


def scaled_sgd(config: Config) -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())


def ftrl(config: Config) -> keras.optimizers.Optimizer:
    return keras.optimizers.Ftrl()


def no_optimizer(config: Config) -> str:
    return "adam"


def with_schedule(config: Config) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(1, 2, 0.5))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adam", keras.optimizers.Adam),
        ("adamw", keras.optimizers.AdamW),
        ("rmsprop", keras.optimizers.RMSprop),
        ("sgd", keras.optimizers.SGD),
        (f"{__name__}:heavy_ball", keras.optimizers.SGD),
        (f"{__name__}:scaled_adamax", keras.optimizers.LossScaleOptimizer),
        (f"{__name__}:ftrl", keras.optimizers.Ftrl),
    ],
)
def test_any_optimizer_is_rolled_back(name: str, kind: type[Any]) -> None:
    config = CONFIG.replace(optimizer=name, learning_rate=0.25)
    optimizer = make_optimizer(config)
    assert type(optimizer) is kind
    assert float(optimizer.learning_rate) == 0.25
    variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
    optimizer.build(variables)
    rollback = EpochRollback(variables[:1], optimizer)
    gradients = [tf.ones([2]), tf.ones([1])]
    saved = rollback.save()
    for _ in range(2):  # each pass starts from the same values and the same momentum
        optimizer.apply(gradients, variables)
        assert (variables[0].numpy() < [1.0, 2.0]).all()
        rollback.restore(saved, tf.constant(True))
        np.testing.assert_array_equal(variables[0], [1.0, 2.0])
    assert float(variables[1][0]) < 3.0
    slots = [v for v in optimizer.variables if v.name.endswith(("momentum", "linear"))]
    of_policy = [v.numpy() for v in slots if v.shape == (2,)]
    assert all((value == 0).all() for value in of_policy)
    assert len(of_policy) == (name not in ("rmsprop", "sgd"))


def test_loss_scaling_does_not_change_the_update() -> None:
    def updated(optimizer: str) -> np.ndarray:
        named = {"optimizer": f"{__name__}:{optimizer}", "max_kl": 0.0}
        subject = learner_with_rollback(**named)
        return subject.outcome()[1]

    np.testing.assert_array_equal(updated("plain_sgd"), updated("scaled_sgd"))


@pytest.mark.parametrize(
    ("function", "text"),
    [("no_optimizer", "expected a keras Optimizer"), ("with_schedule", "TypeError")],
)
def test_an_unsuitable_optimizer_is_an_error(function: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_optimizer(CONFIG.replace(optimizer=f"{__name__}:{function}"))
