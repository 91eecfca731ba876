"""A TCP proxy that simulates network faults in front of a server.

The proxy runs an event loop in its own thread, and opens one connection to the server
per client connection. It reads each direction of a connection, splits it into messages,
and forwards them with the direction's faults. If one end fails, the other is reset; if
one end closes, data in transit is still delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Final, Self

from tests.chaos.network_faults import Direction, NetworkFaults
from tests.chaos.zmtp import Splitter

_NO_FAULTS: Final = NetworkFaults()
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
#: Pieces of data, each with the earliest time to write it; None at the end.
_Queue = asyncio.Queue[tuple[float, bytes] | None]

_READ_BYTES: Final = 1 << 16
_MAX_QUEUED: Final = 10_000
#: Seconds after which a held message is sent if no other one overtakes it.
_HOLD_SECONDS: Final = 0.02
_LINGER_ZERO: Final = struct.pack("ii", 1, 0)


class _Ended(Exception):
    """The connection has ended."""


class _Connection:
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
        """Apply new faults."""
        self._changed.set()

    async def run(self) -> None:
        """Forward data in both directions until the connection ends."""
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
                    _reset(writer)
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
            outgoing = [] if data is not None else direction.release_held()
            for piece in pieces:
                if piece.is_message:
                    outgoing += direction.process(piece.data)
                else:
                    outgoing.append(piece.data)
            for item in outgoing:
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
                raise ConnectionResetError("injected fault")
        raise _Ended


async def _read_some(
    source: asyncio.StreamReader, direction: Direction
) -> bytes | None:
    """Return the next data, b"" at the end, or None if a held message is due."""
    try:
        async with asyncio.timeout(
            _HOLD_SECONDS if direction.has_held_message else None
        ):
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
            await asyncio.sleep(0)  # let the other direction run


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST, so that unread data may be lost."""
    if writer.transport.is_closing():  # the other end closed first
        return
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
    writer.transport.abort()


class Proxy:
    """A context manager that forwards client connections to one server.

    A message that is held for reordering may be sent over another client's connection,
    which servers and clients must tolerate.

    Attributes:
      to_server: The direction of requests.
      to_client: The direction of replies.
    """

    def __init__(
        self,
        target: str,
        *,
        to_server: NetworkFaults = _NO_FAULTS,
        to_client: NetworkFaults = _NO_FAULTS,
        seed: int = 0,
        port: int = 0,
    ) -> None:
        """Start listening.

        Args:
          target: The server's address, for example "tcp://127.0.0.1:5555".
          port: The port to listen on; 0 for any free port.
        """
        host, _, target_port = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(target_port)
        self.to_server = Direction(to_server, 2 * seed)
        self.to_client = Direction(to_client, 2 * seed + 1)
        self._connections: set[_Connection] = set()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.setblocking(False)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name=f"proxy of {target}")
        self._thread.start()

    def change(
        self,
        *,
        to_server: NetworkFaults | None = None,
        to_client: NetworkFaults | None = None,
    ) -> None:
        """Replace the faults of one or both directions."""
        if to_server is not None:
            self.to_server.faults = to_server
        if to_client is not None:
            self.to_client.faults = to_client
        self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()

    def _wake(self) -> None:
        for connection in self._connections:
            connection.wake()

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._serving)
        finally:
            self._listener.close()
            self._loop.close()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                connection, _ = await self._loop.sock_accept(self._listener)
                group.create_task(self._join(connection))

    async def _join(self, connection: socket.socket) -> None:
        """Connect a client to the server; forward data until either end closes."""
        client = await asyncio.open_connection(sock=connection)
        with contextlib.closing(client[1]):
            try:
                server = await asyncio.open_connection(*self._target)
            except OSError:
                _reset(client[1])
                return
            joined = _Connection(client, server, self.to_server, self.to_client)
            self._connections.add(joined)
            try:
                await joined.run()
            finally:
                self._connections.remove(joined)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
