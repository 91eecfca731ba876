"""The training loop: collect rollouts, update, evaluate, report, write checkpoints.

`train` is a library function; `ppo.cli` adds the command line. All random seeds derive
from the config's seed and the iteration, so a run with the same config and envs on the
same machine has the same result.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from envserve.errors import EnvserveError
from ppo.agent.agent import Agent
from ppo.algorithms.load import load_algorithm
from ppo.config.config import Config
from ppo.environments import MakeEnv
from ppo.errors import (
    CallbackError,
    ConfigError,
    DivergedError,
    EnvDataError,
    EnvsLostError,
    RunFolderError,
    RunWriteError,
    TrainingStopped,
)
from ppo.evaluation.evaluate import Evaluation, PeriodicEvaluator, derived_seed
from ppo.learners import SINGLE_LEARNER, Learners
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import Counters
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics import MetricsWriter, ReportWindow, is_due
from ppo.run_folder.metrics_file import last_iteration, read_metrics
from ppo.training_run import TrainingRun
from ppo.user_code import Callbacks

__all__ = ["Progress", "TrainResult", "train"]

_MISSING_FILE_ERRORS = (FileNotFoundError, tf.errors.NotFoundError)


class Progress(NamedTuple):
    """State of a run after an iteration, which `on_progress` receives."""

    steps: int
    """Env steps of the run so far."""
    steps_per_second: float
    """Env steps per second, counting only the time of rollouts and updates."""
    mean_return: float
    """Mean return of the last 100 training episodes; NaN before the first one ends."""
    lost_steps: int
    """Env steps lost by failed envs since `train` was called."""
    metrics: Mapping[str, float]
    """Metrics of the iteration, and of the evaluation after it if there was one."""


class TrainResult(NamedTuple):
    """The result of `train`."""

    agent: Agent
    """The trained agent."""
    steps: int
    """Env steps of the run, including steps before a resume."""
    is_finished: bool
    """False if `should_stop` ended training early; true if a callback ended it."""
    lost_steps: int
    """Env steps lost by failed envs since `train` was called."""
    mean_return: float
    """Mean return of the last 100 training episodes since `train` was called; NaN if
    none has ended."""
    curve: tuple[tuple[int, float], ...]
    """Env steps and mean return of each evaluation during the run, also from before a
    resume. Empty for learners other than the chief."""


def train(
    config: Config,
    run_folder: RunFolder,
    make_env: MakeEnv,
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[], None] = lambda: None,
    learners: Learners = SINGLE_LEARNER,
) -> TrainResult:
    """Train an agent for the config's `total_steps`.

    If envs or callbacks fail, a checkpoint is written before the error is raised. If
    `TrainingStopped` is raised while the envs of a single learner are stepped, training
    ends, and a checkpoint of the last complete iteration is written.

    Args:
      config: All settings.
      run_folder: Folder for the config, metrics and checkpoints. Without `resume`, it
        must not contain any checkpoints.
      make_env: Creates the envs, which are closed at the end.
      resume: Whether to continue from the newest checkpoint of the folder. A run that
        ended before its first checkpoint starts from the beginning.
      on_progress: Called after every iteration. Raising an exception ends training.
      should_stop: Called after every iteration. Training ends if it returns true.
      on_step: Called after every batch step. Raising an exception other than
        `TrainingStopped` ends training immediately, without a checkpoint.
      learners: The connected learners of the run. Only the chief evaluates and saves.

    Returns:
      The agent and the results of the run; a final checkpoint has been written.

    Raises:
      BadInputError: The config does not match the envs, the checkpoint or the user
        code.
      CallbackError: A callback or a schedule failed; a checkpoint has been written.
      RunFolderError: The folder has checkpoints, but `resume` is false.
      RunLockedError: Another process is training the run.
      RunWriteError: The run folder cannot be written.
      EnvDataError: An env returned numbers that are not finite; a checkpoint has been
        written.
      EnvsLostError: Too many env steps were lost; a checkpoint has been written.
      LearnerLostError: Another learner failed; the newest checkpoint is unchanged.
      DivergedError: The policy's outputs or the gradients are not finite; no
        checkpoint is written after that. PPO and SAC never store diverged networks.
      envserve.errors.EnvserveError: The envs failed and cannot recover; a checkpoint
        has been written.
    """
    with learners.guard_collectives(), contextlib.ExitStack() as stack:
        algorithm = load_algorithm(config)
        if learners.num > 1 and not algorithm.supports_several_learners:
            raise config.several_learners_error(learners.num)
        algorithm.check(config)
        if learners.is_chief:  # before another process can change the counters
            stack.enter_context(run_folder.locked())
            if not resume and run_folder.has_checkpoint():
                raise RunFolderError(
                    f"{run_folder.path}: expected a folder without checkpoints, found "
                    "those of an earlier run; pass resume=True to continue it, or use "
                    "another folder."
                )
        counters = _counters_to_resume(run_folder) if resume else ()
        start_counters = Counters(*learners.gather(counters)[0])
        callbacks = Callbacks(config.callbacks)
        seed = config.seed
        if start_counters.iteration > 0:
            # A resumed run must not replay its first episodes.
            seed = derived_seed(seed, start_counters.iteration, 1)
        num_envs = config.per_learner(learners.num).num_envs
        env = stack.enter_context(
            make_env(num_envs=num_envs, seed=seed, is_training=True)
        )
        run = TrainingRun(config, env, start_counters, algorithm, on_step, learners)
        run.before_update = callbacks.before_update
        if resume:
            if run_folder.has_checkpoint():
                checkpoint.restore(run_folder.checkpoints, run.state)
            with _algorithm_data_errors(run_folder, is_loading=True):
                run.algorithm.load_data(run_folder.algorithm_data, start_counters.steps)
        if learners.is_chief:  # the config matches the checkpoint, if there is one
            run_folder.save_config(config)
        learners.broadcast(checkpoint.variables(run.state))
        evaluator = PeriodicEvaluator(run.agent, config, make_env, on_step)
        resumed_from = start_counters if resume else None
        writer = stack.enter_context(
            MetricsWriter(run_folder.path, config, resumed_from=resumed_from)
        )
        loop = _Loop(run, callbacks, run_folder, writer, evaluator)
        loop.run(on_progress, should_stop)
    return _result(run, run_folder)


@dataclasses.dataclass
class _Loop:
    """Runs iterations until the run ends, and evaluates, reports and saves when due.

    The counters determine when evaluations and reports are due, so a resumed run
    continues their schedules. Each iteration updates, evaluates, reports and saves, in
    this order. Therefore a run that was killed has all rows of metrics that were due up
    to its newest checkpoint.
    """

    _run: TrainingRun
    _callbacks: Callbacks
    _run_folder: RunFolder
    _writer: MetricsWriter
    _evaluator: PeriodicEvaluator

    def __post_init__(self) -> None:
        self._config, self._learners = self._run.config, self._run.learners
        self._last_saved = -math.inf  # the first iteration is always saved
        self._saved_iteration = self._run.counters.iteration
        self._window = ReportWindow()
        #: Metrics of an evaluation that is not reported yet.
        self._evaluation_metrics: dict[str, float] = {}
        self._best_return = checkpoint.best_return(self._run_folder.checkpoints)
        self._variables = set(map(id, checkpoint.variables(self._run.state)))

    def run(
        self, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> None:
        """Iterate until the run is finished or stopped, then save it."""
        is_last = self._run.is_finished
        while not is_last:
            before = self._run.counters
            evaluation = None
            try:
                metrics = self._iterate()
                if self._is_evaluation_due(before):
                    evaluation = self._evaluate()
                    metrics |= self._evaluation_metrics
                metrics |= (callback_metrics := self._callbacks(self._run, metrics))
                self._window.add(0, callback_metrics)
                stops = self._learners.gather((self._run.is_finished, should_stop()))
                if any(is_finished for is_finished, _ in stops):
                    self._run.stop()  # another learner's callback may have stopped it
                if evaluation is None and self._is_evaluation_due(before):
                    evaluation = self._evaluate()  # a callback has stopped the run
                    metrics |= self._evaluation_metrics
            except DivergedError:
                self._report()
                raise
            except (EnvserveError, EnvDataError, EnvsLostError, CallbackError):
                # These errors never interrupt an update, so the state is consistent.
                self._report()
                self._save(evaluation)
                raise
            except TrainingStopped:
                if self._learners.num > 1:
                    raise  # the others wait for this learner
                self._report()
                self._save(evaluation)
                break
            is_last = any(map(any, stops))
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
        """Collect a rollout, update the agent, and return the iteration's metrics."""
        before = self._run.counters.steps
        metrics = self._run.iterate()
        iteration_window = ReportWindow()
        for window in (self._window, iteration_window):
            window.add(self._run.counters.steps - before, metrics)
        # With nonfinite="mask", every episode may contain a masked step until the
        # policy improves.
        can_lose_all = self._config.nonfinite == "mask"
        self._run.lost_steps.add(
            int(metrics["invalid_steps"]),
            self._config.steps_per_iteration,
            0 if can_lose_all else int(self._run.tracker.consecutive_lost.min()),
        )
        metrics = iteration_window.take()
        # The loop's metrics come first, and override metrics of the same name.
        return metrics | self._run.statistics() | metrics

    def _is_evaluation_due(self, before: Counters) -> bool:
        every = self._config.evaluate_every * self._learners.is_chief
        is_at_end = every > 0 and self._run.is_finished
        return is_at_end or is_due(every, before.steps, self._run.counters.steps)

    def _evaluate(self) -> Evaluation:
        started = time.perf_counter()
        evaluation = self._evaluator.evaluate()
        self._evaluation_metrics = {
            "evaluation_return": evaluation.mean_return,
            "evaluation_return_std": evaluation.std_return,
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
        row = self._window.take()
        # The loop's metrics come first, and override metrics of the same name.
        row = row | self._run.statistics() | row | self._evaluation_metrics
        self._evaluation_metrics = {}
        self._writer.write(self._run.counters.steps, row)

    def _is_best(self, evaluation: Evaluation | None) -> bool:
        """Return whether an evaluation is the best of the run, and record it if so."""
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

    def _save(self, evaluation: Evaluation | None) -> None:
        is_saved = self._run.counters.iteration == self._saved_iteration
        if is_saved or not self._learners.is_chief:
            return
        state = self._run.state
        self._check_variables(state)
        with _algorithm_data_errors(self._run_folder):
            self._run.algorithm.save_data(self._run_folder.algorithm_data)
        with self._run_folder.writing():
            checkpoint.save(
                self._run_folder.checkpoints,
                self._run.counters,
                state,
                keep=self._config.checkpoints_to_keep,
                evaluation_return=evaluation and evaluation.mean_return,
            )
        self._last_saved = time.monotonic()
        self._saved_iteration = self._run.counters.iteration

    def _check_variables(self, state: tf.train.Checkpoint) -> None:
        """Check that a state can be restored into the state of a new process.

        Raises:
          ConfigError: Trackables have variables that `learn` has created, such as those
            of the optimizer of a compiled Keras model.
        """
        variables = checkpoint.variables(state)
        if new := [v.name for v in variables if id(v) not in self._variables]:
            raise ConfigError(
                f"algorithm {self._config.algorithm}: expected trackables with all of "
                f"their variables, but these were created later: {new!s:.200}; build "
                "models, and the optimizers of compiled models, in __init__, so that a "
                "checkpoint can restore them."
            )


@contextlib.contextmanager
def _algorithm_data_errors(
    run_folder: RunFolder, *, is_loading: bool = False
) -> Iterator[None]:
    """Turn write errors of an algorithm's data into a `RunWriteError`.

    If a file is missing although the run folder exists, or already exists although the
    folder of the data is no link, the code of the algorithm is wrong. When data are
    loaded, an error without a number comes from a library such as h5py. The author of
    the algorithm needs such an error unchanged, with the traceback.
    """
    try:
        with run_folder.writing():
            yield
    except RunWriteError as error:
        cause = error.__cause__
        is_missing = isinstance(cause, _MISSING_FILE_ERRORS)
        is_missing &= run_folder.path.exists()
        is_duplicate = isinstance(cause, FileExistsError)
        is_duplicate &= run_folder.algorithm_data.is_dir()
        is_of_library = isinstance(cause, OSError) and cause.errno is None
        is_unchanged = is_missing or is_duplicate or (is_loading and is_of_library)
        if cause and is_unchanged:
            raise cause from None
        raise


def _result(run: TrainingRun, run_folder: RunFolder) -> TrainResult:
    steps, lost_steps = run.counters.steps, run.lost_steps.total
    has_rows = run.learners.is_chief and last_iteration(run_folder.metrics_path) > 0
    rows = read_metrics(run_folder.metrics_path) if has_rows else []
    curve = tuple(
        (int(row["steps"]), row["evaluation_return"])
        for row in rows
        if row.get("evaluation_return") is not None
    )
    return TrainResult(
        run.agent, steps, run.is_finished, lost_steps, run.mean_return, curve
    )


def _counters_to_resume(run_folder: RunFolder) -> Counters:
    """Return the counters of a run to resume; zeros if it has no checkpoint yet.

    Raises:
      CheckpointError: There is no checkpoint, although the run has completed more
        than one iteration.
    """
    is_at_start = last_iteration(run_folder.metrics_path) <= 1
    if is_at_start and not run_folder.has_checkpoint():
        return Counters()
    return checkpoint.read_counters(run_folder.checkpoints)
