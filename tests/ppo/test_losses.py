"""The losses and diagnostics equal numbers computed by hand."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from ppo.learning import losses

ALL = tf.ones([2])


def test_clipping_applies_only_where_the_objective_would_improve() -> None:
    log_ratio = tf.math.log([1.5, 1.5, 0.5, 0.5])
    advantage = tf.constant([1.0, -1.0, 1.0, -1.0])
    # min(r A, clip(r) A): 1.2, -1.5, 0.5, -0.8.
    loss = losses.policy_loss(log_ratio, advantage, tf.ones([4]), 0.2)
    assert float(loss) == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8) / 4)


def test_dual_clip_bounds_the_loss_of_a_bad_action_that_became_likely() -> None:
    log_ratio = tf.Variable([math.log(2.9), math.log(5.0)])
    with tf.GradientTape() as tape:
        loss = losses.policy_loss(log_ratio, tf.constant([-1.0, -2.0]), ALL, 0.2)
    assert float(loss) == pytest.approx((2.9 + 6.0) / 2)
    assert tape.gradient(loss, log_ratio).numpy() == pytest.approx([1.45, 0.0])


def test_without_clip_range_the_objective_is_ratio_times_advantage() -> None:
    log_ratio = tf.math.log([1.5, 0.5])
    advantage = tf.constant([1.0, -2.0])
    loss = losses.policy_loss(log_ratio, advantage, ALL, None)
    assert float(loss) == pytest.approx(-(1.5 - 1.0) / 2)


@pytest.mark.parametrize(("kl", "loss"), [(0.01, 0.03), (0.05, 0.15 + 1000 * 0.0009)])
def test_kl_penalty_is_linear_with_a_quadratic_term_above_the_cutoff(
    kl: float, loss: float
) -> None:
    result = losses.kl_penalty_loss(
        tf.constant(kl), 3.0, cutoff=0.02, cutoff_coefficient=1000.0
    )
    assert float(result) == pytest.approx(loss, rel=1e-5)


def test_a_row_outside_the_clip_range_has_no_gradient() -> None:
    log_ratio = tf.Variable([math.log(1.5), 0.0])
    with tf.GradientTape() as tape:
        loss = losses.policy_loss(log_ratio, tf.ones([2]), ALL, 0.2)
    assert tape.gradient(loss, log_ratio).numpy().tolist() == [0.0, -0.5]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gradients_stay_finite_when_a_ratio_overflows(advantage: float) -> None:
    log_ratio = tf.Variable([1000.0, -1000.0])
    with tf.GradientTape() as tape:
        loss = losses.policy_loss(log_ratio, tf.fill([2], advantage), ALL, 0.2)
    assert np.isfinite(tape.gradient(loss, log_ratio).numpy()).all()
    assert np.isfinite(float(loss))


def test_value_loss_is_half_the_mean_squared_error() -> None:
    loss = losses.value_loss(tf.constant([1.0, 5.0]), tf.constant([3.0, 4.0]), ALL)
    assert float(loss) == pytest.approx(0.5 * (4 + 1) / 2)


def test_a_value_outside_its_clip_range_has_no_gradient() -> None:
    value = tf.Variable([1.5, 1.5, 0.5, 1.1])
    old_value = tf.ones([4])
    target = tf.constant([3.0, 0.0, 3.0, 3.0])
    with tf.GradientTape() as tape:
        loss = losses.value_loss(
            value, target, tf.ones([4]), old_value=old_value, clip_range=0.2
        )
    # Clipped values: 1.2, 1.2, 0.8, 1.1. The larger errors: 1.8, 1.5, 2.5, 1.9.
    squares = 1.8**2 + 1.5**2 + 2.5**2 + 1.9**2
    assert float(loss) == pytest.approx(0.5 * squares / 4)
    # Only the first row has moved beyond its clip range towards its target.
    expected = [0.0, 1.5 / 4, -2.5 / 4, -1.9 / 4]
    assert tape.gradient(loss, value).numpy().tolist() == pytest.approx(expected)


def test_approximate_kl_and_clip_fraction_equal_numbers_by_hand() -> None:
    log_ratio = tf.math.log([1.5, 1.1])
    kl = ((0.5 - math.log(1.5)) + (0.1 - math.log(1.1))) / 2
    assert float(losses.approximate_kl(log_ratio, ALL)) == pytest.approx(kl, abs=1e-6)
    assert float(losses.clip_fraction(log_ratio, ALL, 0.2)) == 0.5


def test_explained_variance_is_1_for_perfect_and_0_for_constant_predictions() -> None:
    target = tf.constant([1.0, 3.0])
    assert float(losses.explained_variance(target, target, ALL)) == 1.0
    guess = tf.constant([7.0, 7.0])
    explained = float(losses.explained_variance(guess, target, ALL))
    assert explained == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda rows, weight: losses.masked_mean(rows, weight),
        lambda rows, weight: losses.policy_loss(rows, rows, weight, 0.2),
        lambda rows, weight: losses.policy_loss(rows, rows, weight, None),
        lambda rows, weight: losses.value_loss(rows, rows + 1.0, weight),
        lambda rows, weight: losses.value_loss(
            rows, rows + 1.0, weight, old_value=2.0 * rows, clip_range=0.1
        ),
        lambda rows, weight: losses.approximate_kl(rows, weight),
        lambda rows, weight: losses.clip_fraction(rows, weight, 0.2),
        lambda rows, weight: losses.explained_variance(rows, rows**2, weight),
    ],
)
def test_rows_of_weight_0_do_not_affect_any_loss(
    function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
) -> None:
    rows = tf.constant([0.1, -0.3, 0.5, 0.7])
    weight = tf.constant([1.0, 0.0, 1.0, 1.0])
    kept = tf.gather(rows, [0, 2, 3])
    np.testing.assert_allclose(
        function(rows, weight).numpy(), function(kept, tf.ones([3])).numpy(), rtol=1e-5
    )


def test_masked_mean_of_no_rows_is_zero() -> None:
    assert float(losses.masked_mean(ALL, tf.zeros([2]))) == 0.0
