"""Envs in a graph: shapes, dtypes, actions and errors."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from envserve.errors import EnvError
from ppo.errors import EnvDataError, UnsupportedSpaceError
from ppo.in_graph_batch_env import InGraphBatchEnv
from tests.ppo.fakes import CountingBatchEnv, as_batch_env

SPACES = gymnasium.spaces
NESTED = SPACES.Dict(
    {
        "image": SPACES.Box(0, 255, (2, 2), np.uint8),
        "parts": SPACES.Tuple(
            (SPACES.Discrete(9), SPACES.Box(-1.0, 9.0, (1,), np.float64))
        ),
    }
)


def observe_nested(rows: np.ndarray) -> Any:
    count = rows[:, 1]
    return {
        "image": np.tile(count[:, None, None], (1, 2, 2)).astype(np.uint8),
        "parts": (count.astype(np.int64), count[:, None]),
    }


def nested_env() -> InGraphBatchEnv:
    return InGraphBatchEnv(
        as_batch_env(
            CountingBatchEnv([2, 5], observation_space=NESTED, observe=observe_nested)
        )
    )


def test_a_step_in_a_graph_has_static_shapes_and_the_dtypes_of_the_spaces() -> None:
    env = nested_env()
    step = tf.function(env.step).get_concrete_function(tf.zeros([2, 1])).outputs
    described = [(tensor.dtype, tensor.shape.as_list()) for tensor in step]
    observation = [(tf.uint8, [2, 2, 2]), (tf.int64, [2]), (tf.float64, [2, 1])]
    flags = [(tf.bool, [2])] * 3
    assert described == [*observation, (tf.float64, [2]), *flags, *observation]


def test_nested_observations_keep_their_structure_and_values() -> None:
    env = nested_env()
    first = env.reset()
    assert first["parts"][0].numpy().tolist() == [0, 0]
    step = tf.function(env.step)
    step(tf.zeros([2, 1]))
    result = step(tf.zeros([2, 1]))
    assert result.truncated.numpy().tolist() == [True, False]
    assert result.observation["image"].numpy()[:, 0, 0].tolist() == [0, 2]
    assert result.final_observation["parts"][1].numpy().tolist() == [[2.0], [0.0]]


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (SPACES.Box(-2.0, 2.0, (1,)), [[0.5], [-9.0]], [[1.0], [-2.0]]),
        (SPACES.Box(0.0, 1.0, (1,), np.float64), [[0.0], [1.0]], [[0.5], [1.0]]),
        (SPACES.Box(-np.inf, np.inf, (1,)), [[7.0], [-7.0]], [[7.0], [-7.0]]),
        (SPACES.Box(0.0, np.inf, (1,)), [[7.0], [-7.0]], [[7.0], [0.0]]),
        (SPACES.Box(0, 255, (1,), np.uint8), [[1.5], [-1.5]], [[255], [0]]),
        (SPACES.Box(-2, 2, (1,), np.int8), [[0.9], [-0.9]], [[2], [-2]]),  # the nearest
        (SPACES.Box(-10, 10, (1,), np.int8), [[20.0], [-20.0]], [[10], [-10]]),
        (SPACES.Box(-1, 1, (1,), np.int8), [[200.0], [-200.0]], [[1], [-1]]),
    ],
)
def test_policy_actions_span_the_bounds_and_are_clipped(
    space: gymnasium.spaces.Box, action: list[list[float]], expected: list[list[float]]
) -> None:
    env = InGraphBatchEnv(as_batch_env(CountingBatchEnv([9, 9], action_space=space)))
    env_action = env.to_env_action(tf.constant(action)).numpy()
    assert env_action.dtype == space.dtype
    assert env_action.tolist() == expected


def test_no_rounding_leads_out_of_the_bounds(
    random_generator: np.random.Generator,
) -> None:
    low = random_generator.normal(size=(1000,)).astype(np.float32)
    space = gymnasium.spaces.Box(low, low + np.float32(0.1))
    env = InGraphBatchEnv(as_batch_env(CountingBatchEnv([9], action_space=space)))
    for extreme in (-1.0, 1.0, 1e30):
        assert space.contains(env.to_env_action(tf.fill([1, 1000], extreme)).numpy()[0])


def test_actions_keep_the_shape_of_their_space() -> None:
    space = gymnasium.spaces.Box(-1.0, 1.0, (2, 3))
    env = InGraphBatchEnv(as_batch_env(CountingBatchEnv([9, 9], action_space=space)))
    assert env.action_spec.shape.as_list() == [2, 6]
    assert env.to_env_action(tf.zeros([2, 6])).shape == (2, 2, 3)


def test_discrete_choices_start_where_the_space_starts() -> None:
    space = gymnasium.spaces.Discrete(3, start=-1)
    env = InGraphBatchEnv(as_batch_env(CountingBatchEnv([9, 9], action_space=space)))
    chosen = env.to_env_action(tf.constant([0, 2], tf.int64))
    assert chosen.dtype == space.dtype
    assert chosen.numpy().tolist() == [-1, 1]


def test_many_choices_have_the_shape_start_and_dtype_of_their_space() -> None:
    dtype: Any = np.int16
    start = np.array([[0, 7], [-3, 1]])
    space = SPACES.MultiDiscrete(np.array([[2, 3], [4, 5]]), dtype, start=start)
    env = InGraphBatchEnv(as_batch_env(CountingBatchEnv([9, 9], action_space=space)))
    assert (env.action_spec.shape, env.action_spec.dtype) == ([2, 4], tf.int64)
    rows = env.to_env_action(tf.constant([[0, 0, 0, 0], [1, 2, 3, 4]], tf.int64))
    assert rows.dtype == tf.int16
    assert rows.numpy().tolist() == [[[0, 7], [-3, 1]], [[1, 9], [0, 5]]]
    assert all(row in space for row in rows.numpy())


def test_bits_have_the_shape_and_dtype_of_their_space() -> None:
    space = SPACES.MultiBinary((2, 2))
    env = InGraphBatchEnv(as_batch_env(CountingBatchEnv([9], action_space=space)))
    assert (env.action_spec.shape, env.action_spec.dtype) == ([1, 4], tf.int64)
    rows = env.to_env_action(tf.constant([[0, 1, 1, 0]], tf.int64))
    assert rows.numpy().tolist() == [[[0, 1], [1, 0]]]
    assert rows.numpy()[0] in space


def test_an_exception_of_an_env_arrives_as_itself() -> None:
    class Failing(CountingBatchEnv):
        def step(self, actions: np.ndarray, out: Any = None) -> Any:
            raise EnvError("Env 1: boom", env_index=1)

    env = InGraphBatchEnv(as_batch_env(Failing([9, 9])))
    step = tf.function(env.step)
    with pytest.raises(EnvError, match="boom") as caught, env.original_errors():
        step(tf.zeros([2, 1]))
    assert caught.value.env_index == 1


def test_an_error_outlives_a_signal_handler_that_raises_meanwhile() -> None:
    class Interrupted(CountingBatchEnv):
        def step(self, actions: np.ndarray, out: Any = None) -> Any:
            raise KeyboardInterrupt

    env = InGraphBatchEnv(as_batch_env(Interrupted([9])))

    def step() -> None:
        try:
            tf.function(env.step)(tf.zeros([1, 1]))
        except tf.errors.UnknownError as error:
            raise RuntimeError("UnknownError replaced by KeyboardInterrupt") from error

    with pytest.raises(KeyboardInterrupt), env.original_errors():
        step()


def test_errors_of_the_graph_itself_pass_through() -> None:
    env = InGraphBatchEnv(as_batch_env(CountingBatchEnv([9])))
    with pytest.raises(tf.errors.InvalidArgumentError), env.original_errors():
        tf.debugging.assert_equal(1, 2)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_an_observation_that_is_not_finite_names_the_env(number: float) -> None:
    def observe(rows: np.ndarray) -> np.ndarray:
        return np.where((rows == [1.0, 2.0]).all(axis=1, keepdims=True), number, rows)

    env = InGraphBatchEnv(as_batch_env(CountingBatchEnv([9, 9], observe=observe)))
    with env.original_errors():
        env.step(tf.zeros([2, 1]))
    with (
        pytest.raises(EnvDataError, match=r"Env 1 .* finite observation leaf 0"),
        env.original_errors(),
    ):
        env.step(tf.zeros([2, 1]))


def test_a_reward_that_is_not_finite_names_the_env() -> None:
    env = InGraphBatchEnv(as_batch_env(CountingBatchEnv([9, 9])))
    with pytest.raises(EnvDataError, match=r"Env 0 .* finite reward, got nan"):
        env.check_finite(np.zeros((2, 2)), np.array([np.nan, 1.0]))


def test_unknown_spaces_are_refused_by_name() -> None:
    spaces: list[tuple[Any, Any, str]] = [
        (SPACES.Text(3), SPACES.Discrete(2), r"observation: .* got Text"),
        (SPACES.Dict(a=SPACES.Text(3)), SPACES.Discrete(2), r"observation\['a'\]"),
        (SPACES.Sequence(SPACES.Discrete(2)), SPACES.Discrete(2), "wrap the env to"),
        (SPACES.Discrete(2), SPACES.Dict(a=SPACES.Discrete(2)), r"Action space: .*a"),
        (SPACES.Discrete(2), SPACES.Text(3), r"Action space: .* Text.*wrap the env so"),
    ]
    for observation_space, action_space, message in spaces:
        env = CountingBatchEnv(
            [9], observation_space=observation_space, action_space=action_space
        )
        with pytest.raises(UnsupportedSpaceError, match=message):
            InGraphBatchEnv(as_batch_env(env))
