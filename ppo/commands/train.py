"""`ppo train`: a run from its config to its evaluation."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from envserve.errors import EnvserveError, SpaceError, WrapperError
from ppo.commands.evaluate import print_evaluation
from ppo.commands.shared import (
    Connect,
    Import,
    NumWorkers,
    Threads,
    reported_errors,
    start_tensorflow,
)
from ppo.commands.stop_signals import StopSignals
from ppo.config import Config
from ppo.configs import CONFIGS, apply_settings, load_config
from ppo.errors import BadInputError, ConfigError, PpoError
from ppo.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from ppo.agent import Agent
    from ppo.environments import MakeEnv
    from ppo.train import Progress

__all__ = ["hints_at_resuming", "progress_bar", "train"]

_RESUMING_FAILS_TOO = (BadInputError, SpaceError, WrapperError)
_SECONDS_BETWEEN_LINES = 10.0


def train(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A name from `ppo configs`, or a .toml, .json or .py file."
        ),
    ] = None,
    connect: Connect = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting; repeatable. `ppo configs NAME` lists all keys.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Root of all randomness.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for this run. Default: runs/NAME-TIME.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Go on with the run of this folder."),
    ] = None,
    num_workers: NumWorkers = None,
    import_modules: Import = None,
    intra_op_threads: Threads = 2,
    inter_op_threads: Threads = 1,
) -> None:
    """Train an agent, and evaluate it at the end."""
    console = Console()
    with reported_errors():
        if resume is not None and (run_dir is not None or seed is not None):
            raise ConfigError(
                "--resume takes folder and seed from the earlier run: leave out "
                "--run-dir and --seed; use --set to change a setting."
            )
        changes = [*(settings or []), *([] if seed is None else [f"seed={seed}"])]
        run_folder, chosen = _prepare(config, changes, run_dir, resume)
        start_tensorflow(intra_op_threads, inter_op_threads)
        from ppo.environments import env_maker
        from ppo.evaluate import evaluate_run

        make_env = env_maker(chosen, connect, num_workers, import_modules)
        try:
            with hints_at_resuming(run_folder):
                is_resumed = resume is not None
                agent = _train(console, chosen, run_folder, make_env, is_resumed)
                if agent is not None:
                    evaluation = evaluate_run(chosen, run_folder, make_env, agent)
                    print_evaluation(console, evaluation)
        finally:
            if resume is not None or not run_folder.remove_if_unused():
                console.print(f"Run folder: {run_folder.path}", soft_wrap=True)


def _prepare(
    name: str | None, changes: list[str], run_dir: Path | None, resume: Path | None
) -> tuple[RunFolder, Config]:
    """Find out what to run and where; makes the run folder."""
    if resume is not None:
        run_folder, config = RunFolder.open(resume)
        if name is not None and load_config(name).env_name != config.env_name:
            raise ConfigError(
                f"--resume takes the config from the earlier run, whose env is "
                f"{config.env_name}: leave out CONFIG; use --set to change a setting."
            )
        return run_folder, apply_settings(config, changes)
    if name is None:
        raise ConfigError(
            f"Expected a CONFIG: one of {', '.join(CONFIGS)} or a .toml, .json or .py "
            "file."
        )
    config = apply_settings(load_config(name), changes)
    default = Path("runs") / f"{Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return RunFolder.create(run_dir or default, config), config


def _train(
    console: Console,
    config: Config,
    run_folder: RunFolder,
    make_env: "MakeEnv",
    is_resumed: bool,
) -> "Agent | None":
    """Train; returns the agent, or None when a signal ended it early."""
    from ppo.run_folder.checkpoint import read_counters
    from ppo.train import train as run_training

    if is_resumed and run_folder.has_checkpoint():
        before = read_counters(run_folder.checkpoints)
        if before.iteration >= config.num_iterations:
            console.print(
                f"The run is already at {before.steps:,} steps; "
                "--set total_steps=... to train on."
            )
    announcement = "Stopping after this iteration; Ctrl-C again stops now"
    total_steps = config.num_iterations * config.steps_per_iteration
    with (
        progress_bar(console, total_steps) as show,
        StopSignals(lambda: console.print(announcement)) as stop,
    ):
        result = run_training(
            config,
            run_folder,
            make_env,
            resume=is_resumed,
            on_progress=show,
            should_stop=stop.has_fired,
            on_step=stop.check,
        )
    if result.lost_steps:
        console.print(f"{result.lost_steps:,} steps were lost to envs that failed.")
    if result.is_finished:
        return result.agent
    console.print(
        f"Stopped by {stop.received.name if stop.received else 'request'} after "
        f"{result.steps:,} steps. {_how_to_go_on(run_folder)}",
        soft_wrap=True,
    )
    return None


@contextlib.contextmanager
def progress_bar(
    console: Console, total_steps: int
) -> Iterator[Callable[["Progress"], None]]:
    """Show how far a run is, on a terminal as a bar, elsewhere as a line now and then.

    Yields what to call with the run's new state.
    """
    bar = RichProgress(
        BarColumn(bar_width=None),
        TextColumn("{task.completed:,}/{task.total:,} steps"),
        TextColumn("{task.fields[speed]}"),
        TextColumn("return {task.fields[earned]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        redirect_stderr=sys.stderr.isatty(),  # a log file gets its own lines
    )
    task = bar.add_task("train", total=total_steps, speed="compiling", earned="-")
    last_line = -math.inf

    def show(progress: "Progress") -> None:
        nonlocal last_line
        steps, mean_return = progress.steps, progress.mean_return
        speed = f"{progress.steps_per_second:,.0f} steps/s"
        earned = "-" if math.isnan(mean_return) else f"{mean_return:.1f}"
        if progress.lost_steps:
            earned += f", {progress.lost_steps:,} lost"
        bar.update(task, completed=steps, speed=speed, earned=earned)
        is_due = time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES
        if not console.is_terminal and (is_due or steps >= total_steps):
            last_line = time.monotonic()
            console.print(f"{steps:,}/{total_steps:,} steps, {speed}, return {earned}")

    with bar:
        yield show


@contextlib.contextmanager
def hints_at_resuming(run_folder: RunFolder) -> Iterator[None]:
    """Say how to go on from the last checkpoint when a run ends early."""
    from ppo.run_folder.checkpoint import latest_checkpoint

    try:
        yield
    except (PpoError, EnvserveError) as error:
        if not isinstance(error, _RESUMING_FAILS_TOO) and run_folder.has_checkpoint():
            error.add_note(_how_to_go_on(run_folder))
        raise
    except KeyboardInterrupt:
        text = "Stopped at once; there is no checkpoint yet."
        if run_folder.has_checkpoint():
            newest = latest_checkpoint(run_folder.checkpoints)
            text = f"Stopped at once; the newest checkpoint is {newest}. "
            text += _how_to_go_on(run_folder)
        Console(stderr=True).print(text, soft_wrap=True)
        raise typer.Exit(130) from None


def _how_to_go_on(run_folder: RunFolder) -> str:
    return f"Go on with: ppo train --resume {run_folder.path}"
