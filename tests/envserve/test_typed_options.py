"""Type checkers check the options of `make_vec` and `make`."""

from __future__ import annotations

import inspect

import gymnasium
import pytest
from gymnasium.wrappers import ClipAction

import envserve
from envserve.client import BatchEnv
from envserve.client.make_vec import Options


def test_misspelt_options_are_type_errors() -> None:
    """If mypy accepted one of these calls, it would report an unused comment."""
    with pytest.raises(TypeError, match="'num_worker'; did you mean num_workers"):
        envserve.make_vec("CartPole-v1", num_worker=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'step_timeot'; did you mean step_timeout"):
        envserve.make_vec("CartPole-v1", step_timeot=1.0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="seed: expected an int; got 'x'"):
        envserve.make_vec("CartPole-v1", seed="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'sed'; did you mean seed"):
        envserve.make("CartPole-v1", sed=1)  # type: ignore[call-arg]


def make_envs_with_valid_options() -> None:
    """Never called: if a type of an option is too narrow, mypy reports an error."""
    envserve.make_vec("A-v0", 2, num_workers=1, wrappers=[ClipAction, "ClipReward"])
    envserve.make_vec("A-v0", 2, ["sim1"], env_kwargs={"size": 1})
    envserve.make_vec([lambda: gymnasium.make("A-v0")], step_timeout=1.0)
    envserve.make_vec(env_fns=[lambda: gymnasium.make("A-v0")], seed=None)
    envserve.make_vec(gymnasium.spec("A-v0"), vectorization_mode="async")
    envserve.make("A-v0", max_episode_steps=3, env_kwargs={"size": 1})
    envserve.make(gymnasium.spec("A-v0"), "sim1", wrappers=[ClipAction], seed=1)


def test_all_options_of_batches_are_typed() -> None:
    explicit = {"cls", "env_name", "num_envs", "num_workers", "addresses", "options"}
    for function in (BatchEnv.local, BatchEnv.connect):
        names = set(inspect.signature(function).parameters)
        assert names - explicit <= set(Options.__annotations__)
