"""The training loop: collect, learn, report, checkpoint.

A library function without a command line. Same config, same envs, same machine: same
result. All random seeds derive from the config's seed and the iteration.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from envserve.errors import EnvserveError
from ppo.agent.agent import Agent
from ppo.config.config import Config
from ppo.environments import MakeEnv
from ppo.errors import CallbackError, DivergedError, EnvDataError, EnvsLostError
from ppo.evaluation.evaluate import Evaluation, PeriodicEvaluator, derived_seed
from ppo.learners import ALONE, Learners
from ppo.learning.objective import load_policy_loss
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import Counters
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics import MetricsWriter, ReportWindow, is_due
from ppo.run_folder.metrics_file import last_iteration, read_metrics
from ppo.training_run import TrainingRun
from ppo.user_code import Callbacks

__all__ = ["Progress", "TrainResult", "TrainingRun", "train"]


class Progress(NamedTuple):
    """State of a run after an iteration."""

    steps: int
    steps_per_second: float
    mean_return: float
    """Mean of the last 100 training episodes; NaN before the first has ended."""
    lost_steps: int
    """Steps that failed envs have cost since `train` was called."""
    metrics: Mapping[str, float]
    """What the iteration, and an evaluation after it, gave; see docs/metrics.md."""


class TrainResult(NamedTuple):
    """How a call of `train` ended."""

    agent: Agent
    steps: int
    is_finished: bool
    """False when `should_stop` ended it early; not when a callback did."""
    lost_steps: int
    """Steps that failed envs have cost since `train` was called."""
    mean_return: float
    """Mean of the last 100 training episodes, as far as they ended since then."""
    curve: tuple[tuple[int, float], ...]
    """Env steps and mean return of each evaluation on the way since the run began, as
    the chief of the learners has them; the others have none."""


def train(
    config: Config,
    run_folder: RunFolder,
    make_env: MakeEnv,
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[], None] = lambda: None,
    learners: Learners = ALONE,
) -> TrainResult:
    """Train until the config's steps are used up.

    Args:
        config: what to train and how.
        run_folder: where metrics and checkpoints go. When the envs fail, what has
            been learned until then is saved before the error is raised.
        make_env: makes the envs, which are closed at the end.
        resume: whether to go on from the newest checkpoint of the folder; a run that
            ended before its first one begins again.
        on_progress: called after every iteration; what it raises ends training.
        should_stop: asked after every iteration; when true, training ends there.
        on_step: called after every batch step; what it raises ends training at once,
            without a checkpoint.
        learners: those of the run, which have met. The chief alone evaluates and saves.

    Returns:
        The agent and how far it came. A checkpoint has been written in any case.

    Raises:
        BadInputError: config and envs, checkpoint or the user's code do not fit.
        CallbackError: a callback failed; the run is saved as for envs that fail.
        RunWriteError: the run folder cannot be written.
        EnvDataError: an env gave numbers that are not finite.
        EnvsLostError: hardly any step of the envs is valid.
        LearnerLostError: another learner is gone; the newest checkpoint stays.
        DivergedError: the policy's outputs or the gradients are not finite; what came
            of that is not saved.
        envserve.errors.EnvserveError: the envs failed for good.
    """
    first = Counters(*learners.gather(_first_counters(run_folder) if resume else ())[0])
    callbacks, policy_loss = Callbacks(config.callbacks), load_policy_loss(config)
    seed = config.seed
    if first.iteration > 0:  # a resumed run must not replay its first episodes
        seed = derived_seed(seed, first.iteration, 1)
    num_envs = config.share_of(learners.num).num_envs
    envs = make_env(num_envs=num_envs, seed=seed, is_training=True)
    with learners.together(), envs as env:
        run = TrainingRun(config, env, first, policy_loss, on_step, learners)
        if resume:
            if run_folder.has_checkpoint():
                checkpoint.restore(run_folder.checkpoints, run.state)
            run_folder.save_config(config)
        learners.align(checkpoint.variables(run.state))
        evaluator = PeriodicEvaluator(run.agent, config, make_env, on_step)
        resumed_from = first if resume else None
        with MetricsWriter(
            run_folder.path, config, resumed_from=resumed_from
        ) as writer:
            loop = _Loop(run, callbacks, run_folder, writer, evaluator)
            loop.run(on_progress, should_stop)
    return _result(run, run_folder)


@dataclasses.dataclass
class _Loop:
    """Iterations until the steps are used up, and what is due between them.

    All that is due follows from the counters, so that a resumed run goes on with it.
    The order within an iteration is: learn, evaluate, report, save. A run that was
    killed thus has reported all that its newest checkpoint knows.
    """

    _run: TrainingRun
    _callbacks: Callbacks
    _run_folder: RunFolder
    _writer: MetricsWriter
    _evaluator: PeriodicEvaluator

    def __post_init__(self) -> None:
        self._config, self._learners = self._run.config, self._run.learners
        self._last_saved = -math.inf  # the first iteration is saved, however soon
        self._saved_iteration = self._run.counters.iteration  # what it goes on from
        self._window = ReportWindow()
        self._evaluated: dict[str, float] = {}
        self._best_return = checkpoint.best_return(self._run_folder.checkpoints)

    def run(
        self, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> None:
        """Iterate until the end or a stop; saves the run in any case."""
        is_last = self._run.is_finished
        while not is_last:
            before = self._run.counters
            evaluation = None
            try:
                metrics = self._iterate()
                if self._is_evaluation_due(before):
                    evaluation = self._evaluate()
                    metrics |= self._evaluated
                metrics |= (numbers := self._callbacks(self._run, metrics))
                self._window.add(0, numbers)
            except DivergedError:
                self._report()
                raise
            except (EnvserveError, EnvDataError, EnvsLostError, CallbackError):
                # Envs fail while a rollout or an evaluation is collected, and callbacks
                # after the update: nothing is half learned.
                self._report()
                self._save(evaluation)
                raise
            ends = self._learners.gather((self._run.is_finished, should_stop()))
            if any(is_finished for is_finished, _ in ends):  # by a callback, it may be
                self._run.stop()
            is_last = any(map(any, ends))
            if is_last or evaluation is not None or self._is_report_due(before):
                self._report()
            if self._is_best(evaluation) or is_last or self._is_save_due(before):
                self._save(evaluation)
            on_progress(
                Progress(
                    self._run.counters.steps,
                    metrics["steps_per_second"],
                    self._run.mean_return,
                    self._run.lost_steps.total,
                    metrics,
                )
            )

    def _iterate(self) -> dict[str, float]:
        """Collect and learn once; returns what a report of this alone would have."""
        before = self._run.counters.steps
        metrics = self._run.iterate()
        alone = ReportWindow()
        for window in (self._window, alone):
            window.add(self._run.counters.steps - before, metrics)
        self._run.lost_steps.add(
            int(metrics["invalid_steps"]), self._config.steps_per_iteration
        )
        return alone.take() | self._run.statistics()

    def _is_evaluation_due(self, before: Counters) -> bool:
        every = self._config.evaluate_every * self._learners.is_chief
        is_at_end = every > 0 and self._run.is_finished
        return is_at_end or is_due(every, before.steps, self._run.counters.steps)

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
        return every == 0 or is_due(every, before.steps, self._run.counters.steps)

    def _report(self) -> None:
        if not self._window:
            return
        row = self._window.take() | self._run.statistics() | self._evaluated
        self._evaluated = {}
        self._writer.write(self._run.counters.steps, row)

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
            is_due(every, before.steps, self._run.counters.steps)
            or age >= self._config.checkpoint_seconds
        )

    def _save(self, evaluation: Evaluation | None = None) -> None:
        is_saved = self._run.counters.iteration == self._saved_iteration
        if is_saved or not self._learners.is_chief:
            return
        with self._run_folder.writing():
            checkpoint.save(
                self._run_folder.checkpoints,
                self._run.counters,
                self._run.state,
                keep=self._config.checkpoints_to_keep,
                evaluation_return=evaluation and evaluation.mean_return,
            )
        self._last_saved = time.monotonic()
        self._saved_iteration = self._run.counters.iteration


def _result(run: TrainingRun, run_folder: RunFolder) -> TrainResult:
    steps, lost_steps = run.counters.steps, run.lost_steps.total
    rows = read_metrics(run_folder.metrics_path) if run.learners.is_chief else []
    curve = tuple(
        (int(row["steps"]), row["evaluation_return"])
        for row in rows
        if row.get("evaluation_return") is not None
    )
    return TrainResult(
        run.agent, steps, run.is_finished, lost_steps, run.mean_return, curve
    )


def _first_counters(run_folder: RunFolder) -> Counters:
    """Return where to go on; a run that ended within its first iteration has no place.

    Raises:
        CheckpointError: there should be a checkpoint, but there is none.
    """
    is_at_start = last_iteration(run_folder.metrics_path) <= 1
    if is_at_start and not run_folder.has_checkpoint():
        return Counters()
    return checkpoint.read_counters(run_folder.checkpoints)
