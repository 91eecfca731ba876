"""Perceptrons: initialisation, shapes, nested inputs."""

import math
from typing import Any

import numpy as np
import tensorflow as tf

from ppo.agent.networks.perceptrons import (
    GaussianHead,
    LogitsHead,
    NetworkPart,
    Perceptron,
    ValueHead,
    flatten_observation,
    mlp,
)
from ppo.config import Config


def test_weights_are_orthogonal_with_the_given_gain_and_biases_are_zero() -> None:
    network = mlp(8, (8, 8), 4, output_gain=0.01, activation="tanh", seed=0)
    kernels = [layer.kernel.numpy() for layer in network.layers]
    gains = [math.sqrt(2.0), math.sqrt(2.0), 0.01]
    for kernel, gain in zip(kernels, gains, strict=True):
        product = kernel.T @ kernel
        np.testing.assert_allclose(
            product, gain**2 * np.eye(len(product)), atol=1e-5 * gain**2
        )
    assert not any(layer.bias.numpy().any() for layer in network.layers)


def test_weights_differ_between_layers_and_depend_on_the_seed() -> None:
    def kernels(seed: int) -> list[np.ndarray]:
        network = mlp(8, (8, 8), 8, output_gain=1.0, activation="tanh", seed=seed)
        return [layer.kernel.numpy() for layer in network.layers]

    first, again, other = kernels(1), kernels(1), kernels(7)
    assert (first[0] != first[1]).any()
    for left, right, different in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(left, right)
        assert (left != different).any()


def outputs_of(head: NetworkPart, size: int, gain: float = 0.01) -> Any:
    """Return the outputs of a perceptron with this head for five equal rows."""
    network = Perceptron(
        3,
        output_size=size,
        output_gain=gain,
        head=head,
        hidden_sizes=(8,),
        activation="relu",
        seed=0,
    )
    return network(tf.ones([5, 3]))


def test_gaussian_starts_near_mean_zero_with_the_given_deviation() -> None:
    head = GaussianHead(2, Config(env_name="fake", initial_log_std=-0.5))
    mean, log_std = outputs_of(head, 2)
    assert mean.shape == (5, 2)
    assert np.abs(mean.numpy()).max() < 0.05
    assert log_std.numpy().tolist() == [-0.5, -0.5]


def test_categorical_starts_near_uniform() -> None:
    (logits,) = outputs_of(LogitsHead(), 4)
    assert logits.shape == (5, 4)
    assert np.abs(logits.numpy()).max() < 0.05


def test_values_are_one_number_per_row() -> None:
    assert outputs_of(ValueHead(), 1, gain=1.0).shape == (5,)


def test_nested_observations_become_one_vector_per_row() -> None:
    observation = {"b": tf.fill([2, 1], 5.0), "a": (tf.ones([2, 2, 2]), tf.zeros([2]))}
    flat = flatten_observation(observation)
    assert flat.numpy().tolist() == [[1.0, 1.0, 1.0, 1.0, 0.0, 5.0]] * 2
