"""A TCP proxy in front of a server of the demo, to cut the network."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Final

_HOST: Final = "127.0.0.1"


class TcpProxy:
    """Forward connections from its `address` to a `port` of this host."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._listening = socket.create_server((_HOST, 0))
        self.address = f"tcp://{_HOST}:{self._listening.getsockname()[1]}"
        self._is_whole = threading.Event()
        self._is_whole.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Forward nothing for some seconds; TCP loses no data."""
        self._is_whole.clear()
        mend = threading.Timer(seconds, self._is_whole.set)
        mend.daemon = True
        mend.start()

    def close(self) -> None:
        """Takes no more connections; those that there are end with either end."""
        self._is_whole.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                near, _ = self._listening.accept()
                threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        with near, contextlib.suppress(ConnectionRefusedError):  # no server is there
            self._is_whole.wait()
            with socket.create_connection((_HOST, self.port)) as far:
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(target=self._pass, args=(far, near))
                back.start()
                self._pass(near, far)
                back.join()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):  # either end may go at any time
            while data := source.recv(1 << 16):
                self._is_whole.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)  # then the other way ends as well
