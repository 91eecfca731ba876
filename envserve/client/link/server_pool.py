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
from typing import Final, NamedTuple

from envserve.client.link.connection import NOWHERE, ask_welcome
from envserve.client.link.discovery import SOURCES, resolve
from envserve.client.link.zmq_guards.diagnosis import Finding, diagnose_connection
from envserve.errors import ConnectError, EnvserveError
from envserve.wire.handshake import Welcome
from envserve.wire.sockets import raise_file_limit

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
        answers = ask_servers(self._words, _ASK_SECONDS, insecure=self._insecure)
        for name, error in answers.errors.items():
            if error not in self._told:
                self._told.add(error)
                _LOGGER.warning("%s: %s; it gets no rows", name, error)
        known = answers.welcomes
        silent = [address for address, welcome in known.items() if welcome is None]
        with ThreadPoolExecutor(max(1, len(silent))) as threads:
            refused = list(threads.map(_is_refused, silent))
        gone = set(itertools.compress(silent, refused))
        with self._lock:
            if answers.is_complete:  # else what was known is not off the list
                gone.update({*self.places.values()} - known.keys())
            self._free = {
                address: welcome.free_envs
                for address, welcome in known.items()
                if welcome and not (welcome.is_draining or welcome.is_starting)
            }
            self._gone, self.looked_at = gone, began
            self._next_at = time.monotonic() + _PAUSE_SECONDS

    def leave(self, who: object, until: float) -> None:
        """Notes that a lane has ended; the last one waits for a look at work."""
        with self._lock:
            self.places.pop(who, None)
        if self._thread is not None and not self.places:
            self._thread.join(max(0.0, until - time.monotonic()))


class Answers(NamedTuple):
    """The answers of several servers to HELLO.

    Attributes:
      welcomes: The WELCOME of each server by address; None without an answer.
      errors: Why an address was not found or a server did not answer, by name.
      is_complete: Whether all words were resolved to addresses.
    """

    welcomes: dict[str, Welcome | None]
    errors: dict[str, str]
    is_complete: bool


def ask_servers(
    words: Sequence[str], timeout_seconds: float, *, insecure: bool
) -> Answers:
    """Ask all servers that the words stand for, at the same time."""
    raise_file_limit()  # each connection takes nine descriptors
    answers = Answers({}, {}, True)
    for word in words:
        try:
            answers.welcomes.update(dict.fromkeys(resolve(word)))
        except ConnectError as error:
            answers.errors[word] = str(error)
            answers = answers._replace(is_complete=False)

    def ask(address: str) -> None:
        try:
            welcome = ask_welcome(address, timeout_seconds, insecure=insecure)
            answers.welcomes[address] = welcome
        except EnvserveError as error:
            text = str(error).removeprefix(f"{address}: ")
            answers.errors[address.removeprefix("tcp://")] = text

    with ThreadPoolExecutor(max(1, len(answers.welcomes))) as threads:
        list(threads.map(ask, answers.welcomes))
    return answers


def living(words: Sequence[str], *, insecure: bool = False) -> list[str]:
    """Returns the servers that answer, and do not drain; all of them if none does."""
    answers = ask_servers(words, 2 * _ASK_SECONDS, insecure=insecure)
    welcomes = answers.welcomes
    alive = [at for at, found in welcomes.items() if found and not found.is_draining]
    return alive or list(welcomes)


def _is_refused(address: str) -> bool:
    return diagnose_connection(address, None, _ASK_SECONDS) is Finding.REFUSED
