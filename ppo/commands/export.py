"""`ppo export`: the policy of a run as a SavedModel."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ppo.commands.shared import Connect, Import, Run, WhichCheckpoint, opened_run

__all__ = ["export"]


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
    with opened_run(run, checkpoint, 1, 1) as (run_folder, config, which):
        from ppo.environments import env_maker
        from ppo.export import export_run

        make_env = env_maker(config, connect, 1, import_modules)
        counters = export_run(config, run_folder, make_env, folder, which=which)
        text = f"SavedModel: {folder}, the policy after {counters.steps:,} steps"
        Console().print(text, soft_wrap=True)
