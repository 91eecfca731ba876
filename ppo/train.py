"""The training loop: collect, learn, report, checkpoint.

A library function without a command line. Same config, same envs, same machine: same
result. All random seeds derive from the config's seed and the iteration.
"""

import collections
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from envserve.client import BatchEnv
from envserve.errors import EnvserveError
from ppo.agent import Agent
from ppo.config import Config
from ppo.environments import MakeEnv
from ppo.errors import DivergedError, EnvDataError, EnvsLostError
from ppo.evaluate import CurveEvaluator, Evaluation, derived_seed
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.learning.update import Updater
from ppo.normalize import ReturnScale
from ppo.rollout import Episode, EpisodeTracker, LostSteps
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import Counters
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics import MetricsWriter, ReportWindow, is_due
from ppo.run_folder.metrics_file import last_iteration
from ppo.simulate import Simulation

__all__ = ["Progress", "TrainResult", "train"]

_RECENT_EPISODES = 100


class Progress(NamedTuple):
    """State of a run after an iteration."""

    steps: int
    steps_per_second: float
    mean_return: float
    """Mean of the last 100 training episodes; NaN before the first has ended."""
    lost_steps: int
    """Steps that failed envs have cost since `train` was called."""
    metrics: Mapping[str, float]
    """What the iteration gave; see docs/metrics.md."""


class TrainResult(NamedTuple):
    """How a call of `train` ended."""

    agent: Agent
    steps: int
    is_finished: bool
    """False when `should_stop` ended it early."""
    lost_steps: int
    """Steps that failed envs have cost since `train` was called."""


class _Run:
    """What one iteration works with."""

    def __init__(
        self, config: Config, env: BatchEnv, on_step: Callable[[], None]
    ) -> None:
        self.config = config
        graph_env = InGraphBatchEnv(env)
        self.agent = Agent(env.observation_space, env.action_space, config)
        self.updater = Updater(self.agent, config)
        self.return_scale = ReturnScale(config.num_envs, config.discount)
        self.simulation = Simulation(
            graph_env,
            self.agent.act_on_noise,
            config.horizon,
            on_step,
            draw_noise=self.agent.draw_noise,
            state_sizes=self.agent.state_sizes,
            sequence_length=config.sequence_length,
        )
        self.tracker = EpisodeTracker(config.num_envs)
        self.recent: collections.deque[Episode] = collections.deque(
            maxlen=_RECENT_EPISODES
        )
        self.lost_steps = LostSteps()

    def iterate(self, counters: Counters) -> tuple[Counters, dict[str, float]]:
        """Collect one rollout and learn from it."""
        config = self.config
        started = time.perf_counter()
        seeds = np.random.SeedSequence(config.seed, spawn_key=(counters.iteration,))
        act_0, act_1, shuffle_0, shuffle_1 = map(int, seeds.generate_state(4) >> 1)
        rollout = self.simulation.run((act_0, act_1))
        collected = time.perf_counter()
        self.recent.extend(self.tracker.add(rollout))
        # Before the update: nothing stored in the rollout depends on this scale.
        self.return_scale.update(rollout.reward, rollout.done, rollout.valid)
        learned: dict[str, float] = {}
        num_valid = int(rollout.valid.sum())
        if num_valid > 0:
            learned = self.updater.update(
                rollout,
                reward_scale=self.return_scale.factor,
                progress=counters.iteration / config.num_iterations,
                seed=(shuffle_0, shuffle_1),
            )
        # After the update: log-probabilities were taken with the old statistics.
        acted_on = tf.nest.map_structure(
            lambda leaf: leaf[:-1].reshape(-1, *leaf.shape[2:]), rollout.observation
        )  # [T + 1, B, ...] -> [T * B, ...]
        self.agent.preprocess.update(acted_on, rollout.valid.reshape(-1))
        counters = Counters(counters.iteration + 1, counters.steps + num_valid)
        finished = time.perf_counter()
        return counters, {
            "iteration": counters.iteration,
            "mean_return": self.mean_return,
            "mean_length": _mean([episode.length for episode in self.recent]),
            "invalid_steps": float(rollout.valid.size - num_valid),
            "lost_episodes": float((rollout.done & ~rollout.valid).sum()),
            "valid_fraction": num_valid / rollout.valid.size,
            "rollout_seconds": collected - started,
            "update_seconds": finished - collected,
            **learned,
        }

    def statistics(self) -> dict[str, float]:
        """Return what the normalisers have come to."""
        statistics = self.agent.preprocess.statistics()
        if self.config.scale_rewards:
            statistics["reward_scale"] = float(self.return_scale.factor)
        return statistics

    @property
    def mean_return(self) -> float:
        return _mean([episode.total_reward for episode in self.recent])


def train(
    config: Config,
    run_folder: RunFolder,
    make_env: MakeEnv,
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[], None] = lambda: None,
) -> TrainResult:
    """Train until the config's steps are used up.

    Args:
        config: what to train and how.
        run_folder: where metrics and checkpoints go. When the envs fail, what has
            been learned until then is saved before the error is raised.
        make_env: makes the envs, which are closed at the end.
        resume: whether to go on from the newest checkpoint of the folder; a run that
            ended before its first one begins again.
        on_progress: called after every iteration.
        should_stop: asked after every iteration; when true, training ends there.
        on_step: called after every batch step; what it raises ends training at once,
            without a checkpoint.

    Returns:
        The agent and how far it came. A checkpoint has been written in any case.

    Raises:
        BadInputError: the config does not fit the envs or the checkpoint.
        RunWriteError: the run folder cannot be written.
        EnvDataError: an env gave numbers that are not finite.
        EnvsLostError: hardly any step of the envs is valid.
        DivergedError: the policy's outputs or the gradients are not finite; what came
            of that is not saved.
        envserve.errors.EnvserveError: the envs failed for good.
    """
    first = _first_counters(run_folder) if resume else Counters()
    env_seed = config.seed
    if first.iteration > 0:  # a resumed run must not replay its first episodes
        env_seed = derived_seed(config.seed, first.iteration, 1)
    with make_env(num_envs=config.num_envs, seed=env_seed) as env:
        run = _Run(config, env, on_step)
        if resume and run_folder.has_checkpoint():
            checkpoint.restore(
                run_folder.checkpoints, run.agent, run.updater, run.return_scale
            )
        if resume:
            run_folder.save_config(config)
        evaluator = CurveEvaluator(run.agent, config, make_env, on_step)
        with run_folder.writing():
            writer = MetricsWriter(
                run_folder.path, config, resumed_from=first if resume else None
            )
        with writer:
            loop = _Loop(run, first, run_folder, writer, evaluator)
            loop.run(on_progress, should_stop)
    counters = loop.counters
    is_finished = counters.iteration >= config.num_iterations
    return TrainResult(run.agent, counters.steps, is_finished, run.lost_steps.total)


class _Loop:
    """Iterations until the steps are used up, and what is due between them.

    All that is due follows from the counters, so that a resumed run goes on with it.
    The order within an iteration is: learn, evaluate, report, save. A run that was
    killed thus has reported all that its newest checkpoint knows.
    """

    def __init__(
        self,
        run: _Run,
        counters: Counters,
        run_folder: RunFolder,
        writer: MetricsWriter,
        evaluator: CurveEvaluator,
    ) -> None:
        self.counters = counters
        self._run = run
        self._config = run.config
        self._run_folder = run_folder
        self._writer = writer
        self._evaluator = evaluator
        self._last_saved = -math.inf  # the first iteration is saved, however soon
        self._saved_iteration: int | None = None
        self._window = ReportWindow()
        self._evaluated: dict[str, float] = {}
        self._best_return = checkpoint.best_return(run_folder.checkpoints)

    def run(
        self, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> None:
        """Iterate until the end or a stop; saves the run in any case."""
        is_last = self._is_finished
        while not is_last:
            before = self.counters
            evaluation = None
            try:
                steps_per_second, metrics = self._iterate()
                if self._is_evaluation_due(before):
                    evaluation = self._evaluate()
            except DivergedError:
                self._report()
                raise
            except (EnvserveError, EnvDataError, EnvsLostError):
                # Envs fail while a rollout or an evaluation is collected: nothing is
                # half learned.
                self._report()
                self._save()
                raise
            is_last = self._is_finished or should_stop()
            if is_last or evaluation is not None or self._is_report_due(before):
                self._report()
            if self._is_best(evaluation) or is_last or self._is_save_due(before):
                self._save(evaluation)
            on_progress(
                Progress(
                    self.counters.steps,
                    steps_per_second,
                    self._run.mean_return,
                    self._run.lost_steps.total,
                    metrics,
                )
            )

    @property
    def _is_finished(self) -> bool:
        return self.counters.iteration >= self._config.num_iterations

    def _iterate(self) -> tuple[float, dict[str, float]]:
        """Collect and learn once; returns the steps per second, and all numbers."""
        before = self.counters.steps
        self.counters, metrics = self._run.iterate(self.counters)
        steps = self.counters.steps - before
        self._window.add(steps, metrics)
        self._run.lost_steps.add(
            int(metrics["invalid_steps"]), self._config.steps_per_iteration
        )
        seconds = metrics["rollout_seconds"] + metrics["update_seconds"]
        return steps / seconds, metrics

    def _is_evaluation_due(self, before: Counters) -> bool:
        every = self._config.evaluate_every
        is_at_end = every > 0 and self._is_finished
        return is_at_end or is_due(every, before.steps, self.counters.steps)

    def _evaluate(self) -> Evaluation:
        started = time.perf_counter()
        evaluation = self._evaluator.evaluate()
        self._evaluated = {
            "evaluation_return": evaluation.mean_return,
            "evaluation_return_std": float(np.std(evaluation.returns)),
            "evaluation_length": float(np.mean(evaluation.lengths)),
            "evaluation_seconds": time.perf_counter() - started,
        }
        return evaluation

    def _is_report_due(self, before: Counters) -> bool:
        every = self._config.report_every
        return every == 0 or is_due(every, before.steps, self.counters.steps)

    def _report(self) -> None:
        if not self._window:
            return
        row = self._window.take() | self._run.statistics() | self._evaluated
        self._evaluated = {}
        with self._run_folder.writing():
            self._writer.write(self.counters.steps, row)

    def _is_best(self, evaluation: Evaluation | None) -> bool:
        """Whether no evaluation of the run was as good; remembers it then."""
        if evaluation is None or evaluation.mean_return <= self._best_return:
            return False
        self._best_return = evaluation.mean_return
        return True

    def _is_save_due(self, before: Counters) -> bool:
        every = self._config.checkpoint_every
        age = time.monotonic() - self._last_saved
        return (
            is_due(every, before.steps, self.counters.steps)
            or age >= self._config.checkpoint_seconds
        )

    def _save(self, evaluation: Evaluation | None = None) -> None:
        if self.counters.iteration == self._saved_iteration:
            return
        with self._run_folder.writing():
            checkpoint.save(
                self._run_folder.checkpoints,
                self.counters,
                self._run.agent,
                self._run.updater,
                self._run.return_scale,
                keep=self._config.checkpoints_to_keep,
                evaluation_return=evaluation and evaluation.mean_return,
            )
        self._last_saved = time.monotonic()
        self._saved_iteration = self.counters.iteration


def _first_counters(run_folder: RunFolder) -> Counters:
    """Return where to go on; a run that ended within its first iteration has no place.

    Raises:
        CheckpointError: there should be a checkpoint, but there is none.
    """
    is_at_start = last_iteration(run_folder.metrics_path) <= 1
    if is_at_start and not run_folder.has_checkpoint():
        return Counters()
    return checkpoint.read_counters(run_folder.checkpoints)


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
