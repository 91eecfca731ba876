"""The servers of a batch, looked up and looked at while one of its lanes has none.

A thread does that, while it lasts: nobody waits for names, files or silent servers.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from envserve.client.connection import NOWHERE
from envserve.client.diagnosis import Finding, diagnose_connection
from envserve.client.sources import SOURCES, resolve
from envserve.client.survey import look_at, sights_of

__all__ = ["Fleet", "living"]

_LOGGER: Final = logging.getLogger(__name__)
#: How long a server may take to say what it has.
_ASK_SECONDS: Final = 1.0
#: How long after a look the next one begins.
_PAUSE_SECONDS: Final = 1.0
#: How long a server gets no rows that has other envs, or refuses ours.
_SHUN_SECONDS: Final = 60.0


class Fleet:
    """Finds servers for lanes, in whichever threads they are.

    Attributes:
      first: The addresses that were found first, in their order.
      places: Where each lane is.
      looked_at: When the last look began that has ended.
      has_choice: Whether there may ever be another server than one.
    """

    def __init__(self, words: Sequence[str], *, insecure: bool = False) -> None:
        """Looks words up; raises AddressError as `resolve` does, or TypeError."""
        if isinstance(words, str) or not all(isinstance(at, str) for at in words):
            raise TypeError(
                f"expected a list of addresses like 'tcp://sim1:5555'; got {words!r}"
            )
        self.first = [address for word in words for address in resolve(word)]
        has_source = any(word.startswith(SOURCES) for word in words)
        self.has_choice = has_source or len(self.first) > 1
        self._words, self._insecure = tuple(dict.fromkeys(words)), insecure
        self._free: dict[str, int] = {}  # envs, by server
        self._gone: set[str] = set()
        self.looked_at = self._next_at = -math.inf
        self._shunned: dict[str, float] = {}  # until when
        self._told: set[str] = set()
        self.places: dict[object, str] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def is_gone(self, address: str, since: float) -> bool:
        """Tells whether, since then, nobody listens there, or it is listed no more.

        It is to be asked again and again: it has somebody look.
        """
        with self._lock:
            is_due = time.monotonic() >= self._next_at or self.looked_at < since
            if is_due and (self._thread is None or not self._thread.is_alive()):
                thread = threading.Thread(target=self._run, daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:  # the system gives no more threads
                    self._fail(error, time.monotonic())
            return self.looked_at >= since and address in self._gone

    def shun(self, who: object) -> None:
        """Has nobody go for a while to the server where a lane is, and cannot be."""
        self._shunned[self.places[who]] = time.monotonic() + _SHUN_SECONDS
        self.places[who] = NOWHERE

    def take(self, who: object, num_envs: int, *, alone: bool) -> str | None:
        """Gives a lane another server with so many free envs, if one was seen.

        Those that no other lane is on are preferred; if `alone`, no others will do.
        """
        now = time.monotonic()
        with self._lock:
            taken = Counter(at for other, at in self.places.items() if other != who)
            fits = [
                (taken[address], -num_free, address)
                for address, num_free in self._free.items()
                if num_free >= num_envs
                and address != self.places[who]
                and now >= self._shunned.get(address, now)
                and not (alone and taken[address])
            ]
            if not fits:
                return None
            _, _, address = min(fits)
            self._free[address] -= num_envs
            self.places[who] = address
            return address

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._look(began)
        except Exception as error:  # nobody else would see it
            with self._lock:
                self._fail(error, began)

    def _fail(self, error: Exception, began: float) -> None:
        """Notes a look that has seen nothing: lanes wait for it no longer."""
        text = f"expected to look at the servers; got {type(error).__name__}: {error}"
        if text not in self._told:
            self._told.add(text)
            _LOGGER.warning("%s; it is tried on", text, exc_info=error)
        self._free, self._gone, self.looked_at = {}, set(), began
        self._next_at = time.monotonic() + _PAUSE_SECONDS

    def _look(self, began: float) -> None:
        with sights_of(self._words, insecure=self._insecure) as sights:
            look_at(sights, _ASK_SECONDS)
        for sight in sights:
            if sight.error and sight.error not in self._told:
                self._told.add(sight.error)
                _LOGGER.warning("%s: %s; it gets no rows", sight.name, sight.error)
        known = {sight.address: sight.status for sight in sights if sight.is_known}
        silent = [address for address, status in known.items() if status is None]
        with ThreadPoolExecutor(max(1, len(silent))) as threads:
            refused = list(threads.map(_is_refused, silent))
        gone = set(itertools.compress(silent, refused))
        with self._lock:
            if len(known) == len(sights):  # else what was known is not off the list
                gone.update({*self.places.values()} - known.keys())
            self._free = {
                address: status.free_envs
                for address, status in known.items()
                if status and not (status.is_draining or status.is_starting)
            }
            self._gone, self.looked_at = gone, began
            self._next_at = time.monotonic() + _PAUSE_SECONDS

    def leave(self, who: object, until: float) -> None:
        """Notes that a lane has ended; the last one waits for a look at work."""
        with self._lock:
            self.places.pop(who, None)
        if self._thread is not None and not self.places:
            self._thread.join(max(0.0, until - time.monotonic()))


def living(words: Sequence[str], *, insecure: bool = False) -> list[str]:
    """Returns the servers that answer, and do not drain; all of them if none does."""
    with sights_of(words, insecure=insecure) as sights:
        look_at(sights, 2 * _ASK_SECONDS)
    alive = [s.address for s in sights if s.status and not s.status.is_draining]
    return alive or [sight.address for sight in sights]


def _is_refused(address: str) -> bool:
    return diagnose_connection(address, None, _ASK_SECONDS) is Finding.REFUSED
