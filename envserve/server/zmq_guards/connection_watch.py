"""Closes all connections of a server if they use too much memory or all descriptors.

libzmq limits neither, and cannot close a single connection. Therefore all connections
are closed, and clients reconnect (see `server_sockets`).
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
_CHECK_SECONDS: Final = 0.25
#: Connections are closed after this many seconds without a free descriptor, during
#: which idle peers may disconnect by themselves. The time doubles with each consecutive
#: closure, up to the maximum, because a closure affects all clients.
_MIN_SHORTAGE_SECONDS: Final = 1.0
_MAX_SHORTAGE_SECONDS: Final = 16.0


class ConnectionWatch:
    """Checks memory and descriptors four times a second until it is stopped.

    Shared memory, which holds the rows of leases, is not counted. Copies of rows that
    are being sent are counted.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sockets: ServerSockets,
        zap: Zap | None,
        max_growth_bytes: Callable[[], int],
        min_connections: int,
    ) -> None:
        """Start checking.

        Args:
          loop: Event loop.
          sockets: The sockets whose connections are closed.
          zap: Counts the connections of each user; None without keys.
          max_growth_bytes: Function that returns the maximum growth of memory, relative
            to its minimum since connections were last closed.
          min_connections: Minimum number of new connections for a user to be blamed
            when no descriptor is free.
        """
        self._loop = loop
        self._sockets, self._zap = sockets, zap
        self._max_growth_bytes = max_growth_bytes
        self._min_connections = min_connections
        self._min_bytes = self._shortage_since = math.inf
        self._shortage_limit = _MIN_SHORTAGE_SECONDS
        self._reopened_at = -math.inf
        # Open the file now, because later there may be no free descriptor.
        self._statm = os.open(_STATM, os.O_RDONLY) if os.path.exists(_STATM) else -1
        self._timer = self._schedule()

    def stop(self) -> None:
        """Stop checking."""
        self._timer.cancel()
        if self._statm >= 0:
            os.close(self._statm)

    def _schedule(self) -> asyncio.TimerHandle:
        return self._loop.call_later(_CHECK_SECONDS, self._check)

    def _check(self) -> None:
        self._timer = self._schedule()
        if self._min_bytes == math.inf:  # the first check, or the first after a closure
            _trim_memory()
        now, used = self._loop.time(), self._private_bytes()
        self._min_bytes = min(self._min_bytes, used)
        growth = used - self._min_bytes
        self._shortage_since = (
            math.inf if _has_free_descriptor() else min(self._shortage_since, now)
        )
        if growth > self._max_growth_bytes():
            reason = f"memory grew by {growth / 2**20:.0f} MiB, see --max-buffered-mib"
            blames_user = False
        elif now - self._shortage_since >= self._shortage_limit:
            reason = "connections use all descriptors, see ulimit -n"
            blames_user = True
            self._shortage_limit = min(2 * self._shortage_limit, _MAX_SHORTAGE_SECONDS)
        else:
            if now - self._reopened_at > 2 * _MAX_SHORTAGE_SECONDS:
                self._shortage_limit = _MIN_SHORTAGE_SECONDS
            return
        self._min_bytes = self._shortage_since = math.inf
        self._reopened_at = now
        suspect = self._zap.take_suspect(self._min_connections) if self._zap else ""
        self._sockets.reopen(reason, suspect if blames_user else "")

    def _private_bytes(self) -> int:
        """Return the private memory of this process in bytes; 0 without /proc."""
        if self._statm < 0:
            return 0
        _, resident, shared, *_ = map(int, os.pread(self._statm, 128, 0).split())
        return (resident - shared) * resource.getpagesize()


def _trim_memory() -> None:
    """Return freed memory to the system, which glibc does not do by itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _has_free_descriptor() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True
