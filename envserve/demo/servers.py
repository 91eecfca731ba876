"""The demo's servers: child processes that exit when the demo process exits."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Final

from envserve.demo.tcp_proxy import TcpProxy
from envserve.errors import ServerError
from envserve.python_process import python_command
from envserve.worker.orphans import child_processes

#: Modules that envs use for rendering. The server imports these once, so that new
#: workers do not import them for their first frame.
_RENDERING_MODULES: Final = ("PIL.Image", "pygame")
#: Python code of a server process.
_RUN: Final = (
    "from envserve.demo.servers import end_with_stdin; end_with_stdin()\n"
    "from envserve.__main__ import main; main()"
)


class DemoServer:
    """An `envserve start` process."""

    proxy: TcpProxy
    """Proxy in front of the server; the demo sets it once the server is ready."""

    def __init__(self, folder: Path, *options: str) -> None:
        """Start the server with additional options; create a folder for its files."""
        folder.mkdir(parents=True)
        self._log, self._address = folder / "log", folder / "address"
        self._command = python_command(_RUN, "start", *options)
        self._command += ["--bind", "tcp://127.0.0.1:0", "--crash-dir", str(folder)]
        self._command += ["--address-file", str(self._address)]
        for module in _RENDERING_MODULES:
            if importlib.util.find_spec(module.partition(".")[0]):
                self._command += ["--import", module]
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,  # Ctrl-C must reach only the demo
                env={**os.environ, "PYGAME_HIDE_SUPPORT_PROMPT": "1"},
            )

    def wait_until_ready(self) -> int:
        """Wait until the server is ready, and return its port.

        Raises:
          ServerError: The server exited; the message contains its log.
        """
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            log = self._log.read_text(errors="replace")[-2000:]
            raise ServerError(f"a demo server did not start; its log:\n{log}")
        return int(re.findall(r"\d+", self._address.read_text())[-1])

    def signal_worker(self, number: int) -> None:
        """Send the signal `number` to a random worker."""
        templates = _children(self._process.pid)
        workers = [pid for template in templates for pid in _children(template)]
        if not workers:
            raise ServerError("no worker was found; try again")
        os.kill(random.choice(workers), number)

    def kill_and_restart(self) -> None:
        """Kill the server and thereby its workers, and restart it behind its proxy."""
        self._stop(signal.SIGKILL)
        self._start()
        self.proxy.port = self.wait_until_ready()

    def close(self) -> None:
        """Stop the server and its workers."""
        self._stop(signal.SIGINT)

    def _stop(self, number: int) -> None:
        self._process.send_signal(number)
        try:
            self._process.communicate(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def _children(pid: int) -> list[int]:
    if os.path.isdir("/proc"):
        return [child for child, *_ in child_processes(pid)]
    found = subprocess.run(["pgrep", "-P", str(pid)], stdout=subprocess.PIPE)
    return [*map(int, found.stdout.split())]


def _exit_with_parent() -> None:
    os.read(0, 1)  # blocks until the demo ends, because nothing is written to stdin
    os._exit(1)  # the template process then ends the workers


def end_with_stdin() -> None:
    """Exit when stdin is closed."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
