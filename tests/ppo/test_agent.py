"""`Agent`: preprocessing of each kind of observation, and actions."""

from typing import Any

import gymnasium
import keras
import numpy as np
import pytest
import tensorflow as tf

from ppo.agent.agent import Agent
from ppo.agent.observations import ObservationPreprocessor
from ppo.algorithms.ppo.update import Updater
from ppo.config import Config
from ppo.errors import UnsupportedSpaceError
from tests.ppo.runs import SMALL, eagerly, parameters, rollout_of

SPACES = gymnasium.spaces
SEED = tf.constant([1, 2])
CONFIG = Config(env_name="fake", policy_layers=(8,), value_layers=(8,))


def preprocessed(space: gymnasium.Space[Any], rows: Any) -> Any:
    preprocess = ObservationPreprocessor(space, normalize=True, clip=10.0)
    features = preprocess(tf.nest.map_structure(tf.constant, rows))
    inputs, mask = preprocess.inputs(features)
    assert mask is None
    sizes = [int(np.prod(leaf.shape[1:])) for leaf in tf.nest.flatten(inputs)]
    assert preprocess.size == sum(sizes)
    assert all(leaf.dtype == tf.float32 for leaf in tf.nest.flatten(inputs))
    one_row = tf.nest.map_structure(lambda leaf: leaf.numpy()[0], inputs)
    assert preprocess.input_space.contains(one_row)
    return inputs


def test_images_stay_uint8_until_they_are_scaled_and_keep_their_shape() -> None:
    space = SPACES.Box(0, 255, (8, 8, 1), np.uint8)
    rows = np.repeat(np.array([0, 51, 255], np.uint8), 64).reshape(3, 8, 8, 1)
    preprocess = ObservationPreprocessor(space, normalize=True, clip=10.0)
    assert preprocess(tf.constant(rows)).dtype == tf.uint8
    inputs = preprocessed(space, rows)
    assert inputs.shape == (3, 8, 8, 1)
    np.testing.assert_allclose(inputs.numpy(), rows / 255)
    assert preprocess.trackables == {}


def test_network_that_does_not_fit_into_memory_is_an_error() -> None:
    with pytest.raises(UnsupportedSpaceError, match="with 1,099,511,627,776 inputs"):
        Agent(SPACES.Discrete(2**40), SPACES.Discrete(2), CONFIG)


@pytest.mark.parametrize(
    ("space", "rows", "expected"),
    [
        (SPACES.Discrete(3, start=-1), np.array([-1, 1]), [[1, 0, 0], [0, 0, 1]]),
        (
            SPACES.MultiDiscrete([2, 3], start=[0, 5]),
            np.array([[1, 5], [0, 7]]),
            [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]],
        ),
        (SPACES.MultiBinary(2), np.array([[0, 1]], np.int8), [[0, 1]]),
        # uint8 arrays that are 1-D or have bounds other than 0 and 255 are not images.
        (SPACES.Box(0, 255, (2,), np.uint8), np.array([[3, 4]], np.uint8), [[3, 4]]),
        (
            SPACES.Box(0, 9, (1, 2), np.uint8),
            np.array([[[3, 4]]], np.uint8),
            [[[3, 4]]],
        ),
    ],
)
def test_discrete_values_are_one_hot_encoded_and_other_numbers_kept(
    space: gymnasium.Space[Any], rows: np.ndarray, expected: list[Any]
) -> None:
    assert preprocessed(space, rows).numpy().tolist() == expected


def test_only_box_leaves_have_statistics() -> None:
    space = SPACES.Dict(
        n=SPACES.Discrete(2), image=SPACES.Box(0, 255, (8, 8), np.uint8),
        x=SPACES.Box(-1.0, 1.0, (2,)),
    )  # fmt: skip
    preprocess = ObservationPreprocessor(space, normalize=True, clip=10.0)
    rows = {
        "n": np.array([0, 1]),
        "image": np.zeros((2, 8, 8), np.uint8),
        "x": np.array([[1.0, 2.0], [3.0, 2.0]], np.float32),
    }
    preprocess.update(rows, tf.constant([True, True]))
    features = preprocess(tf.nest.map_structure(tf.constant, rows))
    np.testing.assert_allclose(features["x"].numpy(), [[-1, 0], [1, 0]], atol=1e-4)
    assert features["n"].numpy().tolist() == [[1, 0], [0, 1]]
    assert len(preprocess.trackables) == 1


def test_without_normalisation_values_are_unchanged() -> None:
    preprocess = ObservationPreprocessor(
        SPACES.Box(-1.0, 1.0, (1,)), normalize=False, clip=10.0
    )
    assert preprocess(tf.constant([[99.0]])).numpy().tolist() == [[99.0]]
    assert preprocess.trackables == {}
    bytes_of_a_board = SPACES.Box(0, 9, (2, 2), np.uint8)
    preprocess = ObservationPreprocessor(bytes_of_a_board, normalize=True, clip=10.0)
    assert list(preprocess.trackables) == ["leaf_0"]


def test_act_returns_actions_with_their_log_probabilities() -> None:
    agent = Agent(SPACES.Box(-1.0, 1.0, (3,)), SPACES.Box(-1.0, 1.0, (2, 2)), CONFIG)
    observation = tf.ones([5, 3])
    action, log_prob = agent.act(observation, SEED)
    assert action.shape == (5, 4)
    distribution = agent.distribution(agent.preprocess(observation))
    np.testing.assert_allclose(log_prob, distribution.log_prob(action), atol=1e-6)
    mode, mode_log_prob = agent.mode(observation, SEED)
    np.testing.assert_array_equal(mode, distribution.mode())
    assert (mode_log_prob.numpy() >= log_prob.numpy()).all()


def test_actions_of_a_recurrent_agent_depend_on_earlier_observations() -> None:
    config = CONFIG.replace(recurrent_size=4, minibatch_size=128)
    agent = Agent(SPACES.Box(-1.0, 1.0, (3,)), SPACES.Discrete(5), config)
    assert agent.state_sizes == (4, 4)
    zeros = [tf.zeros([5, 4])] * 2
    action, log_prob, *first = agent.act(tf.ones([5, 3]), SEED, *zeros)
    assert action.shape == log_prob.shape == (5,)
    *_, policy_state, value_state = agent.act(tf.zeros([5, 3]), SEED, *first)
    *_, without_history, _ = agent.act(tf.zeros([5, 3]), SEED, *zeros)
    assert (policy_state.numpy() != without_history.numpy()).any()
    assert policy_state.shape == value_state.shape == (5, 4)
    # Callers that do not need values can omit the state of the value function.
    _, mode_log_prob, *state = agent.mode(tf.zeros([5, 3]), SEED, first[0])
    np.testing.assert_allclose(state, [policy_state], atol=1e-6)
    assert (mode_log_prob.numpy() >= np.log(1 / 5) - 1e-6).all()


@pytest.mark.parametrize("recurrent_size", [0, 16])
def test_initial_weights_depend_on_the_seed_of_the_config(recurrent_size: int) -> None:
    config = CONFIG.replace(recurrent_size=recurrent_size, minibatch_size=128)

    def numbers(seed: int) -> np.ndarray:
        space = SPACES.Box(-1.0, 1.0, (3,))
        return parameters(Agent(space, SPACES.Discrete(2), config.replace(seed=seed)))

    first = numbers(2**31 - 1)
    np.testing.assert_array_equal(first, numbers(2**31 - 1))
    assert (first != numbers(3)).any()


@pytest.mark.parametrize("kind", ["mlp", "recurrent", "cnn"])
def test_networks_do_not_depend_on_global_settings_of_keras(kind: str) -> None:
    space = SPACES.Box(0, 255, (8, 8, 1), np.uint8)
    config = CONFIG.replace(
        horizon=64,
        recurrent_size=8 if kind == "recurrent" else 0,
        network="cnn" if kind == "cnn" else "mlp",
    )
    rows = tf.constant(np.arange(128).reshape(2, 8, 8, 1), tf.uint8)

    def outputs() -> list[np.ndarray]:
        agent = Agent(space, SPACES.Discrete(2), config)
        state = [tf.ones([2, size]) for size in agent.state_sizes]
        act = agent.act_from(None, rows, tf.zeros([2, 2]), *state)
        values = agent.value(agent.preprocess(rows), *state[1:])
        return list(map(np.asarray, tf.nest.flatten((act, values))))

    expected, before = outputs(), keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.set_image_data_format("channels_first")
    try:
        found = outputs()
    finally:
        keras.config.set_dtype_policy(before)
        keras.config.set_image_data_format("channels_last")
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_error_for_an_unsupported_action_space_names_it() -> None:
    bits: Any = np.bool_
    for space, text in (
        (SPACES.Box(0, 1, (2,), bits), "a numeric Box, .*MultiBinary"),
        (SPACES.Box(-1.0, 1.0, (0,)), r"at least one element, .*Discrete\(1\)"),
        (SPACES.MultiDiscrete([]), r"at least one element, .*Discrete\(1\)"),
    ):
        with pytest.raises(UnsupportedSpaceError, match=text):
            Agent(SPACES.Box(-1.0, 1.0, (3,)), space, CONFIG)
    with pytest.raises(UnsupportedSpaceError, match="got Tuple"):
        Agent(SPACES.Box(-1.0, 1.0, (3,)), SPACES.Tuple([SPACES.Discrete(2)]), CONFIG)


def test_subclass_changes_all_actions_if_it_overrides_act_from() -> None:
    class Negated(Agent):
        def act_from(self, *inputs: Any) -> tuple[Any, ...]:
            action, *others = super().act_from(*inputs)
            return -action, *others

    box = SPACES.Box(-1.0, 1.0, (2,))
    agent, negated = Agent(box, box, CONFIG), Negated(box, box, CONFIG)
    rows = tf.constant([[0.5, -1.0]])
    for name in ("act", "mode"):
        action, _ = getattr(agent, name)(rows, SEED)
        np.testing.assert_array_equal(getattr(negated, name)(rows, SEED)[0], -action)


class Cautious(Agent):
    """An agent with more entropy and larger values than those of its networks."""

    def distribution(self, features: Any, core_output: Any = None) -> Any:
        (logits,) = super().distribution(features, core_output).parameters
        return self.distribution_from([0.5 * logits])

    def value(self, features: Any, core_output: Any = None) -> tf.Tensor:
        return 2.0 * super().value(features, core_output)


def test_updates_use_the_distribution_and_the_value_of_a_subclass() -> None:
    spaces = SPACES.Box(-1.0, 1.0, (3,)), SPACES.Discrete(4)
    base, agent = Agent(*spaces, CONFIG), Cautious(*spaces, CONFIG)
    features = agent.preprocess(tf.ones([5, 3]))
    distribution, value = agent.distribution_and_value(features)
    expected, expected_value = base.distribution_and_value(features)
    (logits,), (expected_logits,) = distribution.parameters, expected.parameters
    np.testing.assert_allclose(logits, 0.5 * expected_logits, rtol=1e-6)
    np.testing.assert_allclose(value, 2.0 * expected_value, rtol=1e-6)


class Shifted(Agent):
    """An agent whose policy has an additional variable."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shift = keras.Variable([0.0])
        self.trainable_variables = [*self.trainable_variables, self.shift]
        self.trackables["shift"] = self.shift

    def distribution(self, features: Any, core_output: Any = None) -> Any:
        mean, log_std = super().distribution(features, core_output).parameters
        return self.distribution_from([mean + self.shift, log_std])


def test_a_subclass_may_need_more_noise_than_actions_have_elements() -> None:
    box = SPACES.Box(-1.0, 1.0, (1,))
    agent = Agent(box, box, CONFIG)
    agent.actions.noise_size += 1  # for a mixture, for example
    assert agent.actions.noise(5, SEED).shape == [5, 2]
    assert agent.actions.spec(5).shape == [5, 1]


@eagerly()
def test_variables_of_a_subclass_belong_to_its_policy() -> None:
    box = SPACES.Box(-np.inf, np.inf, (2,))
    spaces = box, SPACES.Box(-1.0, 1.0, (1,))
    config = SMALL.replace(learning_rate=0.1, max_kl=1e-6)
    agent = Shifted(*spaces, config)
    assert any(each is agent.shift for each in agent.policy_variables)
    rows = np.random.default_rng(0).normal(size=(9, 2, 2))
    rollout = rollout_of(8, 2, observation=rows, reward=rows[1:, :, 0])
    rollout = rollout._replace(action=rows[:8, :, :1].astype(np.float32))
    assert Updater(agent, config).update(rollout, seed=(0, 0))["undone_epochs"] == 1
    assert agent.shift.numpy() == 0.0
