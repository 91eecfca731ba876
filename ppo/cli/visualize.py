"""The command `ppo visualize`: record videos of a policy."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from envserve.cli.options import Count
from envserve.text import counted, rounded
from ppo.cli.options import (
    Checkpoint,
    Connect,
    Import,
    Run,
    Sampled,
    SourceOptions,
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
    sampled: Sampled = False,
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None,
    connect: Connect = None,
    import_: Import = None,
    trust: Trust = False,
) -> None:
    """Record episodes of the policy, each as an MP4 file.

    The policy takes its most likely actions, unless --sampled is given or the run's
    evaluation_actions is "sample".

    Args:
      outdir: Folder to write the videos and their returns to; by default, `films` in
        the run folder.
      episodes: Number of episodes to record.
      seed: Seed of the env; by default, the seed of the run's evaluation.
    """
    from ppo.evaluation.rendering import prepare_filming

    options = SourceOptions(connect, import_, trust)
    with open_run(run, checkpoint, options, check=prepare_filming) as opened:
        run_folder, config, which, source, screen = opened
        if sampled:
            config = config.replace(evaluation_actions="sample")
        more: dict[str, Any] = {"outdir": outdir, "which": which, "seed": seed}
        film(screen, run_folder, config, source, episodes=episodes, **more)


def film(
    screen: Screen,
    run_folder: RunFolder,
    config: Config,
    source: EnvSource,
    *,
    episodes: int,
    outdir: Path | None = None,
    **options: Any,
) -> None:
    """Record episodes with `visualize_run(..., **options)`, and print the results."""
    from ppo.evaluation.rendering import rendering_env_maker
    from ppo.evaluation.videos import visualize_run

    def report(path: Path, episode: "Episode") -> None:
        result = f"return {rounded(episode.total_reward)}, {episode.length} steps"
        screen.print(f"{path}: {result}")

    if outdir is None:  # a link that the user names is followed
        run_folder.check_folders("films")
        outdir = run_folder.path / "films"
    number = counted(episodes, "episode")
    screen.phase(f"filming {number}", is_transient=True)
    evaluation = visualize_run(
        config,
        run_folder,
        rendering_env_maker(config, source.addresses, source.import_modules),
        outdir,
        episodes=episodes,
        on_episode=report,
        **options,
    )
    if episodes > 1:
        screen.print(
            f"Mean return {rounded(evaluation.mean_return)}, standard deviation "
            f"{rounded(evaluation.std_return)}, over {number}"
        )
