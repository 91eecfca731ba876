"""Convolutional networks: supported leaves, image layouts, layers, shared torsos."""

from typing import Any

import gymnasium
import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from ppo.agent.agent import Agent
from ppo.agent.networks.convolution import channels_last, convolution
from ppo.config import Config
from ppo.config.named_configs import recommended_settings
from ppo.errors import UnsupportedSpaceError
from ppo.spaces import is_image
from tests.learning.tasks import XorTask

CONFIG = Config(env_name="fake", policy_layers=(8,), value_layers=(8,))


def image(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def layers(network: keras.Sequential) -> list[tuple[int, ...]]:
    """Return filters, kernel and stride of convolutions, and units of dense layers."""
    found: list[tuple[int, ...]] = []
    for layer in network.layers:
        if isinstance(layer, keras.layers.Conv2D):
            found.append((layer.filters, layer.kernel_size[0], layer.strides[0]))
        elif isinstance(layer, keras.layers.Dense):
            found.append((layer.units,))
    return found


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((9, 8), (9, 8, 1)),
        ((9, 8, 3), (9, 8, 3)),
        ((3, 9, 8), (9, 8, 3)),
        ((8, 8, 8), (8, 8, 8)),
        ((2, 9, 8, 3), (9, 8, 6)),
        ((2, 3, 9, 8), (9, 8, 6)),
    ],
)
def test_every_layout_is_converted_to_channels_last(
    shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    rows = np.arange(2 * np.prod(shape)).reshape(2, *shape)
    arranged = channels_last(tf.constant(rows)).numpy()
    assert arranged.shape == (2, *expected)
    # Compare the pixel in row 3 and column 5 of every channel.
    height = shape.index(9) if 9 in shape else 0
    pixel = rows.take(3, axis=height + 1).take(5, axis=height + 1)
    np.testing.assert_array_equal(arranged[:, 3, 5], pixel.reshape(2, -1))
    assert convolution(shape, seed=0).input_shape == (None, *expected)


def test_large_images_are_processed_by_the_network_of_mnih_et_al() -> None:
    nature = [(32, 8, 4), (64, 4, 2), (64, 3, 1), (512,)]
    network = convolution((4, 84, 84), seed=0)
    assert layers(network) == nature
    assert network.count_params() == 1_684_128  # the paper's, without the last layer
    assert layers(convolution((36, 40, 3), seed=0)) == nature
    small = [(16, 3, 1), (32, 3, 2), (32, 3, 2), (128,)]
    for shape in ((8, 8, 3), (1, 35, 84)):
        assert layers(convolution(shape, seed=0)) == small


def test_weights_are_orthogonal_and_depend_on_the_seed() -> None:
    first, again, other = (convolution((8, 8, 3), seed=seed) for seed in (1, 1, 20))
    for left, right, different in zip(
        first.trainable_variables,
        again.trainable_variables,
        other.trainable_variables,
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)
        if len(left.shape) == 1:
            assert not left.numpy().any()
            continue
        assert (left.numpy() != different.numpy()).any()
        kernel = left.numpy().reshape(-1, left.shape[-1])
        np.testing.assert_allclose(
            kernel.T @ kernel, 2 * np.eye(kernel.shape[1]), atol=1e-4
        )


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (image(8, 8, 3), True),
        (image(4, 84, 84), True),
        (image(8, 8), True),
        (image(7, 84, 3), False),
        (image(2, 2, 2, 8, 8), False),
        (spaces.Box(0, 9, (8, 8), np.uint8), False),
        (spaces.Box(0.0, 1.0, (8, 8, 3)), False),
        (image(64), False),
        (spaces.Discrete(3), False),
    ],
)
def test_only_images_are_convolved(space: gymnasium.Space[Any], expected: bool) -> None:
    assert is_image(space) is expected


def convolutions(agent: Agent) -> int:
    return sum(len(v.shape) == 4 for v in agent.trainable_variables)


def test_images_are_convolved_unless_the_config_selects_an_mlp() -> None:
    actions = spaces.Discrete(2)
    assert convolutions(Agent(image(8, 8), actions, CONFIG)) == 3
    assert convolutions(Agent(spaces.Box(0.0, 1.0, (3,)), actions, CONFIG)) == 0
    flat = Agent(image(8, 8), actions, CONFIG.replace(network="mlp"))
    assert convolutions(flat) == 0
    rows = tf.cast(tf.fill([2, 8, 8], 255), tf.uint8)
    assert flat.value(flat.preprocess(rows)).shape == (2,)
    with pytest.raises(UnsupportedSpaceError, match=r"got Box.*set network=mlp"):
        Agent(image(7, 7), actions, CONFIG.replace(network="cnn"))


def test_other_observations_are_concatenated_after_the_convolutions() -> None:
    space = spaces.Dict(
        camera=image(8, 8, 3), left=image(9, 9), mode=spaces.Discrete(3),
        x=spaces.Box(-1.0, 1.0, (2, 2)), tiny=image(2, 2),
    )  # fmt: skip
    agent = Agent(space, spaces.Discrete(2), CONFIG)
    assert convolutions(agent) == 6
    inputs = [v for v in agent.trainable_variables if v.shape[-1] == 8]
    assert {v.shape[0] for v in inputs if len(v.shape) == 2} == {2 * 128 + 3 + 4 + 4}
    features = agent.preprocess(
        tf.nest.map_structure(lambda leaf: tf.stack([leaf] * 5), space.sample())
    )
    distribution, value = agent.distribution_and_value(features)
    assert value.shape == (5,)
    assert distribution.mode().shape == (5,)


def test_only_bytes_that_are_convolved_are_divided_by_255() -> None:
    """A smaller grid contains numbers, which are normalised."""
    space = spaces.Dict(camera=image(8, 8), grid=image(7, 7))
    preprocess = Agent(space, spaces.Discrete(2), CONFIG).preprocess
    grid = np.random.default_rng(0).integers(0, 11, (500, 7, 7), np.uint8)
    rows = {"camera": np.full((500, 8, 8), 51, np.uint8), "grid": grid}
    preprocess.update(rows, tf.ones([500], tf.bool))
    inputs, _ = preprocess.inputs(preprocess(rows))
    np.testing.assert_allclose(inputs["camera"], 0.2, rtol=1e-6)
    np.testing.assert_allclose(np.mean(inputs["grid"], axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(np.std(inputs["grid"], axis=0), 1.0, atol=1e-3)


def test_by_default_a_policy_can_combine_numbers_that_come_with_an_image() -> None:
    """The logits are not a sum of functions of the single numbers."""
    task = XorTask()
    settings = recommended_settings(task.observation_space, task.action_space)
    corners = {
        "image": np.full((4, 8, 8), 128, np.uint8),
        "numbers": np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]], np.float32),
    }
    for layers, is_combined in ((settings["policy_layers"], True), ((), False)):
        config = CONFIG.replace(**{**settings, "policy_layers": layers})
        agent = Agent(task.observation_space, task.action_space, config)
        features = agent.preprocess(corners)
        (logits,) = agent.distribution(features).parameters
        interaction = np.asarray(logits[0] - logits[1] - logits[2] + logits[3])
        # The initial gain of the output layer is 0.01.
        assert bool(np.abs(interaction).max() > 1e-5) is is_combined


@pytest.mark.parametrize("shared", [True, False])
def test_policy_and_value_share_the_torso_if_configured(shared: bool) -> None:
    agent = Agent(
        image(8, 8, 3), spaces.Discrete(2), CONFIG.replace(shared_torso=shared)
    )
    assert convolutions(agent) == (3 if shared else 6)
    observation = tf.cast(
        tf.random.stateless_uniform([4, 8, 8, 3], (1, 2), 0, 256, tf.int32), tf.uint8
    )
    features = agent.preprocess(observation)
    with tf.GradientTape(persistent=True) as tape:
        distribution, value = agent.distribution_and_value(features)
        log_prob = distribution.log_prob(tf.constant([0, 1, 0, 1], tf.int64))
    np.testing.assert_allclose(value, agent.value(features), atol=1e-6)
    alone = agent.distribution(features)
    np.testing.assert_allclose(distribution.entropy(), alone.entropy(), atol=1e-6)
    kernels = [v.value for v in agent.trainable_variables if len(v.shape) == 4]
    for part in (log_prob, value):
        assert sum(g is not None for g in tape.gradient(part, kernels)) == 3
