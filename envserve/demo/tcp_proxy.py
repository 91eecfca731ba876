"""A TCP proxy in front of a demo server, to simulate a network outage."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Final

_HOST: Final = "127.0.0.1"


class TcpProxy:
    """A proxy that accepts connections and forwards them to a server on this host.

    Attributes:
      port: Port of the server; it may change when the server restarts.
      address: Address at which the proxy accepts connections.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._listening = socket.create_server((_HOST, 0))
        self.address = f"tcp://{_HOST}:{self._listening.getsockname()[1]}"
        self._is_connected = threading.Event()
        self._is_connected.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Pause forwarding for a number of seconds; data is delayed, not lost."""
        self._is_connected.clear()
        timer = threading.Timer(seconds, self._is_connected.set)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """Stop accepting connections; existing ones end when a peer closes them."""
        self._is_connected.set()
        with contextlib.suppress(OSError):  # macOS: `close` alone ends `accept`
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # `close` was called
            while True:
                client, _ = self._listening.accept()
                threading.Thread(
                    target=self._connect, args=(client,), daemon=True
                ).start()

    def _connect(self, client: socket.socket) -> None:
        with client, contextlib.suppress(ConnectionRefusedError):  # the server is down
            self._is_connected.wait()
            with socket.create_connection((_HOST, self.port)) as server:
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                thread = threading.Thread(target=self._forward, args=(server, client))
                thread.start()
                self._forward(client, server)
                thread.join()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):  # either peer may disconnect
            while data := source.recv(1 << 16):
                self._is_connected.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)  # ends the other direction, too
