"""The `ppo` command.

Exit codes: 0 when done or stopped by SIGINT or SIGTERM, 130 when a second one cut it
short, 1 when a run failed, 2 when what was asked for cannot be done.
TensorFlow is only loaded once the input is checked.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from envserve.errors import EnvserveError, SpaceError, WrapperError
from ppo.commands import tools
from ppo.commands.options import (
    Connect,
    Import,
    NumWorkers,
    Threads,
    WhichCheckpoint,
    plain_warnings,
    reported_errors,
    start_tensorflow,
    which_checkpoint,
)
from ppo.config import Config
from ppo.config_text import apply_settings, describe_keys
from ppo.configs import CONFIGS, EXPECTED_RETURNS, load_config
from ppo.errors import BadInputError, ConfigError, PpoError
from ppo.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from ppo.agent import Agent
    from ppo.environments import MakeEnv
    from ppo.run_folder.checkpoint import Which

__all__ = ["main"]

_RESUMING_FAILS_TOO = (BadInputError, SpaceError, WrapperError)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train and evaluate agents with proximal policy optimisation.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` default to those of the process."""
    # --import finds modules of the working directory too, as `python -m` would; last,
    # so that a file there hides nothing.
    sys.path.append(os.getcwd())
    app(arguments if arguments is None else list(arguments), prog_name="ppo")


@app.command()
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
    with reported_errors(), plain_warnings():
        if resume is not None and (run_dir is not None or seed is not None):
            raise ConfigError(
                "--resume takes folder and seed from the earlier run: leave out "
                "--run-dir and --seed; use --set to change a setting."
            )
        changes = [*(settings or []), *([] if seed is None else [f"seed={seed}"])]
        run_folder, settled = _settle(config, changes, run_dir, resume)
        start_tensorflow(intra_op_threads, inter_op_threads)
        from ppo.environments import env_maker

        make_env = env_maker(
            settled,
            addresses=connect or [],
            num_workers=num_workers,
            import_modules=import_modules or [],
        )
        try:
            with _hints_at_resuming(run_folder):
                agent = _train(
                    console, settled, run_folder, make_env, resume is not None
                )
                if agent is not None:
                    _evaluate(console, settled, run_folder, make_env, agent)
        finally:
            if resume is not None or not run_folder.remove_if_unused():
                console.print(f"Run folder: {run_folder.path}", soft_wrap=True)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    checkpoint: WhichCheckpoint = None,
    connect: Connect = None,
    num_workers: NumWorkers = None,
    import_modules: Import = None,
    intra_op_threads: Threads = 2,
    inter_op_threads: Threads = 1,
) -> None:
    """Evaluate a checkpoint of a run, by default the newest."""
    with reported_errors(), plain_warnings():
        which = which_checkpoint(checkpoint)
        run_folder, config = RunFolder.open(run)
        start_tensorflow(intra_op_threads, inter_op_threads)
        from ppo.environments import env_maker

        make_env = env_maker(
            config,
            addresses=connect or [],
            num_workers=num_workers,
            import_modules=import_modules or [],
        )
        _evaluate(Console(), config, run_folder, make_env, None, which)


@app.command()
def configs(
    name: Annotated[
        str | None,
        typer.Argument(help="Show all keys of this one; a file will do, too."),
    ] = None,
) -> None:
    """List the named configs, or all keys of one."""
    if name is not None:
        with reported_errors():
            _print_keys(load_config(name))
        return
    table = Table("name", "env", "steps", "expected return")
    for name, config in CONFIGS.items():
        table.add_row(
            name,
            config.env_name,
            f"{config.total_steps:,}",
            EXPECTED_RETURNS.get(name, "-"),
        )
    Console().print(table)


app.command()(tools.export)
app.command()(tools.plot)
app.command()(tools.visualize)


def _print_keys(config: Config) -> None:
    # Plain lines: a table would cut values and meanings to the terminal's width.
    for key, meaning in describe_keys().items():
        value = getattr(config, key)
        print(f"{key} = {value if isinstance(value, str) else json.dumps(value)}")
        print(f"    {meaning}.")


def _settle(
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
    from ppo.commands.progress_bar import ProgressBar
    from ppo.commands.stop_signals import StopSignals
    from ppo.run_folder.checkpoint import read_counters
    from ppo.train import train as run_training

    if is_resumed and run_folder.has_checkpoint():
        before = read_counters(run_folder.checkpoints)
        if before.iteration >= config.num_iterations:
            console.print(
                f"The run is already at {before.steps:,} steps; "
                "--set total_steps=... to train on."
            )
    total_steps = config.num_iterations * config.steps_per_iteration
    with (
        ProgressBar(console, total_steps) as bar,
        StopSignals(lambda: _announce_stop(console)) as stop,
    ):
        result = run_training(
            config,
            run_folder,
            make_env,
            resume=is_resumed,
            on_progress=lambda progress: bar.show(
                progress.steps,
                progress.steps_per_second,
                progress.mean_return,
                progress.lost_steps,
            ),
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


def _announce_stop(console: Console) -> None:
    console.print("Stopping after this iteration; Ctrl-C again stops now")


@contextlib.contextmanager
def _hints_at_resuming(run_folder: RunFolder) -> Iterator[None]:
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


def _evaluate(
    console: Console,
    config: Config,
    run_folder: RunFolder,
    make_env: "MakeEnv",
    agent: "Agent | None",
    which: "Which" = None,
) -> None:
    """Evaluate an agent, or that of a checkpoint."""
    from ppo.evaluate import evaluate_run

    evaluation = evaluate_run(config, run_folder, make_env, agent, which=which)
    console.print(
        f"Evaluation after {evaluation.steps:,} steps: "
        f"mean return {evaluation.mean_return:.1f} "
        f"over {len(evaluation.returns)} episodes "
        f"(lowest {evaluation.returns.min():.1f}, "
        f"highest {evaluation.returns.max():.1f})",
        soft_wrap=True,
    )
