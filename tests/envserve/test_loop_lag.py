"""An event loop's lag is reported while the loop is blocked and for 10 s after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from envserve.server.event_loop import LoopLag


class FakeTimer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self._when = when
        self.callback = callback
        self.is_cancelled = False

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeLoop:
    """A loop whose time passes only in `run_for`."""

    now = 100.0
    timer: FakeTimer

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> FakeTimer:
        self.timer = FakeTimer(self.now + delay, callback)
        return self.timer

    def run_for(self, seconds: float) -> None:
        self.now += seconds
        while self.timer.when() <= self.now:
            self.timer.callback()


def test_lag_is_reported_immediately_and_for_ten_seconds() -> None:
    loop = FakeLoop()
    lag = LoopLag(cast(asyncio.AbstractEventLoop, loop))
    assert lag.seconds == 0.0
    loop.run_for(0.5)
    assert lag.seconds == 0.0
    loop.now += 3.5  # the loop was blocked, and its callback has not run
    assert lag.seconds == 3.0
    loop.run_for(0.0)
    assert lag.seconds == 3.0
    for _ in range(19):
        loop.run_for(0.5)
        assert lag.seconds == 3.0
    loop.run_for(0.5)
    assert lag.seconds == 0.0
    lag.stop()
    assert loop.timer.is_cancelled
