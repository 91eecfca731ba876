"""`ppo visualize`: an MP4 of each of some episodes."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ppo.commands.shared import Connect, Import, Run, WhichCheckpoint, opened_run

if TYPE_CHECKING:
    from ppo.rollout import Episode

__all__ = ["visualize"]


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
    with opened_run(run, checkpoint, 1, 1) as (run_folder, config, which):
        from ppo.films.rendering import headless_backend, rendering_env_maker
        from ppo.films.visualize import visualize_run

        backend = headless_backend(os.environ)
        if backend is not None:
            os.environ["MUJOCO_GL"] = backend  # for the workers, which inherit it

        def report(path: Path, episode: "Episode") -> None:
            earned = f"return {episode.total_reward:.1f}, {episode.length} steps"
            console.print(f"{path}: {earned}", soft_wrap=True)

        evaluation = visualize_run(
            config,
            run_folder,
            rendering_env_maker(config, connect, import_modules),
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
