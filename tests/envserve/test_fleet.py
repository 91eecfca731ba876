"""Looks at the servers of a batch: how long they last, and what ends well anyhow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from envserve.client import fleet as module
from envserve.client.diagnosis import Finding
from envserve.client.fleet import Fleet
from tests.envserve.conftest import WaitUntil

ADDRESSES = [f"tcp://127.0.0.1:{port}" for port in range(1, 5)]
#: Longer than any test may last.
FOREVER_SECONDS = 3600.0


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """One of servers that do not answer."""
    monkeypatch.setattr(module, "look_at", lambda sights, seconds: None)
    fleet = Fleet(ADDRESSES, insecure=True)
    yield fleet
    fleet.leave(None)


def test_silent_servers_are_asked_at_the_same_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    all_are_asked = threading.Barrier(len(ADDRESSES))

    def diagnose(address: str, keys: object, seconds: float) -> Finding:
        all_are_asked.wait(120)
        return Finding.NOBODY if address == ADDRESSES[0] else Finding.REFUSED

    monkeypatch.setattr(module, "diagnose_connection", diagnose)
    since = time.monotonic()
    fleet.is_gone(ADDRESSES[0], since)
    wait_until(lambda: fleet.looked_at >= since, 240)
    gone = [fleet.is_gone(address, since) for address in ADDRESSES]
    assert gone == [False, True, True, True]
