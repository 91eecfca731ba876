"""The command `ppo evaluate`: compute the mean return of a checkpoint's policy."""

from envserve.text import counted
from ppo.cli.options import (
    Checkpoint,
    Connect,
    Import,
    InterOpThreads,
    IntraOpThreads,
    NumWorkers,
    Run,
    Sampled,
    SourceOptions,
    Trust,
    open_run,
)


def evaluate(
    run: Run,
    *,
    checkpoint: Checkpoint = None,
    sampled: Sampled = False,
    connect: Connect = None,
    num_workers: NumWorkers = None,
    import_: Import = None,
    trust: Trust = False,
    intra_op_threads: IntraOpThreads = 2,
    inter_op_threads: InterOpThreads = 1,
) -> None:
    """Evaluate the policy of a checkpoint, by default the newest."""
    options = SourceOptions(connect, import_, trust)
    with open_run(
        run, checkpoint, options, intra_op_threads, inter_op_threads
    ) as opened:
        from ppo.environments import env_maker
        from ppo.evaluation.evaluate import evaluate_run, mode_remark

        run_folder, config, which, source, screen = opened
        if sampled:
            config = config.replace(evaluation_actions="sample")
        make_env = env_maker(
            config, source.addresses, num_workers, source.import_modules
        )
        screen.phase(f"evaluating {counted(config.evaluation_episodes, 'episode')}")
        evaluation = evaluate_run(config, run_folder, make_env, which=which)
        screen.print(str(evaluation))
        if remark := mode_remark(evaluation, config, run_folder):
            screen.print(remark)
