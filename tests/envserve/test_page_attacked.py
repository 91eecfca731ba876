"""The page with malicious servers, and with clients that occupy its connections."""

from __future__ import annotations

import contextlib
import socket
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from envserve.lane import RenderedFrame
from envserve.monitoring.page.app import build_app
from envserve.monitoring.page.data_feed import DataFeed
from tests.envserve.page_client import TIMEOUT_SECONDS, Browser, served
from tests.envserve.page_fakes import FakeObserver, FakeServerState
from tests.envserve.test_page import ADDRESS, build_over, set_tiles


class UnrequestedFrames(FakeObserver):
    """An observer whose server sends frames of rows that were not requested."""

    def frames(self, *args: Any) -> list[RenderedFrame]:
        (frame,) = super().frames(*args)
        first = self.server.ticks = self.server.ticks + 100
        return [replace(frame, row=first + row, serial=first) for row in range(100)]


def test_unrequested_frames_are_not_stored() -> None:
    server = FakeServerState("CartPole-v1")
    feed = DataFeed([ADDRESS], None, cast(Any, lambda _: UnrequestedFrames(server)))

    with (
        served(lambda token: build_app(feed, token=token)) as url,
        Browser(url).events() as events,
    ):
        set_tiles(Browser(url), events.subscriber, (0, 1, 3, 160))
        while len(server.frame_requests) < 3:
            events.until("server")
        assert [key for key in feed._latest if key != 0] == []


@pytest.mark.parametrize(
    "sent", ["", "GET /events HTTP/1.1\r\n", "GET /x HTTP/1.1\r\nHost: x\r\n\r\nGET"]
)
def test_connections_without_a_complete_request_are_closed(
    monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    monkeypatch.setattr("envserve.monitoring.page.serve._MAX_IDLE_SECONDS", 1.0)
    with served(build_over(FakeServerState())) as url, Browser(url).events():
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port)) as silent:
            silent.settimeout(TIMEOUT_SECONDS)
            silent.sendall(sent.encode())
            with contextlib.suppress(ConnectionResetError):
                while silent.recv(1 << 16):
                    pass
        assert Browser(url).request("GET", "/")[0] == 200
