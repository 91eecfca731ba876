"""Refreshes a server's clients file in a thread.

Checking and reading files blocks while a network file system does not respond, and
parsing thousands of lines is slow. Neither must delay the server's event loop.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from envserve.keys.clients_file import ClientsFile

#: Seconds to wait for the file system; afterwards, the old clients stay authorised.
_WAIT_SECONDS: Final = 2.0


class ClientsRefresh:
    """The thread that reads the clients file if it has changed.

    Once it is created, lookups in the file use the clients of the last completed
    refresh.
    """

    def __init__(self, clients: ClientsFile) -> None:
        """Take over the refreshes of a file."""
        self._clients = clients
        self._thread = threading.Thread()  # replaced by each refresh
        self._wait_ends_at = 0.0
        self._is_awaited = False  # whether `is_done` started the latest refresh
        clients.refreshes_on_lookup = False

    @property
    def is_running(self) -> bool:
        """Whether a refresh has not finished yet."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start a refresh, unless one is running or awaited by `is_done`."""
        if not (self.is_running or self._is_awaited):
            self._start()

    def is_done(self) -> bool:
        """Return whether a refresh that this method has started is complete.

        Call it repeatedly. It starts a refresh in the first call, and in the next call
        after each result True, unless another refresh is still running. While the file
        system does not respond, the result is True after `_WAIT_SECONDS`.
        """
        is_running = self.is_running
        if not (is_running or self._is_awaited):
            self._start()
            self._is_awaited = True
            return False
        if is_running and time.monotonic() < self._wait_ends_at:
            return False
        self._is_awaited = False
        return True

    def _start(self) -> None:
        # A daemon thread, because it must not delay the end of the process.
        self._thread = threading.Thread(target=self._clients.refresh, daemon=True)
        self._wait_ends_at = time.monotonic() + _WAIT_SECONDS
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started
            self._clients.refresh()
