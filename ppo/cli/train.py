"""The command `ppo train`: train an agent, and evaluate it at the end."""

import contextlib
import dataclasses
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from msgspec import Meta

from envserve.cli.logs import nonblocking_output, set_up_logs
from envserve.cli.options import Count, Host, LogFormat, Port, Resources, Seconds
from envserve.cli.program import GivenOptions, Option
from envserve.cli.terminal import console
from envserve.errors import EnvserveError, SpaceError, WrapperError
from envserve.text import counted, install_command
from envserve.worker.rendering import headless_variables
from ppo.cli import on_ray
from ppo.cli.options import (
    Connect,
    Import,
    InterOpThreads,
    IntraOpThreads,
    NumWorkers,
    SourceOptions,
    Terminated,
    Trust,
    check_trust,
    config_names,
    preserved_interrupts,
    report_errors,
    resolve_env_source,
    run_folders,
    setting_keys,
    sigterm_raises,
    start_tensorflow,
    user_command,
)
from ppo.cli.progress import Screen
from ppo.cli.run_setup import (
    RunPlan,
    plan_new_run,
    plan_resumed_run,
    read_tf_config,
    save_env_source,
)
from ppo.cli.seeds import train_seeds
from ppo.cli.stop_signals import StopSignals
from ppo.cli.visualize import film as film_run
from ppo.config.config import Config
from ppo.errors import BadInputError, ConfigError, PpoError
from ppo.run_folder.folder import RunFolder, seed_folders
from ppo.run_folder.trust import EnvSource

if TYPE_CHECKING:
    from envserve.client import BatchEnv
    from ppo.train import Progress

_PERMANENT_ERRORS = (BadInputError, SpaceError, WrapperError)

_THREADS: Final = {"intra_op_threads", "inter_op_threads"}
_RAY: Final = Option(panel="On Ray")
_WATCHING: Final = Option(panel="Watching")


def train(
    config: Annotated[str | None, Option(values=config_names)] = None,
    *,
    connect: Connect = None,
    set_: Annotated[
        list[str] | None, Option(metavar="KEY=VALUE", values=setting_keys)
    ] = None,
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None,
    seeds: Count | None = None,
    at_once: Count | None = None,
    run_dir: Path | None = None,
    resume: Annotated[Path | None, Option(metavar="RUN", values=run_folders)] = None,
    restartable: bool = False,
    min_servers: Count | None = None,
    num_workers: NumWorkers = None,
    import_: Import = None,
    trust: Trust = False,
    distribute: bool = False,
    rendezvous_timeout: Seconds = 300.0,
    page: Annotated[bool, _WATCHING] = False,
    film: Annotated[bool, _WATCHING] = False,
    metrics_port: Annotated[Port | None, _WATCHING] = None,
    metrics_host: Annotated[Host, _WATCHING] = "127.0.0.1",
    on: Annotated[Literal["ray"] | None, _RAY] = None,
    learners: Annotated[Count | None, _RAY] = None,
    resources: Resources = None,
    log_format: LogFormat = "text",
    intra_op_threads: IntraOpThreads = 2,
    inter_op_threads: InterOpThreads = 1,
    given: GivenOptions,
) -> int:
    """Train an agent, and evaluate it at the end.

    Args:
      config: A config that `ppo configs` lists, a .toml, .json or .py file, or an env:
        a registered name, FILE.py:CLASS or MODULE:NAME. Required unless a run is
        resumed.
      set_: Setting to change, such as num_envs=16; repeatable. `ppo configs NAME
        --all` lists all settings.
      seed: Seed of the run's random numbers; by default, the config's seed.
      seeds: Number of seeds to train, starting at --seed, each in its own process and
        run folder; by default, one.
      at_once: Number of seeds to train at a time; by default, one per core.
      run_dir: Folder to create for the run; by default, runs/CONFIG-TIME.
      resume: Resume the run in this folder from its newest checkpoint.
      restartable: For supervisors that restart the command: resume the run in
        --run-dir if it exists, and exit with 3 if SIGINT, SIGTERM or SIGHUP stops it,
        or if all servers are lost. The exit code is 0 when the run is complete.
      min_servers: Minimum number of servers that must be ready at the start; others
        can join later. By default, all servers of --connect.
      distribute: Train as one of the learners that the environment variable TF_CONFIG
        lists.
      rendezvous_timeout: Seconds to wait until all learners have started.
      page: Serve a web page about the run on this host until the run ends, and for up
        to a minute longer while a browser shows the page.
      film: Record a video of an episode after training.
      metrics_port: Port for Prometheus to scrape the run's metrics from; 0 chooses a
        free port. By default, metrics are not served.
      metrics_host: Address on which the metrics port listens; by default, only this
        host can reach it.
      on: Train with several learners on a Ray cluster; the first runs on this host.
      learners: Number of learners, including the one on this host.
    """
    logger = None
    if log_format == "json":
        set_up_logs("info", log_format)
        logger = logging.getLogger("ppo")
    with report_errors(log_format, restartable):
        if (on, learners, resources) != (None, None, None):
            return on_ray.train_on_ray(given)
        addresses, index = (
            read_tf_config(seeds, resume) if distribute else (["here"], 0)
        )
        can_restart = restartable and not index
        resume = _folder_to_resume(can_restart, resume, run_dir, seed, seeds)
        is_study = seeds is not None or bool(resume and seed_folders(resume))
        is_monitored = page or film or metrics_port is not None
        if is_study and (is_monitored or restartable or distribute):
            raise ConfigError(
                "--page, --film, --metrics-port, --restartable, --distribute: cannot "
                "be combined with several seeds; omit these options or --seeds."
            )
        if at_once is not None and not is_study:
            raise ConfigError(
                "--at-once requires --seeds; add --seeds, or omit --at-once."
            )
        changes = [*(set_ or []), *([] if seed is None else [f"seed={seed}"])]
        changes += [] if min_servers is None else [f"min_servers={min_servers}"]
        options = SourceOptions(connect, import_, trust)
        check_trust(config, resume, changes, options)
    with (
        nonblocking_output(),
        report_errors(log_format, restartable),
        resume_hints(3 if restartable else 130, logger, index) as runs,
        sigterm_raises(),
        Screen(console(), logger) as screen,
        Monitors(screen, page, metrics_port, metrics_host) as monitors,
    ):
        if index:  # only the run folder of learner 0 is kept
            folder = tempfile.TemporaryDirectory(prefix="ppo-learner-")
            run_dir = Path(monitors.enter_context(folder))
        try:
            if resume is not None:
                plan = plan_resumed_run(resume, config, changes, options)
                if film:
                    from ppo.evaluation.rendering import prepare_filming

                    prepare_filming(plan.config, plan.env_source.addresses)
                runs.append(plan.run_folder)
                if plan.remark:
                    screen.print(plan.remark)
            else:
                source = resolve_env_source(EnvSource(), options)
                plan = plan_new_run(
                    screen, config, changes, run_dir, source, runs, film=film
                )
            monitors.enter_context(plan.run_folder.locked())
            if is_study:
                words = given.words(*given.values.keys() - _THREADS)
                return train_seeds(
                    screen, plan, seeds or 0, at_once, num_workers, words
                )
            # Raise an error if the envs cannot be divided equally among the learners.
            plan.config.per_learner(len(addresses))
            for line in plan.header(num_workers):
                screen.print(line)
            threads = (intra_op_threads, inter_op_threads)
            plan = _join_learners(
                screen, plan, threads, addresses, index, rendezvous_timeout
            )
            is_finished = _train(screen, monitors, plan, num_workers)
        finally:
            with preserved_interrupts(is_deferred=True):
                for run in runs if not index else ():
                    if resume is not None or not run.remove_if_unused():
                        screen.print(f"Run folder: {run.path}")
        if is_finished and not index:
            _finish(screen, plan, film, can_film=monitors.can_render)
            monitors.finish_page()
        return 3 if restartable and not is_finished else 0


def _folder_to_resume(
    can_restart: bool,
    resume: Path | None,
    run_dir: Path | None,
    seed: int | None,
    seeds: int | None,
) -> Path | None:
    """Check the options that select a run; return the folder to resume, or None."""
    if can_restart and (run_dir is None or (resume, seeds) != (None, None)):
        raise ConfigError(
            "--restartable requires --run-dir, and cannot be combined with --resume or "
            "--seeds."
        )
    if can_restart and run_dir and os.path.exists(RunFolder(run_dir).config_path):
        return run_dir
    if resume is not None and (run_dir, seed, seeds) != (None,) * 3:
        raise ConfigError(
            "--resume uses the folder and seed of the earlier run; omit --run-dir, "
            "--seed and --seeds, and use --set to change a setting."
        )
    return resume


def _join_learners(
    screen: Screen,
    plan: RunPlan,
    threads: tuple[int, int],
    addresses: list[str],
    index: int,
    timeout_seconds: float,
) -> RunPlan:
    """Start TensorFlow and connect to the other learners.

    Returns:
      A copy of the plan that contains all learners and the config of learner 0.

    Raises:
      ConfigError: Learners of a new run have different settings.
      LearnerLostError: Another learner did not start in time, or exited.
    """
    screen.phase("starting TensorFlow")
    start_tensorflow(*threads, plan.config)
    from ppo.learners import Learners

    learners = Learners(addresses, index)
    if learners.num == 1:
        return plan._replace(learners=learners)
    screen.phase(f"learner {index}: waiting for {learners.num - 1} other learners")
    learners.connect(timeout_seconds)
    settings = (plan.is_resumed, dataclasses.asdict(plan.config))
    with learners.guard_collectives():
        (is_resumed, first), *others = learners.gather(settings)
    for number, (_, other) in enumerate(others, 1):
        names = [name for name in first if first[name] != other.get(name)]
        if names and not is_resumed:
            raise ConfigError(
                f"Learner {number}: expected the settings of learner 0, but these "
                f"differ: {', '.join(names)}; start all learners with the same CONFIG "
                "and --set."
            )
    return plan._replace(config=Config(**first), learners=learners)


def _train(
    screen: Screen, monitors: "Monitors", plan: RunPlan, num_workers: int | None
) -> bool:
    """Train and evaluate; return False if a signal stopped training, otherwise True."""
    from ppo.environments import env_maker
    from ppo.evaluation.evaluate import evaluate_run, mode_remark
    from ppo.run_folder.checkpoint import read_counters
    from ppo.train import train as run_training

    run_folder, config, source = plan.run_folder, plan.config, plan.env_source
    learners, share = plan.learners, config.per_learner(plan.learners.num)
    if plan.is_resumed and run_folder.has_checkpoint():
        _report_earlier_run(screen, plan, read_counters(run_folder.checkpoints).steps)
    make_env = env_maker(
        share,
        source.addresses,
        num_workers,
        source.import_modules,
        first_env_index=learners.index * share.num_envs,
    )

    batches: dict[str, BatchEnv] = {}

    def is_waiting() -> bool:
        # Other learners cannot continue without this one.
        return learners.num == 1 and any(
            env.is_waiting for env in list(batches.values())
        )

    def make_monitored_env(
        *, num_envs: int, seed: int, is_training: bool = False
    ) -> "BatchEnv":
        if not is_training:
            screen.phase("evaluating", is_transient=True)
            batches["evaluation"] = env = make_env(num_envs=num_envs, seed=seed)
            return env
        screen.phase(f"starting {counted(num_envs, 'env')}")
        env = make_env(num_envs=num_envs, seed=seed, is_training=True)
        save_env_source(plan)  # now that its servers have replied
        monitors.begin(env, plan)
        batches["training"] = env
        screen.phase(
            "first iteration",
            activity=lambda: "waiting for envs" if env.is_waiting else "compiling",
        )
        return env

    announcement = (
        "Stopping after this iteration; press Ctrl-C again to stop immediately"
    )
    screen.total_steps = config.planned_steps
    with StopSignals(lambda: screen.print(announcement), is_waiting) as stop:
        result = run_training(
            config,
            run_folder,
            make_monitored_env,
            resume=plan.is_resumed,
            on_progress=monitors.show,
            should_stop=stop.has_fired,
            on_step=stop.check,
            learners=learners,
        )
    if result.lost_steps:
        screen.print(f"Envs failed, which cost {counted(result.lost_steps, 'step')}.")
    if not learners.is_chief:
        screen.print(f"Learner {learners.index} finished after {result.steps:,} steps.")
        return result.is_finished
    # Other learners have finished, and are not restarted.
    if not result.is_finished or (stop.received and learners.num == 1):
        screen.phase("")
        hint = "There is no checkpoint, so the run cannot be resumed."
        if run_folder.has_checkpoint():
            hint = _resume_hint(run_folder)
        screen.print(
            f"Stopped by {stop.received.name if stop.received else 'request'} after "
            f"{result.steps:,} steps. {hint}"
        )
        return False
    screen.phase(f"evaluating {counted(config.evaluation_episodes, 'episode')}")
    evaluation = evaluate_run(config, run_folder, make_env, result.agent)
    screen.phase("")
    screen.print(str(evaluation))
    if remark := mode_remark(evaluation, config, run_folder):
        screen.print(remark)
    return True


def _report_earlier_run(screen: Screen, plan: RunPlan, steps: int) -> None:
    if plan.config.is_finished_after(steps):
        screen.print(
            f"The run is already at {steps:,} steps; use --set total_steps=... to "
            "train for more steps."
        )
    if warning := plan.decay_warning(steps):
        screen.print(warning)


class Monitors(contextlib.ExitStack):
    """The optional monitors of a run: a web page and a Prometheus port.

    Attributes:
      finish_page: Function to call after the run. It waits until no browser shows the
        page, or until Ctrl-C.
      can_render: Whether the envs can render images, as far as is known.
    """

    def __init__(
        self, screen: Screen, has_page: bool, port: int | None, host: str
    ) -> None:
        super().__init__()
        self._screen, self._has_page, self._metrics = screen, has_page, None
        self._env: BatchEnv | None = None
        self.finish_page: Callable[[], None] = lambda: None
        self.can_render = True
        self._evaluated: dict[str, float] = {}  # metrics of the latest evaluation
        if has_page:
            try:
                import envserve.monitoring.page.serve  # noqa: F401
            except ModuleNotFoundError as error:
                raise BadInputError(
                    f"--page: {error}; {install_command('page')}."
                ) from error

            # Workers inherit these variables, so they can render without a display.
            os.environ.update(headless_variables(os.environ))
        if port is not None:
            from ppo.metrics_port import TrainerMetrics

            self._metrics = self.enter_context(TrainerMetrics(port, host))
            screen.print(f"Metrics: {self._metrics.address}")

    def begin(self, env: "BatchEnv", plan: RunPlan) -> None:
        """Start the monitors; `env` is the training env."""
        from envserve.client.vector_env import metadata_of

        self._env = env
        if not plan.env_source.addresses:  # servers may hide the metadata
            modes = metadata_of(env).get("render_modes")
            self.can_render = "rgb_array" in (modes or ())
        if self._has_page:
            from envserve.monitoring.local_status_server import LocalStatusServer
            from envserve.monitoring.page.serve import finish_page, page_process

            servers = plan.env_source.addresses or [
                self.enter_context(LocalStatusServer(env)).address
            ]
            run, insecure = plan.run_folder.path, plan.config.insecure
            process, url = page_process(servers, run, insecure=insecure)
            self.enter_context(process)
            self.finish_page = partial(finish_page, process, self._screen.print)
            self._screen.print(f"Page: {url}")

    def show(self, progress: "Progress") -> None:
        """Update the monitors and the screen."""
        if self._metrics is not None and self._env is not None:
            new = progress.metrics.items()
            self._evaluated |= {k: v for k, v in new if k.startswith("evaluation_")}
            row = {**self._evaluated, **progress.metrics}
            self._metrics.update(progress.steps, row, self._env.stats())
        # Update the screen last: when it shows an iteration, its metrics are available.
        self._screen.show(progress)


def _finish(screen: Screen, plan: RunPlan, is_filmed: bool, *, can_film: bool) -> None:
    """Record an episode if requested, and print commands that the user may run next."""
    from ppo.evaluation.rendering import prepare_filming
    from ppo.run_folder.checkpoint import read_counters

    path, steps = plan.run_folder.quoted_path, plan.config.total_steps
    # A run that was resumed with fewer steps has already taken more.
    more_steps = 2 * max(steps, read_counters(plan.run_folder.checkpoints).steps)
    try:
        prepare_filming(plan.config, plan.env_source.addresses)
        if is_filmed:
            film_run(screen, plan.run_folder, plan.config, plan.env_source, episodes=1)
    except (PpoError, EnvserveError) as error:
        can_film = False
        if is_filmed:
            screen.print(f"Could not record a video: {error}")
    ppo, tensorboard = user_command("ppo"), user_command("tensorboard")
    more = f"{ppo} train --resume {path} --set total_steps={more_steps}"
    screen.print("Next:")
    for command, purpose, can_run in (
        (f"{ppo} visualize {path}", "record videos", can_film),
        (f"{ppo} plot {path}", "plot the learning curve", find_spec("matplotlib")),
        (
            f"{tensorboard} --logdir {path}",
            "show all metrics",
            find_spec("tensorboard"),
        ),
        (more, "train for more steps", True),
    ):
        if can_run:
            screen.print(f"  {command}  # {purpose}")


@contextlib.contextmanager
def resume_hints(
    terminated_code: int = 130,
    logger: logging.Logger | None = None,
    learner_index: int = 0,
) -> Iterator[list[RunFolder]]:
    """If the run ends early, print how to resume it, or add this hint to the error.

    Args:
      terminated_code: Exit code after SIGTERM or SIGHUP.
      logger: Logger to use instead of stderr.
      learner_index: Index of the learner; only learner 0 has a run to resume.

    Yields:
      A list to which the caller appends the run folder.
    """
    runs: list[RunFolder] = []
    try:
        yield runs
    except (PpoError, EnvserveError) as error:
        can_resume = not isinstance(error, _PERMANENT_ERRORS)
        if can_resume and runs and runs[0].has_checkpoint():
            error.add_note(_resume_hint(runs[0]))
        raise
    except KeyboardInterrupt as interrupt:
        text = "Stopped before the first checkpoint; the run cannot be resumed."
        if runs and runs[0].has_checkpoint():
            newest = max(runs[0].checkpoints.glob("[0-9]" * 8))
            text = f"Stopped immediately; the newest checkpoint is {newest}. "
            text += _resume_hint(runs[0])
        elif runs and any(runs[0].path.glob("seed-*")):
            text = f"Stopped immediately. {_resume_hint(runs[0])}"
        elif learner_index:
            text = f"Learner {learner_index} stopped immediately."
        if logger is None:
            print(text, file=sys.stderr)
        else:
            logger.warning(text)
        is_sigterm = isinstance(interrupt, Terminated)
        raise SystemExit(terminated_code if is_sigterm else 130) from None


def _resume_hint(run_folder: RunFolder) -> str:
    resume = f"{user_command('ppo')} train --resume {run_folder.quoted_path}"
    return f"Resume with: {os.environ.get(on_ray.RESUME_COMMAND, resume)}"
