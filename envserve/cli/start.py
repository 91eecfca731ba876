"""`envserve start`: serve envs, one option a setting."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Container, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, cast, get_type_hints

import typer

from envserve.cli.options import look_for_modules_here, names_here
from envserve.cli.terminal import ConfigFile, LogFormat, LogLevel, fail, set_up_logs
from envserve.envs.user_envs import absolute, is_user_env
from envserve.errors import (
    AddressError,
    EnvserveError,
    EnvStartError,
    KeyFileError,
    SelfTestError,
    ServerError,
    UnknownEnv,
)
from envserve.settings import HostSettings, convert, field_docs

__all__ = ["Resources", "start", "words_of"]

#: Options that are not called like their setting.
_FLAGS: Final = {
    "num_workers": "--workers",
    "env_names": "--env",
    "vector_envs": "--vector",
    "binds": "--bind",
    "import_modules": "--import",
    "exposed": "--expose",
    "allowed_kwargs": "--allow-kwarg",
    "step_timeout_seconds": "--step-timeout",
    "reset_timeout_seconds": "--reset-timeout",
    "drain_grace_seconds": "--drain-grace",
}

#: Which settings stand together in the help; all others are limits.
_PANELS: Final[Mapping[str, Container[str]]] = {
    "What is offered": (
        *("env_names", "vector_envs", "import_modules", "exposed", "allowed_kwargs"),
    ),
    "Limits": (),
    "Network, users and keys": (
        *("binds", "metrics_port", "metrics_host", "insecure_no_auth"),
        *("worker_user", "worker_env"),
    ),
    "Logs": {"audit", "crash_dir", "debug_errors"},
}

#: How `start` ends if it must not begin.
_START_CODES: Final[Mapping[type, int]] = {
    AddressError: 2,
    EnvStartError: 2,
    KeyFileError: 2,
    SelfTestError: 3,
    UnknownEnv: 2,
}

_PANEL: Final = {"rich_help_panel": "On Ray"}
_ON: Final = "Start servers on a Ray cluster; or ray://namespace/name, to be found by."
_TAKES: Final = """What Ray sets aside for each, as '{"CPU": 8}'; by default one CPU."""
_On = Annotated[str | None, typer.Option(metavar="ray", help=_ON, **_PANEL)]
_Servers = Annotated[int, typer.Option(min=1, help="How many there.", **_PANEL)]
_JSON: Final = {"metavar": "JSON", "parser": lambda t: convert(json.loads(t), _Map)}
_Map = dict[str, float]
Resources = Annotated[Any, typer.Option(help=_TAKES, **_JSON, **_PANEL)]


def _flag(setting: str) -> str:
    return _FLAGS.get(setting) or f"--{setting.replace('_', '-')}"


def _panel_number(field: dataclasses.Field[Any]) -> int:
    found = (i for i, names in enumerate(_PANELS.values()) if field.name in names)
    return next(found, list(_PANELS).index("Limits"))


def _with_host_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each of a host's settings, in place of `given`."""
    hints = get_type_hints(HostSettings)
    helps = field_docs(HostSettings)
    parameters = []
    for field in sorted(dataclasses.fields(HostSettings), key=_panel_number):
        name, hint, default = field.name, hints[field.name], field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        kind: Any = next(
            (k for k in (bool, float, int, str) if hint in (k, k | None)), None
        )
        if kind is None:
            kind, default = list[str], list(cast(Any, default) or ()) or None
        option = typer.Option(
            _flag(name),
            help=helps[name],
            callback=look_for_modules_here if name == "import_modules" else None,
            envvar=f"ENVSERVE_{_flag(name)[2:].upper().replace('-', '_')}",
            show_envvar=False,
            autocompletion=names_here if name == "env_names" else None,
            rich_help_panel=list(_PANELS)[_panel_number(field)],
        )
        hinted = kind if default is not None else kind | None
        parameters.append(_parameter(name, Annotated[hinted, option], default))
    for name, own in inspect.signature(command, eval_str=True).parameters.items():
        if name != "given":
            parameters.append(_parameter(name, own.annotation, own.default))
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


@_with_host_settings
def start(
    *,
    own: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ENV",
            help="Env to offer: a registered name, FILE.py for all that it registers, "
            "FILE.py:CLASS, or MODULE:NAME; by default, all registered.",
            autocompletion=names_here,
        ),
    ] = None,
    address_file: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the real addresses.",
            envvar="ENVSERVE_ADDRESS_FILE",
            show_envvar=False,
            rich_help_panel="Logs",
        ),
    ] = None,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="Begin anew when a file of the envs is saved; clients go on.",
            rich_help_panel="What is offered",
        ),
    ] = False,
    on: _On = None,
    servers: _Servers = 1,
    resources: Resources = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    config: ConfigFile = None,
    ctx: typer.Context,
    **given: Any,
) -> None:
    """Serve envs until SIGTERM, which lets episodes end first, or SIGINT."""
    set_up_logs(log_level, log_format)
    if on is not None:
        words = words_of(ctx, ("config", "on", "resources", "servers"))
        return _serve_on_ray([*map(absolute, words)], on, servers, resources)
    if servers > 1 or resources is not None:
        flag = "--servers" if servers > 1 else "--resources"
        fail(f"{flag}: expected --on ray beside it, got none; say that, or leave it", 2)
    names = [*(own or ()), *(given["env_names"] or ())]
    look_for_modules_here([*filter(is_user_env, names)])
    host = _host_settings({**given, "env_names": names})
    serve = partial(_serve, address_file)
    if not reload:
        raise typer.Exit(serve(host))
    from envserve.server.reload import serve_anew

    try:
        raise typer.Exit(serve_anew(host, serve))
    except EnvserveError as error:
        fail(error, 1)


def _serve(
    address_file: Path | None,
    host: HostSettings,
    tell: Callable[[tuple[str, ...]], None] = lambda addresses: None,
) -> int:
    """Runs a server; returns its exit code."""
    import asyncio

    from envserve.server import serve

    def on_ready(addresses: tuple[str, ...], num_names: int) -> None:
        tell(addresses)
        if address_file is not None:
            _write_addresses(address_file, addresses)
        print(
            f"envserve: ready on {' '.join(addresses)} with {num_names} env "
            f"name{'s' * (num_names != 1)}, "
            f"up to {host.total_envs} envs in {host.num_workers} workers",
            flush=True,
        )

    try:
        asyncio.run(serve(host, on_ready))
    except (EnvserveError, OSError) as error:
        try:
            fail(error, _START_CODES.get(type(error), 1))
        except typer.Exit as ended:
            return ended.exit_code
    return 0


def words_of(ctx: typer.Context, but: Container[str]) -> list[str]:
    """Returns what is no default, wherever it is from, as words; but those named."""
    words = []
    for param in ctx.command.params:
        name, flag = str(param.name), max(param.opts, key=len)
        source, value = ctx.get_parameter_source(name), ctx.params[name]
        is_given = source is not None and source.name != "DEFAULT"
        if is_given and name not in but:
            for each in value if isinstance(value, list) else [value]:
                words += [flag] * (flag.startswith("--") and each is not False)
                words += [str(each)] * (not isinstance(each, bool))
    return words


def _serve_on_ray(words: list[str], on: str, number: int, resources: Any) -> None:
    """Has servers until SIGTERM or SIGINT, which let episodes end first."""
    from envserve.ray import EnvServers

    word = "ray://default/envs" if on == "ray" else on
    try:
        with EnvServers(number, words, resources=resources, word=word) as servers:
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, lambda *_: sys.exit(0))
            print(f"envserve: ready on {word}:", *servers.addresses(), flush=True)
            signal.pause()
    except EnvserveError as error:
        fail(error, _START_CODES.get(type(error), 1))


def _host_settings(given: Mapping[str, Any]) -> HostSettings:
    """Checks options; ends with an error that names the option."""
    from envserve.crashes.crash_folder import CrashFolder

    folder = given["crash_dir"]
    given = {name: value for name, value in given.items() if value not in (None, [])}
    try:
        if folder not in ("", "none"):
            CrashFolder(Path(folder)).check()
        return HostSettings(
            **given | {"crash_dir": None if folder == "none" else folder}
        )
    except OSError as error:
        fail(f"--crash-dir: expected a folder that can be written to; {error}", 2)
    except ValueError as error:
        name, _, text = str(error).partition(":")
        fail(f"{_flag(name)}:{text}", 2)


def _write_addresses(path: Path, addresses: tuple[str, ...]) -> None:
    """Writes all or nothing: whoever waits for the file never reads half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text("".join(f"{address}\n" for address in addresses))
        draft.chmod(0o644)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ServerError(
            f"--address-file {path} cannot be written: {error.strerror}; name a file "
            f"in a folder that exists and has room"
        ) from None
