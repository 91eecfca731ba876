"""Advantages and value targets equal numbers computed by hand."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ppo.learning.returns import advantages_and_targets, next_values


def run(
    reward: list[float],
    value: list[float],
    next_value: list[float],
    *,
    terminated: tuple[int, ...] = (),
    truncated: tuple[int, ...] = (),
    invalid: tuple[int, ...] = (),
    discount: float = 0.5,
    gae_lambda: float = 0.5,
) -> tuple[list[float], list[float]]:
    """Return the advantages and targets of one env; flags are lists of steps."""

    def flags(steps: tuple[int, ...]) -> tf.Tensor:
        return tf.constant([[step in steps] for step in range(len(reward))])

    def column(numbers: list[float]) -> tf.Tensor:
        return tf.constant(numbers, tf.float32)[:, None]

    advantage, target = advantages_and_targets(
        reward=column(reward),
        value=column(value),
        next_value=column(next_value),
        terminated=flags(terminated),
        truncated=flags(truncated),
        valid=~flags(invalid),
        discount=discount,
        gae_lambda=gae_lambda,
    )
    return advantage[:, 0].numpy().tolist(), target[:, 0].numpy().tolist()


# delta = r + 0.5 * next - v = [1+2-2, 2+3-4, 3+4-6] = [1, 1, 1]; decay = 0.25.
REWARD = [1.0, 2.0, 3.0]
VALUE = [2.0, 4.0, 6.0]
NEXT = [4.0, 6.0, 8.0]


@pytest.mark.parametrize(
    ("next_value", "named", "advantage", "target"),
    [
        (NEXT, {}, [1 + 0.25 * 1.25, 1 + 0.25 * 1, 1.0], [3.3125, 5.25, 7.0]),
        # delta_1 = 2 + 0 - 4 = -2: no bootstrap, and no later delta is added.
        (NEXT, {"terminated": (1,)}, [1 + 0.25 * -2, -2.0, 1.0], [2.5, 2.0, 7.0]),
        # Termination takes precedence over truncation in the same step.
        (
            *(NEXT, {"terminated": (1,), "truncated": (1,)}),
            *([1 + 0.25 * -2, -2.0, 1.0], [2.5, 2.0, 7.0]),
        ),
        # next_value contains V(final) = 10: delta_1 = 2 + 5 - 4 = 3.
        (
            *([4.0, 10.0, 8.0], {"truncated": (1,)}),
            *([1 + 0.25 * 3, 3.0, 1.0], [3.75, 7.0, 7.0]),
        ),
        # Row 0 bootstraps from V(o_1) = 4, which is real; row 2 starts a new episode.
        (
            *(NEXT, {"invalid": (1,), "truncated": (1,)}),
            *([1.0, 0.0, 1.0], [3.0, 0.0, 7.0]),
        ),
        # lambda = 0: one-step errors.
        (NEXT, {"gae_lambda": 0.0}, [1.0, 1.0, 1.0], [3.0, 5.0, 7.0]),
        # lambda = 1: the first target is r_0 + r_1 / 2 + r_2 / 4 + V(o_3) / 8.
        (NEXT, {"gae_lambda": 1.0}, [1.75, 1.5, 1.0], [3.75, 5.5, 7.0]),
        (NEXT, {"discount": 0.0}, [-1.0, -2.0, -3.0], REWARD),
    ],
)
def test_advantages_and_targets_of_three_steps(
    next_value: list[float],
    named: dict[str, Any],
    advantage: list[float],
    target: list[float],
) -> None:
    assert run(REWARD, VALUE, next_value, **named) == (advantage, target)


@pytest.mark.parametrize("garbage", [1e9, -1e9, np.nan, np.inf])
def test_the_contents_of_an_invalid_row_do_not_matter(garbage: float) -> None:
    clean = run(REWARD, VALUE, NEXT, invalid=(1,), truncated=(1,))
    dirty = run(
        [1.0, garbage, 3.0], VALUE, [4.0, garbage, 8.0], invalid=(1,), truncated=(1,)
    )
    assert clean == dirty


def _random_sequences(
    generator: np.random.Generator, horizon: int, num_envs: int
) -> dict[str, Any]:
    shape = (horizon, num_envs)
    floats = {
        name: generator.normal(size=shape).astype(np.float32)
        for name in ("reward", "value", "next_value")
    }
    flags = {
        "terminated": generator.random(shape) < 0.1,
        "truncated": generator.random(shape) < 0.1,
        "valid": generator.random(shape) > 0.1,
    }
    return {**floats, **flags}


def _by_recursion(
    sequences: dict[str, np.ndarray], discount: float, gae_lambda: float
) -> np.ndarray:
    advantage = np.zeros_like(sequences["reward"])
    following = np.zeros(advantage.shape[1])
    for step in reversed(range(len(advantage))):
        row = {name: values[step] for name, values in sequences.items()}
        bootstrap = np.where(row["terminated"], 0, row["next_value"])
        delta = row["reward"] + discount * bootstrap - row["value"]
        done = row["terminated"] | row["truncated"]
        following = np.where(done, 0, following)
        following = np.where(row["valid"], delta + discount * gae_lambda * following, 0)
        advantage[step] = following
    return advantage


@pytest.mark.parametrize("horizon", [1, 2, 7, 128, 200])
def test_recursive_doubling_equals_the_recursion_over_time(
    random_generator: np.random.Generator, horizon: int
) -> None:
    sequences = _random_sequences(random_generator, horizon, 5)
    advantage, _ = advantages_and_targets(
        **{name: tf.constant(values) for name, values in sequences.items()},
        discount=0.99,
        gae_lambda=0.95,
    )
    np.testing.assert_allclose(
        advantage.numpy(), _by_recursion(sequences, 0.99, 0.95), atol=2e-5
    )


@pytest.mark.parametrize("jit_compile", [False, True])
def test_eager_and_graph_mode_agree(
    random_generator: np.random.Generator, jit_compile: bool
) -> None:
    sequences = {
        name: tf.constant(values)
        for name, values in _random_sequences(random_generator, 16, 3).items()
    }
    settings = {"discount": 0.9, "gae_lambda": 0.8}
    eager = advantages_and_targets(**sequences, **settings)
    compiled = tf.function(
        lambda: advantages_and_targets(**sequences, **settings), jit_compile=jit_compile
    )
    for left, right in zip(eager, compiled(), strict=True):
        np.testing.assert_allclose(left.numpy(), right.numpy(), atol=1e-6)


def test_next_values_use_the_final_observation_at_episode_ends() -> None:
    value = tf.constant([[1.0], [2.0], [3.0]])
    final_value = tf.constant([[10.0], [20.0]])
    done = tf.constant([[False], [True]])
    assert next_values(value, final_value, done).numpy().tolist() == [[2.0], [20.0]]
