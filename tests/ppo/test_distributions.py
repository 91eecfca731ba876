"""Distributions are compared with formulas, sums and numerical integration."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ppo.agent.actions.distributions import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    masked_logits,
    padded_choices,
)

SEED = tf.constant([3, 4], tf.int32)


def gaussian(mean: list[list[float]], log_std: list[float]) -> DiagonalGaussian:
    return DiagonalGaussian(tf.constant(mean), tf.constant(log_std))


def test_gaussian_log_prob_is_the_log_of_the_density() -> None:
    log_prob = gaussian([[1.0, -1.0]], [0.0, math.log(2.0)]).log_prob(
        tf.constant([[2.0, 3.0]])
    )
    first = math.exp(-0.5) / math.sqrt(2 * math.pi)
    second = math.exp(-0.5 * 4) / (2 * math.sqrt(2 * math.pi))
    assert log_prob.numpy().tolist() == pytest.approx([math.log(first * second)])


def test_gaussian_density_integrates_to_one_and_matches_the_entropy() -> None:
    distribution = gaussian([[0.3]], [-0.7])
    grid = np.linspace(-6, 6, 20_001, dtype=np.float32)
    wide = DiagonalGaussian(
        tf.repeat(distribution.mean, len(grid), axis=0), distribution.log_std
    )
    log_density = wide.log_prob(tf.constant(grid[:, None])).numpy().astype(np.float64)
    density = np.exp(log_density)
    width = 12 / 20_000
    assert density.sum() * width == pytest.approx(1.0, abs=1e-5)
    entropy = -(density * log_density).sum() * width
    assert distribution.entropy().numpy()[0] == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize(
    "distribution",
    [
        gaussian([[0.3, 1.0], [2.0, -1.0]], [-0.7, 0.1]),
        Categorical(tf.constant([[0.1, 2.0, -1.0], [0.0, 0.0, 3.0]])),
    ],
)
def test_distribution_is_reconstructed_from_rows_of_its_parameters(
    distribution: DiagonalGaussian | Categorical,
) -> None:
    rows = [tf.gather(parameter, [1]) for parameter in distribution.parameters]
    again = type(distribution)(*rows)
    np.testing.assert_array_equal(again.mode(), distribution.mode()[1:])
    np.testing.assert_array_equal(again.entropy(), distribution.entropy()[1:])


def test_gaussian_kl_is_the_integral_of_the_log_ratio() -> None:
    first, second = gaussian([[0.3]], [-0.7]), gaussian([[-0.4]], [0.2])
    grid = tf.constant(np.linspace(-6, 6, 20_001, dtype=np.float32)[:, None])
    log_p = DiagonalGaussian(0 * grid + first.mean, first.log_std).log_prob(grid)
    log_q = DiagonalGaussian(0 * grid + second.mean, second.log_std).log_prob(grid)
    integral = float(tf.reduce_sum(tf.exp(log_p) * (log_p - log_q))) * 12 / 20_000
    assert float(first.kl(second)[0]) == pytest.approx(integral, abs=1e-4)
    assert float(first.kl(first)[0]) == 0.0


def test_gaussian_samples_have_the_mean_and_deviation() -> None:
    rows = 100_000
    distribution = DiagonalGaussian(
        tf.tile([[1.0, -2.0]], [rows, 1]), tf.constant([0.0, math.log(3.0)])
    )
    samples = distribution.sample(distribution.noise(rows, 2, SEED)).numpy()
    np.testing.assert_allclose(samples.mean(axis=0), [1.0, -2.0], atol=0.05)
    np.testing.assert_allclose(samples.std(axis=0), [1.0, 3.0], rtol=0.02)
    assert distribution.mode() is distribution.mean


def test_standard_deviations_may_differ_between_rows() -> None:
    distribution = DiagonalGaussian(tf.zeros([2, 1]), tf.constant([[0.0], [1.0]]))
    entropy = 0.5 * math.log(2 * math.pi * math.e)
    assert distribution.entropy().numpy() == pytest.approx([entropy, entropy + 1])


SIZES = (2, 3)
SINGLE = [0.2, 0.5, 0.3]
BITS = [0.2, 0.6, 0.9]
CHOICES = [[0.25, 0.75], [0.2, 0.5, 0.3]]
CHOICE_LOGITS = np.log(np.concatenate(CHOICES))[None].astype(np.float32)
# The first choice has no allowed option, so all are allowed; the second allows 0 and 2.
FLAGS = np.array([[False, False, True, False, True]])


def categorical(logits: tf.Tensor) -> Categorical:
    return Categorical(logits + 5.0)  # a constant offset has no effect


def joint(logits: tf.Tensor) -> MultiCategorical:
    return MultiCategorical.from_logits(logits, SIZES)


def masked(logits: tf.Tensor) -> MultiCategorical:
    flags = tf.repeat(tf.constant(FLAGS), len(logits), axis=0)
    return MultiCategorical.from_logits(logits, SIZES, flags)


#: For each distribution: its constructor, its logits, the probabilities per choice.
DISCRETE: dict[str, tuple[Callable[[tf.Tensor], Any], Any, list[list[float]]]] = {
    "categorical": (categorical, np.log([SINGLE]), [SINGLE]),
    "bits": (
        Bernoulli,
        np.log(BITS) - np.log1p(np.negative([BITS])),
        [[1 - bit, bit] for bit in BITS],
    ),
    "choices": (joint, CHOICE_LOGITS, CHOICES),
    "masked": (masked, CHOICE_LOGITS, [CHOICES[0], [0.4, 0.0, 0.6]]),
}


def of_all_actions(choices: list[list[float]]) -> np.ndarray:
    """Return the joint probabilities of all actions, with an axis per choice."""
    table = np.ones(())
    for probabilities in choices:
        table = np.multiply.outer(table, probabilities)
    return table


@pytest.mark.parametrize("name", DISCRETE)
def test_entropy_kl_and_log_prob_match_sums_over_all_actions(name: str) -> None:
    make, logits, choices = DISCRETE[name]
    table = of_all_actions(choices)
    probability = table.ravel()
    actions = np.indices(table.shape).reshape(table.ndim, -1)
    rows = actions[0] if name == "categorical" else actions.T
    logits = tf.constant(logits, tf.float32)
    log_prob = make(tf.repeat(logits, len(rows), axis=0)).log_prob(tf.constant(rows))
    np.testing.assert_allclose(np.exp(log_prob), probability, rtol=1e-5)
    one = make(logits)
    mode = one.mode().numpy()
    assert mode.dtype == np.int64
    assert mode[0].tolist() == rows[probability.argmax()].tolist()
    allowed = probability[probability > 0]
    entropy = -(allowed * np.log(allowed)).sum()
    assert one.entropy().numpy() == pytest.approx([entropy], abs=1e-6)
    kl = (allowed * np.log(len(allowed) * allowed)).sum()
    assert one.kl(make(tf.zeros_like(logits))).numpy() == pytest.approx([kl], abs=1e-6)
    assert one.kl(one).numpy() == pytest.approx([0.0], abs=1e-7)


@pytest.mark.parametrize("name", DISCRETE)
def test_samples_have_the_probabilities_of_all_actions(name: str) -> None:
    make, logits, choices = DISCRETE[name]
    num_rows, num_numbers = 100_000, 6 if len(choices) == 2 else 3
    many = make(tf.repeat(tf.constant(logits, tf.float32), num_rows, axis=0))
    samples = many.sample(many.noise(num_rows, num_numbers, SEED)).numpy()
    assert samples.dtype == np.int64
    # The joint frequencies also show that the choices are independent.
    expected = of_all_actions(choices)
    counts = np.zeros(expected.shape)
    np.add.at(counts, tuple(samples.reshape(num_rows, -1).T), 1)
    np.testing.assert_allclose(counts / num_rows, expected, atol=0.005)
    assert not counts[expected == 0].any()


def test_bernoulli_with_extreme_logits_has_finite_values_and_gradients() -> None:
    logits = tf.constant([[-200.0, 200.0]])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        certain = Bernoulli(logits)
        numbers = [
            certain.log_prob(tf.constant([[0, 1]], tf.int64)),
            certain.entropy(),
            certain.kl(Bernoulli(-0.5 * logits)),
        ]
    assert [float(number[0]) for number in numbers] == [0.0, 0.0, 200.0]
    assert np.isfinite(tape.gradient(numbers, logits).numpy()).all()


def test_gradients_are_finite_and_zero_for_masked_actions() -> None:
    logits = tf.constant(CHOICE_LOGITS)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(logits)
        masked = MultiCategorical.from_logits(logits, SIZES, tf.constant(FLAGS))
        other = MultiCategorical.from_logits(2.0 * logits, SIZES, tf.constant(FLAGS))
        numbers = {
            "log_prob": masked.log_prob(tf.constant([[0, 2]], tf.int64)),
            "entropy": masked.entropy(),
            "kl": masked.kl(other),
        }
    for name, number in numbers.items():
        gradient = tape.gradient(number, logits).numpy()[0]
        assert np.isfinite(gradient).all(), name
        assert gradient[3] == 0.0, name
        assert (gradient[[0, 1, 2, 4]] != 0.0).all(), name


def test_row_without_allowed_actions_allows_all() -> None:
    logits = tf.constant([[1.0, 2.0], [1.0, 2.0]])
    masked = masked_logits(logits, tf.constant([[False, False], [True, False]]))
    log_probs = Categorical(masked).log_probs.numpy()
    np.testing.assert_allclose(log_probs[0], Categorical(logits).log_probs[0])
    assert np.exp(log_probs[1]).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
def test_choices_are_padded_to_one_row_each(sizes: tuple[int, ...]) -> None:
    rows = padded_choices(tf.constant([[1.0, 2.0, 3.0, 4.0]]), sizes).numpy().tolist()
    assert rows == ([[[1, 2], [3, 4]]] if sizes == (2, 2) else [[[1, 0, 0], [2, 3, 4]]])


@pytest.mark.parametrize(
    ("distribution", "shape"),
    [
        (gaussian([[0.5, 1.0]], [0.1, 0.2]), (1, 2)),
        (Categorical(tf.math.log([SINGLE, [0.7, 0.1, 0.2]])), (2, 3)),
        (Bernoulli(tf.constant([[-1.0, 0.0, 2.0]])), (1, 3)),
        (masked(tf.constant(CHOICE_LOGITS)), (1, 6)),
    ],
)
def test_eager_and_compiled_results_agree(
    distribution: Any, shape: tuple[int, int]
) -> None:
    noise = distribution.noise(*shape, SEED)

    def numbers() -> list[tf.Tensor]:
        action = distribution.sample(noise)
        other = type(distribution)(*(2.0 * part for part in distribution.parameters))
        kl = distribution.kl(other)
        return [distribution.log_prob(action), distribution.entropy(), kl]

    compiled = tf.function(numbers, jit_compile=True)()
    for left, right in zip(numbers(), compiled, strict=True):
        np.testing.assert_allclose(left.numpy(), right.numpy(), rtol=1e-6, atol=1e-6)
