"""Rollouts whose policy acts on rows as they arrive (`act_on` below 1)."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from envserve.client import BatchEnv
from ppo.agent.agent import Agent
from ppo.config import Config
from ppo.errors import ConfigError
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.simulate import Simulation
from tests.ppo.runs import agent_simulation, copy
from tests.ppo.stalling_env import StallingEnv

pytestmark = pytest.mark.usefixtures("one_launcher")

HORIZON = 40
NUM_ENVS = 8
SETTINGS: dict[str, Any] = {"env_name": "any", "horizon": HORIZON}


def batch_of() -> BatchEnv:
    return BatchEnv.local("CartPole-v1", NUM_ENVS, 4, seed=3)


def collect(batch: BatchEnv, act_on: float, **settings: Any) -> list[Any]:
    """Return three rollouts of an agent, each as a list of arrays."""
    with batch:
        config = Config(**SETTINGS, **settings)
        agent = Agent(batch.observation_space, batch.action_space, config)
        env = InGraphBatchEnv(batch, agent.actions)
        simulation = agent_simulation(
            agent, env, HORIZON, act_on=act_on, sequence_length=config.sequence_length
        )
        return [copy(simulation.run((1, seed))) for seed in range(3)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activation": "gelu"},  # exists only in TensorFlow
        {"recurrent_size": 8, "sequence_length": 8},
    ],
    ids=["NumPy", "TensorFlow", "recurrent"],
)
def test_rollouts_are_the_same_as_in_lockstep(settings: dict[str, Any]) -> None:
    expected = collect(batch_of(), 1.0, **settings)
    rollouts = [
        rollout
        for act_on in (0.2, 0.75)
        for rollout in collect(batch_of(), act_on, **settings)
    ]
    for ours, theirs in zip(rollouts, 2 * expected, strict=True):
        ended = theirs.terminated | theirs.truncated
        assert ended.any()
        for name in ("action", "observation", "reward", "terminated", "status"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert ours.valid.all()
        final = [each.final_observation[ended] for each in (ours, theirs)]
        np.testing.assert_array_equal(*final)
        np.testing.assert_allclose(ours.log_prob, theirs.log_prob, rtol=1e-5)
        for left, right in zip(ours.state, theirs.state, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_rows_do_not_wait_for_a_row_that_stalls(tmp_path: Path) -> None:
    """Row 0 stalls in its first step until all other rows have taken all steps."""
    path = tmp_path / "others are done"

    def on_step() -> None:
        if batch.stats().rows == (NUM_ENVS - 1) * HORIZON:
            path.touch()

    settings = {"path": str(path)}
    with BatchEnv.local(StallingEnv, NUM_ENVS, NUM_ENVS, env_kwargs=settings) as batch:
        rollout = Simulation(
            InGraphBatchEnv(batch),
            lambda observation, noise: (noise, noise[:, 0]),
            HORIZON,
            on_step,
            noise=lambda num_rows, seed: tf.zeros([num_rows, 1]),
            act_on=1 / NUM_ENVS,
        ).run((0, 0))
    assert path.exists()
    assert rollout.valid.all()


def test_noise_and_a_single_split_are_required() -> None:
    with batch_of() as batch, pytest.raises(ValueError, match="act_on"):
        Simulation(InGraphBatchEnv(batch), mock.Mock(), HORIZON, act_on=0.5)
    with pytest.raises(ConfigError, match="act_on"):
        Config(env_name="CartPole-v1", num_splits=2, act_on=0.5)
