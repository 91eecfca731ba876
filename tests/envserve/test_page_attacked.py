"""The page, when servers lie to it and strangers take its places."""

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
from tests.envserve.page_fakes import FakeObserver, FakeServer
from tests.envserve.test_page import ADDRESS, build_over, look


class Talkative(FakeObserver):
    """Tells of rows that nobody has asked for, others each time."""

    def frames(self, *asked: Any) -> list[RenderedFrame]:
        (wanted,) = super().frames(*asked)
        first = self.server.ticks = self.server.ticks + 100
        return [replace(wanted, row=first + row, serial=first) for row in range(100)]


def test_pictures_that_nobody_has_asked_for_are_not_kept() -> None:
    server = FakeServer("CartPole-v1")
    feed = DataFeed([ADDRESS], None, cast(Any, lambda _: Talkative(server)))

    with (
        served(lambda token: build_app(feed, token=token)) as url,
        Browser(url).events() as events,
    ):
        look(Browser(url), events.subscriber, (0, 1, 3, 160))
        while len(server.asked) < 3:
            events.until("server")
        assert [key for key in feed._latest if key != 0] == []


@pytest.mark.parametrize(
    "said", ["", "GET /events HTTP/1.1\r\n", "GET /x HTTP/1.1\r\nHost: x\r\n\r\nGET"]
)
def test_who_asks_for_nothing_is_let_go(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr("envserve.monitoring.page.serve._MAX_IDLE_SECONDS", 1.0)
    with served(build_over(FakeServer())) as url, Browser(url).events():
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port)) as silent:
            silent.settimeout(TIMEOUT_SECONDS)
            silent.sendall(said.encode())
            with contextlib.suppress(ConnectionResetError):
                while silent.recv(1 << 16):
                    pass
        assert Browser(url).ask("GET", "/")[0] == 200
