"""Envs from popular packages return the same rows locally and on a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from gymnasium.vector.utils import batch_space

from envserve.client import BatchEnv
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from tests.envserve.server_process import ServerProcess

AGENTS: Final = str(Path(__file__).parents[2] / "examples" / "pettingzoo_agents.py")
MODULES: Final = (
    *("ale_py", "envserve.envpool", "gymnasium_robotics", "highway_env", "minigrid"),
    *("shimmy", "vizdoom.gymnasium_wrapper", AGENTS),
)
#: Envs from Gymnasium and other packages.
ENVS: Final = (
    *("CartPole-v1", "Pendulum-v1", "LunarLander-v3", "HalfCheetah-v5", "Humanoid-v5"),
    *("Blackjack-v1", "CliffWalking-v1", "FrozenLake-v1", "ALE/Pong-v5"),
    *("AntMaze_UMaze-v5", "PointMaze_UMaze-v3", "parking-v0", "VizdoomBasic-v1"),
    *("BabyAI-GoToObj-v0", "MiniGrid-Empty-5x5-v0"),
    *("dm_control/cartpole-balance-v0", "dm_control/walker-walk-v0"),
)
#: Gymnasium and EnvPool vector envs, and multi-agent games with one row per agent.
VECTOR_ENVS: Final = (
    *("CartPole-v0", "envpool/CartPole-v1", "envpool/Pong-v5"),
    *("agents/RockPaperScissors-v2", "agents/KnightsArchersZombies-v11"),
)
#: Number of rows, which equals the number of agents in the largest game.
NUM_ENVS: Final = 4


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with contextlib.chdir(tmp_path_factory.mktemp("here")):  # ViZDoom writes a file
        launcher = Launcher(MODULES)
    with contextlib.closing(launcher):
        yield launcher


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("there")
    options = ("--workers", "1")
    with ServerProcess(folder, *options, cwd=folder, imports=MODULES) as server:
        yield server


def play(batch: BatchEnv, num_steps: int = 30) -> list[Any]:
    actions = batch_space(batch.action_space, NUM_ENVS)
    actions.seed(0)
    seen = [batch.reset()]
    for _ in range(num_steps):
        result = batch.step(actions.sample())
        assert result.valid.all(), result.infos
        seen.append(result._replace(infos={}))
    return seen


@pytest.mark.parametrize("name", [*ENVS, *VECTOR_ENVS])
def test_an_env_returns_the_same_rows_locally_and_on_a_server(
    name: str,
    launcher: Launcher,
    server: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"seed": 3, "padding_after": 60.0, "nonfinite": "pass"}
    options["vectorized"] = name in VECTOR_ENVS
    # Gymnasium's CartPole vector env supports only this mode.
    options["autoreset"] = "next_step" if name == "CartPole-v0" else "same_step"
    pool = partial(Pool, launcher=launcher)
    monkeypatch.setattr("envserve.client.factory.Pool", pool)
    with BatchEnv.local(name, NUM_ENVS, 1, import_modules=MODULES, **options) as batch:
        here = play(batch)
    with BatchEnv.connect(name, [server.address], NUM_ENVS, **options) as batch:
        np.testing.assert_equal(play(batch), here)
