"""Evaluate a policy on exactly N episodes.

The policy takes its most likely actions, or samples its actions as in training. Every
env plays a fixed number of episodes, because the first N episodes that end are shorter
than average. Episodes that do not end are cut off, so that every evaluation ends.
"""

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import numpy as np
import tensorflow as tf

from envserve.client import BatchEnv
from envserve.errors import EnvsBusy
from envserve.text import counted, rounded
from ppo.agent.agent import Agent
from ppo.algorithms.load import make_agent
from ppo.config.config import Config
from ppo.config.named_configs import read_table
from ppo.environments import MakeEnv
from ppo.errors import EnvsLostError, RunFolderError, RunWriteError
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.rollout import Episode, EpisodeTracker
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import CheckpointId
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics_file import read_metrics
from ppo.simulate import Simulation

_LOGGER = logging.getLogger("envserve")
_HORIZON = 100  # batch steps between two checks of `time_limit`
#: Maximum number of batch steps without a complete episode, in addition to the time
#: limit; reached only if envs are unavailable.
_MAX_IDLE_STEPS = 100_000
#: Number of consecutive episodes that an env may lose before an evaluation ends.
MAX_LOST_IN_A_ROW = 20
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
    actions: str = "mode"
    """How actions were chosen; a value of the setting `evaluation_actions`."""
    num_cut: int = 0
    """Number of episodes that were cut off because they did not end."""

    @classmethod
    def from_episodes(
        cls, episodes: Iterable[Episode], steps: int | None = None
    ) -> Self:
        """Create an evaluation from the episodes that were played."""
        _, returns, lengths, _ = zip(*episodes, strict=True)
        return cls(np.array(returns), np.array(lengths), steps)

    @property
    @np.errstate(over="ignore", invalid="ignore")  # sums of very large returns
    def mean_return(self) -> float:
        """Mean return over episodes."""
        return float(np.mean(self.returns))

    @property
    @np.errstate(over="ignore", invalid="ignore")  # squares of very large returns
    def std_return(self) -> float:
        """Standard deviation of the returns over episodes."""
        return float(np.std(self.returns))

    def __str__(self) -> str:
        how = " with sampled actions" if self.actions == "sample" else ""
        text = (
            f"Evaluation after {self.steps or 0:,} steps: "
            f"mean return {rounded(self.mean_return)} "
            f"over {counted(len(self.returns), 'episode')}{how} "
            f"(lowest {rounded(self.returns.min())}, "
            f"highest {rounded(self.returns.max())})"
        )
        if self.num_cut:
            text += f"; {self.num_cut} did not end and were cut off"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return summary statistics and all returns, as values for JSON."""
        return {
            "steps": self.steps,
            "episodes": len(self.returns),
            "mean_return": self.mean_return,
            "std_return": self.std_return,
            "min_return": float(np.min(self.returns)),
            "max_return": float(np.max(self.returns)),
            "mean_length": float(np.mean(self.lengths)),
            "actions": self.actions,
            "episodes_cut_off": self.num_cut,
            "returns": self.returns.tolist(),
        }


def evaluate(
    agent: Agent,
    env: BatchEnv,
    episodes: int,
    *,
    actions: str = "mode",
    time_limit: int = 10_000,
    seed: int = 0,
) -> Evaluation:
    """Evaluate the agent on a number of complete episodes.

    The agent's normalisation statistics are not updated. An episode with a lost step is
    played again, up to 20 times in a row per env. If the first episode of every env is
    cut off, the evaluation ends early, because further episodes would not end either.

    Args:
      agent: Agent to evaluate.
      env: Envs, which are reset first.
      episodes: Number of episodes.
      actions: "mode" for the most likely actions, "sample" for sampled ones.
      time_limit: Number of steps after which an episode is cut off; it then counts
        with its return so far. Checked every 100 steps.
      seed: Seed of sampled actions.

    Raises:
      EnvsLostError: 20 episodes of an env were lost in a row, or an env was
        unavailable for too long.
    """
    graph_env = InGraphBatchEnv(env, agent.actions)
    simulation = _simulation(agent, graph_env, actions)
    return _play(simulation, env, actions, episodes, time_limit, seed)


class PeriodicEvaluator:
    """Evaluates an agent repeatedly during training, each time with the same seeds.

    New envs are created for each evaluation and closed after it, so their seeds are the
    same in all evaluations, and env servers are free between evaluations.

    Args:
      agent: Agent to evaluate.
      config: Provides the number of episodes, how actions are chosen, and the seed.
      make_env: Creates the envs.
      on_step: Called after every batch step; an exception ends the evaluation.
    """

    def __init__(
        self,
        agent: Agent,
        config: Config,
        make_env: MakeEnv,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._agent, self._config = agent, config
        self._episodes = config.curve_episodes
        # Use the fewest envs that play all episodes in as few rounds as `num_envs`.
        rounds = math.ceil(self._episodes / config.num_envs)
        self._num_envs = math.ceil(self._episodes / rounds)
        # These evaluations select the best checkpoint, so its return is biased. The
        # final evaluation therefore uses another seed.
        self._seed = derived_seed(config.seed, 0, 3)
        self._make_env = make_env
        self._on_step = on_step
        self._splits: list[list[int]] = []  # those of the simulation's envs

    def evaluate(self) -> Evaluation:
        """Evaluate the agent with its current parameters.

        Raises:
          EnvsLostError: Too many episodes of an env were lost in a row, or an env was
            unavailable for too long.
          envserve.errors.EnvserveError: The envs cannot be created, or failed
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
            actions = self._config.evaluation_actions
            limit = self._config.evaluation_time_limit
            simulation = self._simulation_with(env)
            return _play(simulation, env, actions, self._episodes, limit, self._seed)

    def _simulation_with(self, env: BatchEnv) -> Simulation:
        """Return a simulation of these envs; reuse its graph if the splits match."""
        splits = [rows.tolist() for rows in env.splits]
        if splits != self._splits:
            self._graph_env = InGraphBatchEnv(env, self._agent.actions)
            self._simulation = _simulation(
                self._agent,
                self._graph_env,
                self._config.evaluation_actions,
                self._on_step,
            )
            self._splits = splits
        self._graph_env.env = env
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
      config: Provides the number of episodes, how actions are chosen, and the seed.
      run_folder: Contains the checkpoints; `evaluation.json` is written there.
      make_env: Creates the envs, which are closed at the end.
      agent: An agent that has just been trained; `evaluation.json` then also records
        the run's `total_steps`. By default, the agent is loaded from a checkpoint, and
        the evaluation of the trained agent is kept under the key `final`.
      which: The checkpoint to load; by default, the newest.

    Raises:
      CheckpointError: The checkpoint does not exist, or does not match the config.
      RunWriteError: The result cannot be saved; a note on the error contains the
        result.
    """
    # Fail on a missing checkpoint before envs start.
    counters = checkpoint.read_counters(run_folder.checkpoints, which)
    episodes = config.evaluation_episodes
    seed = evaluation_seed(config.seed)
    is_final = agent is not None
    with make_env(num_envs=min(config.num_envs, episodes), seed=seed) as env:
        if agent is None:
            agent = make_agent(env.observation_space, env.action_space, config)
            # A run in progress may have written a newer checkpoint in the meantime.
            counters = checkpoint.load_agent(run_folder.checkpoints, agent, which)
        evaluation = evaluate(
            agent,
            env,
            episodes,
            actions=config.evaluation_actions,
            time_limit=config.evaluation_time_limit,
            seed=seed,
        )._replace(steps=counters.steps)
    # Read the earlier result now, because the run may have ended in the meantime.
    more = (
        {"total_steps": config.total_steps}
        if is_final
        else _final_evaluation(run_folder)
    )
    try:
        run_folder.save_evaluation(evaluation.as_dict() | more)
    except RunWriteError as error:
        error.add_note(str(evaluation))
        raise
    return evaluation


def _final_evaluation(run_folder: RunFolder) -> dict[str, Any]:
    """Return the content of `evaluation.json` that later evaluations must keep.

    `ppo train --seeds` reads the return of a finished run there, and recognises a run
    that a callback has ended by its `total_steps`.
    """
    with contextlib.suppress(OSError, ValueError):
        earlier = read_table(run_folder.path / "evaluation.json")
        final = earlier if "total_steps" in earlier else earlier.get("final")
        return {} if final is None else {"final": final}
    return {}


def mode_remark(evaluation: Evaluation, config: Config, run_folder: RunFolder) -> str:
    """Return a remark if the return is much lower than during training.

    Training samples its actions; the evaluation took the most likely actions. Returns
    an empty string if the difference is small, or if the two returns are not
    comparable, because training episodes had another time limit.
    """
    if evaluation.actions != "mode" or config.training_time_limit:
        return ""
    with contextlib.suppress(RunFolderError):
        before = (
            row.get("mean_return")
            for row in read_metrics(run_folder.metrics_path)[::-1]
            if row["steps"] <= (evaluation.steps or 0)
        )
        trained, mean = next(before, None), evaluation.mean_return
        error = evaluation.std_return / math.sqrt(len(evaluation.returns))
        if trained is not None and trained - mean > max(0.2 * abs(trained), 2 * error):
            return (
                f"The mean return was {mean:.4g} with the most likely actions, but "
                f"{trained:.4g} with sampled actions in training; try `ppo evaluate "
                '--sampled`, and evaluation_actions = "sample" for the next run.'
            )
    return ""


def _simulation(
    agent: Agent,
    env: InGraphBatchEnv,
    actions: str,
    on_step: Callable[[], None] = lambda: None,
) -> Simulation:
    def zeros(num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        return tf.zeros([num_rows, agent.actions.noise_size])

    return Simulation(
        env,
        agent.act_from,
        _HORIZON,
        on_step,
        snapshot=agent.snapshot,
        in_numpy=agent.in_numpy,
        log_prob=agent.log_prob,
        # Without noise, a sample is the mode.
        noise=agent.actions.noise if actions == "sample" else zeros,
        state_sizes=agent.policy_state_sizes,
    )


def _play(
    simulation: Simulation,
    env: BatchEnv,
    actions: str,
    episodes: int,
    time_limit: int,
    seed: int,
) -> Evaluation:
    """Play `episodes` episodes, and return their evaluation; see `evaluate`."""
    quotas = np.full(env.num_envs, episodes // env.num_envs)
    quotas[: episodes % env.num_envs] += 1
    played: list[list[Episode]] = [[] for _ in quotas]
    num_cut = 0
    # An env cannot be reset separately from the others. After its episode has been cut
    # off, its steps are ignored until the episode ends or all envs are reset.
    is_waiting = np.ones(env.num_envs, np.bool_)
    for number in itertools.count():
        unfinished = np.array(list(map(len, played))) < quotas
        needs_reset = not (unfinished & ~is_waiting).any()
        if needs_reset:
            if not unfinished.any() or 0 < num_cut == sum(map(len, played)):
                break
            tracker, idle_steps = EpisodeTracker(env.num_envs), 0
            is_waiting[:] = False
        rollout = simulation.run((seed, number), reset=needs_reset)
        idle_steps += _HORIZON
        results = [(episode, False) for episode in tracker.add(rollout)]
        results += [(episode, True) for episode in tracker.running(time_limit)]
        for episode, is_cut in results:
            index = episode.env_index
            if unfinished[index] and not is_waiting[index]:
                played[index].append(episode)
                unfinished[index] = len(played[index]) < quotas[index]
                idle_steps = 0
                num_cut += is_cut
                if is_cut and num_cut == 1:
                    _warn_of_endless_episodes(env, time_limit)
            is_waiting[index] = is_cut
        _check_lost_episodes(env, np.where(unfinished, tracker.consecutive_lost, 0))
        if idle_steps >= time_limit + _MAX_IDLE_STEPS:
            raise EnvsLostError(
                f"{env.spec.env_name}: expected {episodes} episodes, but "
                f"{counted(int(unfinished.sum()), 'env')} did not complete all of "
                f"them: every episode in the last {idle_steps:,} steps had a lost "
                "step; see the log for the reasons."
            )
    all_episodes = itertools.chain.from_iterable(played)
    evaluation = Evaluation.from_episodes(all_episodes)
    return evaluation._replace(actions=actions, num_cut=num_cut)


def _warn_of_endless_episodes(env: BatchEnv, time_limit: int) -> None:
    _LOGGER.warning(
        f"{env.spec.env_name}: an episode of the evaluation was cut off, because it "
        f"did not end within {time_limit:,} steps (evaluation_time_limit). If the env "
        f"has no time limit, {TIME_LIMIT_REMEDY}"
    )


def _check_lost_episodes(env: BatchEnv, lost_in_a_row: np.ndarray) -> None:
    worst = int(np.argmax(lost_in_a_row))
    if lost_in_a_row[worst] >= MAX_LOST_IN_A_ROW:
        raise EnvsLostError(
            f"Env {worst} of {env.spec.env_name}: expected complete episodes, but each "
            f"of the last {lost_in_a_row[worst]} had a lost step; see the log for the "
            "reasons."
        )


def evaluation_seed(seed: int) -> int:
    """Return the env seed of the final evaluation; training does not use this seed."""
    return derived_seed(seed, 0, 2)


def derived_seed(seed: int, iteration: int, purpose: int) -> int:
    """Return an env seed; it differs between iterations and between purposes."""
    sequence = np.random.SeedSequence(seed, spawn_key=(iteration, purpose))
    return int(sequence.generate_state(1)[0] >> 1)
