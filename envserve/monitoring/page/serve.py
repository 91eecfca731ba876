"""Serve the page over HTTP, in this process or in a child process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import select
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from envserve.errors import ServerError
from envserve.python_process import main_command

_NUM_PORTS: Final = 50
_START_SECONDS: Final = 60.0
_MAX_CONNECTIONS: Final = 500
#: The kernel closes a connection if the browser accepts no data within this time.
_MAX_UNREAD_MS: Final = 30_000
#: A connection without a request within this time is closed, so that clients without a
#: token cannot occupy all connections.
_MAX_IDLE_SECONDS: Final = 10.0


class _Protocol(H11Protocol):
    """HTTP protocol that closes connections that send no complete request in time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._close_if_idle()

    def _close_if_idle(self, last: object = ...) -> None:
        """Close the connection if no request has arrived since the last check."""
        if last is self.cycle and (last is None or self.cycle.response_complete):
            self.transport.abort()
        elif not self.transport.is_closing():
            self.loop.call_later(_MAX_IDLE_SECONDS, self._close_if_idle, self.cycle)


def page_server(
    build: Callable[[str], Starlette], host: str, port: int
) -> tuple[uvicorn.Server, socket.socket, str]:
    """Return an HTTP server, the socket to run it with, and the URL with the token.

    Args:
      build: Function that returns the application for a token.
      host: Address to listen on.
      port: Port; if it is in use, the next free port is used. 0 chooses any free port.

    Raises:
      ServerError: The address cannot be used, or all ports that were tried are in use.
    """
    listening = _listen(host, port)
    token = secrets.token_urlsafe(24)
    config = uvicorn.Config(
        build(token),
        http=_Protocol,
        log_level="critical",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    # Some browsers cannot open the address of all interfaces.
    url_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url_host = f"[{url_host}]" if ":" in url_host else url_host
    url = f"http://{url_host}:{listening.getsockname()[1]}/?token={token}"
    return uvicorn.Server(config), listening, url


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in range(port, min(port + _NUM_PORTS, 65536)) if port else (0,):
        try:
            host.encode("idna")  # if this fails, `create_server` leaks a socket
            listening = socket.create_server((host, number), family=family)
        except (OSError, UnicodeError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                continue
            reason = getattr(error, "strerror", None) or error
            raise ServerError(
                f"the page cannot listen on {host}:{number}: {reason}; pass an "
                f"address of this host as --host, and a --port that you may use"
            ) from None
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted sockets inherit the option
            option = socket.TCP_USER_TIMEOUT
            listening.setsockopt(socket.IPPROTO_TCP, option, _MAX_UNREAD_MS)
        return listening
    raise ServerError(
        f"{_NUM_PORTS} ports starting at {port} are in use; pass another --port"
    )


def page_process(
    addresses: Sequence[str], run: Path, *, insecure: bool = False
) -> tuple[subprocess.Popen[str], str]:
    """Start a process that serves the page; return the process and the page's URL.

    The page's process exits when this process exits. Ctrl-C does not reach it, because
    it runs in a new session.

    Raises:
      ServerError: The page did not start; the process has printed the error to stderr.
    """
    command = main_command("envserve.__main__", "page", *addresses)
    command += ["--run", str(run), "--end-with-stdin"]
    process = subprocess.Popen(
        command + ["--insecure"] * insecure,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    poller = select.poll()  # unlike `select`, it accepts descriptors above 1023
    poller.register(process.stdout, select.POLLIN)
    ready = poller.poll(_START_SECONDS * 1000)
    url = process.stdout.readline().rpartition(" ")[2].strip() if ready else ""
    if not url:
        process.kill()
        with process:
            raise ServerError("the page did not start; run `envserve page` for details")
    return process, url


def finish_page(process: subprocess.Popen[str], show: Callable[[str], object]) -> None:
    """Wait until no browser shows the page, for a minute at most, or until Ctrl-C.

    Meanwhile, call `show` with each line that the process prints.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # the process has exited already
            with process.stdin as stdin:
                stdin.write("finished")
            for line in process.stdout:
                show(line.rstrip())
    except KeyboardInterrupt:
        process.terminate()
