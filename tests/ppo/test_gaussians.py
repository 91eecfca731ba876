"""Squashed Gaussians, and state-dependent standard deviations."""

import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from ppo.agent.actions.distributions import DiagonalGaussian, SquashedGaussian
from ppo.agent.agent import Agent
from ppo.errors import UnsupportedSpaceError
from ppo.evaluation.evaluate import evaluate_run
from ppo.evaluation.export import export_run
from ppo.run_folder.folder import RunFolder
from tests.ppo import custom_networks
from tests.ppo.fakes import ACTIONS, BOX, CountingBatchEnv
from tests.ppo.runs import SMALL, Maker, rows_of, run

CUSTOM = f"{custom_networks.__name__}:subclass"
SPACE = gymnasium.spaces.Box(2.0, 5.0, (2,), np.float32)
SQUASHED = {"action_distribution": "squashed_gaussian"}
STATE_DEPENDENT = {"state_dependent_std": True}
WIDTH = 1e-4
#: Actions after tanh: the centres of cells of this width.
CELLS = np.arange(-1 + WIDTH / 2, 1, WIDTH)


def log_density(mean: float, log_std: float) -> np.ndarray:
    """Return the log-density in each cell."""
    before = tf.constant(np.arctanh(CELLS)[:, None], tf.float32)
    distribution = SquashedGaussian(
        tf.fill([len(CELLS), 1], mean), tf.fill([1], log_std)
    )
    return distribution.log_prob(before).numpy().astype(np.float64)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, -1.0), (0.4, -0.3), (-0.8, -0.7)])
def test_squashed_density_integrates_to_one_and_matches_entropy_and_kl(
    mean: float, log_std: float
) -> None:
    logs = log_density(mean, log_std)
    density = np.exp(logs)
    assert density.sum() * WIDTH == pytest.approx(1.0, abs=1e-3)
    entropy = -(density * logs).sum() * WIDTH
    one = SquashedGaussian(tf.constant([[mean]]), tf.constant([log_std]))
    assert float(one.entropy()[0]) == pytest.approx(entropy, abs=2e-3)
    other = SquashedGaussian(tf.constant([[0.2]]), tf.constant([-0.5]))
    kl = (density * (logs - log_density(0.2, -0.5))).sum() * WIDTH
    assert float(one.kl(other)[0]) == pytest.approx(kl, abs=2e-3)


@pytest.mark.parametrize("log_std", [-3.0, 0.0, math.log(2.0)])
def test_entropies_before_and_after_tanh_differ_by_the_mean_log_slope(
    log_std: float,
) -> None:
    deviations = np.linspace(-9.0, 9.0, 200_001)
    density = np.exp(-0.5 * deviations**2) / math.sqrt(2 * math.pi) * 18 / 200_000
    mean = np.array([0.3, -2.0])
    numbers = mean[:, None] + math.exp(log_std) * deviations
    slope = (density * -2.0 * np.log(np.cosh(numbers))).sum()
    parts = tf.constant(mean[None], tf.float32), tf.fill([2], log_std)
    difference = SquashedGaussian(*parts).entropy() - DiagonalGaussian(*parts).entropy()
    assert float(difference[0]) == pytest.approx(slope, abs=0.01)


def test_extreme_actions_have_finite_densities_and_gradients() -> None:
    mean, log_std = tf.constant([[60.0, -60.0]]), tf.constant([[-3.0, 1.0]])
    with tf.GradientTape() as tape:
        tape.watch([mean, log_std])
        far = SquashedGaussian(mean, log_std)
        numbers = [far.log_prob(tf.constant([[60.0, -60.0]])), far.entropy()]
    slopes = 2 * (math.log(4.0) - 120.0)  # log(1 - tanh(60)^2), twice
    plain = DiagonalGaussian(mean, log_std)
    wanted = float(plain.log_prob(tf.constant([[60.0, -60.0]]))[0]) - slopes
    assert float(numbers[0][0]) == pytest.approx(wanted)
    assert np.isfinite(tf.concat(tape.gradient(numbers, [mean, log_std]), 0)).all()


def test_space_without_finite_bounds_cannot_be_squashed() -> None:
    for space in (BOX, gymnasium.spaces.Box(0.0, np.inf, (1,))):
        with pytest.raises(
            UnsupportedSpaceError, match=r"finite bounds, got Box.*gauss"
        ):
            Agent(BOX, space, SMALL.replace(**SQUASHED))
    Agent(
        BOX, gymnasium.spaces.Discrete(3), SMALL.replace(**SQUASHED, **STATE_DEPENDENT)
    )


def test_state_dependent_deviations_start_at_initial_log_std() -> None:
    config = SMALL.replace(initial_log_std=-1.0, **STATE_DEPENDENT)
    agent = Agent(BOX, ACTIONS, config)
    rows = agent.preprocess(tf.constant([[0.0, 3.0], [1.0, -2.0]], tf.float64))
    _, log_std = agent.distribution(rows).parameters
    np.testing.assert_allclose(log_std, -1.0, atol=0.1)
    for variable in agent.trainable_variables:
        variable.assign(variable + 0.3)
    _, log_std = agent.distribution(rows).parameters
    assert log_std[0, 0] != log_std[1, 0]
    for variable in agent.trainable_variables:
        variable.assign(100.0 * variable)
    _, log_std = agent.distribution(rows).parameters
    assert set(log_std.numpy().ravel()) <= {-20.0, 2.0}


@pytest.mark.parametrize("changes", [{"network": CUSTOM}, {"recurrent_size": 4}])
def test_custom_and_recurrent_networks_support_state_dependent_deviations(
    changes: dict[str, Any],
) -> None:
    agent = Agent(BOX, SPACE, SMALL.replace(**SQUASHED, **STATE_DEPENDENT, **changes))
    rows = tf.constant([[0.0, 3.0], [1.0, -2.0]], tf.float64)
    for variable in agent.trainable_variables:
        variable.assign(variable + 0.3)
    core_outputs = [tf.constant([[0.1] * 4, [0.7] * 4])] if agent.cores else []
    distribution = agent.distribution(agent.preprocess(rows), *core_outputs)
    assert isinstance(distribution, SquashedGaussian)
    mean, log_std = distribution.parameters
    assert mean.shape == log_std.shape == (2, 2)
    assert (log_std[0] != log_std[1]).numpy().all()
    assert all("log_std" not in v.path for v in agent.trainable_variables)


def test_squashed_actions_are_trained_evaluated_and_exported(tmp_path: Path) -> None:
    config = SMALL.replace(
        **SQUASHED, **STATE_DEPENDENT, initial_log_std=1.0, total_steps=32
    )
    maker = Maker(lambda count: CountingBatchEnv([3] * count, action_space=SPACE))
    agent = run(tmp_path / "run", config, maker).agent
    assert max(row["ratio_deviation"] for row in rows_of(tmp_path / "run")) < 1e-5
    taken = np.concatenate(maker.made[0].actions)
    assert ((SPACE.low < taken) & (taken < SPACE.high)).all()
    assert (np.ptp(taken, axis=0) > 2.0).all()
    rows = tf.constant([[0.0, 1.0], [1.0, 2.0]], tf.float64)
    stored, _ = agent.mode(rows, tf.constant([0, 0]))
    wanted = 3.5 + 1.5 * np.tanh(stored)
    run_folder = RunFolder(tmp_path / "run")
    export_run(config, run_folder, maker, tmp_path / "policy")
    model = tf.saved_model.load(str(tmp_path / "policy"))
    np.testing.assert_allclose(model.mode(rows), wanted, rtol=1e-5)
    for variable in agent.trainable_variables:
        variable.assign(variable + 0.5)
    evaluate_run(config, run_folder, maker, agent)
    (first, *_) = maker.made[-1].actions
    stored, _ = agent.mode(tf.constant([[0.0, 0.0]], tf.float64), tf.constant([0, 0]))
    assert np.abs(stored).min() > 0.1  # tanh changes the actions noticeably
    np.testing.assert_allclose(first[0], 3.5 + 1.5 * np.tanh(stored[0]), rtol=1e-5)
