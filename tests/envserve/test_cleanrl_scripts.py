"""Scripts in the style of CleanRL print the same returns after one changed line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ORIGINAL = "envs = gym.vector.AsyncVectorEnv([make_env(i) for i in range(NUM_ENVS)])"
CHANGED = "envs = envserve.make_vec([make_env(i) for i in range(NUM_ENVS)])"

#: REINFORCE with a linear policy, so that each action depends on all earlier data.
SCRIPT = """
import gymnasium as gym
import numpy as np

import envserve

NUM_ENVS = 3


def make_env(index):
    def thunk():
        env = gym.make(ENV_ID)
        env = gym.wrappers.FlattenObservation(env)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env = wrapped(env)
        env.action_space.seed(index)
        return env

    return thunk


if __name__ == "__main__":
    ENVS
    generator = np.random.default_rng(1)
    size = envs.single_observation_space.shape[0]
    weights = np.zeros((size, num_outputs(envs.single_action_space)))
    obs, _ = envs.reset(seed=1)
    traces = np.zeros((NUM_ENVS, *weights.shape))
    num_returns = 0
    for global_step in range(NUM_STEPS):
        actions, gradients = act(generator, np.asarray(obs, np.float64) @ weights)
        traces = 0.9 * traces + np.asarray(obs)[:, :, None] * gradients[:, None]
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        weights += 1e-3 * (traces * rewards[:, None, None]).mean(0)
        traces[terminations | truncations] = 0
        if "episode" in infos:
            for i in np.flatnonzero(infos["_episode"]):
                num_returns += 1
                print(global_step, i, infos["episode"]["r"][i].hex(), end=" ")
                print(infos["episode"]["l"][i])
    envs.close()
    print("returns:", num_returns)
"""

#: The Gaussian policy exceeds the bounds of the actions, and no wrapper clips them.
PART = """
ENV_ID = "Pendulum-v1"
NUM_STEPS = 450


def wrapped(env):
    env = gym.wrappers.NormalizeObservation(env)
    env = gym.wrappers.TransformObservation(
        env, lambda obs: np.clip(obs, -10, 10), env.observation_space
    )
    env = gym.wrappers.NormalizeReward(env, gamma=0.99)
    return gym.wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))


def num_outputs(space):
    return int(np.prod(space.shape))


def act(generator, means):
    noise = generator.normal(size=means.shape)
    return (means + 2 * noise).astype(np.float32), noise / 2
"""


def test_one_changed_line_keeps_all_returns(tmp_path: Path) -> None:
    printed = []
    for number, line in enumerate((ORIGINAL, CHANGED)):
        file = tmp_path / f"script{number}.py"
        imports, rest = SCRIPT.split("NUM_ENVS = 3\n", 1)
        script = f"{imports}{PART}\nNUM_ENVS = 3\n{rest}"
        file.write_text(script.replace("    ENVS\n", f"    {line}\n"))
        finished = subprocess.run(
            [sys.executable, str(file)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert finished.returncode == 0, finished.stderr
        printed.append(finished.stdout)
    assert printed[0] == printed[1]
    assert int(printed[0].rpartition(" ")[2]) >= 6
