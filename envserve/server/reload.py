"""Restarts a server when a source file of its envs changes (`--reload`).

This process does not serve clients. The server is a child process that imports the
envs. Before each start, another child process, the probe, imports the envs, to find out
whether the import succeeds and which files it reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, Final

from gymnasium.error import DependencyNotInstalled

from envserve.envs.registry import import_env_modules, offered_names, preload
from envserve.envs.user_envs import file_of
from envserve.errors import EnvStartError
from envserve.python_process import stop_signals
from envserve.settings import HostSettings

_LOGGER: Final = logging.getLogger(__name__)
#: Seconds between two checks of the files. `watchfiles` would not be simpler, because
#: it cannot also wait for the server to exit, and its threads would run in a process
#: that forks.
_POLL_SECONDS: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1
#: Main function of a child, which returns an exit code. Its second argument is a
#: function that sends an object to this process.
_ChildMain = Callable[[HostSettings, Callable[[Any], None]], int]
#: Folders of installed modules, whose files are not checked.
_INSTALLED: Final = tuple(
    sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")
)


def serve_with_reload(host: HostSettings, serve: _ChildMain) -> int:
    """Serve, and restart at the same addresses whenever a file of the envs changes.

    Clients attach again, and lose one transition in each row. If the envs cannot be
    imported, the old server keeps running until a file is saved again.

    Args:
      host: Settings.
      serve: Serves until a signal stops it, and returns an exit code. It calls its
        second argument with the server's addresses once clients can connect.

    Returns:
      The exit code of the last server, which exited by itself or after a signal to
      this process.

    Raises:
      EnvStartError: The envs cannot be imported at the start.
    """
    times = _modification_times(_probe(host))
    if not times:
        _LOGGER.warning(
            "--reload has no effect, because the envs import only installed modules"
        )
    received_signals: list[int] = []
    unsent_signals: list[int] = []
    server, addresses = _fork(serve, host)

    def send_signals() -> None:
        while unsent_signals and server.pid is not None and server.exitcode is None:
            os.kill(server.pid, unsent_signals.pop(0))

    def forward(number: int, _: object) -> None:
        received_signals.append(number)
        unsent_signals.append(number)
        send_signals()

    old_handlers = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        while server.exitcode is None:
            server.join(_POLL_SECONDS)
            now = _modification_times(times)
            if now == times or received_signals or server.exitcode is not None:
                continue
            names = ", ".join(os.path.basename(f) for f in now if now[f] != times[f])
            times = now
            try:
                times = {**_modification_times(_probe(host)), **times}
            except EnvStartError as error:
                _LOGGER.error(
                    "%s changed, but the envs cannot be imported; the old server keeps "
                    "running: %s",
                    names,
                    error,
                )
                continue
            _LOGGER.info("%s changed; restarting the server", names)
            with contextlib.suppress(EOFError):  # the server exited before it was ready
                if addresses.poll():
                    host = replace(host, binds=addresses.recv())
            if server.pid is not None and server.exitcode is None:
                os.kill(server.pid, signal.SIGINT)
            server.join()
            if not received_signals:
                server, addresses = _fork(serve, host)
                send_signals()  # those that have arrived since the check above
        return server.exitcode
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _fork(child_main: _ChildMain, host: HostSettings) -> tuple[ForkProcess, Connection]:
    """Start a child process, which exits when this process exits.

    Returns:
      The child, and the connection that receives the objects that it sends.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(child_main, host, sender))
    numbers = stop_signals()
    # The child blocks these signals until it has reset their handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    sender.close()
    return process, receiver


def _run(child_main: _ChildMain, host: HostSettings, connection: Connection) -> None:
    for number in stop_signals():
        signal.signal(number, signal.SIG_DFL)
    # The parent has blocked them; see `_fork`.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    sys.exit(child_main(host, connection.send))


def _probe(host: HostSettings) -> list[str]:
    """Import the envs in a child; return the files that the import reads."""
    probe, connection = _fork(_import, host)
    error: str
    files: list[str]
    try:
        error, files = connection.recv()
    except EOFError:
        modules = ", ".join((*host.import_modules, *(host.env_names or ())))
        error, files = f"a process ended while it imported {modules}", []
    probe.join()
    if error:
        raise EnvStartError(error)
    return files


def _import(host: HostSettings, send: Callable[[Any], None]) -> int:
    loaded = set(sys.modules)
    try:
        names = offered_names(host.env_names, host.import_modules)
        if not host.env_names:
            names = import_env_modules(host.import_modules)
        for name in names:
            try:
                preload(name)
            except EnvStartError as error:
                # A module may register envs whose packages are not installed.
                missing = ModuleNotFoundError, DependencyNotInstalled
                if host.env_names or not isinstance(error.__cause__, missing):
                    raise
    except Exception as error:
        send((str(error) or repr(error), []))
    else:
        modules = (m for name, m in [*sys.modules.items()] if name not in loaded)
        files = filter(None, map(file_of, modules))
        send(("", [f for f in files if not f.startswith(_INSTALLED)]))
    return 0


def _modification_times(files: Iterable[str]) -> dict[str, int]:
    """Return each file's modification time; 0 while an editor is replacing it."""
    times = dict.fromkeys(files, 0)
    for file in times:
        with contextlib.suppress(OSError):
            times[file] = os.stat(file).st_mtime_ns
    return times
