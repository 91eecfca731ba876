"""The envs of the benchmarks sleep, compute and count as specified."""

from __future__ import annotations

import itertools
import time
from typing import Any

import gymnasium
import numpy as np
import pytest

from benchmarks.cases import envs
from envserve.envs.registry import import_env_modules, make_env

import_env_modules([envs.MODULE])


def no_sleep(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def count_until_end(env: gymnasium.Env[Any, Any]) -> int:
    for steps in itertools.count(1):
        _, _, terminated, truncated, _ = env.step(np.int64(0))
        if terminated or truncated:
            return steps
    raise AssertionError


def test_a_sleeping_env_sleeps_in_steps_and_resets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept = no_sleep(monkeypatch)
    env = envs.SleepEnv(step_seconds=0.5, reset_seconds=3.0, episode_length=2)
    env.reset(seed=0)
    assert count_until_end(env) == 2
    assert slept == [3.0, 0.5, 0.5]


def test_staggered_first_episodes_have_different_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_sleep(monkeypatch)
    env = envs.SleepEnv(episode_length=10, is_staggered=True)
    lengths = []
    for seed in range(12):
        env.reset(seed=seed)
        lengths.append(count_until_end(env))
    assert lengths == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 10, 9]
    env.reset()
    assert count_until_end(env) == 10


def test_a_busy_env_computes_for_its_step_time() -> None:
    env = envs.BusyEnv(step_seconds=0.01)
    env.reset(seed=0)
    began = time.thread_time()
    env.step(np.int64(0))
    assert time.thread_time() - began >= 0.01


def test_a_request_env_reports_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = no_sleep(monkeypatch)
    env = envs.RequestEnv()
    assert env.reset(seed=0)[0].tolist() == [-1, 0]
    assert env.step(np.array([7, 2000]))[0].tolist() == [7, 1]
    assert env.step(np.array([5, 0]))[0].tolist() == [5, 2]
    assert slept == [0.002, 0.0]


def test_a_timed_env_adds_up_the_time_of_the_wrapped_env() -> None:
    env = make_env("envserve/Timed-v0", {"env_name": "CartPole-v1"})
    plain = make_env("CartPole-v1", {})
    expected, _ = plain.reset(seed=3)
    began = time.perf_counter()
    observation, _ = env.reset(seed=3)
    seconds = env.get_wrapper_attr("seconds")
    env.step(np.int64(1))
    elapsed = time.perf_counter() - began
    np.testing.assert_array_equal(observation, expected)
    assert 0 < seconds < env.get_wrapper_attr("seconds") < elapsed


def test_observations_of_an_image_env_are_in_its_space() -> None:
    env = make_env("envserve/Image-v0", {})
    observation, _ = env.reset(seed=0)
    assert (observation.shape, observation.dtype) == ((84, 84, 4), np.uint8)
    assert env.observation_space.contains(observation)
