"""Errors from `make` and `make_vec` name the options as the user wrote them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from envserve import make, make_vec
from envserve.client.make_vec import make_batch
from envserve.client.single_env import Env
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
        (make_vec, {"sutton_barto_reward": True}, "'sutton_barto_reward'.*env_kwargs"),
        (make_vec, {"vectorization_mode": "async"}, "'vectorization_mode'"),
        (
            make_vec,
            {"step_timeouts": 2},
            "'step_timeouts'; did you mean step_timeout?",
        ),
        (make_vec, {"num_worker": 2}, "'num_worker'; did you mean num_workers?"),
        (
            make_vec,
            {"conect_timeout": 2, "addresses": [SERVER]},
            "'conect_timeout'; did you mean connect_timeout?",
        ),
        (
            make_vec,
            {"step_timeout": 2, "addresses": [SERVER]},
            "'step_timeout'; it is set on the server",
        ),
        (make, {"address": [SERVER]}, f"a list of addresses.*{SERVER}"),
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


def test_render_mode_is_passed_as_in_gymnasium() -> None:
    with contextlib.closing(
        make_vec("CartPole-v1", 1, num_workers=1, render_mode="rgb_array")
    ) as envs:
        assert envs.render_mode == "rgb_array"
        assert envs.spec is not None
        assert envs.spec.kwargs["render_mode"] == "rgb_array"


BOX, PAIR = gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(2)


@pytest.mark.parametrize(
    ("env", "actions"),
    [
        ("CartPole-v1", [0.0, np.array([0]), None, 2]),
        ("Pendulum-v1", [np.zeros(2), None, [[0.0], [0.0, 1.0]], {}]),
    ],
)
def test_a_single_env_rejects_actions_outside_its_space(
    env: str, actions: list[Any]
) -> None:
    with contextlib.closing(make(env)) as one:
        with pytest.raises(ResetNeeded, match="before the first step"):
            one.step(actions[0])
        one.reset()
        for action in actions:
            with pytest.raises(ActionError, match="action"):
                one.step(action)
        one.step(one.action_space.sample())
    for use in (one.reset, partial(one.step, 0), one.render):
        with pytest.raises(ClosedEnvironmentError, match=f"^{env}: .* already closed"):
            use()


def test_a_single_env_accepts_nested_actions() -> None:
    space = gymnasium.spaces.Dict({"push": BOX, "jump": PAIR})
    batch = _FakeBatch(space)
    env = Env(batch)  # type: ignore[arg-type]
    with pytest.raises(ActionError, match=r"expected a dict with .*; got \['push'\]"):
        env.step({"push": [0.5]})
    with contextlib.suppress(KeyError):
        env.step({"push": [0.5], "jump": 1})
    assert batch.actions == {"push": [[0.5]], "jump": [1]}


class _FakeBatch:
    observation_space = PAIR

    def __init__(self, action_space: gymnasium.Space[Any]) -> None:
        self.action_space = action_space

    def get_attr(self, name: str, rows: Any = None) -> list[Any]:
        return [{} if name == "metadata" else None]

    def step(self, actions: Any) -> Any:
        self.actions = actions
        raise KeyError


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
