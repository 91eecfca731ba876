"""A port where Prometheus reads the metrics of a server or of a trainer.

One thread serves one connection at a time, with a second to receive the request and a
second to send the answer. A stalled reader therefore delays other readers only. After
each answer the thread sleeps nine times as long as it has computed, because it takes
that time from serving or training.
"""

from __future__ import annotations

import io
import logging
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

from envserve.errors import EnvserveError, ServerError

_LOGGER: Final = logging.getLogger(__name__)
_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.05
_REST: Final = 9
_MAX_HEAD_BYTES: Final = 8192


# Not prometheus_client.start_http_server: it starts a thread per connection, without
# limit or timeout (200 silent connections hold 200 threads), lets readers take any
# amount of CPU time, and prints a traceback when a collector raises.
class MetricsPort(socketserver.TCPServer):
    """Listens from the start, and answers once it knows what.

    Attributes:
      address: Where to read.
      collector: What `show` was given.
    """

    allow_reuse_address = True
    collector: Any = None

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """Listens; port 0 is any.

        Raises:
          ServerError: It cannot listen there, or the extra `metrics` is missing.
        """
        try:
            import prometheus_client  # noqa: F401
        except ImportError:
            text = "--metrics-port needs prometheus-client; pip install "
            raise ServerError(f"{text}'envserve[metrics]'") from None
        self._is_closing = threading.Event()
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ServerError(
                f"cannot show metrics at {host}:{port}: {error.strerror or error}; "
                f"name another --metrics-port, or --metrics-host"
            ) from None
        self.address = f"http://{host}:{self.server_address[1]}/metrics"

    def show(self, collector: Any) -> None:
        """Answers with what `collect` of an object returns, in a thread of its own."""
        self.collector = collector
        args = (_LOOK_SECONDS,)
        threading.Thread(target=self.serve_forever, args=args, daemon=True).start()
        _LOGGER.info("metrics are at %s", self.address)

    def server_close(self) -> None:
        """Answers no more."""
        self._is_closing.set()
        if self.collector is not None:
            self.shutdown()
        super().server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers, and rests."""
        begin = time.thread_time()
        super().process_request(request, client_address)
        self._is_closing.wait(_REST * (time.thread_time() - begin))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Has a reader that went away, or does not read in time, be no news."""
        _LOGGER.debug("a reader of metrics has failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS
    server: MetricsPort

    def setup(self) -> None:
        """Reads all that is asked, since a timeout is of each byte else."""
        super().setup()
        head, until = b"", time.monotonic() + _SECONDS
        while b"\r\n\r\n" not in head and len(head) < _MAX_HEAD_BYTES:
            self.connection.settimeout(max(0.001, until - time.monotonic()))
            if not (more := self.connection.recv(_MAX_HEAD_BYTES)):
                break
            head += more
        self.connection.settimeout(_SECONDS)
        self.rfile = io.BufferedReader(io.BytesIO(head))

    def do_GET(self) -> None:
        """Answers at any path."""
        from prometheus_client import generate_latest

        try:
            text = generate_latest(self.server.collector)
        except (EnvserveError, TimeoutError) as error:
            self.send_error(503, str(error).partition("\n")[0] or "too late")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Says nothing of what is read."""
