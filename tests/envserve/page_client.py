"""A browser without a window: requests to a page on a real socket."""

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
    """Serves a page; gives its URL."""
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
    """Asks as a browser would that was given the page's URL."""

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

    def ask(
        self,
        method: str,
        path: str,
        body: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, str, Mapping[str, str]]:
        """Returns status, body and headers; `headers` takes the place of its own."""
        connection = self._connect()
        with contextlib.closing(connection):
            given = self.headers if headers is None else headers
            connection.request(method, path, body, dict(given))
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), dict(answer.headers)

    def events(self) -> Events:
        return Events(self._connect(), self.headers)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, TIMEOUT_SECONDS)


class Events:
    """What the page is told, one after the other."""

    def __init__(
        self, connection: http.client.HTTPConnection, headers: Mapping[str, str]
    ) -> None:
        self._connection = connection
        connection.request("GET", "/events", headers=dict(headers))
        self._answer = connection.getresponse()
        assert self._answer.status == 200
        self.subscriber = str(self.until("hello")["subscriber"])

    def until(
        self, name: str, is_it: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        """Returns the next event of a name for which something holds."""
        while True:
            kind = self._answer.readline().decode().partition(": ")[2].strip()
            data = self._answer.readline().decode().partition(": ")[2]
            assert data, "the page has closed the stream"
            self._answer.readline()
            said: dict[str, Any] = json.loads(data)
            if kind == name and is_it(said):
                return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()
        self._connection.close()
