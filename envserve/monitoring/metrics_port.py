"""An HTTP port where Prometheus scrapes the metrics of a server or of a trainer.

One thread serves one connection at a time, with a timeout of one second for the request
and one for the response, so a stalled client delays only other scrapes. The thread
shares the interpreter with serving or training, so it pauses after each response and
uses at most 10 % of a core. Requests for other host names are rejected, which prevents
DNS rebinding.
"""

from __future__ import annotations

import io
import logging
import socket
import socketserver
import threading
import time
from functools import cached_property
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

from envserve.address import is_known_host
from envserve.errors import EnvserveError, ServerError
from envserve.text import install_command

_LOGGER: Final = logging.getLogger(__name__)
_TIMEOUT_SECONDS: Final = 1.0
_SHUTDOWN_POLL_SECONDS: Final = 0.05
#: The pause after a response, as a multiple of the CPU time that the response took.
_PAUSE_FACTOR: Final = 9
_MAX_HEAD_BYTES: Final = 8192


# prometheus_client.start_http_server is not used, because it starts a thread for each
# connection without limit or timeout (200 idle connections occupy 200 threads), does
# not limit the CPU time of scrapes, and prints a traceback when a collector raises.
class MetricsPort(socketserver.TCPServer):
    """Server that listens once constructed, and serves requests after `start_serving`.

    Attributes:
      address: URL of the metrics.
      collector: Prometheus collector whose metrics are served; None before
        `start_serving`.
    """

    allow_reuse_address = True
    collector: Any = None

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """Listen on a port, or on any free port if `port` is 0.

        Raises:
          ServerError: The address cannot be bound, or the extra `metrics` is not
            installed.
        """
        try:
            import prometheus_client  # noqa: F401
        except ImportError:
            raise ServerError(
                f"--metrics-port needs the package prometheus-client; "
                f"{install_command('metrics')}"
            ) from None
        self._is_closing = threading.Event()
        self._is_serving = False
        self._names = {socket.gethostname().lower(), host.lower()}
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, TypeError) as error:
            # A host name that IDNA cannot encode raises a TypeError.
            reason = getattr(error, "strerror", None) or error
            raise ServerError(
                f"cannot serve metrics on {host}:{port}: {reason}; pass another "
                f"--metrics-port or --metrics-host"
            ) from None
        url_host = f"[{host}]" if ":" in host else host
        self.address = f"http://{url_host}:{self.server_address[1]}/metrics"

    def start_serving(self, collector: Any) -> None:
        """Start a thread that serves the metrics of a Prometheus collector."""
        self.collector = collector
        args = (_SHUTDOWN_POLL_SECONDS,)
        threading.Thread(target=self.serve_forever, args=args, daemon=True).start()
        self._is_serving = True
        _LOGGER.info("metrics are at %s", self.address)

    def server_close(self) -> None:
        """Stop the thread, if it was started, and close the port."""
        self._is_closing.set()
        if self._is_serving:  # otherwise, `shutdown` would wait forever
            self.shutdown()
        super().server_close()

    def accepts_host(self, header: str) -> bool:
        """Return whether a request's Host header names this host.

        A name without a dot is accepted, because only the local network can define it.
        """
        is_known = "." not in header or is_known_host(header, self._names)
        return is_known or is_known_host(header, self._full_names)

    @cached_property
    def _full_names(self) -> set[str]:
        """The host's fully qualified name, as a set; looked up when first needed."""
        return {socket.getfqdn().lower()}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection, then pause."""
        started_at = time.thread_time()
        super().process_request(request, client_address)
        self._is_closing.wait(_PAUSE_FACTOR * (time.thread_time() - started_at))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error at debug level; clients may disconnect or stall at any time."""
        _LOGGER.debug("a metrics request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_SECONDS
    server: MetricsPort

    def setup(self) -> None:
        """Receive the request before a deadline.

        A timeout of the socket would apply to each `recv` separately.
        """
        super().setup()
        head, deadline = b"", time.monotonic() + _TIMEOUT_SECONDS
        while b"\r\n\r\n" not in head and len(head) < _MAX_HEAD_BYTES:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            if not (received := self.connection.recv(_MAX_HEAD_BYTES)):
                break
            head += received
        self.connection.settimeout(_TIMEOUT_SECONDS)
        self.rfile = io.BufferedReader(io.BytesIO(head))

    def do_GET(self) -> None:
        """Respond with the metrics, at any path."""
        from prometheus_client import generate_latest

        if not self.server.accepts_host(self.headers.get("Host", "")):
            self.send_error(
                403,
                "expected an IP address or a name of this host in the URL",
                "Use an IP address, or pass the name in the URL as --metrics-host.",
            )
            return
        try:
            text = generate_latest(self.server.collector)
        except (EnvserveError, TimeoutError) as error:
            self.send_error(503, str(error).partition("\n")[0] or "timed out")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Log nothing; the base class would print a line per request."""
