"""The command `ppo export`: write a policy as a TensorFlow SavedModel."""

from pathlib import Path

from ppo.cli.options import (
    Checkpoint,
    Connect,
    Import,
    Run,
    SourceOptions,
    Trust,
    open_run,
)


def export(
    run: Run,
    dir_: Path,
    *,
    checkpoint: Checkpoint = None,
    connect: Connect = None,
    import_: Import = None,
    trust: Trust = False,
) -> None:
    """Export the policy as a SavedModel that needs nothing but TensorFlow.

    The model maps raw observations to actions in the form that the env accepts. It has
    a function for the most likely actions and one for sampled actions. Starts one env,
    or leases one from a server, to read its spaces.

    Args:
      dir_: New folder to write the SavedModel to.
    """
    with open_run(run, checkpoint, SourceOptions(connect, import_, trust)) as opened:
        from ppo.environments import env_maker
        from ppo.evaluation.export import export_run

        run_folder, config, which, source, screen = opened
        make_env = env_maker(config, source.addresses, 1, source.import_modules)
        screen.phase("exporting")
        counters = export_run(config, run_folder, make_env, dir_, which=which)
        screen.print(
            f"SavedModel after {counters.steps:,} steps: {dir_} (the most likely "
            "actions: `mode` and the default signature; sampled actions: `sample`)"
        )
