"""The sub-commands that make something of a run that has been trained."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ppo.commands.options import (
    Connect,
    Import,
    WhichCheckpoint,
    plain_warnings,
    reported_errors,
    start_tensorflow,
    which_checkpoint,
)
from ppo.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from ppo.episodes import Episode

__all__ = ["export", "plot", "visualize"]

Run = Annotated[Path, typer.Argument(help="Folder of a run.")]


def export(
    run: Run,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="New folder for the SavedModel.")
    ],
    checkpoint: WhichCheckpoint = None,
    connect: Connect = None,
    import_modules: Import = None,
) -> None:
    """Save the policy as a SavedModel that needs nothing but TensorFlow.

    It takes raw observations and gives actions as the env takes them. One env is
    started, or taken from a server, to learn the spaces from.
    """
    with reported_errors(), plain_warnings():
        which = which_checkpoint(checkpoint)
        run_folder, config = RunFolder.open(run)
        start_tensorflow(intra_op_threads=1, inter_op_threads=1)
        from ppo.environments import env_maker
        from ppo.export import export_run

        make_env = env_maker(
            config,
            addresses=connect or [],
            num_workers=1,
            import_modules=import_modules or [],
        )
        counters = export_run(config, run_folder, make_env, folder, which=which)
        text = f"SavedModel: {folder}, the policy after {counters.steps:,} steps"
        Console().print(text, soft_wrap=True)


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Image to write, such as curves.png.")
    ],
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="What to draw, of metrics.jsonl.")
    ] = "mean_return",
) -> None:
    """Draw the return of runs over env steps, one curve per config.

    Runs that only differ in their seed become one curve: mean and standard deviation.
    """
    from ppo.plot import draw_curves, read_curves

    with reported_errors():
        curves = read_curves(runs, metric)
        draw_curves(curves, metric, out)
        Console().print(f"Plot: {out}", soft_wrap=True)


def visualize(
    run: Run,
    outdir: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for videos and their numbers.")
    ],
    episodes: Annotated[int, typer.Option(min=1, help="How many to film.")] = 5,
    checkpoint: WhichCheckpoint = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of the env. Default: that of the run's evaluation."),
    ] = None,
    connect: Connect = None,
    import_modules: Import = None,
) -> None:
    """Film a policy that takes its most likely actions: an MP4 per episode."""
    console = Console()
    with reported_errors(), plain_warnings():
        which = which_checkpoint(checkpoint)
        run_folder, config = RunFolder.open(run)
        start_tensorflow(intra_op_threads=1, inter_op_threads=1)
        from ppo.films.rendering import headless_backend, rendering_env_maker
        from ppo.films.visualize import visualize_run

        backend = headless_backend(os.environ)
        if backend is not None:
            os.environ["MUJOCO_GL"] = backend  # for the workers, which inherit it

        def report(path: Path, episode: "Episode") -> None:
            earned = f"return {episode.total_reward:.1f}, {episode.length} steps"
            console.print(f"{path}: {earned}", soft_wrap=True)

        make_env = rendering_env_maker(
            config, addresses=connect or [], import_modules=import_modules or []
        )
        evaluation = visualize_run(
            config,
            run_folder,
            make_env,
            outdir,
            episodes=episodes,
            which=which,
            seed=seed,
            on_episode=report,
        )
        console.print(
            f"Mean return {evaluation.mean_return:.1f}, standard deviation "
            f"{evaluation.returns.std():.1f}, over {episodes} episodes",
            soft_wrap=True,
        )
