"""Recurrent cores: single steps, unrolled sequences, and states after each result."""

import numpy as np
import pytest
import tensorflow as tf

from envserve.slab import Status
from ppo.agent.networks.recurrent import RecurrentCore, is_pending, next_state


def make_core() -> RecurrentCore:
    return RecurrentCore(2, hidden_sizes=(5,), units=3, activation="tanh", seed=7)


def averaging_core() -> RecurrentCore:
    """Return a core of one unit that turns h into (h + tanh(x)) / 2, given input x."""
    core = RecurrentCore(1, hidden_sizes=(), units=1, activation="tanh", seed=0)
    kernel, recurrent_kernel, bias = core.trainable_variables
    # Columns: update gate, reset gate, candidate. sigmoid(0) is 0.5.
    kernel.assign([[0.0, 0.0, 1.0]])
    recurrent_kernel.assign([[0.0, 0.0, 0.0]])
    bias.assign(np.zeros((2, 3)))
    return core


def test_step_applies_the_hidden_layers_and_a_gru() -> None:
    core = make_core()
    weight, offset, kernel, recurrent_kernel, bias = (
        variable.numpy() for variable in core.trainable_variables
    )
    random = np.random.default_rng(0)
    bias[:] = random.normal(size=bias.shape)
    core.trainable_variables[-1].assign(bias)
    rows, state = random.normal(size=(4, 2)), random.normal(size=(4, 3))
    hidden = np.tanh(rows @ weight + offset)
    # Cho et al. 2014, with the reset gate after the recurrent product.
    update, reset, candidate = np.split(hidden @ kernel + bias[0], 3, axis=1)
    of_update, of_reset, of_candidate = np.split(
        state @ recurrent_kernel + bias[1], 3, axis=1
    )
    update_gate = 1 / (1 + np.exp(-(update + of_update)))
    reset_gate = 1 / (1 + np.exp(-(reset + of_reset)))
    expected = update_gate * state + (1 - update_gate) * np.tanh(
        candidate + reset_gate * of_candidate
    )
    embedding = core.embed(tf.constant(rows, tf.float32))
    got = core.advance(embedding, tf.constant(state, tf.float32))
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_without_hidden_layers_the_gru_gets_the_features() -> None:
    assert averaging_core().embed(tf.constant([[100.0]])) == 100.0
    assert (
        averaging_core().advance(tf.constant([[100.0]]), tf.constant([[0.5]])) == 0.75
    )


@pytest.mark.parametrize("jit_compile", [True, False])
def test_unroll_equals_single_steps(jit_compile: bool) -> None:
    core = make_core()
    random = np.random.default_rng(1)
    rows = tf.constant(random.normal(size=(9, 4, 2)), tf.float32)
    ended = tf.constant(random.random((9, 4)) < 0.3)
    pending = tf.constant(random.random((9, 4)) < 0.3)
    state = tf.constant(random.normal(size=(4, 3)), tf.float32)

    @tf.function(jit_compile=jit_compile)
    def unroll() -> tuple[tf.Tensor, ...]:
        embedding = tf.stack([core.embed(rows[step]) for step in range(9)])
        with tf.GradientTape() as tape:
            outputs, last = core.unroll(embedding, state, ended, pending)
            loss = tf.reduce_sum(tf.square(outputs))
        kernel = core.trainable_variables[-3].value
        return outputs, last, tape.gradient(loss, kernel)

    outputs, last, gradient = unroll()
    with tf.GradientTape() as tape:
        loss = 0.0
        for step in range(9):
            output = core.advance(core.embed(rows[step]), state)
            np.testing.assert_allclose(outputs[step], output, atol=1e-6)
            loss += tf.reduce_sum(tf.square(output))
            state = next_state(state, output, ended[step], pending[step])
    np.testing.assert_allclose(last, state, atol=1e-6)
    kernel = core.trainable_variables[-3].value
    np.testing.assert_allclose(gradient, tape.gradient(loss, kernel), atol=1e-5)


def test_next_state_is_zero_unchanged_or_the_output() -> None:
    before, after = tf.constant([[1.0]] * 4), tf.constant([[2.0]] * 4)
    status = tf.constant(
        [Status.OK, Status.PENDING, Status.LATE, Status.WORKER_DIED], tf.uint8
    )
    ended = tf.constant([False, False, False, True])
    got = next_state(before, after, ended, is_pending(status))
    assert got.numpy().ravel().tolist() == [2.0, 1.0, 2.0, 0.0]
    ended = tf.constant([True] * 4)
    assert not next_state(before, after, ended, is_pending(status)).numpy().any()
