"""An HTTP client for the page, over a real socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from starlette.applications import Starlette

from envserve.monitoring.page.serve import page_server

TIMEOUT_SECONDS = 30.0


@contextlib.contextmanager
def served(build: Callable[[str], Starlette], port: int = 0) -> Iterator[str]:
    """Serve a page in a thread, and yield its URL."""
    server, listening, url = page_server(build, "127.0.0.1", port)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


class Browser:
    """Sends requests like a browser that has opened the page's URL."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        self.host, self.port = parts.hostname, parts.port
        (self.token,) = parse_qs(parts.query)["token"]
        name = f"{self.host}:{self.port}"
        digits = "".join(filter(str.isdigit, name))
        self.headers = {
            "Cookie": f"envserve_page{digits}={self.token}",
            "Origin": f"http://{name}",
        }

    def request(
        self,
        method: str,
        path: str,
        body: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, str, Mapping[str, str]]:
        """Return status, body and headers; `headers` replace the default headers."""
        connection = self._connect()
        with contextlib.closing(connection):
            sent = self.headers if headers is None else headers
            connection.request(method, path, body, dict(sent))
            response = connection.getresponse()
            return response.status, response.read().decode(), dict(response.headers)

    def events(self) -> Events:
        return Events(self._connect(), self.headers)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, TIMEOUT_SECONDS)


class Events:
    """The page's server-sent events, in order."""

    def __init__(
        self, connection: http.client.HTTPConnection, headers: Mapping[str, str]
    ) -> None:
        self._connection = connection
        connection.request("GET", "/events", headers=dict(headers))
        self._response = connection.getresponse()
        assert self._response.status == 200
        self.subscriber = str(self.until("hello")["subscriber"])

    def until(
        self, name: str, matches: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        """Return the data of the next event with this name and matching data."""
        while True:
            kind = self._response.readline().decode().partition(": ")[2].strip()
            data = self._response.readline().decode().partition(": ")[2]
            assert data, f"expected {name}; the page has closed the stream"
            self._response.readline()
            value: dict[str, Any] = json.loads(data)
            if kind == name and matches(value):
                return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()
        self._connection.close()
