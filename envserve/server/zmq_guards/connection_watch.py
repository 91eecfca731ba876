"""Closes all connections of a server when they take too much of its process.

libzmq does not bound the memory and the descriptors that peers make it use.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import resource
from collections.abc import Callable
from typing import Final

from envserve.server.zmq_guards.server_sockets import ServerSockets
from envserve.server.zmq_guards.zap import Zap

_STATM: Final = "/proc/self/statm"
_WATCH_SECONDS: Final = 0.25
#: How long there may be no free descriptor before connections are closed. Idle peers
#: may leave by themselves. It doubles each time in a row, because all clients suffer.
_SHORT_SECONDS: Final = 1.0
_MAX_SHORT_SECONDS: Final = 16.0


class ConnectionWatch:
    """Checks memory and descriptors four times a second, until it is stopped.

    The rows of leases are shared memory, which does not count; copies of them that are
    being sent do.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sockets: ServerSockets,
        zap: Zap | None,
        max_growth_bytes: Callable[[], int],
        many_connections: int,
    ) -> None:
        """Begin to check.

        Args:
          loop: Event loop.
          sockets: The sockets whose connections are closed.
          zap: Knows which user has made most connections; None without keys.
          max_growth_bytes: Returns by how much memory may grow above its minimum since
            connections were closed last.
          many_connections: A user with fewer connections is not to blame for having
            taken all descriptors.
        """
        self._loop = loop
        self._sockets, self._zap = sockets, zap
        self._max_growth_bytes = max_growth_bytes
        self._many_connections = many_connections
        self._least_bytes = self._short_since = math.inf
        self._may_be_short = _SHORT_SECONDS
        self._recycled_at = -math.inf
        # Opened now, because later there may be no free descriptor.
        self._statm = os.open(_STATM, os.O_RDONLY) if os.path.exists(_STATM) else -1
        self._timer = self._plan()

    def stop(self) -> None:
        """Stop checking."""
        self._timer.cancel()
        if self._statm >= 0:
            os.close(self._statm)

    def _plan(self) -> asyncio.TimerHandle:
        return self._loop.call_later(_WATCH_SECONDS, self._check)

    def _check(self) -> None:
        self._timer = self._plan()
        if self._least_bytes == math.inf:  # closed connections have freed their memory
            _trim_memory()
        now, used = self._loop.time(), self._own_bytes()
        self._least_bytes = min(self._least_bytes, used)
        growth = used - self._least_bytes
        is_short = not _has_free_descriptor()
        self._short_since = min(self._short_since, now) if is_short else math.inf
        if growth > self._max_growth_bytes():
            why = f"memory has grown by {growth / 2**20:.0f} MiB (--max-buffered-mib)"
            is_of_number = False
        elif now - self._short_since >= self._may_be_short:
            why = "they have taken all descriptors (ulimit -n)"
            is_of_number = True
            self._may_be_short = min(2 * self._may_be_short, _MAX_SHORT_SECONDS)
        else:
            if now - self._recycled_at > 2 * _MAX_SHORT_SECONDS:
                self._may_be_short = _SHORT_SECONDS
            return
        self._least_bytes = self._short_since = math.inf
        self._recycled_at = now
        user = self._zap.take_suspect(self._many_connections) if self._zap else ""
        self._sockets.recycle(why, user if is_of_number else "")

    def _own_bytes(self) -> int:
        """Return the private memory of this process, in bytes; 0 where unknown."""
        if self._statm < 0:
            return 0
        _, resident, shared, *_ = map(int, os.pread(self._statm, 128, 0).split())
        return (resident - shared) * resource.getpagesize()


def _trim_memory() -> None:
    """Return free memory to the system, which glibc does not do by itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _has_free_descriptor() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True
