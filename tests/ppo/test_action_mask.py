"""Action masks: supported spaces, and actions that the policy never takes."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from ppo.agent.agent import Agent
from ppo.agent.observations import ObservationPreprocessor
from ppo.config import Config
from ppo.errors import UnsupportedSpaceError

SEED = tf.constant([1, 2])
CONFIG = Config(env_name="fake", policy_layers=(8,), value_layers=(8,))
X = spaces.Box(-1.0, 1.0, (3,))


def observation_space(mask: gymnasium.Space[Any]) -> spaces.Dict:
    return spaces.Dict(x=X, action_mask=mask)


def observation(mask: Any, rows: int) -> dict[str, Any]:
    flags = tf.nest.map_structure(lambda part: tf.repeat([part], rows, axis=0), mask)
    return {"x": tf.zeros([rows, 3]), "action_mask": flags}


@pytest.mark.parametrize(
    ("mask_space", "mask"),
    [
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8)),
        (spaces.Box(0.0, 1.0, (3,)), np.array([1.0, 0.0, 1.0], np.float32)),
        (spaces.MultiDiscrete([2, 2, 2]), np.array([1, 0, 1])),
    ],
)
def test_masked_action_is_never_taken(
    mask_space: gymnasium.Space[Any], mask: np.ndarray
) -> None:
    agent = Agent(observation_space(mask_space), spaces.Discrete(3), CONFIG)
    rows = observation(mask, 300)
    action, log_prob = agent.act(rows, SEED)
    assert set(action.numpy()) == {0, 2}
    np.testing.assert_allclose(log_prob.numpy(), np.log(0.5), atol=0.05)
    # Make the masked action the most likely one.
    for variable in agent.trainable_variables:
        variable.assign(variable + np.eye(3)[1] if variable.shape == (3,) else variable)
    mode, mode_log_prob = agent.mode(rows, SEED)
    assert 1 not in mode.numpy()
    np.testing.assert_allclose(mode_log_prob.numpy(), np.log(0.5), atol=0.05)
    learned_from, _ = agent.distribution_and_value(agent.preprocess(rows))
    np.testing.assert_allclose(learned_from.log_prob(mode), mode_log_prob, atol=1e-6)
    assert np.exp(learned_from.log_prob(tf.ones_like(mode))).max() == 0.0


@pytest.mark.parametrize("split", [False, True])
def test_each_choice_has_its_part_of_the_mask(split: bool) -> None:
    parts = [spaces.MultiBinary(2), spaces.MultiBinary(3)]
    mask_space = spaces.Tuple(parts) if split else spaces.MultiBinary(5)
    flags = np.array([0, 1], np.int8), np.array([1, 0, 1], np.int8)
    mask = flags if split else np.concatenate(flags)
    agent = Agent(observation_space(mask_space), spaces.MultiDiscrete([2, 3]), CONFIG)
    action, _ = agent.act(observation(mask, 300), SEED)
    assert {tuple(row) for row in action.numpy()} == {(1, 0), (1, 2)}


def test_mask_without_any_flag_allows_all_actions() -> None:
    space = observation_space(spaces.MultiBinary(3))
    agent = Agent(space, spaces.Discrete(3), CONFIG)
    action, log_prob = agent.act(observation(np.zeros(3, np.int8), 300), SEED)
    assert set(action.numpy()) == {0, 1, 2}
    np.testing.assert_allclose(log_prob.numpy(), np.log(1 / 3), atol=0.05)


def test_mask_is_not_an_input_of_networks_and_statistics() -> None:
    space = observation_space(spaces.Box(0.0, 1.0, (3,)))
    preprocess = ObservationPreprocessor(space, normalize=True, clip=10.0)
    assert preprocess.size == 3
    assert list(preprocess.trackables) == ["leaf_0"]
    assert preprocess.input_space == spaces.Dict(x=spaces.Box(-10.0, 10.0, (3,)))
    rows = {"x": np.ones((2, 3)), "action_mask": np.eye(3, dtype=np.float32)[:2]}
    preprocess.update(rows, tf.constant([True, True]))
    features = preprocess(tf.nest.map_structure(tf.constant, rows))
    assert features["action_mask"].dtype == tf.bool
    inputs, mask = preprocess.inputs(features)
    assert list(inputs) == ["x"]
    assert inputs["x"].numpy().tolist() == [[0.0] * 3] * 2
    assert mask is not None
    assert mask.numpy().tolist() == [[True, False, False], [False, True, False]]


def test_nested_key_action_mask_is_an_ordinary_observation() -> None:
    inner = spaces.Dict(action_mask=spaces.MultiBinary(3))
    agent = Agent(spaces.Dict(inner=inner), spaces.Discrete(2), CONFIG)
    assert agent.preprocess.size == 3


@pytest.mark.parametrize(
    ("mask_space", "action_space", "message"),
    [
        (
            spaces.MultiBinary(4),
            spaces.Discrete(3),
            r"observation\['action_mask'\]: expected flags \[3\] .* Discrete\(3\), got "
            r"MultiBinary\(4\); declare one flag per action",
        ),
        (spaces.Discrete(3), spaces.Discrete(3), r"expected flags \[3\] .* Discrete"),
        (
            spaces.Tuple([spaces.MultiBinary(2), spaces.MultiBinary(2)]),
            spaces.MultiDiscrete([2, 3]),
            r"expected flags \[2\], \[3\] ",
        ),
        (spaces.MultiBinary(3), X, "expected a Discrete or MultiDiscrete action"),
        (
            spaces.MultiBinary(3),
            spaces.MultiBinary(3),
            r"with MultiDiscrete\(\[2\] \* n\)",
        ),
    ],
)
def test_mask_of_another_shape_than_the_actions_is_an_error(
    mask_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], message: str
) -> None:
    with pytest.raises(UnsupportedSpaceError, match=message):
        Agent(observation_space(mask_space), action_space, CONFIG)


def test_observation_with_nothing_but_a_mask_is_an_error() -> None:
    space = spaces.Dict(action_mask=spaces.MultiBinary(3))
    with pytest.raises(UnsupportedSpaceError, match="in addition to the mask"):
        Agent(space, spaces.Discrete(3), CONFIG)
