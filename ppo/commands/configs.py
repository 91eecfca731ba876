"""`ppo configs`: the named configs, or every setting of one."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ppo.commands.shared import reported_errors
from ppo.config import Config
from ppo.configs import CONFIGS, EXPECTED_RETURNS, load_config

__all__ = ["configs"]


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
        steps, expected = f"{config.total_steps:,}", EXPECTED_RETURNS.get(name, "-")
        table.add_row(name, config.env_name, steps, expected)
    Console().print(table)


def _print_keys(config: Config) -> None:
    """Print value and meaning of each key: the first sentence of its description."""
    # Plain lines: a table would cut values and meanings to the terminal's width.
    for key, field in Config.model_fields.items():
        value = getattr(config, key)
        meaning = " ".join((field.description or "").split()).split(". ")[0]
        print(f"{key} = {value if isinstance(value, str) else json.dumps(value)}")
        print(f"    {meaning.rstrip('.')}.")
