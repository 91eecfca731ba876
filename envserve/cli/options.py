"""Annotated types of arguments and options that several commands share."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Annotated, Final, Literal

from msgspec import Meta

from envserve.address import DEFAULT_PORT
from envserve.cli.program import Option
from envserve.envs.user_envs import (
    is_user_env,
    split_reference,
    working_directory,
    writable_by_others,
)
from envserve.errors import EnvStartError, KeyFileError

#: Address of a server on this host, unless it was started with --bind.
THIS_HOST: Final = f"tcp://127.0.0.1:{DEFAULT_PORT}"
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
    from envserve.envs.registry import offered_names

    return [*offered_names()]


def known_addresses() -> list[str]:
    """Return the addresses of joined servers in short form, for shell completion."""
    from envserve.keys.key_folder import KeyFolder

    with contextlib.suppress(KeyFileError):
        return [
            address.removeprefix("tcp://").removesuffix(f":{DEFAULT_PORT}")
            for address in KeyFolder().pinned_addresses
            if "*" not in address
        ]
    return []


Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
#: A socket listens on all addresses if its host is "", so "" is not allowed.
Host = Annotated[str, Meta(min_length=1)]
Seconds = Annotated[float, Meta(ge=0.001)]

Address = Annotated[str, Option(f"Server address: {_ADDRESS}.", values=known_addresses)]
MaybeAddress = Annotated[str | None, Option(values=known_addresses)]
Addresses = Annotated[
    tuple[str, ...],
    Option(
        f"Server addresses: {_ADDRESS}; by default, {THIS_HOST}.",
        metavar="ADDRESS",
        values=known_addresses,
    ),
]
Env = Annotated[str, Option(values=env_names)]
Import = Annotated[tuple[str, ...], Option(_IMPORT_HELP, metavar="MODULE")]
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
Timeout = Annotated[Seconds, Option("Seconds to wait for a server's reply.")]


def address_of(reference: str) -> str:
    """Return the first address that a reference resolves to.

    Raises:
      AddressError: There is none; see `resolve`.
    """
    from envserve.client.link.discovery import resolve

    return resolve(reference)[0]


def import_from_here(modules: Iterable[str], *envs: str) -> None:
    """Allow imports from the working directory; see `add_working_directory`.

    Args:
      modules: Values of --import.
      envs: Registered names, FILE.py:CLASS or MODULE:NAME.
    """
    add_working_directory([*modules, *filter(is_user_env, envs)])


def add_working_directory(references: Iterable[str], *, always: bool = False) -> None:
    """Add the working directory to `sys.path`, if only this user can write to it.

    Args:
      references: Modules, files and envs in the forms that `import_from_here` accepts.
      always: Whether to add the directory even if all modules are found elsewhere.

    Raises:
      EnvStartError: Other users can write to the directory, and a module is not found
        elsewhere.
    """
    modules = [split_reference(reference)[0] for reference in references]
    missing = [m for m in modules if not m.endswith(".py") and not _is_found(m)]
    if not (missing or always) or not (working_dir := working_directory()):
        return
    if not (folder := writable_by_others(working_dir)):
        sys.path.append(working_dir)  # last, so that its files shadow no other module
    elif missing:
        raise EnvStartError(
            f"--import: expected {missing[0]} to be an installed module, because other "
            f"users can write to the working directory ({folder}); install it, or run "
            f"the command in a folder that only you can write to"
        )


def _is_found(module: str) -> bool:
    package = module.partition(".")[0]
    return package in {"", *sys.modules} or find_spec(package) is not None
