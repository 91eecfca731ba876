"""The command `ppo configs`: list the named configs, or all settings of one config."""

import json
import textwrap
from collections.abc import Iterable
from itertools import pairwise

from rich.table import Table

from envserve.cli.terminal import console
from envserve.settings import field_docs
from ppo.cli.options import report_errors
from ppo.config.config import Config
from ppo.config.named_configs import CONFIGS, EXPECTED_RETURNS, load_config

#: Titles of groups of settings, by the first setting of each group.
_GROUPS = {
    "env_name": "Env",
    "total_steps": "Run and rollouts",
    "epochs": "Update",
    "discount": "Returns and objective",
    "normalize_advantages": "Normalisation",
    "network": "Networks",
    "evaluation_episodes": "Evaluations, reports and checkpoints",
    "preload": "Faults",
}


def configs(name: str | None = None) -> None:
    """List the named configs, or all settings of one config.

    Args:
        name: Config whose settings to show: a name, a file or an env.
    """
    if name is not None:
        with report_errors():
            config = load_config(name)
            _print_keys(config)
        if config == Config(env_name=name):
            print(
                "Envs with discrete actions or images have other defaults; see "
                "docs/training.md."
            )
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("name", "env", "steps", "expected return"):
        table.add_column(title, overflow="fold")  # names must stay complete
    for name, config in CONFIGS.items():
        steps, expected = f"{config.total_steps:,}", EXPECTED_RETURNS.get(name, "-")
        table.add_row(name, config.env_name, steps, expected)
    console().print(table)
    print("Other envs: `ppo train my_env.py:Walk`, `ppo train Taxi-v4`.")


def _print_keys(config: Config) -> None:
    """Print the value and description of each setting, changed settings first."""
    changed = config.non_defaults()
    _print_group("Differs from the defaults", config, changed, "bold cyan")
    keys = list(vars(config))
    starts = [*map(keys.index, _GROUPS), len(keys)]
    for title, (start, end) in zip(_GROUPS.values(), pairwise(starts), strict=True):
        same = [key for key in keys[start:end] if key not in changed]
        _print_group(title, config, same, "bold")


def _print_group(title: str, config: Config, keys: Iterable[str], style: str) -> None:
    # A table would truncate values and descriptions to the width of the terminal.
    out, docs = console(), field_docs(Config)
    out.print(f"{title}\n", style=style, soft_wrap=True)
    for key in keys:
        value = getattr(config, key)
        text = value if isinstance(value, str) else json.dumps(value)
        out.print(f"{key} = {text}", style=style, markup=False, soft_wrap=True)
        text = f"    {docs[key].split('. ')[0].rstrip('.')}."
        if out.is_terminal:
            text = textwrap.fill(text, out.width, subsequent_indent="    ")
        out.print(text, markup=False, soft_wrap=True)
    out.print()
