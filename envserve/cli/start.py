"""`envserve start`: serve envs, with one option per field of `HostSettings`."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Container, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta

from envserve.cli.logs import nonblocking_output, set_up_logs
from envserve.cli.options import (
    Count,
    LogFormat,
    LogLevel,
    Resources,
    env_names,
    import_from_here,
)
from envserve.cli.program import (
    Fields,
    GivenOptions,
    Option,
    environment,
    options_of,
)
from envserve.cli.terminal import error_code, fail, show_error
from envserve.envs.user_envs import with_absolute_path
from envserve.errors import EnvserveError, SelfTestError, ServerError
from envserve.python_process import stop_signals, uncollected_imports
from envserve.settings import HostSettings
from envserve.text import counted, nearest_name

_LOGGER: Final = logging.getLogger(__name__)
#: Flags that are not named after their field.
_FLAGS: Final = {
    "num_workers": "--workers",
    "env_names": "--env",
    "vector_envs": "--vector",
    "binds": "--bind",
    "import_modules": "--import",
    "preload": "--no-preload",
    "exposed": "--expose",
    "allowed_kwargs": "--allow-kwarg",
    "step_timeout_seconds": "--step-timeout",
    "reset_timeout_seconds": "--reset-timeout",
    "drain_grace_seconds": "--drain-grace",
}
#: Maps headings of the help to fields; the help lists all other fields under "Limits".
_PANELS: Final[Mapping[str, Container[str]]] = {
    "Offered envs": (
        *("env_names", "vector_envs", "import_modules", "preload"),
        *("exposed", "allowed_kwargs"),
    ),
    "Network, users and keys": (
        *("binds", "metrics_port", "metrics_host", "insecure_no_auth"),
        *("worker_user", "worker_env"),
    ),
    "Logs": ("audit", "crash_dir", "debug_errors"),
}


def _describe_option(field: str) -> Option:
    """Return the flag, panel, variable and completion of a field of `HostSettings`."""
    flag = _FLAGS.get(field) or f"--{field.replace('_', '-')}"
    return Option(
        flag=flag,
        panel=next((p for p, names in _PANELS.items() if field in names), "Limits"),
        variable=f"ENVSERVE_{flag.removeprefix('--').upper().replace('-', '_')}",
        values=env_names if field == "env_names" else tuple,
    )


_RELOAD: Final = Option(panel="Offered envs", variable="ENVSERVE_RELOAD")
_ADDRESS_FILE: Final = Option(panel="Logs", variable="ENVSERVE_ADDRESS_FILE")
_ON_RAY: Final = Option(panel="On Ray")


def start(
    env: Annotated[tuple[str, ...], Option(values=env_names)] = (),
    *,
    reload: Annotated[bool, _RELOAD] = False,
    fields: Annotated[dict[str, Any], Fields(HostSettings, _describe_option)],
    address_file: Annotated[Path | None, _ADDRESS_FILE] = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    on: Annotated[str | None, Option(panel="On Ray", metavar="ray")] = None,
    servers: Annotated[Count, _ON_RAY] = 1,
    scale_to: Annotated[Annotated[int, Meta(ge=0)] | None, _ON_RAY] = None,
    resources: Resources = None,
    config: Annotated[Path | None, Option(metavar="FILE.toml")] = None,
    given: GivenOptions,
) -> int:
    """Serve envs until SIGINT (stop immediately) or SIGTERM (let running episodes end).

    Args:
      env: Env to offer: a registered name, FILE.py:CLASS or MODULE:NAME, or FILE.py for
        all envs that the file registers. By default, all registered envs are offered.
      reload: Restart the server when a source file of the envs changes; clients
        reconnect.
      address_file: File to write the server's addresses to, one per line, with the
        actual ports.
      on: Start the servers on a Ray cluster: ray, or ray://NAMESPACE/NAME to choose
        the address that clients use, which is ray://default/envs by default.
      servers: Number of servers to start on the Ray cluster.
      scale_to: Total number of servers on the Ray cluster, instead of --servers: start
        the missing ones, or stop the newest ones and exit.
      config: TOML file with options by their long names, such as workers = 4. The
        command line overrides environment variables (ENVSERVE_WORKERS=4; lists are
        separated by spaces), which override the file.
    """
    set_up_logs(log_level, log_format)
    _warn_about_variables()
    if on is not None:
        flags = given.words("binds", "config", "on", "resources", "servers", "scale_to")
        flags = [*map(with_absolute_path, flags)]
        grace = fields.get("drain_grace_seconds", 0.0)
        return _serve_on_ray(flags, on, servers, scale_to, resources, grace)
    if servers > 1 or resources is not None or scale_to is not None:
        flag = "--servers" if servers > 1 else "--resources"
        flag = flag if scale_to is None else "--scale-to"
        fail(f"{flag} requires --on ray; add --on ray, or omit {flag}", 2)
    names = [*env, *fields.get("env_names", ())]
    import_from_here(fields.get("import_modules", ()), *names)
    host = _host_settings({**fields, "env_names": names or None})
    serve = partial(_serve, address_file)
    if not reload:
        return serve(host)
    from envserve.pool.worker_states import Exit
    from envserve.server.reload import serve_with_reload

    code = serve_with_reload(host, serve)
    if -code in stop_signals():
        # The server was still starting. End as a server without --reload does.
        signal.raise_signal(-code)
    if code < 0:
        end = Exit(0, code)
        fail(
            f"expected the server to run until it is stopped; it {end}; start it again"
        )
    return code


def _warn_about_variables() -> None:
    """Log a warning that lists unknown environment variables named ENVSERVE_*."""
    known = {option.variable for option in options_of(start)} | {"ENVSERVE_HOME"}
    names = [name.removeprefix("ENVSERVE_") for name in known]
    unknown = []
    for variable in sorted(environment().keys() - known):
        prefix, _, name = variable.partition("ENVSERVE_")
        if name and not prefix:
            nearest = nearest_name(name, names)
            hint = f" (did you mean ENVSERVE_{nearest}?)" if nearest else ""
            unknown.append(f"{variable}{hint}")
    if unknown:
        _LOGGER.warning(
            "ignoring unknown environment variables: %s", ", ".join(unknown)
        )


def _host_settings(values: dict[str, Any]) -> HostSettings:
    """Return the settings; if they are invalid, print an error and exit."""
    from envserve.crashes.crash_folder import CrashFolder

    folder = values.get("crash_dir", "")
    try:
        if folder not in ("", "none"):
            CrashFolder(Path(folder)).check()
        crash_dir = None if folder == "none" else folder
        return HostSettings(**values | {"crash_dir": crash_dir})
    except OSError as error:
        fail(f"--crash-dir: expected a writable folder; {error}", 2)
    except ValueError as error:
        field, _, text = str(error).partition(":")
        fail(f"{_describe_option(field).flag}:{text}", 2)


def _serve(
    address_file: Path | None,
    host: HostSettings,
    report: Callable[[tuple[str, ...]], None] = lambda addresses: None,
) -> int:
    """Run a server until it ends; return its exit code.

    Args:
      address_file: File to write the addresses to, if any.
      host: Settings of the server.
      report: Function to call with the addresses once the server is ready.
    """
    with uncollected_imports():
        import asyncio

        from envserve.server import serve

    def on_ready(addresses: tuple[str, ...], num_names: int) -> None:
        report(addresses)
        if address_file is not None:
            _write_addresses(address_file, addresses)
        print(
            f"envserve: ready on {' '.join(addresses)} with "
            f"{counted(num_names, 'env name')}, up to "
            f"{counted(host.total_envs, 'env')} in "
            f"{counted(host.num_workers, 'worker')}",
            flush=True,
        )

    # This context starts threads, after which forking would be unsafe. Enter it only
    # here, because --reload forks this process before `_serve` is called.
    with nonblocking_output():
        try:
            asyncio.run(serve(host, on_ready))
        except (EnvserveError, OSError) as error:
            show_error(error)
            return 3 if isinstance(error, SelfTestError) else error_code(error)
    return 0


def _serve_on_ray(
    options: list[str],
    on: str,
    number: int,
    scale_to: int | None,
    resources: Any,
    drain_grace: float,
) -> int:
    """Run servers on a Ray cluster until a signal arrives, then drain them."""
    from envserve.ray import EnvServers, scale_down

    name = "ray://default/envs" if on == "ray" else on
    if scale_to is not None:
        number = scale_to - scale_down(name, scale_to)
        if not number:
            print(f"envserve: {scale_to} servers are left on {name}")
            return 0
    with contextlib.ExitStack() as stack:
        servers = EnvServers(number, options, resources=resources, address=name)
        # Servers that are still draining after this time are killed.
        stack.callback(servers.stop, 60.0 + drain_grace)
        for signum in stop_signals():
            signal.signal(signum, lambda *_: sys.exit(0))
        print(f"envserve: ready on {name}:", *servers.addresses(), flush=True)
        signal.pause()
    return 0


def _write_addresses(path: Path, addresses: tuple[str, ...]) -> None:
    """Write the addresses atomically, so that readers never get an incomplete file."""
    part = ""
    try:
        with contextlib.suppress(FileNotFoundError):
            # Root would replace a device such as /dev/stdout, which is a link.
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
        # mkstemp follows no link that another user has created in a shared folder.
        fd, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(fd, "w") as file:
            file.writelines(f"{address}\n" for address in addresses)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise ServerError(
            f"--address-file {path} cannot be written: {error.strerror}; pass a file "
            f"in an existing folder with free space"
        ) from None
