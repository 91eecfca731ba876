"""EnvPool vector envs as blocks: seeds, autoreset modes, `gymnasium.make_vec`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import envserve
from envserve.client import BatchEnv
from envserve.errors import EnvError, EnvStartError

NAME = "envpool:CartPole-v1"
NUM_ENVS = 6


def batch(workers: int, **options: Any) -> BatchEnv:
    options = {"seed": 5, "vectorized": True, **options}
    return BatchEnv.local(NAME, NUM_ENVS, workers, **options)


def play(env: BatchEnv) -> list[Any]:
    draws = np.random.default_rng(0)
    with env:
        seen: list[Any] = [env.reset()]
        for _ in range(60):
            result = env.step(draws.integers(0, 2, NUM_ENVS))
            seen.append(result._replace(infos={}))
            ended = np.flatnonzero(result.terminated | result.truncated)
            if env.autoreset == "disabled" and ended.size:
                seen[-1].observation[ended] = env.reset(ended)
    return seen


def test_rows_depend_only_on_their_seeds_for_any_number_of_workers() -> None:
    np.testing.assert_equal(play(batch(3)), play(batch(1)))


def test_unseeded_rows_differ_between_workers_and_between_batches() -> None:
    with batch(3, seeded=False) as first, batch(3, seeded=False) as second:
        observations = np.concatenate([first.reset(), second.reset()])
    assert len(np.unique(observations, axis=0)) == 2 * NUM_ENVS


def test_resets_by_the_caller_start_the_same_episodes() -> None:
    np.testing.assert_equal(play(batch(1, autoreset="disabled")), play(batch(1)))


def test_a_reset_with_seeds_restarts_the_rows() -> None:
    with batch(1) as env:
        first = env.reset(seeds=[*range(NUM_ENVS)])
        env.step([0] * NUM_ENVS)
        np.testing.assert_equal(env.reset(seeds=[*range(NUM_ENVS)]), first)
        with pytest.raises(EnvError, match="expected no options with seeds"):
            env.reset([1], seeds=[3])


def test_make_vec_returns_the_same_rows() -> None:
    envs = envserve.make_vec(NAME, NUM_ENVS, num_workers=1, seed=5, vectorized=True)
    with batch(1, autoreset="next_step") as env:
        np.testing.assert_equal(envs.reset()[0], env.reset())
        for _ in range(60):
            actions = np.ones(NUM_ENVS, np.int64)
            observation, rewards, *ends, _ = envs.step(actions)
            result = env.step(actions)
            np.testing.assert_equal(observation, result.observation)
            np.testing.assert_equal(rewards, result.reward)
            np.testing.assert_equal(ends, [result.terminated, result.truncated])
    envs.close()


def test_an_env_without_a_single_form_is_an_error() -> None:
    text = "exists only as a vector env; pass vectorized=True"
    with pytest.raises(EnvStartError, match=text):
        batch(1, vectorized=False)
