"""`InGraphBatchEnv`: env actions, original errors, and unsupported spaces."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from envserve.client import StepResult
from envserve.errors import EnvError
from ppo.errors import EnvDataError, UnsupportedSpaceError
from ppo.in_graph_batch_env import InGraphBatchEnv, check_finite
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
        (SPACES.Box(-np.inf, np.inf, (1,), np.int64), [[7.4], [-7.0]], [[7], [-7]]),
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


def test_a_result_of_tensors_can_be_printed() -> None:
    env = batch_of(2)
    env.reset()
    texts = []

    @tf.function
    def step() -> None:
        texts.append(repr(env.step(tf.zeros(env.action_spec.shape))))

    step()
    texts.append(repr(env.step(tf.zeros(env.action_spec.shape))))
    for text in texts:
        assert text.startswith("StepResult(<tf.Tensor")


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
        (SPACES.Discrete(3, start=-1), tf.TensorSpec([2], tf.int64), [0, 2], [-1, 1]),
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
    """Return an env whose steps raise an error, and a graph function that steps it."""

    class FailingBatchEnv(CountingBatchEnv):
        def step(self, actions: np.ndarray, out: StepResult | None = None) -> Any:
            raise error

    env = in_graph(FailingBatchEnv([9]))
    return env, tf.function(lambda: env.step(tf.zeros([1, 1])))


def test_a_loop_in_a_graph_steps_the_envs() -> None:
    fake = CountingBatchEnv([2, 9], terminates=[True, False], lost=frozenset({(1, 1)}))
    env = in_graph(fake)

    @tf.function
    def play(num_steps: tf.Tensor) -> Any:
        result = env.step(tf.zeros([2, 1]))
        for _ in tf.range(num_steps - 1):
            result = env.step(tf.fill([2, 1], 9.0))
        return result

    result = play(tf.constant(2))
    assert [actions.ravel().tolist() for actions in fake.actions] == [[0, 0], [1, 1]]
    assert result.observation.numpy().tolist() == [[0, 0], [1, 0]]
    assert result.final_observation.numpy()[0].tolist() == [0, 2]
    assert result.reward.numpy().tolist() == [1.0, 0.0]
    assert result.terminated.numpy().tolist() == [True, False]
    assert result.truncated.numpy().tolist() == [False, True]
    assert result.valid.numpy().tolist() == [True, False]
    assert result.observation.shape == [2, 2]


def test_a_step_returns_nested_observations() -> None:
    space = SPACES.Dict(b=SPACES.Box(-1, 99, (1,)), a=SPACES.Discrete(99))

    def observe(rows: np.ndarray) -> Any:
        return {"b": rows[:, 1:].astype(np.float32), "a": rows[:, 1].astype(np.int64)}

    env = batch_of(2, observation_space=space, observe=observe)
    result = env.step(tf.zeros([2, 1]))
    assert result.observation["a"].numpy().tolist() == [1, 1]
    assert result.observation["b"].numpy().tolist() == [[1.0], [1.0]]


def test_a_step_with_a_number_that_is_not_finite_raises() -> None:
    env = batch_of(2, observe=lambda rows: rows * np.nan)
    with pytest.raises(EnvDataError, match="Env 0"), env.original_errors():
        env.step(tf.zeros([2, 1]))


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
        check_finite(env.env, np.zeros((2, 2)), np.array([np.nan, 1.0]))


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
