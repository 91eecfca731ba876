"""Resets in threads: in order, with whatever they raise, and dropped at the end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from envserve.worker.reset_threads import ResetThreads

Start = Callable[[int], ResetThreads]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[ResetThreads] = []

    def start_threads(num_envs: int) -> ResetThreads:
        started.append(ResetThreads(num_envs))
        return started[-1]

    yield start_threads
    for threads in started:
        threads.close()


def test_a_reset_runs_in_another_thread_and_its_info_comes_back(start: Start) -> None:
    threads = start(1)
    info = threads.start(lambda: {"ran_in": threading.get_ident()}).result(10)
    assert info["ran_in"] != threading.get_ident()


def test_one_thread_does_resets_in_the_order_they_came_in(start: Start) -> None:
    threads = start(1)
    order: list[int] = []

    def note(index: int) -> Mapping[str, Any]:
        order.append(index)
        return {}

    futures = [threads.start(lambda i=i: note(i)) for i in range(50)]  # type: ignore[misc]
    for future in futures:
        future.result(10)
    assert order == list(range(50))


def test_every_env_has_a_thread_so_that_none_waits_for_another(start: Start) -> None:
    threads = start(8)
    together = threading.Barrier(8)
    resets = [threads.start(lambda: {"seat": together.wait(10)}) for _ in range(8)]
    assert {reset.result(10)["seat"] for reset in resets} == set(range(8))


def test_threads_are_not_without_number(start: Start) -> None:
    before = threading.active_count()
    start(1000)
    assert threading.active_count() - before == 16


@pytest.mark.parametrize("error", [ValueError("no level"), SystemExit(3)])
def test_what_a_reset_raises_is_raised_where_it_is_waited_for(
    start: Start, error: BaseException
) -> None:
    threads = start(1)

    def fail() -> Mapping[str, Any]:
        raise error

    failed = threads.start(fail)
    fine = threads.start(lambda: {"level": 1})
    with pytest.raises(type(error)) as caught:
        failed.result(10)
    assert caught.value is error
    assert fine.result(10) == {"level": 1}


def test_closing_drops_what_has_not_begun_and_ends_the_threads(start: Start) -> None:
    threads = start(1)
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> Mapping[str, Any]:
        begun.set()
        go_on.wait(10)
        return {}

    running, waiting = threads.start(wait), threads.start(lambda: {})
    assert begun.wait(10)
    waiting.add_done_callback(lambda _: go_on.set())
    threads.close()
    assert waiting.cancelled()
    assert running.result(0) == {}
    names = {thread.name for thread in threading.enumerate()}
    assert "reset-0" not in names


def test_closing_does_not_wait_for_a_reset_that_hangs(start: Start) -> None:
    threads = start(1)
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> Mapping[str, Any]:
        begun.set()
        return {"waited": go_on.wait(30)}

    hanging = threads.start(hang)
    assert begun.wait(10)
    threads.close()
    assert not hanging.done()
    go_on.set()
    assert hanging.result(10) == {"waited": True}


def test_resets_give_way_soon_while_the_threads_are_there() -> None:
    before = sys.getswitchinterval()
    threads = ResetThreads(1)
    during = sys.getswitchinterval()
    threads.close()
    assert during == pytest.approx(0.5e-3)
    assert sys.getswitchinterval() == before
