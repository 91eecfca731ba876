"""Annotated types of arguments and options that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Annotated, Final, Literal

from msgspec import Meta

from envserve.cli.program import Option
from envserve.cli.terminal import fail
from envserve.envs.user_envs import is_user_env, writable_by_others
from envserve.errors import AddressError, EnvStartError

_ADDRESS: Final = (
    "HOST, HOST:PORT, tcp://HOST:PORT, ipc://PATH, dns://NAME, file://PATH or "
    "ray://NAMESPACE/NAME"
)
_IMPORT_HELP: Final = (
    "Module or Python file that registers envs or wrappers; repeatable."
)
_RESOURCES_HELP: Final = (
    "Ray resources to reserve for each process, such as '{\"CPU\": 8}'; by default, "
    "one CPU."
)
_LOG_FORMAT_HELP: Final = (
    "Log format: text, or json for one object per line with time, level, logger, "
    "message and further fields."
)


def env_names() -> list[str]:
    """Return the registered env names, for shell completion."""
    from envserve.envs.registry import Registry

    return [*Registry(None, ()).names]


Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0.001)]

Address = Annotated[str, Option(f"Server address: {_ADDRESS}.")]
Addresses = Annotated[
    list[str], Option(f"Server addresses: {_ADDRESS}.", metavar="ADDRESS")
]
Env = Annotated[str, Option(values=env_names)]
Import = Annotated[list[str] | None, Option(_IMPORT_HELP, metavar="MODULE")]
Insecure = Annotated[
    bool, Option("Connect without keys, to a server started with --insecure-no-auth.")
]
LogFormat = Annotated[
    Literal["text", "json"],
    Option(_LOG_FORMAT_HELP, panel="Logs", variable="ENVSERVE_LOG_FORMAT"),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    Option(
        "Minimum level of the messages to log to stderr.",
        panel="Logs",
        variable="ENVSERVE_LOG_LEVEL",
    ),
]
Resources = Annotated[dict[str, float] | None, Option(_RESOURCES_HELP, panel="On Ray")]
Timeout = Annotated[Seconds, Option("Seconds to wait for a server's answer.")]


def address_of(word: str) -> str:
    """Return the first address that a word resolves to; exit if there is none."""
    from envserve.client.link.discovery import resolve

    try:
        return resolve(word)[0]
    except AddressError as error:
        fail(error, 2)


def import_from_here(modules: Iterable[str] | None, *envs: str) -> None:
    """Also find modules in the working directory; exit if they may have been planted.

    Args:
      modules: Values of --import.
      envs: Registered names, FILE.py:CLASS or MODULE:NAME.
    """
    try:
        add_working_directory([*(modules or ()), *filter(is_user_env, envs)])
    except EnvStartError as error:
        fail(error, 2)


def add_working_directory(words: Iterable[str], *, always: bool = False) -> None:
    """Add the working directory to `sys.path`, if only this user can write to it.

    Args:
      words: Modules and files; see `import_from_here`.
      always: Whether to add it even if all modules are found elsewhere.

    Raises:
      EnvStartError: Others can write to it, and a module is not found elsewhere.
    """
    modules = [word.partition(":")[0] for word in words]
    missing = [m for m in modules if not m.endswith(".py") and not _is_found(m)]
    if not missing and not always:
        return
    if not (place := writable_by_others(os.getcwd())):
        sys.path.append(os.getcwd())  # last, so that its files shadow no other module
    elif missing:
        raise EnvStartError(
            f"--import: other users can write to the working directory ({place}) and "
            f"may have planted {missing[0]} there, which is not found elsewhere; run "
            f"the command in a folder that only you can write to"
        )


def _is_found(module: str) -> bool:
    package = module.partition(".")[0]
    return package in {"", *sys.modules} or find_spec(package) is not None
