"""The servers of a batch, which are polled while one of its lanes needs another server.

A thread polls them, so that no lane waits for name lookups, files or silent servers.
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

from envserve.client.link.connection import NOWHERE
from envserve.client.link.discovery import SOURCES, resolve
from envserve.client.link.probe import request_welcome
from envserve.client.link.zmq_guards.diagnosis import Finding, diagnose_connection
from envserve.errors import ConnectError, EnvserveError
from envserve.wire.handshake import Welcome
from envserve.wire.sockets import raise_file_limit

_LOGGER: Final = logging.getLogger(__name__)
#: Longest wait for a server's answer.
_ANSWER_SECONDS: Final = 1.0
#: From the end of a poll to the next one.
_PAUSE_SECONDS: Final = 1.0
#: How long a server is excluded that has other envs, or rejects a lane.
_EXCLUDE_SECONDS: Final = 60.0


class ServerPool:
    """Finds servers for lanes. Methods may be called from any thread.

    Attributes:
      addresses: The addresses of all servers when this was made.
      has_alternatives: Whether there can ever be more than one server.
      locations: The address of each user's server. A user is a lane's driver.
      polled_at: When the last poll began that has ended.
    """

    def __init__(self, words: Sequence[str], *, insecure: bool) -> None:
        """Resolve words to addresses; see `resolve`, also for what it raises.

        Raises:
          TypeError: The words are not a list of strings.
        """
        if isinstance(words, str) or not all(isinstance(at, str) for at in words):
            raise TypeError(
                f"expected a list of addresses like 'tcp://sim1:5555'; got {words!r}"
            )
        self.addresses = [address for word in words for address in resolve(word)]
        has_source = any(word.startswith(SOURCES) for word in words)
        self.has_alternatives = has_source or len(self.addresses) > 1
        self.locations: dict[object, str] = {}
        self._words, self._insecure = tuple(dict.fromkeys(words)), insecure
        self._num_free: dict[str, int] = {}  # envs, by server
        self._gone: set[str] = set()
        self.polled_at = self._next_poll_at = -math.inf
        self._excluded_until: dict[str, float] = {}
        self._reported: set[str] = set()  # errors that were logged
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def is_gone(self, address: str, since: float) -> bool:
        """Return whether a server has been gone since an instant of `monotonic`.

        It is gone if its port refuses connections, or its source no longer lists it.
        This starts a poll if one is due, so call it repeatedly.
        """
        with self._lock:
            is_due = time.monotonic() >= self._next_poll_at or self.polled_at < since
            if is_due and (self._thread is None or not self._thread.is_alive()):
                thread = threading.Thread(target=self._run, daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:  # the system is out of threads
                    self._fail(error, time.monotonic())
            return self.polled_at >= since and address in self._gone

    def exclude(self, user: object) -> None:
        """Give the server of a user to no one for a minute; the user has none then."""
        until = time.monotonic() + _EXCLUDE_SECONDS
        self._excluded_until[self.locations[user]] = until
        self.locations[user] = NOWHERE

    def take(self, user: object, num_envs: int, *, alone: bool) -> str | None:
        """Return another server for a user with enough free envs, if there is one.

        Servers without other users are preferred; with `alone` no others are chosen.
        """
        now = time.monotonic()
        with self._lock:
            locations = self.locations
            num_users = Counter(at for other, at in locations.items() if other != user)
            fits = [
                (num_users[address], -num_free, address)
                for address, num_free in self._num_free.items()
                if num_free >= num_envs
                and address != locations[user]
                and now >= self._excluded_until.get(address, now)
                and not (alone and num_users[address])
            ]
            if not fits:
                return None
            _, _, address = min(fits)
            self._num_free[address] -= num_envs
            locations[user] = address
            return address

    def leave(self, user: object, until: float) -> None:
        """Remove a user; the last one waits until a running poll has ended."""
        with self._lock:
            self.locations.pop(user, None)
        if self._thread is not None and not self.locations:
            self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._poll(began)
        except Exception as error:  # of a thread, which has no caller
            with self._lock:
                self._fail(error, began)

    def _fail(self, error: Exception, began: float) -> None:
        """Record a poll without results, so that lanes do not wait for it."""
        text = f"expected to look at the servers; got {type(error).__name__}: {error}"
        if text not in self._reported:
            self._reported.add(text)
            _LOGGER.warning("%s; it is tried on", text, exc_info=error)
        self._num_free, self._gone, self.polled_at = {}, set(), began
        self._next_poll_at = time.monotonic() + _PAUSE_SECONDS

    def _poll(self, began: float) -> None:
        found = query_servers(self._words, _ANSWER_SECONDS, insecure=self._insecure)
        for name, error in found.errors.items():
            if error not in self._reported:
                self._reported.add(error)
                _LOGGER.warning("%s: %s; it gets no rows", name, error)
        welcomes = found.welcomes
        silent = [address for address, welcome in welcomes.items() if welcome is None]
        with ThreadPoolExecutor(max(1, len(silent))) as threads:
            gone = set(itertools.compress(silent, threads.map(_is_refused, silent)))
        with self._lock:
            if found.is_complete:  # otherwise an address may only be unresolved
                gone.update({*self.locations.values()} - welcomes.keys())
            self._num_free = {
                address: welcome.free_envs
                for address, welcome in welcomes.items()
                if welcome and not (welcome.is_draining or welcome.is_starting)
            }
            self._gone, self.polled_at = gone, began
            self._next_poll_at = time.monotonic() + _PAUSE_SECONDS


class QueryResult(NamedTuple):
    """The answers of several servers to HELLO.

    Attributes:
      welcomes: The WELCOME of each server by address; None without an answer.
      errors: Why an address was not found or a server did not answer, by name.
      is_complete: Whether all words were resolved to addresses.
    """

    welcomes: dict[str, Welcome | None]
    errors: dict[str, str]
    is_complete: bool


def query_servers(
    words: Sequence[str], timeout_seconds: float, *, insecure: bool
) -> QueryResult:
    """Send HELLO to all servers that words stand for, at the same time."""
    raise_file_limit()  # each connection takes nine descriptors
    found = QueryResult({}, {}, True)
    for word in words:
        try:
            found.welcomes.update(dict.fromkeys(resolve(word)))
        except ConnectError as error:
            found.errors[word] = str(error)
            found = found._replace(is_complete=False)

    def query(address: str) -> None:
        try:
            welcome = request_welcome(address, timeout_seconds, insecure=insecure)
            found.welcomes[address] = welcome
        except EnvserveError as error:
            text = str(error).removeprefix(f"{address}: ")
            found.errors[address.removeprefix("tcp://")] = text

    with ThreadPoolExecutor(max(1, len(found.welcomes))) as threads:
        list(threads.map(query, found.welcomes))
    return found


def live_servers(words: Sequence[str], *, insecure: bool = False) -> list[str]:
    """Return the servers that answer and are not draining, or all if there is none."""
    welcomes = query_servers(words, 2 * _ANSWER_SECONDS, insecure=insecure).welcomes
    alive = [at for at, found in welcomes.items() if found and not found.is_draining]
    return alive or list(welcomes)


def _is_refused(address: str) -> bool:
    return diagnose_connection(address, None, _ANSWER_SECONDS) is Finding.REFUSED
