"""One connection through the proxy: the client's end joined to the server's.

Each direction is read, cut into messages, and written with its faults. If either end
breaks or is broken, the other is reset; if one closes, what is under way still arrives.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

from tests.chaos.network_faults import Direction
from tests.chaos.zmtp import Splitter

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
#: Pieces with the instants from which on they may be written; None at the end.
_Queue = asyncio.Queue[tuple[float, bytes] | None]

_READ_BYTES: Final = 1 << 16
_MAX_QUEUED: Final = 10_000
#: A message that nothing overtakes goes on after this.
_HOLD_SECONDS: Final = 0.02
_LINGER_ZERO: Final = struct.pack("ii", 1, 0)


class _Ended(Exception):
    """The link has come to its end."""


class Link:
    """Moves bytes between two streams until one of them ends."""

    def __init__(
        self, client: Stream, server: Stream, to_server: Direction, to_client: Direction
    ) -> None:
        self._client = client
        self._server = server
        self._to_server = to_server
        self._to_client = to_client
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Has faults looked at that were replaced."""
        self._changed.set()

    async def run(self) -> None:
        """Returns when the connections are closed."""
        writers = self._client[1], self._server[1]
        try:
            async with asyncio.TaskGroup() as group:
                for source, sink, direction in (
                    (self._client[0], self._server[1], self._to_server),
                    (self._server[0], self._client[1], self._to_client),
                ):
                    queue: _Queue = asyncio.Queue(_MAX_QUEUED)
                    group.create_task(self._read(source, queue, direction))
                    group.create_task(self._write(queue, sink, direction))
        except* (_Ended, OSError) as group_of_errors:
            if group_of_errors.subgroup(OSError) is not None:
                for writer in writers:
                    reset(writer)
        finally:
            for writer in writers:
                writer.close()

    async def _read(
        self, source: asyncio.StreamReader, queue: _Queue, direction: Direction
    ) -> None:
        splitter = Splitter()
        loop = asyncio.get_running_loop()
        due = 0.0
        while (data := await _read_some(source, direction)) != b"":
            pieces = splitter.feed(data) if data is not None else []
            going = [] if data is not None else direction.release()
            for piece in pieces:
                if piece.is_message:
                    going += direction.take(piece.data)
                else:
                    going.append(piece.data)
            for item in going:
                due = max(due, loop.time() + direction.draw_delay())
                await queue.put((due, item))
        await queue.put(None)

    async def _write(
        self, queue: _Queue, sink: asyncio.StreamWriter, direction: Direction
    ) -> None:
        loop = asyncio.get_running_loop()
        while (item := await queue.get()) is not None:
            due, data = item
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            while direction.faults.is_stalled:
                self._changed.clear()
                await self._changed.wait()
            cut = direction.draw_reset(len(data))
            await _write_sliced(sink, data[:cut], direction.faults.slice_bytes)
            if cut is not None:
                raise ConnectionResetError("by a toxic")
        raise _Ended


async def _read_some(
    source: asyncio.StreamReader, direction: Direction
) -> bytes | None:
    """Returns what comes next, b"" at the end; None if a held message has to go on."""
    try:
        async with asyncio.timeout(_HOLD_SECONDS if direction.is_holding else None):
            return await source.read(_READ_BYTES)
    except TimeoutError:
        return None


async def _write_sliced(
    sink: asyncio.StreamWriter, data: bytes, slice_bytes: int
) -> None:
    step = slice_bytes or max(1, len(data))
    for start in range(0, len(data), step):
        sink.write(data[start : start + step])
        await sink.drain()
        if slice_bytes:
            await asyncio.sleep(0)  # so that the other direction goes on as well


def reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection by RST: what its other end has not read yet may be lost."""
    if writer.transport.is_closing():  # its other end was quicker
        return
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
    writer.transport.abort()
