"""Tells systemd how a server is: ready, alive, stopping (Type=notify, WatchdogSec)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from typing import Final

_LOGGER: Final = logging.getLogger(__name__)


class Notifier:
    """Writes to the socket that systemd names; without one, nothing happens.

    The loop that serves also says that it is alive, so one that hangs is restarted.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Takes systemd's variables out of the environment: workers must not speak."""
        self._loop = loop
        names = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
        address, microseconds, watched = (os.environ.pop(n, "") for n in names)
        self._address = re.sub("^@", "\0", address)  # an abstract one
        is_watched = address and watched in ("", str(os.getpid()))
        # Twice as often as it is asked for.
        self._seconds = int(microseconds or 0) / 2e6 if is_watched else 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ready(self, status: str) -> None:
        """Says that clients can connect, and where; then, now and then, still so."""
        self._send(f"READY=1\nSTATUS={status}")
        if self._seconds:
            self._say_alive()

    def stopping(self) -> None:
        """Says that it is about to end; a drain goes on being alive."""
        self._send("STOPPING=1")

    def close(self) -> None:
        """Says no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _say_alive(self) -> None:
        self._timer = self._loop.call_later(self._seconds, self._say_alive)
        self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:  # with no free descriptor there is no socket either
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
                datagrams.setblocking(False)
                datagrams.sendto(text.encode(), self._address)
        except OSError as error:
            _LOGGER.warning("systemd was not told %r: %s", text, error)
