"""Poll servers, follow a run's metrics, and send both to all browsers.

Requests of observers block, so each server has a polling thread, and another thread
reads the metrics. The threads pass encoded events to the event loop, which owns the
subscribers and queues the events for them. Frames are requested only for tiles that a
browser shows, once for all browsers. A slow browser does not delay other browsers, and
its queue is bounded, because an event replaces an unsent event with the same key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import asdict

from envserve.errors import EnvserveError, LeaseLost, ServerError
from envserve.monitoring.observer import Observer
from envserve.regular_file import open_regular
from envserve.slab import Status
from envserve.text import one_line
from envserve.wire.status import ServerStatus

_STATUS_SECONDS: Final = 0.25
_FRAME_SECONDS: Final = 0.2
_CURVE_SECONDS: Final = 0.5
#: Polling interval while no browser is connected. It must be short enough that servers
#: continue to record episodes for this observer.
_IDLE_SECONDS: Final = 4.0
_TIMEOUT_SECONDS: Final = 1.5
_RETRY_SECONDS: Final = 0.5
_MAX_ROWS: Final = 64
_MAX_EPISODES: Final = 64
_MAX_POINTS: Final = 600
_MAX_READ_BYTES: Final = 4 << 20
#: Errors that occur if a line is not a JSON object with numbers.
_INVALID_LINE_ERRORS: Final = (
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    RecursionError,
)
_CURVES: Final = ("mean_return", "evaluation_return")
#: Names of the statuses of rows without a fault.
_NOT_LOST: Final = {Status.OK.name, Status.PENDING.name, Status.LATE.name}

#: An env on the page: index of the server, number of the lease, row.
Tile = tuple[int, int, int]
#: Subject of an event: "run", the index of a server, or a tile.
Key = str | int | Tile
Observe = Callable[[str], Observer]
_Publish = Callable[[Key, bytes], object]


def encode_event(name: str, value: object) -> bytes:
    """Return a server-sent event with JSON data; bytes are Base64-encoded."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


class Subscriber:
    """The subscription of a browser, with its event queue.

    Attributes:
      name: Random name by which the browser refers to this subscription.
      tiles: Tiles that the browser shows, with their widths in pixels.
    """

    def __init__(self) -> None:
        self.name = secrets.token_urlsafe(9)
        self.tiles: Mapping[Tile, int] = {}
        self._unsent: dict[Key, bytes] = {}
        self._has_unsent = asyncio.Event()

    def put(self, key: Key, event: bytes) -> None:
        """Queue an event; replace an unsent event with the same key."""
        self._unsent[key] = event
        self._has_unsent.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield queued events, and wait for further events; never ends."""
        while await self._has_unsent.wait():
            self._has_unsent.clear()
            while self._unsent:
                yield self._unsent.pop(next(iter(self._unsent)))


class DataFeed:
    """Keeps all subscribers, and the latest events of the run, servers and tiles.

    Args:
      addresses: Addresses of servers or of `LocalStatusServer`s.
      run: Run folder with a `metrics.jsonl`, which need not exist yet.
      observe: Function that returns an observer of an address.
    """

    def __init__(
        self, addresses: Sequence[str], run: Path | None, observe: Observe = Observer
    ) -> None:
        self.subscribers: dict[str, Subscriber] = {}
        self._latest: dict[Key, bytes] = {}
        self._pollers = [_ServerPoller(*item, observe) for item in enumerate(addresses)]
        self._metrics = _MetricsTail(run) if run else None
        self._has_ended = threading.Event()
        self._threads: list[threading.Thread] = []

    async def start(self) -> None:
        """Start all threads.

        Call the other methods in the same event loop, unless stated otherwise.
        """
        loop = self._loop = asyncio.get_running_loop()

        def publish(key: Key, event: bytes) -> None:
            loop.call_soon_threadsafe(self.publish, key, event)

        for call in [self._follow_metrics, *(poller.run for poller in self._pollers)]:
            thread = threading.Thread(target=call, args=(publish,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def finish_run(self) -> None:
        """Notify all browsers that the run has ended; may be called in any thread."""
        event = encode_event("finished", {})
        self._loop.call_soon_threadsafe(self.publish, "finished", event)

    async def close(self) -> None:
        """Stop all threads and wait for them, at most a few seconds."""
        self._has_ended.set()
        for poller in self._pollers:
            poller.has_ended = True
            poller.wake.set()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def subscribe(self) -> Subscriber:
        """Return a new subscriber, with the latest events of servers and run queued."""
        subscriber = Subscriber()
        self.subscribers[subscriber.name] = subscriber
        for key, event in self._latest.items():
            if not isinstance(key, tuple):
                subscriber.put(key, event)
        self._update_pollers()
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Remove a subscriber."""
        del self.subscribers[subscriber.name]
        self._update_pollers()

    def set_tiles(self, name: str, tiles: Mapping[Tile, int]) -> bool:
        """Set the tiles that a subscriber shows; return False for an unknown name."""
        subscriber = self.subscribers.get(name)
        if subscriber is None:
            return False
        for tile in tiles.keys() & self._latest.keys() - subscriber.tiles.keys():
            subscriber.put(tile, self._latest[tile])
        subscriber.tiles = tiles
        self._update_pollers()
        return True

    def publish(self, key: Key, event: bytes) -> None:
        """Queue an event for all subscribers.

        An event about a tile is queued only for the subscribers that show the tile.
        """
        self._latest[key] = event
        for subscriber in self.subscribers.values():
            if not isinstance(key, tuple) or key in subscriber.tiles:
                subscriber.put(key, event)

    def record(self, tile: Tile) -> bytes:
        """Return the flight record of an env, as the content of a repro file.

        This method may be called in any thread.

        Raises:
          EnvserveError: There is no such env, or the server does not reply.
        """
        index, lease, row = tile
        if index >= len(self._pollers):
            servers = len(self._pollers)
            raise ServerError(f"expected a server index below {servers}; got {index}")
        with self._pollers[index].observer() as observer:
            return observer.record(lease, row, _TIMEOUT_SECONDS)

    def _update_pollers(self) -> None:
        """Make the threads poll all shown tiles, each at the largest shown width."""
        widths: dict[Tile, int] = {}
        for subscriber in self.subscribers.values():
            for tile, width in subscriber.tiles.items():
                widths[tile] = max(width, widths.get(tile, 0))
        for key in self._latest.keys() - widths.keys():
            if isinstance(key, tuple):
                del self._latest[key]
        for index, poller in enumerate(self._pollers):
            poller.tiles = {
                tile: width for tile, width in widths.items() if tile[0] == index
            }
            poller.has_subscribers = len(self.subscribers) > 0
            poller.wake.set()

    def _follow_metrics(self, publish: _Publish) -> None:
        if self._metrics is None:
            return
        is_first = True
        while not self._has_ended.is_set():
            if self._metrics.read() or is_first:
                publish("run", encode_event("run", self._metrics.summary()))
            is_first = False
            self._has_ended.wait(_CURVE_SECONDS)


class _ServerPoller:
    """Polls one server in a thread; the event loop sets the attributes to control it.

    Attributes:
      observer: Function that returns an observer of the server.
      tiles: Tiles of this server that browsers show, with widths in pixels.
      has_subscribers: Whether any browser is connected.
      has_ended: Whether the thread must exit.
      wake: Event that ends the pause between two polls.
    """

    def __init__(self, index: int, address: str, observe: Observe) -> None:
        self._state: dict[str, Any] = {"index": index, "address": str(address)}
        self._state |= {"error": "", "status": None}
        self._pid, self._counts = 0, Counter[str]()
        self._earlier = Counter[str]()  # total counts before the last restart
        self._index, self.observer = index, partial(observe, address)
        self.tiles: Mapping[Tile, int] = {}
        self.has_subscribers = self.has_ended = False
        self.wake = threading.Event()

    def run(self, publish: _Publish) -> None:
        """Poll until `has_ended`; after an error, publish it and reconnect."""
        while not self.has_ended:
            try:
                with self.observer() as observer:
                    self._poll(observer, publish)
            except EnvserveError as error:
                state = self._state | {"error": str(error)}
                publish(self._index, encode_event("server", state))
                self.wake.clear()
                self.wake.wait(0 if self.has_ended else _RETRY_SECONDS)

    def _poll(self, observer: Observer, publish: _Publish) -> None:
        serials: dict[Tile, int] = {}
        status_at = frames_at = -_IDLE_SECONDS
        while not self.has_ended:
            self.wake.clear()
            now = time.monotonic()
            pause = _STATUS_SECONDS if self.has_subscribers else _IDLE_SECONDS
            if now >= status_at + pause:
                status_at, status = now, observer.status(_TIMEOUT_SECONDS)
                if self._count(status):
                    # A restarted server numbers its frames from 1 again.
                    serials = {}
                leases = [
                    asdict(lease) | {"episodes": lease.episodes[-_MAX_EPISODES:]}
                    for lease in status.leases
                ]
                self._state["status"] = asdict(status) | {"leases": leases}
                publish(self._index, encode_event("server", self._state))
            if self.tiles and now >= frames_at + _FRAME_SECONDS:
                frames_at = now
                serials = self._poll_frames(observer, serials, publish)
            due_at = status_at + pause
            if self.tiles:
                due_at = min(due_at, frames_at + _FRAME_SECONDS)
            self.wake.wait(max(0.0, due_at - time.monotonic()))

    def _count(self, status: ServerStatus) -> bool:
        """Update the totals over all restarts of the server.

        While a server runs, its counts and its uptime never decrease. Lower values
        reveal a restart even in a container, where the process id stays the same.

        Returns:
          Whether the server has been restarted since the last status, or this status is
          the first.
        """
        rows = Counter(status.rows)
        counts = Counter(
            uptime=int(status.seconds),
            steps=status.steps,
            faults=sum(status.faults.values()),
            rows=rows.total(),
            lost=sum(rows[name] for name in rows.keys() - _NOT_LOST),
        )
        is_restart = status.pid != self._pid or not self._counts <= counts
        if is_restart:
            self._earlier += self._counts
        self._pid, self._counts = status.pid, counts
        # Use floats: a hostile server may report counts whose sum is too large for a
        # JSON integer.
        self._state["totals"] = {n: float(self._earlier[n] + counts[n]) for n in counts}
        return is_restart

    def _poll_frames(
        self, observer: Observer, serials: Mapping[Tile, int], publish: _Publish
    ) -> dict[Tile, int]:
        """Publish frames that are newer than `serials`; return the latest numbers."""
        tiles = self.tiles
        latest = {tile: serials.get(tile, 0) for tile in tiles}
        groups: dict[tuple[int, int], list[Tile]] = {}
        for tile, width in tiles.items():
            groups.setdefault((tile[1], width), []).append(tile)
        for (lease, width), group in groups.items():
            for start in range(0, len(group), _MAX_ROWS):
                part = group[start : start + _MAX_ROWS]
                rows = [tile[2] for tile in part]
                after = [latest[tile] for tile in part]
                with contextlib.suppress(LeaseLost):  # the lease has ended
                    for frame in observer.frames(
                        lease, rows, width, _TIMEOUT_SECONDS, after
                    ):
                        tile = (self._index, lease, frame.row)
                        if tile not in latest:  # the server sent an unrequested row
                            continue
                        latest[tile] = frame.serial
                        seed = "" if frame.seed is None else str(frame.seed)
                        value = asdict(frame) | {"tile": tile, "seed": seed}
                        publish(tile, encode_event("frame", value))
        return latest


class _MetricsTail:
    """Reads a growing `metrics.jsonl`, whose lines are JSON objects of numbers."""

    def __init__(self, run: Path) -> None:
        self._path = run / "metrics.jsonl"
        self._restart()

    def _restart(self) -> None:
        self._offset, self._read_error, self._line_error = 0, "", ""
        self._row: dict[str, float] = {}
        self._points: dict[str, list[tuple[float, float]]] = {n: [] for n in _CURVES}

    def read(self) -> bool:
        """Read the lines written since the last call.

        Returns:
          Whether there were new lines, or a file error has occurred, changed or ended.
        """
        previous_error, self._read_error = self._read_error, ""
        try:
            with open_regular(self._path) as file:
                # If the file is shorter, a resumed run has truncated it: read it again.
                if file.seek(0, 2) < self._offset:
                    self._restart()
                file.seek(self._offset)
                text = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            return bool(previous_error)
        except OSError as error:
            self._read_error = f"{self._path}: {error.strerror}"
            return previous_error != self._read_error
        # Leave an incomplete last line for the next call, but skip a line that is too
        # long for one call.
        if b"\n" in text or len(text) < _MAX_READ_BYTES:
            text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        for line in text.splitlines():
            try:
                row = json.loads(line)
                steps = float(row["steps"])
                numbers = ((k, n) for k, n in row.items() if isinstance(n, int | float))
                self._row = {one_line(name): float(n) for name, n in numbers}
            except _INVALID_LINE_ERRORS as error:
                self._line_error = (
                    f"{self._path} contains an invalid line: {error!r:.200}"
                )
                continue
            for name, points in self._points.items():
                if name in self._row:
                    points.append((steps, self._row[name]))
                if len(points) > _MAX_POINTS:
                    del points[1:-1:2]
        return bool(text or previous_error)

    def summary(self) -> dict[str, Any]:
        """Return a dict of the run's name, latest row, error, and curves."""
        folder = os.path.abspath(self._path.parent)  # for the name of "."
        name = one_line(os.path.basename(folder))
        error = one_line(self._read_error or self._line_error)
        return {"name": name, "row": self._row, "error": error, **self._points}
