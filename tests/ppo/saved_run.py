"""Run folders with checkpoints of agents that have never been trained."""

from pathlib import Path

import gymnasium
import numpy as np
import tensorflow as tf

from ppo.agent import Agent
from ppo.config import Config
from ppo.learning.update import Updater
from ppo.normalize import ReturnScale
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import Counters
from ppo.run_folder.folder import RunFolder

__all__ = ["save_run"]


def save_run(folder: Path, config: Config, iterations: tuple[int, ...] = (1,)) -> None:
    """Make a run with checkpoints, of 100 steps per iteration; each acts in its way."""
    run_folder = RunFolder.create(folder, config)
    env = gymnasium.make(config.env_name, **config.env_kwargs)
    env.observation_space.seed(0)
    for iteration in iterations:
        seeded = config.replace(seed=config.seed + iteration)
        agent = Agent(env.observation_space, env.action_space, seeded)
        rows = [env.observation_space.sample() for _ in range(9)]
        agent.preprocess.update(
            tf.nest.map_structure(lambda *leaves: np.stack(leaves), *rows),
            tf.ones([9], tf.bool),
        )
        checkpoint.save(
            run_folder.checkpoints,
            Counters(iteration, 100 * iteration),
            agent,
            Updater(agent, config),
            ReturnScale(config.num_envs, config.discount),
            keep=len(iterations),
        )
    env.close()
