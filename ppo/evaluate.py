"""Evaluation: exactly N complete episodes with the most likely actions.

Every env plays a quota fixed beforehand. Counting whichever N episodes end first would
favour short ones.
"""

from typing import Any, NamedTuple

import numpy as np

from envserve.client import BatchEnv
from ppo import checkpoint
from ppo.agent import Agent
from ppo.config import Config
from ppo.environments import MakeEnv
from ppo.episodes import Episode, EpisodeTracker
from ppo.errors import EnvDataError, EnvsLostError
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.run_folder import RunFolder
from ppo.simulate import Simulation

__all__ = ["Evaluation", "evaluate", "evaluate_run", "evaluation_seed"]

_HORIZON = 100
_MAX_LOST_IN_A_ROW = 20


class Evaluation(NamedTuple):
    """Returns and lengths of the episodes, env by env."""

    returns: np.ndarray
    lengths: np.ndarray

    @property
    def mean_return(self) -> float:
        """Mean over episodes."""
        return float(np.mean(self.returns))

    def as_dict(self) -> dict[str, Any]:
        """Return a summary and all returns, as plain numbers."""
        return {
            "episodes": len(self.returns),
            "mean_return": self.mean_return,
            "std_return": float(np.std(self.returns)),
            "min_return": float(np.min(self.returns)),
            "max_return": float(np.max(self.returns)),
            "mean_length": float(np.mean(self.lengths)),
            "returns": self.returns.tolist(),
        }


def evaluate(
    agent: Agent, env: BatchEnv, episodes: int, *, max_batch_steps: int = 1_000_000
) -> Evaluation:
    """Play complete episodes and return what they earned.

    The agent's statistics stay as they are. An episode that lost a step is played
    again, up to 20 times in a row per env.

    Args:
        agent: acts by the mode of its policy.
        env: envs of its own; with more envs than episodes, some idle.
        episodes: how many to play.
        max_batch_steps: give up after so many batch steps.

    Raises:
        EnvDataError: an episode did not end within `max_batch_steps`.
        EnvsLostError: an env fails again and again.
    """
    quotas = np.full(env.num_envs, episodes // env.num_envs)
    quotas[: episodes % env.num_envs] += 1
    played: list[list[Episode]] = [[] for _ in quotas]
    simulation = Simulation(InGraphBatchEnv(env), agent.mode, _HORIZON)
    tracker = EpisodeTracker(env.num_envs)
    batch_steps = 0
    while any(len(done) < quota for done, quota in zip(played, quotas, strict=True)):
        if batch_steps >= max_batch_steps:
            missing = episodes - sum(map(len, played))
            raise EnvDataError(
                f"{env!r}: expected {episodes} episodes within {max_batch_steps} "
                f"steps, {missing} have not ended; give the env a time limit."
            )
        for episode in tracker.add(simulation.run((0, 0))):
            if len(played[episode.env_index]) < quotas[episode.env_index]:
                played[episode.env_index].append(episode)
        unfinished = np.array([len(done) for done in played]) < quotas
        _check_losses(env, np.where(unfinished, tracker.lost_in_a_row, 0))
        batch_steps += _HORIZON
    chosen = [episode for done in played for episode in done]
    return Evaluation(
        np.array([episode.total_reward for episode in chosen]),
        np.array([episode.length for episode in chosen]),
    )


def evaluate_run(
    config: Config, run_folder: RunFolder, make_env: MakeEnv, agent: Agent | None = None
) -> Evaluation:
    """Evaluate an agent on envs of its own, and save the result in the run folder.

    Args:
        config: names the number of episodes.
        run_folder: where `evaluation.json` goes.
        make_env: makes the envs, which are closed at the end.
        agent: by default that of the newest checkpoint of the folder.

    Raises:
        CheckpointError: there is no checkpoint, or it does not fit the config.
    """
    episodes = config.evaluation_episodes
    seed = evaluation_seed(config.seed)
    with make_env(num_envs=min(config.num_envs, episodes), seed=seed) as env:
        if agent is None:
            agent = Agent(env.observation_space, env.action_space, config)
            checkpoint.load_agent(run_folder.checkpoints, agent)
        evaluation = evaluate(agent, env, episodes)
    run_folder.save_evaluation(evaluation.as_dict())
    return evaluation


def _check_losses(env: BatchEnv, lost_in_a_row: np.ndarray) -> None:
    worst = int(np.argmax(lost_in_a_row))
    if lost_in_a_row[worst] >= _MAX_LOST_IN_A_ROW:
        raise EnvsLostError(
            f"Env {worst} of {env!r}: expected complete episodes, but the last "
            f"{lost_in_a_row[worst]} were lost in a row; see the log for why it fails."
        )


def evaluation_seed(seed: int) -> int:
    """Return a seed for envs that training never used."""
    sequence = np.random.SeedSequence(seed, spawn_key=(0, 2))
    return int(sequence.generate_state(1)[0] >> 1)
