"""The page's web application, and its access control.

A browser must present the token: first in the URL, afterwards in a cookie. Requests for
other host names are rejected, which prevents DNS rebinding. POST requests from other
sites are rejected, which prevents cross-site request forgery.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from envserve.address import is_known_host
from envserve.errors import EnvserveError
from envserve.monitoring.page.data_feed import DataFeed, encode_event

#: The label of a button, and the function that it calls. The function runs in a thread,
#: and returns a message to show or raises EnvserveError.
Button = tuple[str, Callable[[], str]]

_HTML: Final = Path(__file__).with_name("index.html").read_bytes()
_MAX_BODY_BYTES: Final = 1 << 16
_MAX_UNREAD_SECONDS: Final = 20.0
_TOKEN_EXPECTED: Final = (
    "Expected a URL with a token: open the URL that the command printed. The token "
    "changes whenever the command starts.\n"
)


def _csp_hash(tag: str) -> str:
    """Return the Content-Security-Policy hash of the page's inline script or style."""
    pattern = rf"<{tag}>(.*?)</{tag}>".encode()
    (text,) = re.findall(pattern, _HTML, re.DOTALL)
    return f"'sha256-{b64encode(sha256(text).digest()).decode()}'"


_HEADERS: Final = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_csp_hash('script')}; "
    f"style-src {_csp_hash('style')}; img-src data:; connect-src 'self'; "
    f"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def build_app(
    feed: DataFeed,
    *,
    token: str,
    buttons: Mapping[str, Button] | None = None,
    host: str = "127.0.0.1",
) -> Starlette:
    """Return the page as an ASGI application; its lifespan starts and closes the feed.

    Args:
      feed: Source of the events that the page shows.
      token: Token that browsers must present.
      buttons: Maps names in the URL to buttons of the page.
      host: Host name or address of the page. The Host header of requests must contain
        this name or address, localhost, or the machine's own host name.
    """

    @contextlib.asynccontextmanager
    async def running_feed(app: Starlette) -> AsyncIterator[None]:
        await feed.start()
        try:
            yield
        finally:
            await feed.close()

    page = _Page(feed, buttons or {})
    routes = [
        Route("/", page.index),
        Route("/events", page.events),
        Route("/tiles", page.set_tiles, methods=["POST"]),
        Route("/press/{name}", page.press, methods=["POST"]),
        Route("/record/{index}/{lease}/{row}", page.record),
    ]
    names = {"localhost", socket.gethostname().lower(), host.lower()}
    return Starlette(
        routes=routes,
        middleware=[Middleware(_AccessControl, token=token, names=names)],
        exception_handlers={
            EnvserveError: _error_response,
            msgspec.DecodeError: _error_response,
        },
        lifespan=running_feed,
    )


class _AccessControl:
    """Rejects requests without the token and POST requests from other sites."""

    def __init__(self, app: ASGIApp, token: str, names: set[str]) -> None:
        self._app, self._token, self._names = app, token.encode(), names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope)
        host = request.headers.get("host", "")
        # Browsers share cookies among all ports of a host, so the cookie's name
        # contains the port.
        cookie = f"envserve_page{''.join(filter(str.isdigit, host))}"
        in_url = request.query_params.get("token") if scope["path"] == "/" else None
        token = in_url or request.cookies.get(cookie, "")
        is_allowed = hmac.compare_digest(token.encode(), self._token)
        is_allowed = is_allowed and self._is_same_origin(request, host)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if in_url and is_allowed:
                    attributes = "Path=/; HttpOnly; SameSite=Strict"
                    headers["Set-Cookie"] = f"{cookie}={in_url}; {attributes}"
            await send(message)

        app = self._app if is_allowed else PlainTextResponse(_TOKEN_EXPECTED, 403)
        await app(scope, receive, send_with_headers)

    def _is_same_origin(self, request: Request, host: str) -> bool:
        """Return whether the host is known and no other site sent this POST request."""
        origin = request.headers.get("origin")
        is_same = origin in (f"http://{host}", f"https://{host}")
        is_same = is_same or request.method in ("GET", "HEAD")
        return is_same and is_known_host(host, self._names)


_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Tile = tuple[_Number, _Number, _Number]
_Width = Annotated[int, msgspec.Meta(ge=8, le=1024)]


class _ShownTiles(msgspec.Struct):
    """The tiles that a browser shows: server index, lease, row, and width in pixels."""

    subscriber: str
    tiles: Annotated[
        list[tuple[_Number, _Number, _Number, _Width]], msgspec.Meta(max_length=512)
    ]


class _Page:
    """The handlers of all routes."""

    def __init__(self, feed: DataFeed, buttons: Mapping[str, Button]) -> None:
        self._feed, self._buttons = feed, buttons

    async def index(self, request: Request) -> Response:
        return Response(_HTML, media_type="text/html")

    async def events(self, request: Request) -> Response:
        buttons = [(name, label) for name, (label, _) in self._buttons.items()]
        return _EventStream(self._feed, {"buttons": buttons})

    async def set_tiles(self, request: Request) -> Response:
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            raise HTTPException(413, f"expected at most {_MAX_BODY_BYTES} bytes")
        shown = msgspec.json.decode(await request.body(), type=_ShownTiles)
        tiles = {(index, lease, row): width for index, lease, row, width in shown.tiles}
        is_known = self._feed.set_tiles(shown.subscriber, tiles)
        return Response(status_code=204 if is_known else 404)

    async def record(self, request: Request) -> Response:
        try:
            tile = msgspec.convert([*request.path_params.values()], _Tile, strict=False)
        except msgspec.ValidationError:
            raise HTTPException(404) from None
        record = await asyncio.to_thread(self._feed.record, tile)
        return Response(record, media_type="application/octet-stream")

    async def press(self, request: Request) -> Response:
        if (name := request.path_params["name"]) not in self._buttons:
            raise HTTPException(404)
        return PlainTextResponse(await asyncio.to_thread(self._buttons[name][1]))


async def _error_response(request: Request, error: Exception) -> Response:
    status = 502 if isinstance(error, EnvserveError) else 400
    return PlainTextResponse(str(error), status)


class _EventStream(StreamingResponse):
    """Server-sent events for a browser, until it disconnects or stops reading."""

    def __init__(self, feed: DataFeed, hello: dict[str, Any]) -> None:
        super().__init__(self._events(), media_type="text/event-stream")
        self._feed, self._hello = feed, hello

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(_MAX_UNREAD_SECONDS):
                await send(message)

        self._subscriber = self._feed.subscribe()
        try:
            with contextlib.suppress(TimeoutError):
                await super().__call__(scope, receive, send_in_time)
        finally:
            self._feed.unsubscribe(self._subscriber)

    async def _events(self) -> AsyncIterator[bytes]:
        name = self._subscriber.name
        yield encode_event("hello", self._hello | {"subscriber": name})
        async for event in self._subscriber.events():
            yield event
