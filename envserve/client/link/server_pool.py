"""The servers of a batch, and polling them to find replacements for lost servers.

A background thread polls the servers while any lane needs another server, so that no
lane waits for DNS, files or unresponsive servers. `_lock` guards the poll results.
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

from envserve.client.link.connection import NO_ADDRESS
from envserve.client.link.discovery import SOURCE_SCHEMES, resolve
from envserve.client.link.probe import request_welcome
from envserve.client.link.zmq_guards.diagnosis import Finding, diagnose_connection
from envserve.errors import ConnectError, EnvserveError
from envserve.wire.handshake import Welcome
from envserve.wire.sockets import raise_file_limit

_LOGGER: Final = logging.getLogger(__name__)
#: Maximum time to wait for a server's answer.
_ANSWER_SECONDS: Final = 1.0
#: Pause between two polls.
_PAUSE_SECONDS: Final = 1.0
#: Time for which a server is excluded after it rejected a lane or had different envs.
_EXCLUDE_SECONDS: Final = 60.0


class ServerPool:
    """Finds servers for the lanes of a batch. Methods are thread-safe.

    Attributes:
      addresses: Addresses of all servers at construction.
      has_alternatives: Whether there can ever be more than one server.
      locations: Current server of each user; a user is the session driver of a lane.
      polled_at: Start of the last completed poll, in seconds of `time.monotonic`.
    """

    def __init__(self, sources: Sequence[str], *, insecure: bool) -> None:
        """Resolve addresses and sources of addresses, as `resolve` does.

        Raises:
          AddressError: As for `resolve`.
          TypeError: The sources are not a list of strings.
        """
        if isinstance(sources, str) or not all(isinstance(at, str) for at in sources):
            raise TypeError(
                f"expected a list of addresses like 'tcp://sim1:5555'; got {sources!r}"
            )
        self.addresses = [address for source in sources for address in resolve(source)]
        has_source = any(source.startswith(SOURCE_SCHEMES) for source in sources)
        self.has_alternatives = has_source or len(self.addresses) > 1
        self.locations: dict[object, str] = {}
        self._sources, self._insecure = tuple(dict.fromkeys(sources)), insecure
        self._num_free: dict[str, int] = {}  # free envs of each server
        self._gone: set[str] = set()
        self.polled_at = self._next_poll_at = -math.inf
        self._excluded_until: dict[str, float] = {}
        self._reported: set[str] = set()  # errors that were already logged
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def is_gone(self, address: str, since: float) -> bool:
        """Return whether a poll that began after `since` found that a server is gone.

        A server is gone if its port refuses connections, or if its source no longer
        lists it. This method starts a poll if one is due, so call it repeatedly.
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
        """Exclude a user's server for a minute, and leave the user without a server."""
        until = time.monotonic() + _EXCLUDE_SECONDS
        self._excluded_until[self.locations[user]] = until
        self.locations[user] = NO_ADDRESS

    def take(self, user: object, num_envs: int, *, alone: bool) -> str | None:
        """Assign another server with enough free envs to a user.

        Args:
          user: The user that needs a server.
          num_envs: Number of envs that the user needs.
          alone: Whether to use only servers that have no other user in this pool. Such
            servers are preferred in any case.

        Returns:
          The address of the server; None if there is none.
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
        """Remove a user; after the last one, wait for a running poll until `until`."""
        with self._lock:
            self.locations.pop(user, None)
        if self._thread is not None and not self.locations:
            self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._poll(began)
        except Exception as error:  # lanes must not wait for this poll
            with self._lock:
                self._fail(error, began)

    def _fail(self, error: Exception, began: float) -> None:
        """Record a poll without results, so that lanes do not wait for it."""
        text = f"polling the servers failed: {type(error).__name__}: {error}"
        if text not in self._reported:
            self._reported.add(text)
            _LOGGER.warning("%s; retrying", text, exc_info=error)
        self._num_free, self._gone, self.polled_at = {}, set(), began
        self._next_poll_at = time.monotonic() + _PAUSE_SECONDS

    def _poll(self, began: float) -> None:
        found = query_servers(self._sources, _ANSWER_SECONDS, insecure=self._insecure)
        for name, error in found.errors.items():
            if error not in self._reported:
                self._reported.add(error)
                _LOGGER.warning("%s: %s; it gets no rows", name, error)
        welcomes = found.welcomes
        silent = [address for address, welcome in welcomes.items() if welcome is None]
        with ThreadPoolExecutor(max(1, len(silent))) as threads:
            gone = set(itertools.compress(silent, threads.map(_is_refused, silent)))
        with self._lock:
            if found.is_complete:  # otherwise an address may be missing temporarily
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
      welcomes: The WELCOME of each server by address; None if it did not answer.
      errors: Error messages of sources that could not be resolved and of servers that
        did not answer, by source or address.
      is_complete: Whether all sources were resolved.
    """

    welcomes: dict[str, Welcome | None]
    errors: dict[str, str]
    is_complete: bool


def query_servers(
    sources: Sequence[str], timeout_seconds: float, *, insecure: bool
) -> QueryResult:
    """Send HELLO to all servers of these sources concurrently."""
    raise_file_limit()  # each connection uses nine descriptors
    found = QueryResult({}, {}, True)
    for source in sources:
        try:
            found.welcomes.update(dict.fromkeys(resolve(source)))
        except ConnectError as error:
            found.errors[source] = str(error)
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


def live_servers(sources: Sequence[str], *, insecure: bool = False) -> list[str]:
    """Return servers that answer and are not draining; if none do, all servers."""
    welcomes = query_servers(sources, 2 * _ANSWER_SECONDS, insecure=insecure).welcomes
    alive = [at for at, found in welcomes.items() if found and not found.is_draining]
    return alive or list(welcomes)


def _is_refused(address: str) -> bool:
    return diagnose_connection(address, None, _ANSWER_SECONDS) is Finding.REFUSED
