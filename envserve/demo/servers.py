"""The servers of the demo: child processes, which end with it however it ends."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from envserve.demo.tcp_proxy import TcpProxy
from envserve.errors import ServerError
from envserve.worker.orphans import child_processes

#: What workers draw with: loaded once, and not by each new one at its first picture.
_DRAWN_WITH: Final = ("PIL.Image", "pygame")


class DemoServer:
    """An `envserve start` of this user, behind a `proxy` once it is ready."""

    proxy: TcpProxy

    def __init__(self, folder: Path, *options: str) -> None:
        """Starts it with more options, its files in a folder that is made."""
        folder.mkdir(parents=True)
        self._log, self._address = folder / "log", folder / "address"
        self._command = [sys.executable, "-m", __name__, "start", *options]
        self._command += ["--bind", "tcp://127.0.0.1:0", "--crash-dir", str(folder)]
        self._command += ["--address-file", str(self._address)]
        for module in _DRAWN_WITH:
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
                process_group=0,  # Ctrl-C is for the demo
                env={**os.environ, "PYGAME_HIDE_SUPPORT_PROMPT": "1"},
            )

    def wait_until_ready(self) -> int:
        """Returns its port; raises ServerError with its log if it ends instead."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            log = self._log.read_text(errors="replace")[-2000:]
            raise ServerError(f"expected a server to start; it has said:\n{log}")
        return int(re.findall(r"\d+", self._address.read_text())[-1])

    def signal_worker(self, number: int) -> None:
        """Sends a signal to any of its workers, which its template has forked."""
        templates = [pid for pid, *_ in child_processes(self._process.pid)]
        workers = [pid for each in templates for pid, *_ in child_processes(each)]
        if not workers:
            raise ServerError("expected a worker in /proc, found none; press again")
        os.kill(random.choice(workers), number)

    def kill_and_restart(self) -> None:
        """Kills it with all its workers, and starts it again behind its proxy."""
        self._end(signal.SIGKILL)
        self._start()
        self.proxy.port = self.wait_until_ready()

    def close(self) -> None:
        """Ends it; its workers end with it."""
        self._end(signal.SIGINT)

    def _end(self, number: int) -> None:
        self._process.send_signal(number)
        try:
            self._process.communicate(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when nobody holds the other end: nothing is written to it
    os._exit(1)  # its template sees that, and ends the workers


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runpy.run_module("envserve", run_name="__main__", alter_sys=True)
