"""`InGraphBatchEnv`: env actions, original errors, and unsupported spaces."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from envserve.errors import EnvError
from ppo.errors import EnvDataError, UnsupportedSpaceError
from ppo.in_graph_batch_env import InGraphBatchEnv
from tests.ppo.fakes import CountingBatchEnv, in_graph

SPACES = gymnasium.spaces
INT16: Any = np.int16
START = np.array([[0, 7], [-3, 1]])


def batch_of(num_envs: int, **named: Any) -> InGraphBatchEnv:
    return in_graph(CountingBatchEnv([9] * num_envs, **named))


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (SPACES.Box(-2.0, 2.0, (1,)), [[0.5], [-9.0]], [[1.0], [-2.0]]),
        (SPACES.Box(0.0, 1.0, (1,), np.float64), [[0.0], [1.0]], [[0.5], [1.0]]),
        (SPACES.Box(-np.inf, np.inf, (1,)), [[7.0], [-7.0]], [[7.0], [-7.0]]),
        (SPACES.Box(0.0, np.inf, (1,)), [[7.0], [-7.0]], [[7.0], [0.0]]),
        (SPACES.Box(0, 255, (1,), np.uint8), [[1.5], [-1.5]], [[255], [0]]),
        (SPACES.Box(-2, 2, (1,), np.int8), [[0.9], [-0.9]], [[2], [-2]]),  # rounded
        (SPACES.Box(-10, 10, (1,), np.int8), [[20.0], [-20.0]], [[10], [-10]]),
        (SPACES.Box(-1, 1, (1,), np.int8), [[200.0], [-200.0]], [[1], [-1]]),
    ],
)
def test_policy_actions_span_the_bounds_and_are_clipped(
    space: gymnasium.spaces.Box, action: list[list[float]], expected: list[list[float]]
) -> None:
    env = batch_of(2, action_space=space)
    env_action = env.to_env_action(tf.constant(action)).numpy()
    assert env_action.dtype == space.dtype
    assert env_action.tolist() == expected


def test_rounding_does_not_exceed_the_bounds(
    random_generator: np.random.Generator,
) -> None:
    low = random_generator.normal(size=(1000,)).astype(np.float32)
    space = gymnasium.spaces.Box(low, low + np.float32(0.1))
    env = batch_of(1, action_space=space)
    for extreme in (-1.0, 1.0, 1e30):
        assert space.contains(env.to_env_action(tf.fill([1, 1000], extreme)).numpy()[0])


@pytest.mark.parametrize(
    ("space", "stored", "action", "expected"),
    [
        (
            SPACES.Box(-1.0, 1.0, (2, 3)),
            tf.TensorSpec([2, 6], tf.float32),
            [[0.0, 0.5, 1.0, 0.0, 0.0, -1.0]] * 2,
            [[[0.0, 0.5, 1.0], [0.0, 0.0, -1.0]]] * 2,
        ),
        (
            SPACES.Discrete(3, start=-1),
            tf.TensorSpec([2], tf.int64),
            [0, 2],
            [-1, 1],
        ),
        (
            SPACES.MultiDiscrete(np.array([[2, 3], [4, 5]]), INT16, start=START),
            tf.TensorSpec([2, 4], tf.int64),
            [[0, 0, 0, 0], [1, 2, 3, 4]],
            [[[0, 7], [-3, 1]], [[1, 9], [0, 5]]],
        ),
        (
            SPACES.MultiBinary((2, 2)),
            tf.TensorSpec([2, 4], tf.int64),
            [[0, 1, 1, 0]] * 2,
            [[[0, 1], [1, 0]]] * 2,
        ),
    ],
)
def test_env_actions_have_the_shape_start_and_dtype_of_their_space(
    space: gymnasium.Space[Any], stored: tf.TensorSpec, action: Any, expected: Any
) -> None:
    env = batch_of(2, action_space=space)
    assert env.action_spec == stored
    rows = env.to_env_action(tf.constant(action, stored.dtype)).numpy()
    assert rows.dtype == space.dtype
    assert rows.tolist() == expected
    assert all(row in space for row in rows)


def failing(error: BaseException) -> Any:
    """Return an env, and a graph function that calls Python code that fails."""
    env = batch_of(1)

    def fail() -> list[np.ndarray]:
        raise error

    return env, tf.function(lambda: env.host_call(fail, [], [tf.TensorSpec([1])]))


def test_exception_of_an_env_is_raised_unchanged() -> None:
    env, step = failing(EnvError("Env 1: boom", env_index=1))
    with pytest.raises(EnvError, match="boom") as caught, env.original_errors():
        step()
    assert caught.value.env_index == 1


def test_exception_is_raised_unchanged_if_a_signal_handler_raises_too() -> None:
    env, step = failing(KeyboardInterrupt())

    def interrupted_step() -> None:
        try:
            step()
        except tf.errors.UnknownError as error:
            raise RuntimeError("UnknownError replaced by KeyboardInterrupt") from error

    with pytest.raises(KeyboardInterrupt), env.original_errors():
        interrupted_step()


def test_errors_of_tensorflow_are_raised_unchanged() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError), batch_of(1).original_errors():
        tf.debugging.assert_equal(1, 2)


def test_error_for_a_reward_that_is_not_finite_names_the_env() -> None:
    env = batch_of(2)
    with pytest.raises(EnvDataError, match=r"Env 0 .* finite reward, got nan"):
        env.check_finite(np.zeros((2, 2)), np.array([np.nan, 1.0]))


def test_unsupported_spaces_raise_errors_that_name_them() -> None:
    spaces: list[tuple[Any, Any, str]] = [
        (SPACES.Text(3), SPACES.Discrete(2), r"observation: .* got Text"),
        (
            *(SPACES.Dict(a=SPACES.Text(3)), SPACES.Discrete(2)),
            r"observation\['a'\].* remove it with the wrapper FilterObservation",
        ),
        (SPACES.Dict({}), SPACES.Discrete(2), "at least one element"),
        (SPACES.Box(-1, 1, (0,)), SPACES.Discrete(2), "at least one element"),
        (SPACES.Sequence(SPACES.Discrete(2)), SPACES.Discrete(2), "wrap the env to"),
        (SPACES.Discrete(2), SPACES.Dict(a=SPACES.Discrete(2)), r"Action space: .*a"),
        (SPACES.Discrete(2), SPACES.Text(3), r"Action space: .* Text.*wrap the env so"),
    ]
    for observation_space, action_space, message in spaces:
        with pytest.raises(UnsupportedSpaceError, match=message):
            batch_of(1, observation_space=observation_space, action_space=action_space)
