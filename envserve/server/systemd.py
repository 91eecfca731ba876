"""Notifies systemd that a server is ready, alive or stopping.

This module implements the protocol for `Type=notify` and `WatchdogSec`; see
sd_notify(3).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from typing import Final

_LOGGER: Final = logging.getLogger(__name__)


class Notifier:
    """Sends datagrams to systemd's socket, if systemd started this process.

    The event loop that serves clients also sends the watchdog's messages, so systemd
    restarts a server whose loop hangs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read systemd's environment variables, and remove them.

        Workers inherit the environment and must not notify systemd themselves.
        """
        self._loop = loop
        names = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
        address, microseconds, watched = (os.environ.pop(n, "") for n in names)
        self._address = re.sub("^@", "\0", address)  # an abstract socket
        is_watched = address and watched in ("", str(os.getpid()))
        # Half the watchdog interval, as sd_watchdog_enabled(3) recommends.
        self._interval_seconds = int(microseconds or 0) / 2e6 if is_watched else 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ready(self, status: str) -> None:
        """Notify that clients can connect, and start sending watchdog messages."""
        self._send(f"READY=1\nSTATUS={status}")
        if self._interval_seconds:
            self._send_alive()

    def stopping(self) -> None:
        """Notify that the server is stopping; watchdog messages continue."""
        self._send("STOPPING=1")

    def close(self) -> None:
        """Stop sending watchdog messages."""
        if self._timer is not None:
            self._timer.cancel()

    def _send_alive(self) -> None:
        self._timer = self._loop.call_later(self._interval_seconds, self._send_alive)
        self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:  # `socket.socket` raises OSError if no descriptor is free
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
                datagrams.setblocking(False)
                datagrams.sendto(text.encode(), self._address)
        except OSError as error:
            _LOGGER.warning("cannot notify systemd of %r: %s", text, error)
