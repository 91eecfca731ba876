"""How envserve's wrappers behave, step by step."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils import seeding

from envserve.envs.registry import make_env
from envserve.errors import EnvStartError
from tests.envserve.scripted_env import Bounded, episode_observations, scripted, wrapped

# ActionRepeat.


def test_action_repeat_sums_rewards_and_returns_the_last_of_the_other_values() -> None:
    env = wrapped(inner := scripted(range(9)), "ActionRepeat", amount=3)
    env.reset()
    observation, reward, terminated, truncated, info = env.step(1)
    assert (float(observation), reward, terminated, truncated) == (
        3.0,
        6.0,
        False,
        False,
    )
    assert info == {"step": 3}
    assert inner.actions == [1, 1, 1]


def test_action_repeat_stops_when_the_episode_ends() -> None:
    env = wrapped(inner := scripted(range(5)), "ActionRepeat", amount=3)
    env.reset()
    env.step(1)
    assert env.step(2)[:4] == (4.0, 4.0, True, False)
    assert inner.actions == [1, 1, 1, 2]
    limited = wrapped(
        gymnasium.wrappers.TimeLimit(scripted(range(9)), 2), "ActionRepeat", amount=3
    )
    limited.reset()
    assert limited.step(0)[:4] == (2.0, 3.0, False, True)


# FrameDelta.


def test_frame_delta_returns_differences_and_zero_at_each_reset() -> None:
    env = wrapped(scripted([[1, 5], [4, 5], [2, 9]]), "FrameDelta")
    assert env.observation_space == spaces.Box(-9.0, 9.0, (2,), np.float32)
    for _ in range(2):
        deltas = episode_observations(env)
        np.testing.assert_array_equal(deltas, [[0, 0], [3, 0], [-2, 4]])
        assert all(env.observation_space.contains(delta) for delta in deltas)


def test_frame_delta_of_bytes_does_not_overflow() -> None:
    env = wrapped(scripted([[250], [5]], "uint8", 0, 255), "FrameDelta")
    assert env.observation_space == spaces.Box(-255, 255, (1,), np.int16)
    deltas = episode_observations(env)
    assert [delta.dtype for delta in deltas] == [np.int16] * 2
    assert [int(delta[0]) for delta in deltas] == [0, -245]


def test_frame_delta_does_not_hide_a_wrong_dtype() -> None:
    env = scripted([[1], [2]])
    env.array = env.array.astype(np.float64)
    assert wrapped(env, "FrameDelta").reset()[0].dtype == np.float64


def test_frame_delta_accepts_infinite_bounds_but_no_long_integers() -> None:
    env = wrapped(scripted([[1], [2]], low=-np.inf, high=np.inf), "FrameDelta")
    assert env.observation_space == spaces.Box(-np.inf, np.inf, (1,), np.float32)
    with pytest.raises(EnvStartError, match="integers of at most 32 bits"):
        wrapped(scripted([[1], [2]], "int64"), "FrameDelta")


# FrameHistory.


def test_frame_history_returns_the_requested_past() -> None:
    """This includes the oldest index, for which the buffer needs one more frame."""
    env = wrapped(
        scripted([[1], [2], [3], [4], [5]]), "FrameHistory", past_indices=[0, 1, 3]
    )
    assert env.observation_space == spaces.Box(0.0, 9.0, (3, 1), np.float32)
    for _ in range(2):
        histories = [history[:, 0].tolist() for history in episode_observations(env)]
        assert histories == [[1, 1, 1], [2, 1, 1], [3, 2, 1], [4, 3, 1], [5, 4, 2]]


def test_frame_history_may_exclude_the_present() -> None:
    env = wrapped(scripted([1, 2, 3, 4]), "FrameHistory", past_indices=[2])
    assert [float(history[0]) for history in episode_observations(env)] == [1, 1, 1, 2]


def test_frame_history_concatenates_along_the_first_axis() -> None:
    env = wrapped(
        scripted([[[1, 2]], [[3, 4]]], "uint8", 0, 255),
        "FrameHistory",
        past_indices=[1, 0],
        flatten=True,
    )
    assert env.observation_space == spaces.Box(0, 255, (2, 2), np.uint8)
    first, second = episode_observations(env)
    assert (first.dtype, first.tolist()) == (np.uint8, [[1, 2], [1, 2]])
    assert second.tolist() == [[1, 2], [3, 4]]
    scalars = wrapped(
        scripted([1, 2]), "FrameHistory", past_indices=[0, 1], flatten=True
    )
    assert scalars.observation_space.shape == (2,)
    assert scalars.reset()[0].tolist() == [1, 1]


# RandomStart.


class Walk(gymnasium.Env[Any, Any]):
    """Observes its number of steps and its actions; ends at a given step."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(1000)

    def __init__(self, length: int = 10**6, is_seeded: bool = True) -> None:
        self._length = length
        self._is_seeded = is_seeded
        self.num_resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self._is_seeded:
            super().reset(seed=seed)
        self.num_resets += 1
        self._seen = np.zeros(2)
        return self._seen.copy(), {}

    def step(self, action: Any) -> Any:
        self._seen += [1, (1 + self._seen[0]) * action]
        return self._seen.copy(), 0.0, self._seen[0] >= self._length, False, {}


def starts(env: Any, seed: int, count: int = 40) -> list[tuple[float, ...]]:
    first = [env.reset(seed=seed)[0]]
    return [tuple(o) for o in first + [env.reset()[0] for _ in range(count - 1)]]


@pytest.mark.parametrize("is_seeded", [True, False])
def test_random_start_is_determined_by_the_seed(is_seeded: bool) -> None:
    """This holds even for envs that ignore the seed."""
    env = wrapped(Walk(is_seeded=is_seeded), "RandomStart", max_steps=5)
    first = starts(env, 3)
    assert starts(env, 3) == first
    other = wrapped(Walk(is_seeded=is_seeded), "RandomStart", max_steps=5)
    assert starts(other, 3) == first
    assert starts(other, 4) != first
    assert {number for number, _ in first} == {0, 1, 2, 3, 4, 5}
    assert len({actions for number, actions in first if number == 1}) > 1


def test_random_start_draws_from_the_generator_that_replays_restore() -> None:
    env = wrapped(Walk(), "RandomStart", max_steps=5)
    starts(env, 3)
    state = env.unwrapped.np_random.bit_generator.state
    following = [tuple(env.reset()[0]) for _ in range(5)]
    other = wrapped(Walk(), "RandomStart", max_steps=5)
    other.reset()
    other.unwrapped.np_random.bit_generator.state = state
    assert [tuple(other.reset()[0]) for _ in range(5)] == following


def test_random_start_does_not_reseed_a_generator_that_the_env_assigned() -> None:
    class Own(Walk):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if seed is not None:
                self.np_random, _ = seeding.np_random(seed + 1)
            return super().reset()

    expected = wrapped(Walk(), "RandomStart", max_steps=5)
    assert starts(wrapped(Own(), "RandomStart", max_steps=5), 3) == starts(expected, 4)


def test_random_start_resets_again_when_an_episode_ends_during_it() -> None:
    env = wrapped(Walk(length=3), "RandomStart", max_steps=5)
    assert {number for number, _ in starts(env, 0)} == {0, 1, 2}


def test_random_start_takes_no_steps_if_every_episode_ends_at_once() -> None:
    env = wrapped(inner := Walk(length=1), "RandomStart", max_steps=10_000)
    assert [number for number, _ in starts(env, 0, 1)] == [0]
    assert inner.num_resets == 11


# StaggerEpisodes.


def lengths(env: Any, seed: int, count: int = 2) -> list[int]:
    """Return the lengths of episodes; the first reset passes a seed."""
    found = []
    for number in range(count):
        env.reset(seed=seed if number == 0 else None)
        steps = 1
        while True:
            _, _, terminated, truncated, _ = env.step(0)
            if terminated or truncated:
                break
            steps += 1
        found.append(steps)
    return found


def limited(limit: int | None, length: int = 10**6) -> Any:
    env: Any = Walk(length)
    env.spec = gymnasium.envs.registration.EnvSpec("Walk-v0")
    if limit is not None:
        env = gymnasium.wrappers.TimeLimit(env, limit)
    return wrapped(env, "StaggerEpisodes")


def test_staggered_first_episodes_end_anywhere_up_to_the_limit() -> None:
    env = limited(20)
    both = np.array([lengths(env, seed) for seed in range(400)])
    assert set(both[:, 0]) == set(range(1, 21))
    # The mean of 1..20 is 10.5; the mean of 400 draws has a standard error of 0.29.
    assert abs(both[:, 0].mean() - 10.5) < 1.5
    assert set(both[:, 1]) == {20}
    assert lengths(limited(20), 7) == lengths(env, 7)


def test_a_staggered_episode_is_unchanged_until_it_is_truncated() -> None:
    plain, env = make_env("Pendulum-v1", {}), make_env("Pendulum-v1", {})
    env = wrapped(env, "StaggerEpisodes")
    assert env.reset(seed=3)[0].tolist() == plain.reset(seed=3)[0].tolist()
    assert env.step([0.1])[0].tolist() == plain.step([0.1])[0].tolist()
    assert env.reset()[0].tolist() == plain.reset()[0].tolist()


def test_staggering_does_not_change_shorter_episodes_or_envs_without_a_limit() -> None:
    assert {tuple(lengths(limited(10**6, length=5), seed)) for seed in range(9)} == {
        (5, 5)
    }
    assert lengths(limited(None, length=30), 3) == [30, 30]
    env = limited(1)
    env.reset(seed=0)
    assert env.step(0)[2:4] == (False, True)


def test_staggered_episodes_end_within_the_lowest_of_several_limits() -> None:
    inner = gymnasium.wrappers.TimeLimit(limited(None, length=30), 4)
    env = wrapped(gymnasium.wrappers.TimeLimit(inner, 1000), "StaggerEpisodes")
    assert {lengths(env, seed)[0] for seed in range(50)} == {1, 2, 3, 4}


def test_the_limit_of_an_env_without_a_spec_is_known() -> None:
    env = wrapped(gymnasium.wrappers.TimeLimit(Walk(30), 4), "StaggerEpisodes")
    assert {lengths(env, seed)[0] for seed in range(50)} == {1, 2, 3, 4}


# RangeNormalize.


BOX = spaces.Box(np.array([0, -4], np.float32), np.array([10, 4], np.float32))


def test_range_normalize_scales_observations_and_actions() -> None:
    env = wrapped(Bounded(BOX, BOX), "RangeNormalize")
    unit = spaces.Box(-1.0, 1.0, (2,), np.float32)
    assert (env.observation_space, env.action_space) == (unit, unit)
    np.testing.assert_allclose(env.reset()[0], [-1, -1])
    for action in ([-1, 1], [0, 0], [0.5, -0.5]):
        seen = env.step(np.array(action, np.float32))[0]
        assert seen.dtype == np.float32
        np.testing.assert_allclose(seen, action, atol=1e-6)
    env = wrapped(Bounded(BOX, BOX), "RangeNormalize", observation=False)
    np.testing.assert_allclose(
        env.step(np.array([0.5, -0.5], np.float32))[0], [7.5, -2]
    )
    env = wrapped(Bounded(BOX, spaces.Discrete(2)), "RangeNormalize", action=False)
    assert env.action_space == spaces.Discrete(2)


def test_range_normalize_converts_bytes_to_floats() -> None:
    space = spaces.Box(0, 255, (2,), np.uint8)
    env = wrapped(Bounded(space, BOX), "RangeNormalize", action=False)
    assert env.observation_space == spaces.Box(-1.0, 1.0, (2,), np.float32)
    seen = env.step(np.array([0, 255], np.uint8))[0]
    assert (seen.dtype, seen.tolist()) == (np.float32, [-1, 1])


@pytest.mark.parametrize(
    ("dtype", "bounds"),
    [
        (np.float32, ([0, -np.inf], [1, np.inf])),
        (np.float32, ([0, -3.4e38], [1, 3.4e38])),
        (np.float32, ([0, 1], [1, 1])),
        (np.int32, ([0, -np.inf], [1, 1])),
        (np.int8, ([0, 1], [1, np.inf])),
    ],
)
@pytest.mark.parametrize("part", ["observation", "action"])
def test_range_normalize_rejects_bounds_without_a_finite_range(
    part: str, dtype: Any, bounds: Any
) -> None:
    low, high = (np.array(bound, np.float32) for bound in bounds)
    space = spaces.Box(low, high, dtype=dtype)
    env = Bounded(space, BOX) if part == "observation" else Bounded(BOX, space)
    with pytest.raises(
        EnvStartError, match=rf"finite bounds.*at \[1\]; set {part} = false"
    ):
        wrapped(env, "RangeNormalize")
    assert wrapped(env, "RangeNormalize", **{part: False}) is not None
