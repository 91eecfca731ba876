"""Several choices at once, and masks, against sums that are written out."""

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ppo.actions.distributions import Categorical
from ppo.actions.multi_categorical import (
    MultiCategorical,
    masked_logits,
    padded_choices,
)

SEED = tf.constant([3, 4], tf.int32)
SIZES = (2, 3)
PROBABILITIES = [[0.25, 0.75], [0.2, 0.5, 0.3]]
LOGITS = np.log(np.concatenate(PROBABILITIES))[None].astype(np.float32)
# Of the first choice nothing is allowed, which allows all; of the second not option 1.
FLAGS = np.array([[False, False, True, False, True]])


def joint(rows: int = 1, allowed: Any = None) -> MultiCategorical:
    flags = None if allowed is None else tf.repeat(tf.constant(allowed), rows, axis=0)
    return MultiCategorical.of(tf.repeat(LOGITS, rows, axis=0), SIZES, flags)


def test_log_prob_and_entropy_are_sums_over_choices_and_the_mode_is_of_each() -> None:
    log_prob = joint().log_prob(tf.constant([[0, 2]], tf.int64))
    assert log_prob.numpy() == pytest.approx([math.log(0.25 * 0.3)], abs=1e-6)
    entropy = -sum(p * math.log(p) for row in PROBABILITIES for p in row)
    assert joint().entropy().numpy() == pytest.approx([entropy], abs=1e-6)
    assert joint().mode().numpy().tolist() == [[1, 1]]


def test_kl_is_the_sum_over_choices() -> None:
    uniform = MultiCategorical.of(tf.zeros([1, 5]), SIZES)
    kl = sum(
        p * math.log(len(row) * p) for row in PROBABILITIES for p in row
    )  # against 1 / len(row)
    assert joint().kl(uniform).numpy() == pytest.approx([kl], abs=1e-6)
    assert joint().kl(joint()).numpy().tolist() == [0.0]


def test_samples_have_the_frequencies_of_each_choice() -> None:
    rows = 100_000
    samples = joint(rows).sample(MultiCategorical.draw_noise(rows, 6, SEED)).numpy()
    assert samples.dtype == np.int64
    for column, probabilities in zip(samples.T, PROBABILITIES, strict=True):
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
    logits = tf.constant(LOGITS)
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


def test_eager_and_compiled_agree() -> None:
    noise = MultiCategorical.draw_noise(1, 6, SEED)

    def numbers() -> list[tf.Tensor]:
        masked = joint(1, FLAGS)
        action = masked.sample(noise)
        return [masked.log_prob(action), masked.entropy(), masked.kl(joint())]

    compiled = tf.function(numbers, jit_compile=True)()
    for left, right in zip(numbers(), compiled, strict=True):
        np.testing.assert_allclose(left.numpy(), right.numpy(), rtol=1e-6)
