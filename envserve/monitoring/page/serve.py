"""Serves the page: on loopback, at the next free port, to whoever has its token.

Here, or in a process of its own, which ends with whoever started it.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from envserve.errors import ServerError

_NUM_PORTS: Final = 50
_START_SECONDS: Final = 60.0
_MAX_CONNECTIONS: Final = 500
#: A browser that takes nothing for so long is gone, whatever its connection says.
_MAX_STUCK_MS: Final = 30_000
#: Who asks for nothing within so long, without a token too, leaves its place to others.
_MAX_SILENT_SECONDS: Final = 10.0


class _Protocol(H11Protocol):
    """HTTP that waits neither for a first request nor for the rest of one."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._look()

    def _look(self, before: object = ...) -> None:
        if before is self.cycle and (before is None or self.cycle.response_complete):
            self.transport.abort()
        elif not self.transport.is_closing():
            self.loop.call_later(_MAX_SILENT_SECONDS, self._look, self.cycle)


def page_server(
    build: Callable[[str], Starlette], host: str, port: int
) -> tuple[uvicorn.Server, socket.socket, str]:
    """Returns a server, the socket to run it with, and the URL with the token.

    `build` makes the page, given its token. The port may be the next one that is free;
    0 is any.

    Raises:
      ServerError: It can listen nowhere.
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
    place = f"[{host}]" if ":" in host else host
    url = f"http://{place}:{listening.getsockname()[1]}/?token={token}"
    return uvicorn.Server(config), listening, url


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for each in range(port, min(port + _NUM_PORTS, 65536)) if port else (0,):
        try:
            listening = socket.create_server((host, each), family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise ServerError(
                f"the page cannot listen at {host}:{each}: {error.strerror}; expected "
                f"--host to be an address of this host, and a --port that you may use"
            ) from None
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            option = socket.TCP_USER_TIMEOUT
            listening.setsockopt(socket.IPPROTO_TCP, option, _MAX_STUCK_MS)
        return listening
    raise ServerError(
        f"{_NUM_PORTS} ports from {port} on are in use; name another by --port"
    )


def page_process(
    addresses: Sequence[str], run: Path, *, insecure: bool = False
) -> tuple[subprocess.Popen[str], str]:
    """Starts a page, and returns its process, a context manager, and its URL.

    It ends when this process does, and is left alone by Ctrl-C.

    Raises:
      ServerError: It did not start; what it says goes to stderr.
    """
    command = [sys.executable, "-m", "envserve", "page", *addresses]
    command += ["--run", str(run), "--end-with-stdin"]
    process = subprocess.Popen(
        command + ["--insecure"] * insecure,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = select.select([process.stdout], [], [], _START_SECONDS)[0]
    url = process.stdout.readline().rpartition(" ")[2].strip() if said else ""
    if not url:
        process.kill()
        with process:
            raise ServerError("the page did not start; `envserve page` alone says why")
    return process, url
