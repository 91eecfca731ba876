"""A TCP proxy in front of a server, which fails as networks do.

It runs in a thread with an event loop of its own. Whoever connects to it is connected
to the server; each direction has its faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Self

from tests.chaos.link import Link, reset
from tests.chaos.network_faults import Direction, NetworkFaults

_CALM = NetworkFaults()


class Proxy:
    """Stands between one client and one server; a context manager.

    With several clients, a message that is held back could reach another one's
    connection. Servers and clients have to bear that as well.

    Attributes:
      to_server: What happens to requests; its `counts` say how often.
      to_client: What happens to answers.
      num_connections: How many connections there have been.
    """

    def __init__(
        self,
        target: str,
        *,
        to_server: NetworkFaults = _CALM,
        to_client: NetworkFaults = _CALM,
        seed: int = 0,
        port: int = 0,
    ) -> None:
        """Starts to listen.

        Args:
          target: The server's address, like "tcp://127.0.0.1:5555".
          port: Where to listen; 0 for any that is free.
        """
        host, _, target_port = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(target_port)
        self.to_server = Direction(to_server, 2 * seed)
        self.to_client = Direction(to_client, 2 * seed + 1)
        self.num_connections = 0
        self._links: set[Link] = set()
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
        """Replaces faults; those that are not given stay as they are."""
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
        for link in self._links:
            link.wake()

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
        """Joins a client's connection to a new one to the server."""
        self.num_connections += 1
        client = await asyncio.open_connection(sock=connection)
        with contextlib.closing(client[1]):
            try:
                server = await asyncio.open_connection(*self._target)
            except OSError:
                reset(client[1])
                return
            link = Link(client, server, self.to_server, self.to_client)
            self._links.add(link)
            try:
                await link.run()
            finally:
                self._links.remove(link)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
