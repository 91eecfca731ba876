"""A server that begins anew when a file of its envs is saved.

This process serves nothing. The server is a child, which has imported the envs; another
child finds out before each start whether they can be imported, and what that reads.
"""

from __future__ import annotations

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

from envserve.envs.registry import Registry, preload
from envserve.errors import EnvStartError
from envserve.settings import HostSettings

_LOGGER: Final = logging.getLogger(__name__)
#: watchfiles would save five lines here, but it cannot wait for the server's end as
#: well, and its threads would run in a process that forks.
_LOOK_SECONDS: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
#: What a child does: takes what to tell this process with, returns an exit code.
_Work = Callable[[HostSettings, Callable[[Any], None]], int]
_INSTALLED: Final = tuple(
    sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")
)


def serve_anew(host: HostSettings, serve: _Work) -> int:
    """Serves, and again at the same addresses whenever a file of the envs is saved.

    Clients attach anew, and are told of a lost transition in each row. Envs that cannot
    be imported leave the server as it is, until a file is saved again.

    Args:
      host: Set-up.
      serve: Serves until it is told to end; is told what to call with its addresses
        once it can be reached; returns an exit code.

    Returns:
      The last exit code: it has ended by itself, or by a signal to this process.

    Raises:
      EnvStartError: The envs cannot be imported at the start.
    """
    times = _times(_probe(host))
    if not times:
        _LOGGER.warning("--reload: no file of yours is imported, so none is looked at")
    told: list[int] = []
    server, addresses = _fork(serve, host)

    def pass_on(number: int, _: object) -> None:
        told.append(number)
        if server.pid is not None and server.exitcode is None:
            os.kill(server.pid, number)

    before = {number: signal.signal(number, pass_on) for number in _SIGNALS}
    try:
        while server.exitcode is None:
            server.join(_LOOK_SECONDS)
            now = _times(times)
            if now == times or told or server.exitcode is not None:
                continue
            names = ", ".join(os.path.basename(f) for f in now if now[f] != times[f])
            times = now
            try:
                times = {**_times(_probe(host)), **times}
            except EnvStartError as error:
                _LOGGER.error("%s: saved, but the server stays: %s", names, error)
                continue
            _LOGGER.info("%s: saved; the server begins anew", names)
            if addresses.poll():
                host = replace(host, binds=addresses.recv())
            pass_on(signal.SIGINT, None)
            server.join()
            if told == [signal.SIGINT]:  # nobody has told us to end meanwhile
                told.clear()
                server, addresses = _fork(serve, host)
        return server.exitcode
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fork(work: _Work, host: HostSettings) -> tuple[ForkProcess, Connection]:
    """Starts a process that ends with this one; returns it, and what it tells."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, host, theirs))
    process.start()
    theirs.close()
    return process, ours


def _run(work: _Work, host: HostSettings, told: Connection) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    sys.exit(work(host, told.send))


def _probe(host: HostSettings) -> list[str]:
    """Imports the envs in a process of its own; returns the files that it has read."""
    probe, found = _fork(_import, host)
    error: str
    files: list[str]
    try:
        error, files = found.recv()
    except EOFError:
        error, files = "it ends the process that imports the envs", []
    probe.join()
    if error:
        raise EnvStartError(error)
    return files


def _import(host: HostSettings, tell: Callable[[Any], None]) -> int:
    before = set(sys.modules)
    try:
        registry = Registry(host.env_names, host.import_modules)
        for name in registry.names if host.env_names else ():
            preload(name)
    except Exception as error:
        tell((str(error) or repr(error), []))
    else:
        modules = (m for name, m in [*sys.modules.items()] if name not in before)
        files = filter(None, (getattr(m, "__file__", None) for m in modules))
        tell(("", [f for f in files if not f.startswith(_INSTALLED)]))
    return 0


def _times(files: Iterable[str]) -> dict[str, int]:
    """Returns when each was saved; 0 while an editor has put it aside."""
    return {f: os.stat(f).st_mtime_ns if os.path.exists(f) else 0 for f in files}
