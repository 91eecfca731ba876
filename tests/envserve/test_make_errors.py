"""Errors from `make` and `make_vec` name the options as the user wrote them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode

from envserve import make, make_vec
from envserve.client import BatchEnv
from envserve.client.make_vec import make_batch
from envserve.errors import ActionError, LocalProtocolError
from envserve.pool.replay import load_repro
from tests.oracle.probe_envs import MODULE

SERVER = "tcp://127.0.0.1:1"
pytestmark = pytest.mark.usefixtures("one_launcher")


@pytest.mark.parametrize(
    ("make_one", "options", "error"),
    [
        (make_vec, {"autoreset": "same_step"}, "expected autoreset_mode='SameStep'"),
        (make, {"autoreset": "same_step"}, "autoreset: expected no value, because"),
        (make, {"autoreset_mode": "SameStep"}, "autoreset_mode: expected no value"),
        (make_vec, {"on_fault": "rase"}, "on_fault: expected one of .*; got 'rase'"),
        (
            make_vec,
            {"on_fault": "rase", "addresses": [SERVER]},
            "on_fault: expected one of",
        ),
        (make_vec, {"autoreset_mode": "samestep"}, "'SameStep', 'NextStep' or 'Dis"),
        (make_vec, {"vectorization_mode": "threads"}, "or no value, .*got 'threads'"),
        (make_vec, {"vector_kwargs": {"copies": 1}}, "autoreset_mode, copy,.*copies=1"),
        (make_vec, {"vector_kwargs": {"worker": print}}, "vector_kwargs: .*worker=<"),
        (make_vec, {"step_timeouts": 2}, "'step_timeouts'; did you mean step_timeout?"),
        (make_vec, {"step_timeout": "2"}, "^step_timeout: expected a number; got '2'"),
        (make_vec, {"num_worker": 2}, "'num_worker'; did you mean num_workers?"),
        (make_vec, {"workers": 2}, "'workers'; did you mean num_workers?"),
        (make_vec, {"step_timeout_seconds": 2}, "did you mean step_timeout?"),
        (
            partial(BatchEnv.connect, addresses=[SERVER]),
            {"num_envs": 1, "workers": 2},
            "'workers'; num_workers is set on the server",
        ),
        (
            make_vec,
            {"conect_timeout": 2, "addresses": [SERVER]},
            "'conect_timeout'; did you mean connect_timeout?",
        ),
        (
            make_vec,
            {"step_timeout": 2, "addresses": [SERVER]},
            "step_timeout is set on the server",
        ),
        (make, {"address": [SERVER]}, f"address: expected one address.*{SERVER}"),
        (make, {"addresses": [SERVER]}, "addresses: expected no value.*as `address`"),
        (make, {"num_envs": 2}, "num_envs: expected no value"),
        (make, {"sed": 1}, "'sed'; did you mean seed[?] Pass it in env_kwargs if"),
    ],
)
def test_an_unknown_option_is_rejected(
    make_one: Callable[..., Any], options: dict[str, Any], error: str
) -> None:
    given: dict[str, Any] = {"num_envs": 1} if make_one is make_vec else {}
    with pytest.raises((TypeError, ValueError), match=error):
        make_one("CartPole-v1", **given, **options)


@pytest.mark.parametrize("name", ["autoreset", "autoreset_mode", "num_splits"])
def test_options_that_an_adapter_sets_cannot_be_overridden(name: str) -> None:
    fixed = {"autoreset": "disabled", "num_splits": 2}
    given: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=rf"{name}: expected no value, .*{name}=1"):
        make_batch("CartPole-v1", 2, None, fixed, **given)


def test_none_means_the_default_of_an_option() -> None:
    given: dict[str, Any] = dict.fromkeys(["infos", "nonfinite", "padding_after"])
    with make_batch("CartPole-v1", 1, None, {}, **given) as batch:
        pool: Any = batch.lanes[0]
        assert (pool.config.infos, pool.config.nonfinite) == ("all", "pass")
    given["actions"] = None
    with contextlib.closing(make("Pendulum-v1", **given)) as env:
        env.reset()
        with warnings.catch_warnings(action="ignore"):
            env.step([5.0])  # is passed to the env
    with contextlib.closing(make_vec("Pendulum-v1", **given)) as envs:
        envs.reset()
        with warnings.catch_warnings(action="ignore"):
            envs.step([[5.0]])


def test_the_arguments_of_gymnasium_make_vec_are_accepted() -> None:
    given: dict[str, Any] = {
        "id": "CartPole-v1",
        "vector_kwargs": {"autoreset_mode": "Disabled", "shared_memory": False},
        "sutton_barto_reward": True,
        "max_episode_steps": 1,
    }
    with pytest.warns(UserWarning, match="'async' has no effect"):
        envs = make_vec(num_envs=2, vectorization_mode="async", **given)
    with contextlib.closing(envs):
        assert envs.autoreset_mode is AutoresetMode.DISABLED
        envs.reset()
        _, reward, _, truncated, _ = envs.step([0, 0])
        assert (reward.tolist(), truncated.tolist()) == ([0.0] * 2, [True] * 2)
    with pytest.warns(UserWarning, match="'sync' has no effect"):
        one: Any = make_vec("CartPole-v1", 2, "sync")
    one.close()
    with contextlib.closing(
        make_vec("CartPole-v1", 2, "vector_entry_point", num_workers=1)
    ) as vectorized:
        assert vectorized.call("num_envs") == (2, 2)
    limit: Any = 1  # the second argument of `gymnasium.make` is `max_episode_steps`
    with contextlib.closing(make("CartPole-v1", limit)) as env:
        env.reset()
        assert env.step(0)[3]


@pytest.mark.parametrize("name", ["same_step", "SameStep", AutoresetMode.SAME_STEP])
def test_an_autoreset_mode_has_several_spellings(name: str) -> None:
    with contextlib.closing(make_vec("CartPole-v1", autoreset_mode=name)) as envs:
        assert envs.autoreset_mode is AutoresetMode.SAME_STEP
        assert envs.num_envs == 1


def test_the_arguments_of_gymnasium_make_are_accepted() -> None:
    given: Any = {"sutton_barto_reward": True}
    spec = gymnasium.spec("CartPole-v1")
    with contextlib.closing(
        make(spec, max_episode_steps=1, disable_env_checker=True, **given)
    ) as env:
        env.reset()
        assert env.step(0)[1:4] == (0.0, False, True)
        assert env.spec is not None
        with contextlib.closing(make(env.spec)) as other:
            other.reset()
            assert other.step(0)[1:4] == (0.0, False, True)


def test_the_spec_of_another_vector_env_makes_an_equal_one() -> None:
    given: Any = {"num_envs": 3, "is_slippery": False}
    for make_other in (gymnasium.make_vec, make_vec):
        with contextlib.closing(make_other("FrozenLake-v1", **given)) as other:
            assert other.spec is not None
            with contextlib.closing(make_vec(other.spec)) as envs:
                assert envs.num_envs == 3
                assert envs.call("nrow") == (4, 4, 4)
                envs.reset()
                assert envs.step([2, 2, 2])[0].tolist() == [1, 1, 1]


def test_a_keyword_like_an_option_is_an_argument_of_an_env_that_takes_it() -> None:
    def make_cart(num_env: int) -> gymnasium.Env[Any, Any]:
        assert num_env == 3
        return gymnasium.make("CartPole-v1")

    given: Any = {"num_env": 3}
    make_vec(make_cart, **given).close()
    with pytest.raises(TypeError, match="'num_env'; did you mean num_envs"):
        make_vec("my_file.py:MyEnv", **given)  # not imported in this process


def test_render_mode_is_passed_as_in_gymnasium() -> None:
    with contextlib.closing(
        make_vec("CartPole-v1", 1, num_workers=1, render_mode="rgb_array")
    ) as envs:
        assert envs.render_mode == "rgb_array"
        assert envs.spec is not None
        assert envs.spec.kwargs["render_mode"] == "rgb_array"


@pytest.mark.parametrize(
    ("env", "actions"),
    [
        ("CartPole-v1", [0.5, np.array([0, 1]), None, np.nan]),
        ("Pendulum-v1", [np.zeros(2), None, [[0.0], [0.0, 1.0]], {}]),
    ],
)
def test_a_single_env_rejects_actions_outside_its_space(
    env: str, actions: list[Any]
) -> None:
    with contextlib.closing(make(env)) as one:
        with pytest.raises(ResetNeeded, match="before the next step"):
            one.step(actions[0])
        one.reset()
        for action in actions:
            with pytest.raises(ActionError, match="action"):
                one.step(action)
        one.step(one.action_space.sample())
    for use in (one.reset, partial(one.step, 0), one.render):
        with pytest.raises(ClosedEnvironmentError, match=f"^{env}: .* already closed"):
            use()


def test_the_error_about_an_ended_episode_names_the_call_that_resets_it() -> None:
    name = "envserve/Faulty-v0"
    options: dict[str, Any] = {"import_modules": [MODULE]}
    with contextlib.closing(
        make_vec(name, 1, num_workers=1, autoreset_mode="Disabled", **options)
    ) as envs:
        with pytest.raises(ResetNeeded):
            envs.step([0])
        envs.reset()
        envs.step([1])
        with pytest.raises(LocalProtocolError, match=r"reset\(options={'reset_mask'"):
            envs.step([0])


def test_making_envs_does_not_use_their_attributes(tmp_path: Path) -> None:
    name = "envserve/Faulty-v0"
    options: dict[str, Any] = {"import_modules": [MODULE]}
    options["crash_dir"] = str(tmp_path)
    with contextlib.closing(make_vec(name, 1, num_workers=1, **options)) as envs:
        envs.reset()
        envs.step([1])
    with contextlib.closing(make(name, **options)) as env:
        env.reset()
        env.step(1)
    first, second = tmp_path.iterdir()
    assert not load_repro(first).played.is_touched
    assert not load_repro(second).played.is_touched


def test_addresses_in_place_of_the_env_are_named() -> None:
    addresses: Any = ["tcp://sim1:5555"]
    with pytest.raises(TypeError, match=r"the list \['tcp://sim1:5555'\]; .*after"):
        BatchEnv.connect(addresses, ["CartPole-v1"], 4)
