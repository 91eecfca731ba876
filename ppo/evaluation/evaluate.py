"""Evaluation: exactly N complete episodes with the most likely actions.

Every env plays a quota fixed beforehand. Counting whichever N episodes end first would
favour short ones.
"""

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
from ppo.run_folder.checkpoint import Which
from ppo.run_folder.folder import RunFolder
from ppo.simulate import Simulation

_HORIZON = 100
_MAX_BATCH_STEPS = 110_000  # an Atari episode may take 108,000
_MAX_LOST_IN_A_ROW = 20
TIME_LIMIT_REMEDY = (
    "give the env a time limit when you train, such as --set "
    """'wrappers=[{name = "TimeLimit", max_episode_steps = 1000}]'."""
)
"""What to do where episodes do not end."""


class Evaluation(NamedTuple):
    """Returns and lengths of the episodes, env by env."""

    returns: np.ndarray
    lengths: np.ndarray
    steps: int | None = None
    """Env steps that the policy was trained for, if it is that of a checkpoint."""

    @classmethod
    def of(cls, episodes: Iterable[Episode], steps: int | None = None) -> Self:
        """Return what these episodes earned."""
        _, returns, lengths, _ = zip(*episodes, strict=True)
        return cls(np.array(returns), np.array(lengths), steps)

    @property
    def mean_return(self) -> float:
        """Mean over episodes."""
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
        """Return a summary and all returns, as plain numbers."""
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
    """Play so many complete episodes by the mode of the policy.

    The agent's statistics stay as they are. An episode that lost a step is played
    again, up to 20 times in a row per env. With more envs than episodes, some idle.

    Raises:
        EnvDataError: an episode did not end within 110,000 batch steps.
        EnvsLostError: an env fails again and again.
    """
    return _play(_simulation(agent, InGraphBatchEnv(env, agent.actions)), env, episodes)


class CurveEvaluator:
    """Evaluates an agent again and again while it learns: every time the same episodes.

    The envs are made anew for each evaluation and closed after it: servers that are
    shared lend them only meanwhile, and all evaluations start from the same seeds.

    Args:
        agent: acts by the mode of its policy.
        config: names the number of episodes, and the seed.
        make_env: makes the envs.
        on_step: called after every batch step; what it raises ends the evaluation.
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
        # No more envs than keep the last round of episodes full.
        rounds = math.ceil(self._episodes / config.num_envs)
        self._num_envs = math.ceil(self._episodes / rounds)
        # Not the seed of the evaluation at the end: the best of the curve is chosen by
        # these episodes, and has to show what it can do on others.
        self._seed = derived_seed(config.seed, 0, 3)
        self._make_env = make_env
        self._on_step = on_step
        self._graph_env: InGraphBatchEnv | None = None
        self._simulation: Simulation | None = None

    def evaluate(self) -> Evaluation:
        """Play the episodes with the agent as it is.

        Raises:
            EnvDataError: an episode did not end.
            EnvsLostError: an env fails again and again.
            envserve.errors.EnvserveError: the envs cannot be made, or failed for good.
        """
        try:
            env = self._make_env(num_envs=self._num_envs, seed=self._seed)
        except EnvsBusy as error:
            error.add_note(
                f"Evaluations on the way (evaluate_every) take {self._num_envs} envs "
                "besides those of the training: start the servers with more "
                "--envs-per-worker, or --set evaluate_every=0."
            )
            raise
        with env:
            return _play(self._simulation_with(env), env, self._episodes)

    def _simulation_with(self, env: BatchEnv) -> Simulation:
        """Return the simulation, at its start with these envs; it is traced once."""
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
    which: Which = None,
) -> Evaluation:
    """Evaluate an agent on envs of its own, and save the result in the run folder.

    Args:
        config: names the number of episodes.
        run_folder: has the checkpoints; `evaluation.json` goes there.
        make_env: makes the envs, which are closed at the end.
        agent: that of the newest checkpoint, of a training that has just ended, as is
            noted then; by default it is loaded.
        which: the checkpoint to load.

    Raises:
        CheckpointError: there is no checkpoint, or it does not fit the config.
        RunWriteError: the result cannot be saved; a note of the error has it.
    """
    # Sooner than envs start: there may be no such checkpoint.
    counters = checkpoint.read_counters(run_folder.checkpoints, which)
    episodes = config.evaluation_episodes
    seed = evaluation_seed(config.seed)
    ended = {} if agent is None else {"total_steps": config.total_steps}
    with make_env(num_envs=min(config.num_envs, episodes), seed=seed) as env:
        if agent is None:
            agent = Agent(env.observation_space, env.action_space, config)
            # A run that goes on may have written a newer one since.
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
        state_sizes=agent.state_sizes[:1],  # values are not asked for
    )


def _play(simulation: Simulation, env: BatchEnv, episodes: int) -> Evaluation:
    quotas = np.full(env.num_envs, episodes // env.num_envs)
    quotas[: episodes % env.num_envs] += 1
    played: list[list[Episode]] = [[] for _ in quotas]
    tracker = EpisodeTracker(env.num_envs)
    idle_steps = 0  # since an episode that counts has ended
    while any(len(done) < quota for done, quota in zip(played, quotas, strict=True)):
        if idle_steps >= _MAX_BATCH_STEPS:
            missing = episodes - sum(map(len, played))
            raise EnvDataError(
                f"{env!r}: expected {episodes} episodes, {missing} have not ended, "
                f"none in the last {_MAX_BATCH_STEPS:,} steps; {TIME_LIMIT_REMEDY}"
            )
        idle_steps += _HORIZON
        for episode in tracker.add(simulation.run((0, 0))):
            if len(played[episode.env_index]) < quotas[episode.env_index]:
                played[episode.env_index].append(episode)
                idle_steps = 0
        unfinished = np.array([len(done) for done in played]) < quotas
        _check_losses(env, np.where(unfinished, tracker.consecutive_lost, 0))
    return Evaluation.of(episode for done in played for episode in done)


def _have_same_splits(one: BatchEnv, other: BatchEnv) -> bool:
    return len(one.splits) == len(other.splits) and all(
        map(np.array_equal, one.splits, other.splits)
    )


def _check_losses(env: BatchEnv, lost_in_a_row: np.ndarray) -> None:
    worst = int(np.argmax(lost_in_a_row))
    if lost_in_a_row[worst] >= _MAX_LOST_IN_A_ROW:
        raise EnvsLostError(
            f"Env {worst} of {env!r}: expected complete episodes, but the last "
            f"{lost_in_a_row[worst]} were lost in a row; see the log for why it fails."
        )


def evaluation_seed(seed: int) -> int:
    """Return a seed for envs that training never used."""
    return derived_seed(seed, 0, 2)


def derived_seed(seed: int, iteration: int, purpose: int) -> int:
    """Return a seed of its own for envs that a run makes."""
    sequence = np.random.SeedSequence(seed, spawn_key=(iteration, purpose))
    return int(sequence.generate_state(1)[0] >> 1)
