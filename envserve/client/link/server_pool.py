"""Tracks the servers of a batch, and polls them to find servers for its lanes.

A background thread polls the servers while any lane needs another server, so that no
lane waits for DNS, files or unresponsive servers. While lanes are spread unevenly, it
also polls the servers with few lanes. `_lock` guards the poll results.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from envserve.client.link.connection import SharedContext
from envserve.client.link.discovery import SOURCE_SCHEMES, resolve
from envserve.client.link.placement import Placement
from envserve.client.link.sessionless_requests import request_welcome
from envserve.client.link.zmq_guards.diagnosis import Finding, diagnose_connection
from envserve.errors import AddressError, ConnectError, EnvserveError
from envserve.wire.handshake import Welcome
from envserve.wire.sockets import raise_file_limit

_LOGGER: Final = logging.getLogger(__name__)
#: Maximum time to wait for a server's reply.
_REPLY_SECONDS: Final = 1.0
#: Pause between two polls, and its increase for each server: a poll connects to every
#: server, which takes several milliseconds of CPU time for each server with keys.
_PAUSE_SECONDS: Final = 1.0
_PAUSE_SECONDS_PER_SERVER: Final = 0.02
#: Interval for checking whether lanes are spread unevenly over the servers.
SPREAD_CHECK_SECONDS: Final = 1.0
#: Interval for polling the servers that have few lanes, so that lanes of other servers
#: can move to them.
SPREAD_POLL_SECONDS: Final = 10.0
#: Number of file descriptors that the connection to a server uses.
_FILES_PER_SERVER: Final = 5


class ServerPool:
    """Finds servers for the lanes of a batch. Methods are thread-safe.

    Attributes:
      addresses: Addresses of all servers at construction.
      has_alternatives: Whether there can ever be more than one server.
      placement: The servers of the lanes; a lane is represented by its session driver.
      spread_at: Time of the next call to `spread`.
      polled_at: Time at which the last completed poll of all servers began, as a value
        of `time.monotonic()`.
    """

    def __init__(self, sources: Sequence[str], *, insecure: bool) -> None:
        """Resolve addresses and sources of addresses, as `resolve` does.

        Raises:
          AddressError: As for `resolve`.
          TypeError: The sources are not a list of strings.
        """
        if (
            isinstance(sources, str)
            or not isinstance(sources, Iterable)
            or not all(isinstance(source, str) for source in sources)
        ):
            raise TypeError(
                f"expected a list of addresses, like ['sim1', 'sim2']; got {sources!r}"
            )
        #: Maps each source to the addresses that it listed last.
        self._known = {source: resolve(source) for source in dict.fromkeys(sources)}
        self.addresses = [
            address for source in sources for address in self._known[source]
        ]
        has_source = any(source.startswith(SOURCE_SCHEMES) for source in sources)
        self.has_alternatives = has_source or len(self.addresses) > 1
        self.placement = Placement()
        self._insecure = insecure
        self._gone: set[str] = set()
        self.polled_at = self._next_poll_at = -math.inf
        self.spread_at = self._next_spread_poll_at = -math.inf
        self._reported: set[str] = set()  # errors that were already logged
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def is_gone(self, address: str, since: float) -> bool:
        """Return whether a poll that began after `since` found that a server is gone.

        A server is gone if its port refuses connections, or if its source no longer
        lists it. This method also starts a poll of all servers if the last result is
        outdated, so call it repeatedly.
        """
        with self._lock:
            if time.monotonic() >= self._next_poll_at or self.polled_at < since:
                self._start_poll(is_full=True)
            return self.polled_at >= since and address in self._gone

    def _start_poll(self, *, is_full: bool) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        thread = threading.Thread(target=self._run, args=(is_full,), daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # the system is out of threads
            self._fail(error, time.monotonic())

    def assign(self, lane: object, **options: bool) -> str | None:
        """Assign another server to a lane, or return None; see `Placement.assign`."""
        with self._lock:
            return self.placement.assign(lane, time.monotonic(), **options)

    def exclude(self, lane: object) -> None:
        """Exclude a lane's server for a minute, and leave the lane without a server."""
        with self._lock:
            self.placement.exclude(lane, time.monotonic())

    def end_search(self, lane: object) -> None:
        """Record that a lane has stopped looking for another server."""
        with self._lock:
            self.placement.end_search(lane)

    def record_rejection(self, lane: object) -> None:
        """Record that a lane's target has not granted it envs; the lane stays."""
        with self._lock:
            # The lane has no target any more if it has lost its own server by now.
            if lane in self.placement.targets:
                self.placement.record_rejection(lane, time.monotonic())

    def move(self, lane: object) -> str:
        """Record that a lane moves to its target now; return its address."""
        with self._lock:
            return self.placement.move(lane)

    def spread(self) -> None:
        """Choose a lane to move if lanes are spread unevenly; see `Placement.spread`.

        While several lanes share a server, this method also starts a poll of the
        servers with few lanes, at most every 10 seconds.
        """
        now = time.monotonic()
        with self._lock:
            self.spread_at = now + SPREAD_CHECK_SECONDS
            if max(self.placement.num_lanes().values(), default=0) > 1:
                self.placement.spread(now)
                if now >= self._next_spread_poll_at:
                    self._next_spread_poll_at = now + SPREAD_POLL_SECONDS
                    self._start_poll(is_full=False)

    def remove(self, lane: object, deadline: float) -> None:
        """Remove a lane; after the last one, wait for a poll until `deadline`."""
        with self._lock:
            self.placement.remove(lane)
        thread = self._thread
        if thread is None or self.placement.locations:
            return
        # The garbage collector may close an unused batch in the thread of a poll.
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, is_full: bool) -> None:
        began_at = time.monotonic()
        try:
            self._poll(began_at, is_full=is_full)
        except Exception as error:  # record it: lanes may be waiting for this poll
            with self._lock:
                self._fail(error, began_at)

    def _fail(self, error: Exception, began_at: float) -> None:
        """Record that a poll has failed, so that lanes do not wait for its results."""
        text = f"polling the servers failed: {type(error).__name__}: {error}"
        if text not in self._reported:
            self._reported.add(text)
            _LOGGER.warning("%s; retrying", text, exc_info=error)
        self.placement.num_free = {}
        self._gone = set()
        self.polled_at = began_at
        self._next_poll_at = time.monotonic() + _PAUSE_SECONDS

    def _poll(self, began_at: float, *, is_full: bool) -> None:
        """Poll all servers if `is_full`, otherwise those to which lanes could be moved.

        If a source cannot be resolved, use the addresses that it listed last. Single
        hosts are not looked up, because their addresses stay the same.
        """
        changing = [each for each in self._known if each.startswith(SOURCE_SCHEMES)]
        found, failed = _resolve_all(changing)
        self._known |= found
        addresses = {address for each in self._known.values() for address in each}
        with self._lock:
            lanes = self.placement.num_lanes()
        if not is_full:
            most = max(lanes.values(), default=0)
            addresses = {each for each in addresses if lanes[each] + 2 <= most}
        replies = query_servers(addresses, _REPLY_SECONDS, insecure=self._insecure)
        errors = {at: e for at, e in replies.items() if not isinstance(e, Welcome)}
        texts = {
            address.removeprefix("tcp://"): str(error).removeprefix(f"{address}: ")
            for address, error in errors.items()
        }
        for name, error in {**failed, **texts}.items():
            if error not in self._reported:
                self._reported.add(error)
                _LOGGER.warning("%s: %s; it gets no rows", name, error)
        with ThreadPoolExecutor(max(1, len(errors))) as threads:
            gone = set(itertools.compress(errors, threads.map(_is_refused, errors)))
        with self._lock:
            self.placement.num_free = {
                address: reply.free_envs
                for address, reply in replies.items()
                if isinstance(reply, Welcome)
                and not (reply.is_draining or reply.is_starting)
            }
            if not is_full:
                return
            # An address that no source lists is gone if all sources were resolved.
            if not failed:
                gone.update({*self.placement.locations.values()} - replies.keys())
            self._gone, self.polled_at = gone, began_at
            pause = _PAUSE_SECONDS + _PAUSE_SECONDS_PER_SERVER * len(addresses)
            self._next_poll_at = time.monotonic() + pause


def _resolve_all(
    sources: Iterable[str],
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the addresses of each source, and the error of each that has none."""
    found, failed = dict[str, tuple[str, ...]](), dict[str, str]()
    for source in sources:
        try:
            found[source] = resolve(source)
        except ConnectError as error:
            failed[source] = str(error)
    return found, failed


def query_servers(
    addresses: Iterable[str], timeout_seconds: float, *, insecure: bool
) -> dict[str, Welcome | EnvserveError]:
    """Send HELLO to all servers concurrently; return the reply or error of each.

    Raises:
      ConnectError: The process's limit on open files is too low.
    """
    servers = [*dict.fromkeys(addresses)]
    raise_file_limit_for(len(servers))
    context = SharedContext(len(servers))

    def query(address: str) -> Welcome | EnvserveError:
        try:
            return request_welcome(
                address, timeout_seconds, insecure=insecure, context=context
            )
        except EnvserveError as error:
            return error

    with ThreadPoolExecutor(max(1, len(servers))) as threads:
        return dict(zip(servers, threads.map(query, servers), strict=True))


def raise_file_limit_for(num_servers: int) -> None:
    """Raise this process's limit on open files for connections to many servers.

    Raises:
      ConnectError: Even the hard limit is too low.
    """
    limit, needed = raise_file_limit(), num_servers * _FILES_PER_SERVER
    if needed > limit:
        raise ConnectError(
            f"{num_servers} servers need about {needed} open files, but this process "
            f"may open at most {limit}; raise the hard limit (ulimit -n), or connect "
            "to fewer servers"
        )


def live_servers(sources: Sequence[str], *, insecure: bool = False) -> list[str]:
    """Return the addresses of servers that reply and are not draining.

    If there are none, return all addresses.

    Raises:
      AddressError: No source can be resolved.
    """
    if len(sources) == 1 and len(only := resolve(sources[0])) == 1:
        return [*only]  # no need to query it: `BatchEnv.connect` waits for its reply
    found, failed = _resolve_all(sources)
    addresses = [address for each in found.values() for address in each]
    if failed and not addresses:
        raise AddressError("; ".join(failed.values()))
    seconds = 2 * _REPLY_SECONDS
    replies = query_servers(addresses, seconds, insecure=insecure)
    alive = [
        address
        for address, reply in replies.items()
        if isinstance(reply, Welcome) and not reply.is_draining
    ]
    return alive or list(replies)


def _is_refused(address: str) -> bool:
    return diagnose_connection(address, None, _REPLY_SECONDS) is Finding.REFUSED
