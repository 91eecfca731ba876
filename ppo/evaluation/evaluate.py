"""Evaluate a policy's most likely actions on exactly N complete episodes.

Every env plays a fixed number of episodes. Using the first N episodes that end would
favour short episodes.
"""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import numpy as np

from envserve.client import BatchEnv
from envserve.errors import EnvsBusy
from ppo.agent.agent import Agent
from ppo.config.config import Config
from ppo.environments import MakeEnv
from ppo.errors import EnvDataError, EnvsLostError, RunWriteError
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.rollout import Episode, EpisodeTracker
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import CheckpointId
from ppo.run_folder.folder import RunFolder
from ppo.simulate import Simulation

_LOGGER = logging.getLogger("envserve")
_HORIZON = 100
_MAX_BATCH_STEPS = 110_000  # an Atari episode may take 108,000
_MAX_LOST_IN_A_ROW = 20
TIME_LIMIT_REMEDY = (
    "train with a time limit, for example --set "
    """'wrappers=[{name = "TimeLimit", max_episode_steps = 1000}]'."""
)
"""Advice in error messages about episodes that do not end."""


class Evaluation(NamedTuple):
    """Returns and lengths of the episodes of an evaluation, ordered by env."""

    returns: np.ndarray
    lengths: np.ndarray
    steps: int | None = None
    """Env steps that the policy was trained for; None if unknown."""

    @classmethod
    def from_episodes(
        cls, episodes: Iterable[Episode], steps: int | None = None
    ) -> Self:
        """Create an evaluation from the episodes that were played."""
        _, returns, lengths, _ = zip(*episodes, strict=True)
        return cls(np.array(returns), np.array(lengths), steps)

    @property
    def mean_return(self) -> float:
        """Mean return over episodes."""
        return float(np.mean(self.returns))

    def __str__(self) -> str:
        return (
            f"Evaluation after {self.steps or 0:,} steps: "
            f"mean return {self.mean_return:.1f} "
            f"over {len(self.returns)} episodes "
            f"(lowest {self.returns.min():.1f}, "
            f"highest {self.returns.max():.1f})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return summary statistics and all returns, as values for JSON."""
        return {
            "steps": self.steps,
            "episodes": len(self.returns),
            "mean_return": self.mean_return,
            "std_return": float(np.std(self.returns)),
            "min_return": float(np.min(self.returns)),
            "max_return": float(np.max(self.returns)),
            "mean_length": float(np.mean(self.lengths)),
            "returns": self.returns.tolist(),
        }


def evaluate(agent: Agent, env: BatchEnv, episodes: int) -> Evaluation:
    """Evaluate the agent's most likely actions on a number of complete episodes.

    The agent's normalisation statistics are not updated. An episode with a lost step is
    played again, up to 20 times in a row per env.

    Raises:
        EnvDataError: no episode ended within 110,000 batch steps.
        EnvsLostError: 20 episodes of an env were lost in a row.
    """
    return _play(_simulation(agent, InGraphBatchEnv(env, agent.actions)), env, episodes)


class PeriodicEvaluator:
    """Evaluate an agent repeatedly during training, on the same episodes each time.

    New envs are created for each evaluation and closed after it. All evaluations
    therefore start from the same seeds, and env servers are free between evaluations.

    Args:
        agent: agent to evaluate; it takes its most likely actions.
        config: provides the number of episodes and the seed.
        make_env: creates the envs.
        on_step: called after every batch step; an exception ends the evaluation.
    """

    def __init__(
        self,
        agent: Agent,
        config: Config,
        make_env: MakeEnv,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._agent = agent
        self._episodes = config.curve_episodes
        # Use the smallest number of envs that needs the same number of rounds.
        rounds = math.ceil(self._episodes / config.num_envs)
        self._num_envs = math.ceil(self._episodes / rounds)
        # The final evaluation uses another seed, because these episodes select the best
        # checkpoint, and its final score must not depend on them.
        self._seed = derived_seed(config.seed, 0, 3)
        self._make_env = make_env
        self._on_step = on_step
        self._graph_env: InGraphBatchEnv | None = None
        self._simulation: Simulation | None = None

    def evaluate(self) -> Evaluation:
        """Evaluate the agent with its current parameters.

        Raises:
            EnvDataError: an episode did not end.
            EnvsLostError: too many episodes of an env were lost in a row.
            envserve.errors.EnvserveError: the envs cannot be created, or failed
                permanently.
        """
        try:
            env = self._make_env(num_envs=self._num_envs, seed=self._seed)
        except EnvsBusy as error:
            error.add_note(
                f"Evaluations during training (evaluate_every) need {self._num_envs} "
                "additional envs; increase the servers' --envs-per-worker, or "
                "train with --set evaluate_every=0."
            )
            raise
        with env:
            return _play(self._simulation_with(env), env, self._episodes)

    def _simulation_with(self, env: BatchEnv) -> Simulation:
        """Return the simulation, restarted with these envs, without retracing it."""
        if self._graph_env is None or not _have_same_splits(self._graph_env.env, env):
            self._graph_env = InGraphBatchEnv(env, self._agent.actions)
            self._simulation = _simulation(self._agent, self._graph_env, self._on_step)
        assert self._simulation is not None
        self._graph_env.env = env
        self._simulation.restart()
        return self._simulation


def evaluate_run(
    config: Config,
    run_folder: RunFolder,
    make_env: MakeEnv,
    agent: Agent | None = None,
    *,
    which: CheckpointId = None,
) -> Evaluation:
    """Evaluate an agent on new envs, and save the result in the run folder.

    Args:
        config: provides the number of episodes and the seed.
        run_folder: contains the checkpoints; `evaluation.json` is written there.
        make_env: creates the envs, which are closed at the end.
        agent: an agent that has just been trained; `evaluation.json` then also records
            the run's `total_steps`. By default, the agent is loaded from a checkpoint.
        which: the checkpoint to load; by default, the newest.

    Raises:
        CheckpointError: the checkpoint does not exist, or does not match the config.
        RunWriteError: the result cannot be saved; a note on the error contains the
            result.
    """
    # Fail on a missing checkpoint before envs start.
    counters = checkpoint.read_counters(run_folder.checkpoints, which)
    episodes = config.evaluation_episodes
    seed = evaluation_seed(config.seed)
    ended = {} if agent is None else {"total_steps": config.total_steps}
    with make_env(num_envs=min(config.num_envs, episodes), seed=seed) as env:
        if agent is None:
            agent = Agent(env.observation_space, env.action_space, config)
            # A run in progress may have written a newer checkpoint in the meantime.
            counters = checkpoint.load_agent(run_folder.checkpoints, agent, which)
        evaluation = evaluate(agent, env, episodes)._replace(steps=counters.steps)
    try:
        run_folder.save_evaluation(evaluation.as_dict() | ended)
    except RunWriteError as error:
        error.add_note(str(evaluation))
        raise
    return evaluation


def _simulation(
    agent: Agent, env: InGraphBatchEnv, on_step: Callable[[], None] = lambda: None
) -> Simulation:
    return Simulation(
        env,
        agent.mode,
        _HORIZON,
        on_step,
        state_sizes=agent.state_sizes[:1],  # acting does not need the value's state
    )


def _play(simulation: Simulation, env: BatchEnv, episodes: int) -> Evaluation:
    quotas = np.full(env.num_envs, episodes // env.num_envs)
    quotas[: episodes % env.num_envs] += 1
    played: list[list[Episode]] = [[] for _ in quotas]
    tracker = EpisodeTracker(env.num_envs)
    idle_steps = 0  # since the last episode within the quotas ended
    while any(len(done) < quota for done, quota in zip(played, quotas, strict=True)):
        if idle_steps >= _MAX_BATCH_STEPS:
            missing = episodes - sum(map(len, played))
            raise EnvDataError(
                f"{env!r}: expected {episodes} episodes, but {missing} have not ended, "
                f"and none ended in the last {_MAX_BATCH_STEPS:,} steps; "
                f"{TIME_LIMIT_REMEDY}"
            )
        if idle_steps >= _MAX_BATCH_STEPS // 20 > idle_steps - _HORIZON:
            _LOGGER.warning(
                f"{env!r}: no episode of the evaluation has ended in the last "
                f"{idle_steps:,} steps, and the evaluation fails after "
                f"{_MAX_BATCH_STEPS:,}. If the env has no time limit, its episodes may "
                f"never end; {TIME_LIMIT_REMEDY}"
            )
        idle_steps += _HORIZON
        for episode in tracker.add(simulation.run((0, 0))):
            if len(played[episode.env_index]) < quotas[episode.env_index]:
                played[episode.env_index].append(episode)
                idle_steps = 0
        unfinished = np.array([len(done) for done in played]) < quotas
        _check_lost_episodes(env, np.where(unfinished, tracker.consecutive_lost, 0))
    return Evaluation.from_episodes(episode for done in played for episode in done)


def _have_same_splits(one: BatchEnv, other: BatchEnv) -> bool:
    return len(one.splits) == len(other.splits) and all(
        map(np.array_equal, one.splits, other.splits)
    )


def _check_lost_episodes(env: BatchEnv, lost_in_a_row: np.ndarray) -> None:
    worst = int(np.argmax(lost_in_a_row))
    if lost_in_a_row[worst] >= _MAX_LOST_IN_A_ROW:
        raise EnvsLostError(
            f"Env {worst} of {env!r}: expected complete episodes, but the last "
            f"{lost_in_a_row[worst]} were lost in a row; see the log for the reasons."
        )


def evaluation_seed(seed: int) -> int:
    """Return the env seed of the final evaluation, which training does not use."""
    return derived_seed(seed, 0, 2)


def derived_seed(seed: int, iteration: int, purpose: int) -> int:
    """Return an env seed that is unique to this iteration and purpose."""
    sequence = np.random.SeedSequence(seed, spawn_key=(iteration, purpose))
    return int(sequence.generate_state(1)[0] >> 1)
