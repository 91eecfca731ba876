"""What is done with runs: `ppo evaluate`, `export`, `plot` and `visualize`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppo.cli.options import (
    Connect,
    Import,
    NumWorkers,
    Run,
    Threads,
    WhichCheckpoint,
    opened_run,
    reported_errors,
)
from ppo.cli.progress import Screen
from ppo.config.config import Config
from ppo.run_folder.folder import EnvSource, RunFolder

if TYPE_CHECKING:
    from ppo.rollout import Episode

__all__ = ["evaluate", "export", "film", "plot", "visualize"]


def evaluate(
    run: Run,
    checkpoint: WhichCheckpoint = None,
    connect: Connect = None,
    num_workers: NumWorkers = None,
    import_modules: Import = None,
    intra_op_threads: Threads = 2,
    inter_op_threads: Threads = 1,
) -> None:
    """Evaluate a checkpoint of a run, by default the newest."""
    threads = intra_op_threads, inter_op_threads
    with opened_run(run, checkpoint, connect, import_modules, *threads) as opened:
        from ppo.environments import env_maker
        from ppo.evaluation.evaluate import evaluate_run

        run_folder, config, which, place, screen = opened
        make_env = env_maker(config, place.addresses, num_workers, place.import_modules)
        screen.phase(f"evaluating {config.evaluation_episodes} episodes")
        evaluation = evaluate_run(config, run_folder, make_env, which=which)
        screen.print(str(evaluation))


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
    with opened_run(run, checkpoint, connect, import_modules) as opened:
        from ppo.environments import env_maker
        from ppo.evaluation.export import export_run

        run_folder, config, which, place, screen = opened
        make_env = env_maker(config, place.addresses, 1, place.import_modules)
        screen.phase("exporting")
        counters = export_run(config, run_folder, make_env, folder, which=which)
        text = f"SavedModel: {folder}, the policy after {counters.steps:,} steps"
        screen.print(text)


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Image to write. Default: METRIC.png in the run's folder, or in the "
            "one above those of several.",
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="What to draw, of metrics.jsonl.")
    ] = "mean_return",
) -> None:
    """Draw the return of runs over env steps, one curve per config.

    Runs that only differ in their seed become one curve: mean and standard deviation.
    """
    from ppo.evaluation.plot import draw_curves, read_curves

    with reported_errors():
        curves = read_curves(runs, metric)
        if out is None:
            places = map(os.path.abspath, runs)
            folder = runs[0] if len(runs) == 1 else Path(os.path.commonpath([*places]))
            out = folder / f"{metric.replace('/', '_')}.png"
        out = out if out.suffix else out.with_suffix(".png")
        draw_curves(curves, metric, out)
        print(f"Plot: {out}")


def visualize(
    run: Run,
    outdir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for videos and their numbers. Default: films, in the run's.",
        ),
    ] = None,
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
    with opened_run(run, checkpoint, connect, import_modules) as opened:
        run_folder, config, which, place, screen = opened
        chosen: dict[str, Any] = {"outdir": outdir, "which": which, "seed": seed}
        film(screen, run_folder, config, place, episodes=episodes, **chosen)


def film(
    screen: Screen,
    run_folder: RunFolder,
    config: Config,
    place: EnvSource,
    *,
    episodes: int,
    outdir: Path | None = None,
    **chosen: Any,
) -> None:
    """Film episodes as `visualize_run` does; say which, and what they earn."""
    from envserve.worker.rendering import headless_settings
    from ppo.evaluation.videos import rendering_env_maker, visualize_run

    os.environ.update(headless_settings(os.environ))  # for the workers

    def report(path: Path, episode: "Episode") -> None:
        earned = f"return {episode.total_reward:.1f}, {episode.length} steps"
        screen.print(f"{path}: {earned}")

    screen.phase(f"filming {episodes} episodes", is_passing=True)
    evaluation = visualize_run(
        config,
        run_folder,
        rendering_env_maker(config, place.addresses, place.import_modules),
        outdir or run_folder.path / "films",
        episodes=episodes,
        on_episode=report,
        **chosen,
    )
    screen.print(
        f"Mean return {evaluation.mean_return:.1f}, standard deviation "
        f"{evaluation.returns.std():.1f}, over {episodes} episodes"
    )
