"""Options that commands share, and what is looked at before any of them."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from envserve.cli.terminal import fail
from envserve.envs.user_envs import writable_by_others
from envserve.errors import AddressError

__all__ = [
    "Import",
    "Insecure",
    "Timeout",
    "address_of",
    "look_for_modules_here",
    "names_here",
]


def look_for_modules_here(words: list[str] | None) -> list[str] | None:
    """Has --import find modules of the working directory too, as `python -m` would."""
    here = os.getcwd()
    if all(word.partition(":")[0].endswith(".py") for word in words or ()):
        return words  # files are looked for where they are
    if place := writable_by_others(here):
        fail(
            f"--import: others can write to the working directory, {place}, and so "
            f"any module there could be theirs; start in a folder of your own",
            2,
        )
    sys.path.append(here)  # last, so that a file there hides nothing
    return words


Import = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help="Module or file that registers envs or wrappers; repeatable.",
        callback=look_for_modules_here,
    ),
]
Timeout = Annotated[float, typer.Option(min=0.001, help="Seconds to wait for it.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Use no keys, as --insecure-no-auth there.")
]


def address_of(word: str) -> str:
    """Returns the one address that a word stands for; ends the command if none."""
    from envserve.client.link.discovery import resolve

    try:
        return resolve(word)[0]
    except AddressError as error:
        fail(error, 2)


def names_here(incomplete: str) -> list[str]:
    """Returns the registered names of envs that begin like a word, for completion."""
    from envserve.envs.registry import Registry

    return [name for name in Registry(None, ()).names if name.startswith(incomplete)]
