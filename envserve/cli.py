"""The `envserve` command: start a server, ask one for its health or envs, benchmark."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, get_type_hints

import typer

from envserve.errors import (
    EnvserveError,
    KeyFileError,
    ProtocolMismatch,
    SelfTestError,
    ServerError,
)
from envserve.key_commands import app as key_commands
from envserve.own_envs import is_own, named, which_others_write
from envserve.settings import HostSettings, WorkerSettings, is_private, num_cores

__all__ = ["main"]

app = typer.Typer(
    help="Environment servers for reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(key_commands)


def _look_for_modules_here(words: list[str] | None) -> list[str] | None:
    """Has --import find modules of the working directory too, as `python -m` would."""
    here = os.getcwd()
    if all(word.partition(":")[0].endswith(".py") for word in words or ()):
        return words  # files are looked for where they are
    if place := which_others_write(here):
        _fail(
            f"--import: others can write to the working directory, {place}, and so "
            f"any module there could be theirs; start in a folder of your own",
            2,
        )
    sys.path.append(here)  # last, so that a file there hides nothing
    return words


_Import = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help="Module or file that registers envs or wrappers; repeatable.",
        callback=_look_for_modules_here,
    ),
]
_Timeout = Annotated[float, typer.Option(min=0.001, help="Seconds to wait for it.")]
_Insecure = Annotated[
    bool, typer.Option("--insecure", help="Use no keys, as --insecure-no-auth there.")
]


def main() -> None:
    """Runs the command that the arguments name."""
    app()


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


#: How `start` ends if it must not begin.
_START_CODES: Final[Mapping[type, int]] = {KeyFileError: 2, SelfTestError: 3}


def _flag(setting: str) -> str:
    return _FLAGS.get(setting) or f"--{setting.replace('_', '-')}"


def _with_host_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each of a host's settings, in place of `given`."""
    hints = get_type_hints(HostSettings)
    helps = _lines_below_fields(WorkerSettings) | _lines_below_fields(HostSettings)
    parameters = []
    for field in dataclasses.fields(HostSettings):
        kind = str if hints[field.name] == str | None else hints[field.name]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if kind not in (bool, float, int, str):
            kind, default = list[str] | None, None
        look = _look_for_modules_here if field.name == "import_modules" else None
        option = typer.Option(_flag(field.name), help=helps[field.name], callback=look)
        parameters.append(_parameter(field.name, Annotated[kind, option], default))
    for name, own in inspect.signature(command, eval_str=True).parameters.items():
        if name != "given":
            parameters.append(_parameter(name, own.annotation, own.default))
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _lines_below_fields(kind: type) -> dict[str, str]:
    (body,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for pair in pairwise(body.body):
        match pair:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


@app.command()
@_with_host_settings
def start(
    *,
    own: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ENV]...",
            help="Env to offer: a registered name, FILE.py for all that it registers, "
            "FILE.py:CLASS, or MODULE:NAME; by default, all registered.",
        ),
    ] = None,
    address_file: Annotated[
        Path | None, typer.Option(help="Where to write the real addresses.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="What goes to stderr."),
    ] = "info",
    **given: Any,
) -> None:
    """Serve envs until SIGTERM, which lets episodes end first, or SIGINT."""
    import asyncio

    from envserve.server import serve

    logging.basicConfig(
        stream=sys.stderr,
        level=log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
    )
    names = [*(own or ()), *(given["env_names"] or ())]
    _look_for_modules_here([*filter(is_own, names)])
    host = _host_settings({**given, "env_names": names})

    def on_ready(addresses: tuple[str, ...], num_names: int) -> None:
        if address_file is not None:
            _write_addresses(address_file, addresses)
        print(
            f"envserve: ready on {' '.join(addresses)} with {num_names} env names, "
            f"up to {host.total_envs} envs in {host.num_workers} workers",
            flush=True,
        )

    try:
        asyncio.run(serve(host, on_ready))
    except (EnvserveError, OSError) as error:
        _fail(error, _START_CODES.get(type(error), 1))


def _host_settings(given: Mapping[str, Any]) -> HostSettings:
    """Checks options; ends with an error that names the option."""
    from envserve.crashes.files import CrashFiles

    folder = given["crash_dir"]
    given = {name: value for name, value in given.items() if value not in (None, [])}
    try:
        if folder not in ("", "none"):
            CrashFiles(Path(folder)).check()
        return HostSettings(
            **given | {"crash_dir": None if folder == "none" else folder}
        )
    except OSError as error:
        _fail(f"--crash-dir: expected a folder that can be written to; {error}", 2)
    except ValueError as error:
        name, _, text = str(error).partition(":")
        _fail(f"{_flag(name)}:{text}", 2)


@app.command()
def health(
    address: Annotated[str, typer.Argument(help="Address of a server.")],
    startup: Annotated[
        bool, typer.Option("--startup", help="Can it start workers? If not, 3.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Does its loop keep up? If not, 4.")
    ] = False,
    ready: Annotated[
        bool,
        typer.Option(
            "--ready", help="Are there envs to have? 3, 5: draining, 6: all leased."
        ),
    ] = False,
    timeout: _Timeout = 2.0,
    insecure: _Insecure = False,
) -> None:
    """Ask a server how it is.

    The exit code is 0 if it is well, 1 if none answers, 7 if it is of another release.
    """
    from envserve.client.connection import ask_welcome
    from envserve.client.health import Ailment, diagnose

    _check_address(address)
    try:
        welcome = ask_welcome(address, timeout, insecure=insecure)
    except ProtocolMismatch as error:
        _fail(f"ProtocolMismatch: {error}", Ailment.MISMATCH)
    except EnvserveError as error:
        _fail(error, Ailment.NO_ANSWER)
    found = diagnose(welcome, startup=startup, live=live, ready=ready)
    if found is not None:
        _fail(f"{address}: {found[1]}", found[0])
    print(
        f"{address}: serving {welcome.num_names} env names; "
        f"{welcome.free_envs} of {welcome.total_envs} envs free"
    )


@app.command()
def envs(
    address: Annotated[
        str | None, typer.Argument(help="Address of a server; by default, here.")
    ] = None,
    import_module: _Import = None,
    timeout: _Timeout = 2.0,
    insecure: _Insecure = False,
) -> None:
    """List the env names that a server offers, or that one here would offer."""
    from envserve.client.connection import ask_welcome
    from envserve.registry import Registry

    try:
        if address is None:
            names = Registry(None, import_module or ()).names
        else:
            _check_address(address)
            names = ask_welcome(address, timeout, insecure=insecure).env_names
    except EnvserveError as error:
        _fail(error, 1)
    for name in names:
        print(name)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="Repro file; the log names it.")],
    import_module: _Import = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a step hangs; by default, as it was."),
    ] = None,
) -> None:
    """Play a crashed env again; exits with 0 if it ends alike, with 1 if not."""
    from envserve.pool import replay as replays
    from envserve.pool.launcher import Launcher

    try:
        repro = replays.load_repro(file)
        print(replays.describe_repro(repro), flush=True)
        with contextlib.closing(Launcher(import_module or ())) as launcher:
            ending = replays.replay(repro, launcher, timeout)
    except (EnvserveError, OSError) as error:
        _fail(error, 2)
    print("reproduced" if ending.is_reproduced else "not reproduced:", ending.text)
    raise typer.Exit(0 if ending.is_reproduced else 1)


@app.command()
def bench(
    env: Annotated[
        str, typer.Option(help="Env to measure, as of `start`.")
    ] = "CartPole-v1",
    import_module: _Import = None,
    num_envs: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 16,
    num_workers: Annotated[
        int, typer.Option(min=1, help="Processes that step envs.")
    ] = num_cores(),
    seconds: Annotated[
        float, typer.Option(min=0.001, help="Length of one measurement.")
    ] = 0.6,
    rounds: Annotated[
        int, typer.Option(min=1, help="Measurements of each case, in turns.")
    ] = 5,
) -> None:
    """Measure an env here, behind a server, and in Gymnasium's vector envs."""
    from envserve.bench.command import bench as measure
    from envserve.bench.load import Load

    workers = min(num_workers, num_envs)
    _look_for_modules_here([env] if is_own(env) else [])
    try:
        name, modules = named(env, import_module or ())
        load = Load(name, num_envs, workers, seconds, import_modules=modules)
        measure(load, rounds)
    except EnvserveError as error:
        _fail(error, 1)


def _check_address(address: str) -> None:
    try:
        is_private(address)
    except ValueError as error:
        _fail(error, 2)


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


def _fail(error: Exception | str, code: int) -> NoReturn:
    print(f"envserve: {error}", file=sys.stderr)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
