"""`ppo train`: a run from its config to its evaluation."""

import contextlib
import dataclasses
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from envserve.cli.terminal import LogFormat, console, set_up_logs
from envserve.errors import EnvserveError, SpaceError, WrapperError
from envserve.worker.rendering import headless_settings
from ppo.cli import on_ray
from ppo.cli.options import (
    Connect,
    Import,
    NumWorkers,
    Terminated,
    Threads,
    place_of,
    reported_errors,
    start_tensorflow,
    terminable,
)
from ppo.cli.progress import Screen
from ppo.cli.run_setup import Plan, cluster, new_plan, resumed_plan
from ppo.cli.runs import film as film_run
from ppo.cli.seeds import train_seeds
from ppo.cli.stop_signals import StopSignals
from ppo.config.config import Config
from ppo.errors import BadInputError, ConfigError, PpoError
from ppo.run_folder.folder import EnvSource, RunFolder

if TYPE_CHECKING:
    from envserve.client import BatchEnv
    from ppo.train import Progress

__all__ = ["hints_at_resuming", "train"]

_RESUMING_FAILS_TOO = (BadInputError, SpaceError, WrapperError)
_WATCHING: Final = {"rich_help_panel": "Watching"}

_Name = Annotated[
    str | None,
    typer.Argument(
        help="A name from `ppo configs`; a .toml, .json or .py file; or an env: any "
        "that Gymnasium knows, FILE.py:CLASS or MODULE:NAME."
    ),
]
_SET: Final = "Change a setting; repeatable. `ppo configs NAME` lists all keys."
_Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_SET)
]
_Seed = Annotated[int | None, typer.Option(help="Root of all randomness.")]
_Seeds = Annotated[
    int | None,
    typer.Option(min=1, help="Train so many seeds, from --seed on, a process each."),
]
_AtOnce = Annotated[
    int | None, typer.Option(min=1, help="Seeds at a time. Default: one per core.")
]
_MinServers = Annotated[
    int | None,
    typer.Option(min=1, help="Begin with so many servers; the others may come later."),
]
_RunDir = Annotated[
    Path | None, typer.Option(help="Folder for this run. Default: runs/NAME-TIME.")
]
_Resume = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Go on with the run of this folder.")
]
_Distribute = Annotated[
    bool, typer.Option("--distribute", help="Learn with those that TF_CONFIG names.")
]
_Restartable = Annotated[
    bool,
    typer.Option(
        "--restartable",
        help="Go on with the run of --run-dir if it has begun, and end with 3 if it is "
        "stopped: for what starts this command again until it ends with 0.",
    ),
]
_Page = Annotated[
    bool, typer.Option("--page", help="Show the run in the browser.", **_WATCHING)
]
_Film = Annotated[
    bool, typer.Option("--film", help="Film an episode at the end.", **_WATCHING)
]
_PORT: Final = "Port where Prometheus reads the run's numbers; 0 is any."
_MetricsPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help=_PORT, **_WATCHING)
]
_HOST: Final = "Address to listen at for that; by default only this host reaches it."
_MetricsHost = Annotated[str, typer.Option(help=_HOST, **_WATCHING)]


def train(
    ctx: typer.Context,
    config: _Name = None,
    connect: Connect = None,
    settings: _Settings = None,
    seed: _Seed = None,
    seeds: _Seeds = None,
    at_once: _AtOnce = None,
    run_dir: _RunDir = None,
    resume: _Resume = None,
    restartable: _Restartable = False,
    min_servers: _MinServers = None,
    num_workers: NumWorkers = None,
    import_modules: Import = None,
    distribute: _Distribute = False,
    page: _Page = False,
    film: _Film = False,
    metrics_port: _MetricsPort = None,
    metrics_host: _MetricsHost = "127.0.0.1",
    on: on_ray.On = None,
    learners: on_ray.Learners = None,
    resources: on_ray.Resources = None,
    log_format: LogFormat = "text",
    intra_op_threads: Threads = 2,
    inter_op_threads: Threads = 1,
) -> None:
    """Train an agent, and evaluate it at the end."""
    with reported_errors(log_format, restartable):
        if (on, learners, resources) != (None, None, None):
            raise typer.Exit(on_ray.train_on_ray(ctx))
        is_study = seeds is not None or (resume is not None and _is_study(resume))
        if is_study and (page or film or metrics_port is not None):
            raise ConfigError(
                "--page, --film, --metrics-port: expected a run of one seed; leave "
                "these out, or --seeds."
            )
        if at_once is not None and not is_study:
            raise ConfigError("--at-once: expected --seeds; leave it out, or add that.")
    logger = None
    if log_format == "json":
        set_up_logs("info", log_format)
        logger = logging.getLogger("ppo")
    with (
        reported_errors(log_format, restartable),
        hints_at_resuming(3 if restartable else 130) as runs,
        terminable(),
        Screen(console(), logger) as screen,
        Watchers(screen, page, metrics_port, metrics_host) as watchers,
    ):
        addresses, index = cluster(seeds, resume) if distribute else (["here"], 0)
        can_restart = restartable and not index
        resume = _folder_to_resume(can_restart, resume, run_dir, seed, seeds)
        changes = [*(settings or []), *([] if seed is None else [f"seed={seed}"])]
        changes += [] if min_servers is None else [f"min_servers={min_servers}"]
        if resume is not None:
            plan = resumed_plan(resume, config, changes, connect, import_modules)
        else:
            place = place_of(EnvSource(), connect, import_modules)
            if index:  # only the first leaves a run
                folder = tempfile.TemporaryDirectory(prefix="ppo-learner-")
                run_dir = Path(watchers.enter_context(folder))
            plan = new_plan(screen, config, changes, run_dir, place)
        runs.append(run_folder := plan.run_folder)
        try:
            if seeds is not None or _is_study(run_folder.path):
                train_seeds(screen, plan, seeds or 0, at_once, num_workers)
                return
            plan.config.share_of(len(addresses))  # raises before anything is started
            for line in plan.header(num_workers):
                screen.print(line)
            threads = (intra_op_threads, inter_op_threads)
            plan = _agreed_plan(screen, plan, threads, addresses, index)
            is_finished = _train(screen, watchers, plan, num_workers)
        finally:
            if not index and (plan.is_resumed or not run_folder.remove_if_unused()):
                screen.print(f"Run folder: {run_folder.path}")
        if is_finished and not index:
            _end(screen, plan, film)
        elif restartable and not is_finished:
            raise typer.Exit(3)


def _is_study(path: Path) -> bool:
    """Whether a folder has runs of several seeds."""
    return any(path.glob("seed-*/config.json"))


def _folder_to_resume(
    can_restart: bool,
    resume: Path | None,
    run_dir: Path | None,
    seed: int | None,
    seeds: int | None,
) -> Path | None:
    """Return the folder of a run to go on with, if there is one."""
    if can_restart and (run_dir is None or (resume, seeds) != (None, None)):
        raise ConfigError("--restartable: expected --run-dir, no --resume, no --seeds.")
    if can_restart and run_dir and RunFolder(run_dir).config_path.exists():
        return run_dir
    if resume is not None and (run_dir, seed, seeds) != (None,) * 3:
        raise ConfigError(
            "--resume takes folder and seed from the earlier run: leave out "
            "--run-dir, --seed and --seeds; use --set to change a setting."
        )
    return resume


def _agreed_plan(
    screen: Screen,
    plan: Plan,
    threads: tuple[int, int],
    addresses: list[str],
    index: int,
) -> Plan:
    """Start TensorFlow, meet the other learners, and return what all are to do."""
    screen.phase("starting TensorFlow")
    start_tensorflow(*threads, plan.config)
    from ppo.learners import Learners

    learners = Learners(addresses, index)
    if learners.num == 1:
        return plan._replace(learners=learners)
    screen.phase(f"learner {index} waits for {learners.num - 1} more")
    learners.meet()
    own = (plan.is_resumed, dataclasses.asdict(plan.config))
    (is_resumed, first), *others = learners.gather(own)
    for number, (_, other) in enumerate(others, 1):
        names = [name for name in first if first[name] != other.get(name)]
        if names and not is_resumed:
            learners.part()
            raise ConfigError(
                f"Learner {number}: expected the settings of learner 0, got another "
                f"{', '.join(names)}; start all with the same CONFIG and --set."
            )
    return plan._replace(config=Config(**first), learners=learners)


def _train(
    screen: Screen, watchers: "Watchers", plan: Plan, num_workers: int | None
) -> bool:
    """Train and evaluate, or return False if a signal stops it."""
    from ppo.environments import env_maker
    from ppo.evaluation.evaluate import evaluate_run
    from ppo.run_folder.checkpoint import read_counters
    from ppo.train import train as run_training

    run_folder, config, place = plan.run_folder, plan.config, plan.place
    learners, share = plan.learners, config.share_of(plan.learners.num)
    if plan.is_resumed and run_folder.has_checkpoint():
        _tell_of_earlier(screen, plan, read_counters(run_folder.checkpoints).steps)
    where = (place.addresses, num_workers, place.import_modules)
    first = learners.index * share.num_envs
    make_env = env_maker(share, *where, first_env_index=first)

    def make_shown_env(
        *, num_envs: int, seed: int, is_training: bool = False
    ) -> "BatchEnv":
        if not is_training:
            screen.phase("evaluating", is_passing=True)
            return make_env(num_envs=num_envs, seed=seed)
        screen.phase(f"starting {num_envs} envs")
        env = make_env(num_envs=num_envs, seed=seed, is_training=True)
        watchers.begin(env, plan)
        screen.phase("compiling")
        return env

    announcement = "Stopping after this iteration; Ctrl-C again stops now"
    screen.total_steps = config.planned_steps
    with StopSignals(lambda: screen.print(announcement)) as stop:
        result = run_training(
            config,
            run_folder,
            make_shown_env,
            resume=plan.is_resumed,
            on_progress=watchers.show,
            should_stop=stop.has_fired,
            on_step=stop.check,
            learners=learners,
        )
    if result.lost_steps:
        screen.print(f"{result.lost_steps:,} steps were lost to envs that failed.")
    if not learners.is_chief:
        screen.print(f"Learner {learners.index} is done after {result.steps:,} steps.")
        return result.is_finished
    if not result.is_finished:
        screen.phase("")
        screen.print(
            f"Stopped by {stop.received.name if stop.received else 'request'} after "
            f"{result.steps:,} steps. {_how_to_go_on(run_folder)}"
        )
        return False
    screen.phase(f"evaluating {config.evaluation_episodes} episodes")
    evaluation = evaluate_run(config, run_folder, make_env, result.agent)
    screen.phase("")
    screen.print(str(evaluation))
    return True


def _tell_of_earlier(screen: Screen, plan: Plan, steps: int) -> None:
    if plan.config.is_over_after(steps):
        screen.print(
            f"The run is already at {steps:,} steps; --set total_steps=... to train on."
        )
    if leap := plan.leap(steps):
        screen.print(leap)


class Watchers(contextlib.ExitStack):
    """A page and a port for metrics, as far as they are asked for."""

    def __init__(
        self, screen: Screen, has_page: bool, port: int | None, host: str
    ) -> None:
        super().__init__()
        self._screen, self._has_page, self._metrics = screen, has_page, None
        self._env: BatchEnv | None = None
        self._evaluated: dict[str, float] = {}  # the last time
        if has_page:
            try:
                import envserve.monitoring.page.app  # noqa: F401
            except ModuleNotFoundError as error:
                raise BadInputError(
                    f"--page: {error}; pip install 'envserve[page]'."
                ) from error
            os.environ.update(headless_settings(os.environ))  # for the workers
        if port is not None:
            from ppo.metrics_port import TrainerMetrics

            self._metrics = self.enter_context(TrainerMetrics(port, host))
            screen.print(f"Metrics: {self._metrics.address}")

    def begin(self, env: "BatchEnv", plan: Plan) -> None:
        """Let others look from now on; `env` is what the run trains on."""
        self._env = env
        if self._has_page:
            from envserve.monitoring.local_status_server import LocalStatusServer
            from envserve.monitoring.page.serve import page_process

            servers = plan.place.addresses or [
                self.enter_context(LocalStatusServer(env)).address
            ]
            run, insecure = plan.run_folder.path, plan.config.insecure
            process, url = page_process(servers, run, insecure=insecure)
            self.enter_context(process)
            self._screen.print(f"Page: {url}")

    def show(self, progress: "Progress") -> None:
        """Take in how far the training is."""
        if self._metrics is not None and self._env is not None:
            new = progress.metrics.items()
            self._evaluated |= {k: v for k, v in new if k.startswith("evaluation_")}
            row = {**self._evaluated, **progress.metrics}
            self._metrics.update(progress.steps, row, self._env.stats())
        self._screen.show(progress)  # last: who reads it may then ask for the others


def _end(screen: Screen, plan: Plan, has_film: bool) -> None:
    """Film an episode if that is asked for and can be; say what to do next."""
    path, more_steps = plan.run_folder.word, 2 * plan.config.total_steps
    if has_film:
        try:
            film_run(screen, plan.run_folder, plan.config, plan.place, episodes=1)
        except (PpoError, EnvserveError) as error:
            screen.print(f"No film: {error}")
    screen.print("Next:")
    screen.print(f"  ppo visualize {path}  # films of it")
    screen.print(f"  tensorboard --logdir {path}  # its curves")
    more = f"ppo train --resume {path} --set total_steps={more_steps}"
    screen.print(f"  {more}  # more steps")


@contextlib.contextmanager
def hints_at_resuming(terminated_code: int = 130) -> Iterator[list[RunFolder]]:
    """Say how to go on when a run ends early; yields a list for its folder.

    What SIGTERM has cut short ends with a code of its own.
    """
    runs: list[RunFolder] = []
    try:
        yield runs
    except (PpoError, EnvserveError) as error:
        can_go_on = not isinstance(error, _RESUMING_FAILS_TOO)
        if can_go_on and runs and runs[0].has_checkpoint():
            error.add_note(_how_to_go_on(runs[0]))
        raise
    except KeyboardInterrupt as interrupt:
        text = "Stopped before the first checkpoint; there is nothing to go on with."
        if runs and runs[0].has_checkpoint():
            newest = max(runs[0].checkpoints.glob("[0-9]" * 8))
            text = f"Stopped at once; the newest checkpoint is {newest}. "
            text += _how_to_go_on(runs[0])
        elif runs and any(runs[0].path.glob("seed-*")):
            text = f"Stopped at once. {_how_to_go_on(runs[0])}"
        print(text, file=sys.stderr)
        is_told = isinstance(interrupt, Terminated)
        raise typer.Exit(terminated_code if is_told else 130) from None


def _how_to_go_on(run_folder: RunFolder) -> str:
    resume = f"ppo train --resume {run_folder.word}"
    return f"Go on with: {os.environ.get(on_ray.AGAIN, resume)}"
