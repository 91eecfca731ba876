"""`ppo evaluate`: what a checkpoint of a run earns."""

from typing import TYPE_CHECKING

from rich.console import Console

from ppo.commands.shared import (
    Connect,
    Import,
    NumWorkers,
    Run,
    Threads,
    WhichCheckpoint,
    opened_run,
)

if TYPE_CHECKING:
    from ppo.evaluate import Evaluation

__all__ = ["evaluate", "print_evaluation"]


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
    with opened_run(run, checkpoint, *threads) as (run_folder, config, which):
        from ppo.environments import env_maker
        from ppo.evaluate import evaluate_run

        make_env = env_maker(config, connect, num_workers, import_modules)
        evaluation = evaluate_run(config, run_folder, make_env, which=which)
        print_evaluation(Console(), evaluation)


def print_evaluation(console: Console, evaluation: "Evaluation") -> None:
    """Print how far the policy was trained, and what it earned."""
    console.print(
        f"Evaluation after {evaluation.steps:,} steps: "
        f"mean return {evaluation.mean_return:.1f} "
        f"over {len(evaluation.returns)} episodes "
        f"(lowest {evaluation.returns.min():.1f}, "
        f"highest {evaluation.returns.max():.1f})",
        soft_wrap=True,
    )
