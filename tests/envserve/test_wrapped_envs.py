"""Wrapped envs yield the same rows wherever they run; errors name the wrapper."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.envs.registry import make_env
from envserve.envs.seeding import env_seed
from envserve.errors import EnvStartError, UnknownEnv, WrapperError
from envserve.wrappers.specs import parse_wrappers

from .server_process import ServerProcess

CARTPOLE = "CartPole-v1"
NUM_ENVS = 5
NUM_STEPS = 60
WRAPPERS: list[dict[str, Any]] = [
    {"name": "RandomStart", "max_steps": 6},
    {"name": "ActionRepeat", "amount": 2},
    {"name": "TimeLimit", "max_episode_steps": 12},
    {"name": "FrameHistory", "past_indices": [0, 2], "flatten": True},
    {"name": "DtypeObservation", "dtype": "float64"},
]
USER_WRAPPERS = """
import gymnasium
from envserve.wrappers import Integer, register_wrapper

def scaled(env, by):
    return gymnasium.wrappers.TransformReward(env, lambda reward: reward * by)

register_wrapper("Scaled", scaled, {"by": Integer(1, 100, required=True)})
"""


def actions_of(step: int) -> np.ndarray[Any, Any]:
    return (np.arange(NUM_ENVS) + step // 3) % 2


def rows_of_a_run(batch: BatchEnv) -> list[list[np.ndarray[Any, Any]]]:
    with batch:
        rows = [[batch.reset().copy()]]
        for step in range(NUM_STEPS):
            result = batch.step(actions_of(step))
            assert result.valid.all()
            rows.append([np.array(array) for array in result[:-1]])
    return rows


def assert_equal_runs(runs: Sequence[Any]) -> None:
    first, *others = runs
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            for left, right in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(left, right)


def test_rows_do_not_depend_on_where_wrapped_envs_run(
    tcp_address: str, ipc_address: str
) -> None:
    ipc, both = [ipc_address], [tcp_address, ipc_address]
    for spare_envs in (False, True):
        options: dict[str, Any] = {"seed": 5, "wrappers": WRAPPERS}
        options["spare_envs"] = spare_envs
        runs = [
            rows_of_a_run(BatchEnv.local(CARTPOLE, NUM_ENVS, 1, **options)),
            rows_of_a_run(BatchEnv.connect(CARTPOLE, ipc, NUM_ENVS, **options)),
            rows_of_a_run(
                BatchEnv.connect(CARTPOLE, both, NUM_ENVS, num_splits=2, **options)
            ),
        ]
        assert_equal_runs(runs)
        assert runs[0][0][0].shape == (NUM_ENVS, 8)
        assert runs[0][0][0].dtype == np.float64


def test_rows_equal_those_of_an_env_wrapped_by_hand() -> None:
    rows = rows_of_a_run(
        BatchEnv.local(CARTPOLE, NUM_ENVS, 2, seed=5, wrappers=WRAPPERS)
    )
    ends = 0
    for row in range(NUM_ENVS):
        env = make_env(CARTPOLE, {}, parse_wrappers(WRAPPERS))
        observation, _ = env.reset(seed=env_seed(5, row, 0))
        np.testing.assert_array_equal(rows[0][0][row], observation)
        for step in range(NUM_STEPS):
            seen, reward, terminated, truncated, _ = env.step(actions_of(step)[row])
            result = rows[1 + step]
            assert (result[1][row], result[2][row], result[3][row]) == (
                reward,
                terminated,
                truncated,
            )
            if terminated or truncated:
                ends += 1
                seen, _ = env.reset()
            np.testing.assert_array_equal(result[0][row], seen)
    assert ends >= NUM_ENVS


def test_arguments_are_checked_before_a_server_is_contacted() -> None:
    wrong = [{"name": "ActionRepeat", "amount": 0}]
    message = r"wrappers\[0\] \(ActionRepeat\): amount: expected an int from 1 to 1000"
    with pytest.raises(WrapperError, match=message):
        BatchEnv.connect(CARTPOLE, ["tcp://127.0.0.1:1"], 1, wrappers=wrong)
    with pytest.raises(WrapperError, match=message):
        BatchEnv.local(CARTPOLE, 1, 1, wrappers=wrong)
    with pytest.raises(WrapperError, match="did you mean ActionRepeat"):
        BatchEnv.local(CARTPOLE, 1, 1, wrappers=[{"name": "ActionRepaet", "amount": 4}])
    with pytest.raises(EnvStartError, match="wrappers"):
        BatchEnv.connect(
            CARTPOLE,
            ["tcp://127.0.0.1:1"],
            1,
            wrappers=[{"name": "Theirs", "data": bytes(20_000)}],
        )


def test_a_server_applies_only_registered_wrappers_and_explains_errors(
    tmp_path: Path,
) -> None:
    (tmp_path / "user_wrappers.py").write_text(USER_WRAPPERS)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    options = ("--import", "user_wrappers", "--env", CARTPOLE)
    with ServerProcess(tmp_path, *options, environment=environment) as server:

        def connect(wrappers: list[dict[str, Any]], name: str = CARTPOLE) -> BatchEnv:
            return BatchEnv.connect(
                name, [server.address], 2, seed=1, wrappers=wrappers
            )

        with pytest.raises(WrapperError, match=r"tcp://.*'Scald' .* mean Scaled\?"):
            connect([{"name": "Scald", "by": 3}])
        with pytest.raises(WrapperError, match="'os:system' is known"):
            connect([{"name": "os:system"}])
        with pytest.raises(WrapperError, match=r"by: expected an int from 1 to 100"):
            connect([{"name": "Scaled", "by": 10**9}])
        with pytest.raises(WrapperError, match=r"missing argument 'by'; expected"):
            connect([{"name": "Scaled"}])
        with pytest.raises(UnknownEnv, match="Pendulum-v1"):
            connect([{"name": "ClipAction"}], "Pendulum-v1")
        with pytest.raises(EnvStartError, match=r"\(ClipAction\): .* Box action space"):
            connect([{"name": "ClipAction"}])
        with connect([{"name": "Scaled", "by": 3}]) as batch:
            batch.reset()
            assert batch.step(np.array([0, 1])).reward.tolist() == [3.0, 3.0]


def test_local_workers_apply_wrappers_that_modules_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_wrappers.py").write_text(USER_WRAPPERS)
    monkeypatch.syspath_prepend(tmp_path)
    options: dict[str, Any] = {"seed": 1, "import_modules": ["user_wrappers"]}
    wrappers = [{"name": "Scaled", "by": 3}, {"name": "Scaled", "by": 2}]
    with BatchEnv.local(CARTPOLE, 2, 1, wrappers=wrappers, **options) as batch:
        batch.reset()
        assert batch.step(np.array([0, 1])).reward.tolist() == [6.0, 6.0]
    with pytest.raises(WrapperError, match=r"wrappers\[0\] \(Scaled\): by: expected"):
        BatchEnv.local(
            CARTPOLE, 2, 1, wrappers=[{"name": "Scaled", "by": 0}], **options
        )
    with pytest.raises(WrapperError, match="no wrapper named 'Scaled' is known"):
        BatchEnv.local(CARTPOLE, 2, 1, seed=1, wrappers=wrappers)
