"""Trainers without an adapter compute the same parameters as on Gymnasium's envs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import vector
from skrl.agents.torch.ppo import PPO
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.trainers.torch import SequentialTrainer
from torch import nn

import envserve

NUM_ENVS = 3


def make_envs(is_original: bool, **options: Any) -> gymnasium.vector.VectorEnv[Any]:
    if is_original:
        return gymnasium.make_vec("Pendulum-v1", NUM_ENVS, "sync", **options)
    return envserve.make_vec("Pendulum-v1", NUM_ENVS, **options)


class Policy(GaussianMixin, Model):
    def __init__(self, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        GaussianMixin.__init__(self)
        self.net = nn.Linear(self.num_observations, self.num_actions)
        self.log_std = nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs: Any, role: str) -> Any:
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Value(DeterministicMixin, Model):
    def __init__(self, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.net = nn.Linear(self.num_observations, 1)

    def compute(self, inputs: Any, role: str) -> Any:
        return self.net(inputs["observations"]), {}


# The policy exceeds the bounds of the actions, which Pendulum clips itself.
@pytest.mark.filterwarnings("ignore")
def test_skrl_trains_the_same_parameters(tmp_path: Path) -> None:
    results = []
    for is_original in (True, False):
        torch.manual_seed(1)
        envs = wrap_env(make_envs(is_original), wrapper="gymnasium")
        spaces = {
            "observation_space": envs.observation_space,
            "action_space": envs.action_space,
            "device": envs.device,
        }
        agent = PPO(
            models={"policy": Policy(**spaces), "value": Value(**spaces)},
            memory=RandomMemory(memory_size=32, num_envs=NUM_ENVS, device=envs.device),
            **spaces,
            cfg={
                "rollouts": 32,
                "experiment": {
                    "directory": str(tmp_path),
                    "write_interval": 0,
                    "checkpoint_interval": 0,
                },
            },
        )
        options = {"timesteps": 256, "headless": True, "disable_progressbar": True}
        options |= {"close_environment_at_exit": False}
        torch.manual_seed(2)
        SequentialTrainer(env=envs, agents=agent, cfg=options).train()
        envs.close()
        models = (agent.models["policy"], agent.models["value"])
        results.append([p.tolist() for m in models for p in m.parameters()])
    assert results[0] == results[1]


def test_gymnasiums_vector_wrappers_return_the_same_values() -> None:
    results: list[Any] = [[], []]
    for is_original, rows in zip((True, False), results, strict=True):
        envs: Any = vector.RecordEpisodeStatistics(make_envs(is_original))
        envs = vector.NormalizeReward(vector.NormalizeObservation(envs), gamma=0.99)
        envs = vector.TransformReward(envs, lambda r: np.clip(r, -10, 10))
        rows.append(envs.reset(seed=4)[0])
        actions = np.random.default_rng(0).uniform(-2, 2, (410, NUM_ENVS, 1))
        for action in actions.astype(np.float32):
            *step, infos = envs.step(action)
            rows += [*step, infos.get("episode", {}).get("r")]
        envs.close()
    np.testing.assert_equal(*results)
