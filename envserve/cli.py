"""The `envserve` command: start a server, ask one for its health or envs, benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from envserve.cores import num_cores
from envserve.errors import EnvserveError, ServerError

__all__ = ["main"]

app = typer.Typer(
    help="Environment servers for reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Runs the command that the arguments name."""
    # --import finds modules of the working directory too, as `python -m` would; last,
    # so that a file there hides nothing.
    sys.path.append(os.getcwd())
    app()


@app.command()
def start(
    workers: Annotated[
        int, typer.Option(help="Most worker processes that one client gets.")
    ] = num_cores(),
    envs_per_worker: Annotated[
        int, typer.Option(help="With --workers, how many envs all clients may have.")
    ] = 64,
    env: Annotated[
        list[str] | None,
        typer.Option(help="Env to offer; repeatable. By default, all registered."),
    ] = None,
    bind: Annotated[
        list[str] | None,
        typer.Option(help="tcp://host:port or ipc://path; repeatable; port 0 is any."),
    ] = None,
    address_file: Annotated[
        Path | None, typer.Option(help="Where to write the real addresses.")
    ] = None,
    import_module: Annotated[
        list[str] | None,
        typer.Option(
            "--import", help="Module that registers envs or wrappers; repeatable."
        ),
    ] = None,
    expose: Annotated[
        list[str] | None,
        typer.Option(help="Attribute that clients may get, set and call; repeatable."),
    ] = None,
    allow_kwarg: Annotated[
        list[str] | None,
        typer.Option(help="Env argument that clients may set; repeatable."),
    ] = None,
    lease_seconds: Annotated[
        float, typer.Option(help="Silence after which a client's envs are given up.")
    ] = 60.0,
    step_timeout: Annotated[
        float, typer.Option(help="Seconds that one env's step may take.")
    ] = 30.0,
    reset_timeout: Annotated[
        float, typer.Option(help="Seconds that one env's reset or start may take.")
    ] = 120.0,
    padding_after: Annotated[
        float,
        typer.Option(
            help="Seconds that a step waits for envs whose worker is being replaced; "
            "then their rows are padding."
        ),
    ] = 0.1,
    max_restarts: Annotated[
        int,
        typer.Option(
            help="How often a worker that ends without a step in between is replaced."
        ),
    ] = 5,
    drain_grace: Annotated[
        float,
        typer.Option(help="Seconds for running episodes to end in after SIGTERM."),
    ] = 8.0,
    crash_dir: Annotated[
        str,
        typer.Option(
            help="Folder for repro files of crashes, by default one of this user's "
            "under the system's temporary folder; 'none' for no files."
        ),
    ] = "",
    max_message_mib: Annotated[
        int, typer.Option(help="Longest message accepted from a client.")
    ] = 1,
    insecure_no_auth: Annotated[
        bool, typer.Option(help="Allow addresses that other hosts can reach.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error; goes to stderr.")
    ] = "info",
) -> None:
    """Serve envs until SIGTERM, which lets episodes end first, or SIGINT."""
    from envserve.crash_files import CrashFiles
    from envserve.server import ServerConfig, serve

    _set_up_logging(log_level)
    try:
        config = ServerConfig(
            num_workers=workers,
            envs_per_worker=envs_per_worker,
            env_names=tuple(env) if env else None,
            binds=tuple(bind or ("tcp://127.0.0.1:5555",)),
            import_modules=tuple(import_module or ()),
            exposed=tuple(expose or ()),
            allowed_kwargs=tuple(allow_kwarg or ()),
            lease_seconds=lease_seconds,
            step_timeout_seconds=step_timeout,
            reset_timeout_seconds=reset_timeout,
            padding_after_seconds=padding_after,
            max_restarts=max_restarts,
            drain_grace_seconds=drain_grace,
            crash_dir=None if crash_dir == "none" else crash_dir,
            max_message_bytes=max_message_mib << 20,
            allows_public_binds=insecure_no_auth,
        )
        if crash_dir not in ("", "none"):
            CrashFiles(Path(crash_dir)).check()
    except ValueError as error:
        _fail(error, 2)
    except OSError as error:
        _fail(f"--crash-dir: expected a folder that can be written to; {error}", 2)

    def on_ready(addresses: tuple[str, ...], num_names: int) -> None:
        if address_file is not None:
            _write_addresses(address_file, addresses)
        print(
            f"envserve: ready on {' '.join(addresses)} with {num_names} env names, "
            f"up to {workers * envs_per_worker} envs in {workers} workers",
            flush=True,
        )

    try:
        asyncio.run(serve(config, on_ready))
    except (EnvserveError, OSError) as error:
        _fail(error, 1)


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
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds to wait for it.")
    ] = 2.0,
) -> None:
    """Ask a server how it is. The exit code is 0 if it is well, 1 if none answers."""
    from envserve.client.connection import ask_welcome
    from envserve.client.health import Ailment, Probe, diagnose

    asked = {Probe.STARTUP: startup, Probe.LIVE: live, Probe.READY: ready}
    _check_address(address)
    try:
        welcome = ask_welcome(address, timeout)
    except EnvserveError as error:
        _fail(error, Ailment.NO_ANSWER)
    found = diagnose(welcome, {probe for probe, is_asked in asked.items() if is_asked})
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
    import_module: Annotated[
        list[str] | None,
        typer.Option(
            "--import", help="Module that registers envs or wrappers; repeatable."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds to wait for it.")
    ] = 2.0,
) -> None:
    """List the env names that a server offers, or that one here would offer."""
    from envserve.client.connection import ask_welcome
    from envserve.registry import Registry

    try:
        if address is None:
            names = Registry(None, import_module or ()).names
        else:
            _check_address(address)
            names = ask_welcome(address, timeout).env_names
    except EnvserveError as error:
        _fail(error, 1)
    for name in names:
        print(name)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="Repro file; the log names it.")],
    import_module: Annotated[
        list[str] | None,
        typer.Option(
            "--import", help="Module that registers envs or wrappers; repeatable."
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a step hangs; by default, as it was."),
    ] = None,
) -> None:
    """Play a crashed env again; exits with 0 if it ends alike, with 1 if not."""
    from envserve import replay as replays
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


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Measure speed, with peers beside us in the same run."""
    # A command of its own: only who benchmarks waits for what it imports.
    from envserve.bench.cli import main

    main(context.args)


def _check_address(address: str) -> None:
    from envserve.server.config import is_private

    try:
        is_private(address)
    except ValueError as error:
        _fail(error, 2)


def _set_up_logging(level: str) -> None:
    names = ("debug", "info", "warning", "error")
    if level not in names:
        _fail(ValueError(f"expected --log-level out of {names}; got {level!r}"), 2)
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
    )


def _write_addresses(path: Path, addresses: tuple[str, ...]) -> None:
    """Writes all or nothing: whoever waits for the file never reads half of it."""
    name = ""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            name = file.name
            file.write("".join(f"{address}\n" for address in addresses))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        if name:
            os.unlink(name)
        raise ServerError(
            f"--address-file {path} cannot be written: {error.strerror}; name a file "
            f"in a folder that exists and has room"
        ) from None


def _fail(error: Exception | str, code: int) -> NoReturn:
    print(f"envserve: {error}", file=sys.stderr)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
