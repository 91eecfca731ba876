"""Distributions against hand-written formulas, sums and numerical integration."""

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ppo.actions.distributions import (
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


def test_gaussian_density_integrates_to_one_and_gives_the_entropy() -> None:
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
def test_a_distribution_is_made_again_from_any_of_its_rows(
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


def test_gaussian_samples_have_its_mean_and_deviation() -> None:
    rows = 100_000
    distribution = DiagonalGaussian(
        tf.tile([[1.0, -2.0]], [rows, 1]), tf.constant([0.0, math.log(3.0)])
    )
    samples = distribution.sample(distribution.draw_noise(rows, 2, SEED)).numpy()
    np.testing.assert_allclose(samples.mean(axis=0), [1.0, -2.0], atol=0.05)
    np.testing.assert_allclose(samples.std(axis=0), [1.0, 3.0], rtol=0.02)
    assert distribution.mode() is distribution.mean


def test_a_standard_deviation_per_row_counts_per_row() -> None:
    distribution = DiagonalGaussian(tf.zeros([2, 1]), tf.constant([[0.0], [1.0]]))
    entropy = 0.5 * math.log(2 * math.pi * math.e)
    assert distribution.entropy().numpy() == pytest.approx([entropy, entropy + 1])


PROBABILITIES = np.array([[0.2, 0.5, 0.3], [0.7, 0.1, 0.2]], np.float32)


def categorical() -> Categorical:
    # Logits are only defined up to a constant per row.
    return Categorical(tf.constant(np.log(PROBABILITIES) + [[5.0], [-3.0]], tf.float32))


def test_categorical_log_prob_and_mode() -> None:
    log_prob = categorical().log_prob(tf.constant([1, 2], tf.int64))
    assert log_prob.numpy() == pytest.approx(np.log([0.5, 0.2]), abs=1e-6)
    assert categorical().mode().numpy().tolist() == [1, 0]


def test_categorical_entropy_and_kl_are_sums_over_actions() -> None:
    entropy = -(PROBABILITIES * np.log(PROBABILITIES)).sum(axis=1)
    assert categorical().entropy().numpy() == pytest.approx(entropy, abs=1e-6)
    uniform = Categorical(tf.zeros([2, 3]))
    kl = (PROBABILITIES * np.log(3 * PROBABILITIES)).sum(axis=1)
    assert categorical().kl(uniform).numpy() == pytest.approx(kl, abs=1e-6)


def test_categorical_samples_have_its_frequencies() -> None:
    rows = 100_000
    logits = tf.tile(categorical().logits[:1], [rows, 1])
    samples = Categorical(logits).sample(Categorical.draw_noise(rows, 3, SEED)).numpy()
    frequencies = np.bincount(samples, minlength=3) / rows
    assert samples.dtype == np.int64
    np.testing.assert_allclose(frequencies, PROBABILITIES[0], atol=0.01)


BITS = np.array([[0.2, 0.5, 0.9]], np.float32)


def bernoulli() -> Bernoulli:
    return Bernoulli(tf.constant(np.log(BITS / (1 - BITS))))


def test_bernoulli_log_prob_and_mode_are_of_each_bit() -> None:
    log_prob = bernoulli().log_prob(tf.constant([[0, 1, 1]], tf.int64))
    assert log_prob.numpy() == pytest.approx([math.log(0.8 * 0.5 * 0.9)], abs=1e-6)
    mode = Bernoulli(tf.constant([[-1.0, 2.0]])).mode()
    assert mode.numpy().tolist() == [[0, 1]]
    assert mode.dtype == tf.int64


def test_bernoulli_entropy_and_kl_are_sums_over_both_values_of_each_bit() -> None:
    both = np.stack([BITS, 1 - BITS]).astype(np.float64)
    entropy = -(both * np.log(both)).sum()
    assert bernoulli().entropy().numpy() == pytest.approx([entropy], abs=1e-6)
    fair = Bernoulli(tf.zeros([1, 3]))
    kl = (both * np.log(2 * both)).sum()
    assert bernoulli().kl(fair).numpy() == pytest.approx([kl], abs=1e-6)


def test_bernoulli_samples_have_its_frequencies_and_bits_are_independent() -> None:
    rows = 100_000
    distribution = Bernoulli(tf.tile(bernoulli().logits, [rows, 1]))
    samples = distribution.sample(Bernoulli.draw_noise(rows, 3, SEED)).numpy()
    assert samples.dtype == np.int64
    np.testing.assert_allclose(samples.mean(axis=0), BITS[0], atol=0.01)
    assert np.abs(np.corrcoef(samples.T) - np.eye(3)).max() < 0.02


def test_bits_that_are_certain_have_finite_numbers_and_gradients() -> None:
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


SIZES = (2, 3)
CHOICES = [[0.25, 0.75], [0.2, 0.5, 0.3]]
CHOICE_LOGITS = np.log(np.concatenate(CHOICES))[None].astype(np.float32)
# Of the first choice nothing is allowed, which allows all; of the second not option 1.
FLAGS = np.array([[False, False, True, False, True]])


def joint(rows: int = 1, allowed: Any = None) -> MultiCategorical:
    flags = None if allowed is None else tf.repeat(tf.constant(allowed), rows, axis=0)
    return MultiCategorical.of(tf.repeat(CHOICE_LOGITS, rows, axis=0), SIZES, flags)


def test_log_prob_and_entropy_are_sums_over_choices_and_the_mode_is_of_each() -> None:
    log_prob = joint().log_prob(tf.constant([[0, 2]], tf.int64))
    assert log_prob.numpy() == pytest.approx([math.log(0.25 * 0.3)], abs=1e-6)
    entropy = -sum(p * math.log(p) for row in CHOICES for p in row)
    assert joint().entropy().numpy() == pytest.approx([entropy], abs=1e-6)
    assert joint().mode().numpy().tolist() == [[1, 1]]


def test_kl_is_the_sum_over_choices() -> None:
    uniform = MultiCategorical.of(tf.zeros([1, 5]), SIZES)
    kl = sum(
        p * math.log(len(row) * p) for row in CHOICES for p in row
    )  # against 1 / len(row)
    assert joint().kl(uniform).numpy() == pytest.approx([kl], abs=1e-6)
    assert joint().kl(joint()).numpy().tolist() == [0.0]


def test_samples_have_the_frequencies_of_each_choice() -> None:
    rows = 100_000
    samples = joint(rows).sample(MultiCategorical.draw_noise(rows, 6, SEED)).numpy()
    assert samples.dtype == np.int64
    for column, probabilities in zip(samples.T, CHOICES, strict=True):
        frequencies = np.bincount(column) / rows
        np.testing.assert_allclose(frequencies, probabilities, atol=0.01)
    # Independent of each other.
    assert abs(np.corrcoef(samples.T)[0, 1]) < 0.01


def test_what_is_forbidden_has_no_probability_and_the_rest_all_of_it() -> None:
    rows = 10_000
    samples = joint(rows, FLAGS).sample(MultiCategorical.draw_noise(rows, 6, SEED))
    first, second = samples.numpy().T
    np.testing.assert_allclose(np.bincount(first) / rows, [0.25, 0.75], atol=0.02)
    np.testing.assert_allclose(np.bincount(second) / rows, [0.4, 0, 0.6], atol=0.02)
    one = joint(1, FLAGS)
    assert one.mode().numpy().tolist() == [[1, 2]]
    log_prob = one.log_prob(tf.constant([[1, 0]], tf.int64)).numpy()
    assert log_prob == pytest.approx([math.log(0.75 * 0.4)], abs=1e-6)
    assert math.exp(one.log_prob(tf.constant([[1, 1]], tf.int64)).numpy()[0]) == 0.0
    left = [[0.25, 0.75], [0.4, 0.6]]
    entropy = -sum(p * math.log(p) for row in left for p in row)
    assert one.entropy().numpy() == pytest.approx([entropy], abs=1e-6)
    uniform = MultiCategorical.of(tf.zeros([1, 5]), SIZES, tf.constant(FLAGS))
    kl = sum(p * math.log(2 * p) for row in left for p in row)
    assert one.kl(uniform).numpy() == pytest.approx([kl], abs=1e-6)


def test_gradients_are_finite_and_zero_for_what_is_forbidden() -> None:
    logits = tf.constant(CHOICE_LOGITS)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(logits)
        masked = MultiCategorical.of(logits, SIZES, tf.constant(FLAGS))
        other = MultiCategorical.of(2.0 * logits, SIZES, tf.constant(FLAGS))
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


def test_where_nothing_is_allowed_everything_is() -> None:
    logits = tf.constant([[1.0, 2.0], [1.0, 2.0]])
    masked = masked_logits(logits, tf.constant([[False, False], [True, False]]))
    log_probs = Categorical(masked).log_probs.numpy()
    np.testing.assert_allclose(log_probs[0], Categorical(logits).log_probs[0])
    assert np.exp(log_probs[1]).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
def test_choices_get_a_row_each(sizes: tuple[int, ...]) -> None:
    rows = padded_choices(tf.constant([[1.0, 2.0, 3.0, 4.0]]), sizes).numpy().tolist()
    assert rows == ([[[1, 2], [3, 4]]] if sizes == (2, 2) else [[[1, 0, 0], [2, 3, 4]]])


@pytest.mark.parametrize(
    ("distribution", "shape"),
    [
        (gaussian([[0.5, 1.0]], [0.1, 0.2]), (1, 2)),
        (categorical(), (2, 3)),
        (bernoulli(), (1, 3)),
        (joint(1, FLAGS), (1, 6)),
    ],
)
def test_eager_and_compiled_agree(distribution: Any, shape: tuple[int, int]) -> None:
    noise = distribution.draw_noise(*shape, SEED)

    def numbers() -> list[tf.Tensor]:
        action = distribution.sample(noise)
        other = type(distribution)(*(2.0 * part for part in distribution.parameters))
        kl = distribution.kl(other)
        return [distribution.log_prob(action), distribution.entropy(), kl]

    compiled = tf.function(numbers, jit_compile=True)()
    for left, right in zip(numbers(), compiled, strict=True):
        np.testing.assert_allclose(left.numpy(), right.numpy(), rtol=1e-6, atol=1e-6)
