"""Asks servers and reads a run's metrics, once for all who look at the page.

A thread per address, since an observer blocks; the event loop hands out what they find.
Pictures are asked for only while somebody sees their tile. Nobody waits for a reader:
what it has not taken makes room for what is newer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import asdict

from envserve.errors import EnvserveError, LeaseLost, ServerError
from envserve.monitoring.observer import Observer

__all__ = ["Gatherer", "Reader", "Tile", "encoded"]

_STATUS_SECONDS: Final = 0.25
_FRAME_SECONDS: Final = 0.2
_CURVE_SECONDS: Final = 0.5
#: While nobody looks: often enough for servers to go on noting episodes.
_IDLE_SECONDS: Final = 4.0
_TIMEOUT_SECONDS: Final = 1.5
_RETRY_SECONDS: Final = 0.5
_MAX_ROWS: Final = 64
_MAX_EPISODES: Final = 64
_MAX_POINTS: Final = 600
_MAX_READ_BYTES: Final = 4 << 20
_CURVES: Final = ("mean_return", "evaluation_return")

#: Index of the address, number of the lease, row.
Tile = tuple[int, int, int]
#: What news are about, of which the newest count: the run, a server, or a tile.
Key = str | int | Tile
Observe = Callable[[str], Observer]
_Tell = Callable[[Key, bytes], object]


def encoded(name: str, value: object) -> bytes:
    """Returns a server-sent event; bytes in it are Base64."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


class Reader:
    """A browser that listens, and the tiles that it sees, with widths in pixels."""

    def __init__(self) -> None:
        self.name = secrets.token_urlsafe(9)
        self.tiles: Mapping[Tile, int] = {}
        self._waiting: dict[Key, bytes] = {}
        self._has_news = asyncio.Event()

    def put(self, key: Key, text: bytes) -> None:
        """Has it sent, in place of what waits of the same key."""
        self._waiting[key] = text
        self._has_news.set()

    async def texts(self) -> AsyncIterator[bytes]:
        """Yields what is to be sent, for ever."""
        while await self._has_news.wait():
            self._has_news.clear()
            while self._waiting:
                yield self._waiting.pop(next(iter(self._waiting)))


class Gatherer:
    """Knows all readers, and the newest of each server, tile and run.

    Args:
      addresses: Of servers, or of trainers that let themselves be looked at.
      run: Folder of a `metrics.jsonl`, which need not be there yet.
      observe: Gives what asks a server, by its address.
    """

    def __init__(
        self, addresses: Sequence[str], run: Path | None, observe: Observe
    ) -> None:
        self.readers: dict[str, Reader] = {}
        self._newest: dict[Key, bytes] = {}
        self._watches = [_Watch(*each, observe) for each in enumerate(addresses)]
        self._curve = _Curve(run) if run else None
        self._has_ended = threading.Event()
        self._threads: list[threading.Thread] = []

    async def start(self) -> None:
        """Begins to ask; readers belong to the event loop that this runs in."""
        loop = asyncio.get_running_loop()

        def tell(key: Key, text: bytes) -> None:
            loop.call_soon_threadsafe(self.publish, key, text)

        for call in [self._follow, *(watch.run for watch in self._watches)]:
            thread = threading.Thread(target=call, args=(tell,), daemon=True)
            thread.start()
            self._threads.append(thread)

    async def close(self) -> None:
        """Ends all threads, within some seconds."""
        self._has_ended.set()
        for watch in self._watches:
            watch.has_ended = True
            watch.wake.set()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def join(self) -> Reader:
        """Returns a new reader, who is told at once how things stand."""
        reader = Reader()
        self.readers[reader.name] = reader
        for key, text in self._newest.items():
            if not isinstance(key, tuple):
                reader.put(key, text)
        self._ask_for_what_is_seen()
        return reader

    def leave(self, reader: Reader) -> None:
        """Forgets a reader."""
        del self.readers[reader.name]
        self._ask_for_what_is_seen()

    def look(self, name: str, tiles: Mapping[Tile, int]) -> bool:
        """Notes which tiles a reader sees now; False if there is no such reader."""
        reader = self.readers.get(name)
        if reader is None:
            return False
        for tile in tiles.keys() & self._newest.keys() - reader.tiles.keys():
            reader.put(tile, self._newest[tile])
        reader.tiles = tiles
        self._ask_for_what_is_seen()
        return True

    def publish(self, key: Key, text: bytes) -> None:
        """Hands news to all whom they concern: those of a tile to who sees it."""
        self._newest[key] = text
        for reader in self.readers.values():
            if not isinstance(key, tuple) or key in reader.tiles:
                reader.put(key, text)

    def record(self, tile: Tile) -> bytes:
        """Returns the flight record of an env, as a repro file; blocks.

        Raises:
          EnvserveError: There is none, or the server does not answer.
        """
        index, lease, row = tile
        if index >= len(self._watches):
            raise ServerError(f"expected one of {len(self._watches)} servers")
        with self._watches[index].observer() as observer:
            return observer.record(lease, row, _TIMEOUT_SECONDS)

    def _ask_for_what_is_seen(self) -> None:
        wanted: dict[Tile, int] = {}
        for reader in self.readers.values():
            for tile, width in reader.tiles.items():
                wanted[tile] = max(width, wanted.get(tile, 0))
        for key in self._newest.keys() - wanted.keys():
            if isinstance(key, tuple):
                del self._newest[key]
        for index, watch in enumerate(self._watches):
            watch.rows = {e: wanted[e] for e in wanted if e[0] == index}
            watch.is_read = len(self.readers) > 0
            watch.wake.set()

    def _follow(self, tell: _Tell) -> None:
        curve, is_new = self._curve, True
        while curve and not self._has_ended.is_set():
            if curve.read() or is_new:
                tell("run", encoded("run", curve.shown()))
            is_new = self._has_ended.wait(_CURVE_SECONDS)


class _Watch:
    """Asks one server in a thread of its own; the event loop says what, and wakes it.

    Attributes:
      rows: The tiles of this server that are seen, with widths in pixels.
      is_read: Whether anybody looks.
    """

    def __init__(self, index: int, address: str, observe: Observe) -> None:
        self._said: dict[str, Any] = {"index": index, "address": str(address)}
        self._said |= {"error": "", "status": None}
        self._index, self.observer = index, partial(observe, address)
        self.rows: Mapping[Tile, int] = {}
        self.is_read = self.has_ended = False
        self.wake = threading.Event()

    def run(self, tell: _Tell) -> None:
        """Asks until the end; says what is wrong, and asks again."""
        while not self.has_ended:
            try:
                with self.observer() as observer:
                    self._ask(observer, tell)
            except EnvserveError as error:
                said = self._said | {"error": str(error)}
                tell(self._index, encoded("server", said))
                self.wake.clear()
                self.wake.wait(0 if self.has_ended else _RETRY_SECONDS)

    def _ask(self, observer: Observer, tell: _Tell) -> None:
        serials: dict[Tile, int] = {}
        status_at = frames_at = -_IDLE_SECONDS
        pid = 0
        while not self.has_ended:
            self.wake.clear()
            now = time.monotonic()
            pause = _STATUS_SECONDS if self.is_read else _IDLE_SECONDS
            if now >= status_at + pause:
                status_at, status = now, observer.status(_TIMEOUT_SECONDS)
                if status.pid != pid:  # started anew, as are its serials
                    pid, serials = status.pid, {}
                leases = [
                    asdict(lease) | {"episodes": lease.episodes[-_MAX_EPISODES:]}
                    for lease in status.leases
                ]
                self._said["status"] = asdict(status) | {"leases": leases}
                tell(self._index, encoded("server", self._said))
            if self.rows and now >= frames_at + _FRAME_SECONDS:
                frames_at = now
                serials = self._ask_pictures(observer, serials, tell)
            due = status_at + pause
            if self.rows:
                due = min(due, frames_at + _FRAME_SECONDS)
            self.wake.wait(max(0.0, due - time.monotonic()))

    def _ask_pictures(
        self, observer: Observer, serials: Mapping[Tile, int], tell: _Tell
    ) -> dict[Tile, int]:
        """Tells pictures that are newer than these; returns their serials."""
        rows = self.rows
        known = {tile: serials.get(tile, 0) for tile in rows}
        groups: dict[tuple[int, int], list[Tile]] = {}
        for tile, width in rows.items():
            groups.setdefault((tile[1], width), []).append(tile)
        for (lease, width), tiles in groups.items():
            for start in range(0, len(tiles), _MAX_ROWS):
                asked = tiles[start : start + _MAX_ROWS]
                places, after = [each[2] for each in asked], [known[e] for e in asked]
                with contextlib.suppress(LeaseLost):  # the next status says so
                    for picture in observer.frames(
                        lease, places, width, _TIMEOUT_SECONDS, after
                    ):
                        tile = (self._index, lease, picture.row)
                        if tile not in known:  # nobody has asked for it
                            continue
                        known[tile] = picture.serial
                        seed = "" if picture.seed is None else str(picture.seed)
                        said = asdict(picture) | {"tile": tile, "seed": seed}
                        tell(tile, encoded("picture", said))
        return known


class _Curve:
    """Follows a file of rows, each a JSON object with `steps` and other numbers."""

    def __init__(self, run: Path) -> None:
        self._path = run / "metrics.jsonl"
        self._restart()

    def _restart(self) -> None:
        self._offset, self._error = 0, ""
        self._row: dict[str, float] = {}
        self._points: dict[str, list[tuple[float, float]]] = {n: [] for n in _CURVES}

    def read(self) -> bool:
        """Takes in whole lines written since; tells whether there is anything new."""
        try:
            with self._path.open("rb") as file:
                # A run that is resumed cuts off what it will report again.
                if file.seek(0, 2) < self._offset:
                    self._restart()
                file.seek(self._offset)
                text = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            return False
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        for line in text.splitlines():
            try:
                row = json.loads(line)
                steps = float(row["steps"])
            except (ValueError, TypeError, KeyError) as error:
                self._error = f"{self._path} has a line that is no row: {error}"
                continue
            self._row = {k: n for k, n in row.items() if isinstance(n, int | float)}
            for name, points in self._points.items():
                if name in self._row:
                    points.append((steps, self._row[name]))
                if len(points) > _MAX_POINTS:
                    del points[1:-1:2]
        return bool(text)

    def shown(self) -> dict[str, Any]:
        """Returns what the page is told: points `(steps, return)`, and the last row."""
        name = self._path.parent.name
        return {"name": name, "row": self._row, "error": self._error, **self._points}
