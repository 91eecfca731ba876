"""The command `ppo visualize`: record videos of a policy."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from envserve.cli.options import Count
from ppo.cli.options import (
    Checkpoint,
    Connect,
    EnvOptions,
    Import,
    Run,
    Trust,
    open_run,
)
from ppo.cli.progress import Screen
from ppo.config.config import Config
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.trust import EnvSource

if TYPE_CHECKING:
    from ppo.rollout import Episode


def visualize(
    run: Run,
    *,
    outdir: Path | None = None,
    episodes: Count = 5,
    checkpoint: Checkpoint = None,
    seed: Annotated[int, Meta(ge=0)] | None = None,
    connect: Connect = None,
    import_: Import = None,
    trust: Trust = False,
) -> None:
    """Film episodes of the policy's most likely actions, each as an MP4 file.

    Args:
        outdir: Folder to write the videos and their returns to; by default, `films` in
            the run folder.
        episodes: Number of episodes to film.
        seed: Seed of the env; by default, the seed of the run's evaluation.
    """
    with open_run(run, checkpoint, EnvOptions(connect, import_, trust)) as opened:
        run_folder, config, which, source, screen = opened
        chosen: dict[str, Any] = {"outdir": outdir, "which": which, "seed": seed}
        film(screen, run_folder, config, source, episodes=episodes, **chosen)


def film(
    screen: Screen,
    run_folder: RunFolder,
    config: Config,
    source: EnvSource,
    *,
    episodes: int,
    outdir: Path | None = None,
    **chosen: Any,
) -> None:
    """Record episodes with `visualize_run`; print the file and return of each."""
    from envserve.worker.rendering import headless_variables
    from ppo.evaluation.videos import rendering_env_maker, visualize_run

    os.environ.update(headless_variables(os.environ))  # for the workers

    def report(path: Path, episode: "Episode") -> None:
        result = f"return {episode.total_reward:.1f}, {episode.length} steps"
        screen.print(f"{path}: {result}")

    screen.phase(f"filming {episodes} episodes", is_transient=True)
    evaluation = visualize_run(
        config,
        run_folder,
        rendering_env_maker(config, source.addresses, source.import_modules),
        outdir or run_folder.path / "films",
        episodes=episodes,
        on_episode=report,
        **chosen,
    )
    screen.print(
        f"Mean return {evaluation.mean_return:.1f}, standard deviation "
        f"{evaluation.returns.std():.1f}, over {episodes} episodes"
    )
