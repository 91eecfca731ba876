"""The command `ppo configs`: list the named configs, or the settings of one config."""

import json
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

from rich.table import Table

from envserve.cli.program import Option
from envserve.cli.terminal import console
from envserve.settings import field_docs
from envserve.text import one_line
from ppo.cli.options import config_names, report_errors
from ppo.config.config import PPO_SETTINGS, SETTINGS_TYPES, Config
from ppo.config.named_configs import CONFIGS, expected_result, load_config

#: Maps the first setting of each group of settings to the title of the group.
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


def configs(
    name: Annotated[str | None, Option(values=config_names)] = None,
    *,
    all_: bool = False,
) -> None:
    """List the named configs, or the settings of one config.

    Args:
      name: Config whose settings to show: a name, a file or an env.
      all_: Also show the settings that have their default values.
    """
    if name is not None:
        with report_errors():
            config = load_config(name)
        _print_keys(config, all_=all_)
        if config.non_defaults() == {"env_name": name}:
            print("`ppo train` adapts some settings to the spaces of the env.")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("name", "env", "steps", "return", "time"):
        table.add_column(title, no_wrap=title != "return")  # do not wrap names
    for name, config in CONFIGS.items():
        thousands = config.total_steps // 1000
        expected, duration = expected_result(config)
        is_million = thousands % 1000 == 0
        steps = f"{thousands // 1000}M" if is_million else f"{thousands}k"
        table.add_row(name, config.env_name, steps, expected or "-", duration or "-")
    console().print(table)
    print(
        "Return: expected mean over 100 episodes (range over seeds). "
        "Time: training on one core.\n"
        "Settings of a config: `ppo configs NAME`.\n"
        "Other envs: `ppo train my_env.py:Walk`, `ppo train Taxi-v4`."
    )


def _print_keys(config: Config, *, all_: bool) -> None:
    """Print the settings that differ from the defaults; with `all_`, print all.

    Each setting is followed by its description.
    """
    values, docs = dict(vars(config)), field_docs(Config)
    changed = config.non_defaults()
    if kind := SETTINGS_TYPES.get(config.algorithm):
        docs |= field_docs(kind)
        for table in (values, changed):
            table.pop("algorithm_settings", None)
    _print_group("Differs from the defaults", changed, docs, "bold cyan")
    if kind:
        title = f"Settings of {config.algorithm}"
        _print_group(title, config.algorithm_settings, docs, "bold")
    keys = list(values)
    if not all_:
        num_others = len(keys) - len(changed)
        print(f"--all also shows the {num_others} settings with their default values.")
        return
    starts = [*map(keys.index, _GROUPS), len(keys)]
    for title, (start, end) in zip(_GROUPS.values(), pairwise(starts), strict=True):
        same = {key: values[key] for key in keys[start:end] if key not in changed}
        _print_group(title, same, docs, "bold")


def _print_group(
    title: str, values: Mapping[str, Any], docs: Mapping[str, str], style: str
) -> None:
    # A table would truncate values and descriptions to the width of the terminal.
    out = console()
    out.print(f"{title}\n", style=style, soft_wrap=True)
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        text = one_line(f"{key} = {text}")  # it may be another person's
        out.print(text, style=style, markup=False, soft_wrap=True)
        text = f"    {docs[key].split('. ')[0].rstrip('.')}."
        if key in PPO_SETTINGS:
            text += " (ppo)"
        if out.is_terminal:
            text = textwrap.fill(text, out.width, subsequent_indent="    ")
        out.print(text, markup=False, soft_wrap=True)
    out.print()
