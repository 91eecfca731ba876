"""Polling a batch's servers: unresponsive servers, failed polls, closing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from envserve.client.link import placement
from envserve.client.link import server_pool as module
from envserve.client.link.connection import Connection
from envserve.client.link.server_pool import ServerPool
from envserve.client.link.session_driver import SessionDriver
from envserve.client.link.zmq_guards.diagnosis import Finding
from envserve.errors import (
    AddressError,
    ConnectError,
    KeyFileError,
    RemoteProtocolError,
    ServerLost,
)
from envserve.keys.key_folder import KeyFolder
from envserve.session.client.client_session import ClientSession
from envserve.session.states import ClientState
from envserve.wire.constants import MessageType
from envserve.wire.handshake import Welcome
from envserve.wire.message import Buffer, decode
from tests.envserve.conftest import WaitUntil
from tests.envserve.session_fakes import FakeServer, attach_and_step, exchange, state_of

ADDRESSES = [f"tcp://127.0.0.1:{port}" for port in range(1, 5)]
#: Longer than any test takes.
FOREVER_SECONDS = 3600.0


def silence(*_: object, **__: object) -> NoReturn:
    raise ConnectError("no server replied")


def welcome(free_envs: int) -> Welcome:
    return Welcome(
        max_message_bytes=1,
        env_names=(),
        num_names=0,
        lease_seconds=1.0,
        total_envs=free_envs,
        free_envs=free_envs,
    )


@pytest.fixture
def server_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerPool]:
    """A pool of servers that never reply."""
    monkeypatch.setattr(module, "request_welcome", silence)
    server_pool = ServerPool(ADDRESSES, insecure=True)
    yield server_pool
    server_pool.remove(None, time.monotonic() + 120)


def test_unresponsive_servers_are_polled_concurrently(
    server_pool: ServerPool, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    all_are_asked = threading.Barrier(len(ADDRESSES))

    def diagnose(address: str, keys: object, seconds: float) -> Finding:
        all_are_asked.wait(120)
        return Finding.UNKNOWN if address == ADDRESSES[0] else Finding.REFUSED

    monkeypatch.setattr(module, "diagnose_connection", diagnose)
    since = time.monotonic()
    server_pool.is_gone(ADDRESSES[0], since)
    wait_until(lambda: server_pool.polled_at >= since, 240)
    gone = [server_pool.is_gone(address, since) for address in ADDRESSES]
    assert gone == [False, True, True, True]


def test_an_unresponsive_server_is_gone_once_its_source_no_longer_lists_it(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil, tmp_path: Path
) -> None:
    """If a host has disappeared, connections to it are not refused."""
    monkeypatch.setattr(module, "request_welcome", silence)
    monkeypatch.setattr(module, "diagnose_connection", lambda *_: Finding.UNKNOWN)
    listed, vanished = ADDRESSES[:2]
    source = tmp_path / "servers"
    source.write_text(f"{listed}\n{vanished}")
    server_pool = ServerPool([f"file://{source}"], insecure=True)
    server_pool.placement.add(0, listed, 1)
    server_pool.placement.add(1, vanished, 1)

    def gone() -> list[bool]:
        since = time.monotonic()
        server_pool.is_gone(listed, since)
        wait_until(lambda: server_pool.polled_at >= since, 240)
        return [server_pool.is_gone(address, since) for address in (listed, vanished)]

    assert gone() == [False, False]
    source.write_text(listed)
    assert gone() == [False, True]
    source.unlink()  # a server is not gone if its source is unreadable
    assert gone() == [False, False]
    for lane in (0, 1):
        server_pool.remove(lane, time.monotonic() + 120)


def test_names_that_cannot_be_resolved_leave_the_known_servers(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    """A server dies while DNS is down; another one that DNS has listed takes over."""
    dead, alive = (f"tcp://192.0.2.{host}:5555" for host in (1, 2))

    def look_up(*_: object, **__: object) -> list[Any]:
        if is_dns_down:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure")
        return [(0, 0, 0, "", (f"192.0.2.{host}", 0)) for host in (1, 2)]

    def request_welcome(address: str, *_: object, **__: object) -> Welcome:
        return welcome(8) if address == alive else silence()

    is_dns_down = False
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(module, "request_welcome", request_welcome)
    monkeypatch.setattr(module, "diagnose_connection", lambda *_: Finding.REFUSED)
    server_pool = ServerPool(["dns://envs:5555"], insecure=True)
    assert server_pool.addresses == [dead, alive]
    for lane, address in enumerate(server_pool.addresses):
        server_pool.placement.add(lane, address, 4)
    is_dns_down = True
    since = time.monotonic()
    assert not server_pool.is_gone(dead, since)
    wait_until(lambda: server_pool.polled_at >= since, 240)
    assert [server_pool.is_gone(at, since) for at in (dead, alive)] == [True, False]
    assert server_pool.assign(0, may_recover=False) == alive
    for lane in (0, 1):
        server_pool.remove(lane, time.monotonic() + 120)


def test_sources_that_cannot_be_resolved_are_an_error(tmp_path: Path) -> None:
    sources = [f"file://{tmp_path}/{name}" for name in ("one", "two")]
    with pytest.raises(AddressError, match=r"one'.*; .*two'"):
        module.live_servers(sources)


def test_polls_do_not_wait_for_lookups_of_single_hosts(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    """Lookups of many hosts, one after the other, would take minutes."""
    looked_up: list[str] = []

    def look_up(host: str, *_: object, **__: object) -> list[Any]:
        looked_up.append(host)
        return [(0, 0, 0, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(module, "request_welcome", silence)
    monkeypatch.setattr(module, "diagnose_connection", lambda *_: Finding.UNKNOWN)
    server_pool = ServerPool(["sim1", "sim2", "dns://sims"], insecure=True)
    assert looked_up == ["sim1", "sim2", "sims"]
    since = time.monotonic()
    server_pool.is_gone(server_pool.addresses[0], since)
    wait_until(lambda: server_pool.polled_at >= since, 240)
    assert looked_up[3:] == ["sims"]
    server_pool.remove(None, time.monotonic() + 120)


def test_only_the_last_lane_waits_for_a_poll_and_only_until_its_deadline(
    server_pool: ServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def wait(*_: object, **__: object) -> NoReturn:
        may_end.wait()
        silence()

    monkeypatch.setattr(module, "request_welcome", wait)
    for user, address in enumerate(ADDRESSES):
        server_pool.placement.add(user, address, 1)
    since = time.monotonic()
    server_pool.is_gone(ADDRESSES[0], since)
    *others, last = list(server_pool.placement.locations)
    for lane in others:
        server_pool.remove(lane, since + FOREVER_SECONDS)
    server_pool.remove(last, since)
    assert server_pool.polled_at < since
    may_end.set()
    server_pool.remove(last, since + FOREVER_SECONDS)
    assert server_pool.polled_at >= since


def test_the_garbage_collector_can_close_a_batch_in_the_thread_of_a_poll(
    server_pool: ServerPool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait_until: WaitUntil,
) -> None:
    def collect_garbage(*_: object, **__: object) -> dict[str, Welcome]:
        server_pool.remove(None, time.monotonic() + 120)
        return {}

    monkeypatch.setattr(module, "query_servers", collect_garbage)
    since = time.monotonic()
    server_pool.is_gone(ADDRESSES[0], since)
    wait_until(lambda: server_pool.polled_at >= since, 240)
    assert caplog.text == ""


@pytest.mark.parametrize("has_thread", [True, False])
def test_a_failed_poll_is_logged_once_and_retried_after_a_pause(
    server_pool: ServerPool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait_until: WaitUntil,
    has_thread: bool,
) -> None:
    """Thread creation fails, for the poll itself or for the threads that it starts."""
    tried: list[float] = []

    def fail(*_: object, **__: object) -> None:
        tried.append(time.monotonic())
        raise RuntimeError("can't start new thread")

    if has_thread:
        monkeypatch.setattr(module, "query_servers", fail)
    else:
        monkeypatch.setattr(threading.Thread, "start", fail)
    since = time.monotonic()

    def has_failed_twice() -> bool:
        assert not server_pool.is_gone(ADDRESSES[0], since)
        return len(tried) > 1

    wait_until(has_failed_twice, 240)
    server_pool.remove(None, time.monotonic() + 120)
    assert server_pool.polled_at >= since
    assert tried[1] > tried[0] + module._PAUSE_SECONDS
    assert caplog.text.count("polling the servers failed: RuntimeError") == 1


@contextmanager
def lane_of(
    address: str, now: float, server_pool: ServerPool, wait_until: WaitUntil
) -> Iterator[tuple[ClientSession, Connection, SessionDriver]]:
    """Yield the session, connection and driver of a lane whose server is gone.

    The lane has tried to move to another server once.
    """
    session = attach_and_step()
    session.attachment.address = address
    session.record_disconnect(1.0)
    with closing(Connection(address, insecure=True)) as connection:
        driver = SessionDriver(session, connection, server_pool)
        server_pool.is_gone(address, now)
        wait_until(lambda: server_pool.polled_at >= now, 240)
        driver.run(now)
        yield session, connection, driver
        server_pool.remove(driver, time.monotonic() + 120)


def test_a_server_whose_keys_cannot_be_read_is_excluded_without_failing_the_lane(
    server_pool: ServerPool, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    old, unreadable, fit, _ = ADDRESSES
    have = {unreadable: welcome(free_envs=8), fit: welcome(free_envs=4)}

    def ask(address: str, seconds: float, **_: object) -> Welcome:
        return have[address] if address in have else silence()

    def keys_for(folder: KeyFolder, address: str, *, insecure: bool) -> None:
        if address == unreadable:
            raise KeyFileError("cannot read servers: Too many open files")

    monkeypatch.setattr(module, "request_welcome", ask)
    monkeypatch.setattr(KeyFolder, "keys_for", keys_for)
    monkeypatch.setattr(placement, "EXCLUDE_SECONDS", FOREVER_SECONDS)
    now = 3.0
    with lane_of(old, now, server_pool, wait_until) as (session, connection, driver):
        assert state_of(session) is ClientState.READY
        assert session.address == connection.address == old
        assert server_pool.placement.locations[driver] == old
        driver.run(now)
        assert state_of(session) is ClientState.HELLO_SENT
        assert session.address == connection.address == fit
        assert server_pool.placement.locations[driver] == fit


def test_a_server_with_other_envs_gets_its_envs_back_although_another_one_is_free(
    server_pool: ServerPool, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    first, different, fit, _ = ADDRESSES
    have = {different: welcome(free_envs=8), fit: welcome(free_envs=4)}

    def ask(address: str, seconds: float, **_: object) -> Welcome:
        return have[address] if address in have else silence()

    sent = []

    def send(_: Connection, frames: list[Buffer]) -> bool:
        sent.append(decode(frames))
        return True

    monkeypatch.setattr(module, "request_welcome", ask)
    monkeypatch.setattr(Connection, "send", send)
    now = 3.0
    with lane_of(first, now, server_pool, wait_until) as (session, _, driver):
        assert session.address == different
        session.record_connect(now)
        exchange(session, FakeServer(boot=2, builds_at_once=False), now)
        assert state_of(session) is ClientState.ATTACHING
        lease = session.requests.session, session.requests.boot
        session.abort(RemoteProtocolError("expected the same envs as before"))
        driver.run(now)
        assert session.address == fit
    detached = [(m.session, m.boot) for m in sent if m.type is MessageType.DETACH]
    assert lease in detached


def test_a_poll_that_never_ends_delays_the_loss_of_a_server_by_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file that lists the servers may be on a network file system that hangs."""
    is_over = threading.Event()

    def hang(source: str) -> tuple[str, ...]:
        is_over.wait()
        return (source,)

    server_pool = ServerPool(ADDRESSES, insecure=True)
    monkeypatch.setattr(module, "resolve", hang)
    monkeypatch.setattr(module, "request_welcome", silence)
    session = attach_and_step()
    session.attachment.address = ADDRESSES[0]
    session.record_disconnect(1.0)
    session.submit_step([0, 1], 1.0)
    with closing(Connection(ADDRESSES[0], insecure=True)) as connection:
        driver = SessionDriver(session, connection, server_pool)
        for now in range(2, 130, 4):  # a longer pause would count as a suspension
            driver.run(float(now))
        is_over.set()
        server_pool.remove(driver, time.monotonic() + 120)
    assert isinstance(session.error, ServerLost)
