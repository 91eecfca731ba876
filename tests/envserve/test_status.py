"""STATUS: what a server says about itself, to whom, how often, and how much of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from envserve.keys.grant import Grant
from envserve.pool.pool_metrics import PoolMetrics
from envserve.server.status import Counters, StatusReporter
from envserve.settings import HostSettings
from envserve.spaces import codec
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.handshake import ErrorBody, Hello
from envserve.wire.message import Message, decode, encode
from envserve.wire.status import Histogram, LeaseStatus, ServerStatus
from tests.envserve.session_fakes import FakeServer, make_attach

MAX_BYTES = 64 << 10


class SeenPool:
    """A pool with nothing but counts."""

    def __init__(self, server: FakeServer, session: Any) -> None:
        pool = server.pools[session]
        self.metrics = PoolMetrics(pool.blocks)
        self.inspector, self.num_in_flight = self, 2

    def status(self, max_episodes: int, **known: Any) -> LeaseStatus:
        return self.metrics.status(max_episodes, **known)


class Board:
    """A server half with leases, and a board that sums up what they have counted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        policy = HostSettings(num_workers=16, max_processes=1000)
        self.server = FakeServer(policy)
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: 0.0  # type: ignore[method-assign]
        self.pools: dict[Any, Any] = {}
        self.counters = Counters(resends=1, dropped=2)
        self.board = StatusReporter(
            self.server.policy,
            self.server.session,
            self.pools,
            self.counters,
            self.server.session.leases.welcome_for,
            self.loop,
        )
        patch.setattr(self.server, "report", self.board.report)

    def attach(self, user: str, number: int) -> PoolMetrics:
        peer = (b"route", user)
        for kind, body in (
            (MessageType.HELLO, Hello(client=f"of {user}").encode()),
            (MessageType.ATTACH, make_attach(num_envs=2).encode()),
        ):
            message = Message(kind, session=number, boot=77, request=1, body=body)
            self.server.receive(peer, encode(message), 0.0)
        self.server.take_replies()
        pool = SeenPool(self.server, (user, number))
        self.pools[user, number] = SimpleNamespace(pool=pool)
        return pool.metrics

    def ask(self, user: str, now: float) -> bytes:
        """What STATUS is answered with; outside of any session."""
        asked = encode(Message(MessageType.STATUS, request=9))
        self.server.receive((b"route", user), asked, now)
        (frames,) = self.server.take_replies()
        answer = decode(frames)
        assert (answer.type, answer.request) == (MessageType.STATUS_RESULT, 9)
        assert len(answer.body) <= MAX_BYTES
        return answer.body

    def status(self, user: str, now: float) -> ServerStatus:
        return ServerStatus.decode(self.ask(user, now))


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    board = Board(monkeypatch)
    yield board
    board.loop.close()


def test_users_see_their_own_leases_and_no_trace_of_others(board: Board) -> None:
    board.attach("ann", 11).steps[0] = 5
    board.attach("bob", 12).steps[0] = 7
    for user, other in (("ann", "bob"), ("bob", "ann")):
        body = board.ask(user, 1.0)
        assert other.encode() not in body
        status = ServerStatus.decode(body)
        (lease,) = status.leases
        assert (lease.user, lease.client) == (user, f"{user} (of {user})")
        assert (status.num_leases, status.steps, lease.steps) == (
            1,
            12,
            5 if user == "ann" else 7,
        )
    assert board.status("eve", 2.0).leases == ()
    for user in ("local", ""):
        seen = board.status(user, 3.0)
        assert {lease.user for lease in seen.leases} == {"ann", "bob"}
    assert (seen.in_flight, seen.resends, seen.dropped) == (4, 1, 2)
    assert (seen.total_envs, seen.free_envs) == (16 * 64, 16 * 64 - 4)


def test_a_thousand_questions_in_a_second_are_ten_fresh_answers(board: Board) -> None:
    tally = board.attach("ann", 11)
    found = []
    for question in range(1000):
        tally.steps[0] += 1
        found.append(board.status("ann", 5.0 + question / 1000).steps)
    assert found == sorted(found)
    assert 9 <= len(set(found)) <= 10
    assert found[0] == 1
    assert board.status("ann", 6.0).steps == 1000


def test_asking_watches_episodes_and_metrics_do_not(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = board.attach("ann", 11)
    watched: list[float] = []
    monkeypatch.setattr(tally, "watch", watched.append)
    port = SimpleNamespace(show=lambda collector: list(ask_in_thread(board, collector)))
    board.board.export_to(cast(Any, port))
    assert watched == []
    board.ask("ann", 1.0)
    assert len(watched) == 1


def ask_in_thread(board: Board, collector: Any) -> list[Any]:
    async def run() -> list[Any]:
        return await asyncio.to_thread(lambda: list(collector.collect()))

    return board.loop.run_until_complete(run())


def test_many_leases_are_cut_to_what_fits(board: Board) -> None:
    num_leases = 400
    for number in range(1, num_leases + 1):
        tally = board.attach("ann", number)
        tally.episodes.extend((serial, 1, 1e9 / 7, 1 << 20) for serial in range(256))
        tally.recoveries.extend((1 << 20, 1, 1 << 20) for _ in range(64))
        tally._binned[:] = 1 << 40
    status = board.status("local", 1.0)
    assert status.num_leases == num_leases
    assert 20 <= len(status.leases) < num_leases
    assert status.leases[0].episodes[-1][0] == 255


def test_no_status_takes_a_server_long(board: Board) -> None:
    for number in range(1, 129):
        board.attach("ann", number).episodes.extend([(1, 1, 0.5, 2)] * 256)
    took = []
    for question in range(5):
        began = time.thread_time()
        board.ask("ann", 1.0 + question)
        took.append(time.thread_time() - began)
    assert min(took) < 0.02, took


def test_of_very_many_leases_each_tells_its_last_episode(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserve.server.status._MAX_EPISODES", 2)
    for number in range(1, 4):
        board.attach("ann", number).episodes.extend([(1, 1, 0.5, 2)] * 256)
    leases = board.status("ann", 1.0).leases
    assert [len(lease.episodes) for lease in leases] == [1, 1, 1]


def test_who_asks_has_only_own_episodes_followed(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[str] = []
    for number, user in enumerate(("ann", "bob"), 11):
        tally = board.attach(user, number)
        monkeypatch.setattr(tally, "watch", lambda now, who=user: watched.append(who))
    board.ask("ann", 1.0)
    assert watched == ["ann"]


@pytest.mark.parametrize("field", ["rows", "faults", "refusals"])
def test_names_of_a_server_that_lies_are_fit_for_a_terminal(field: str) -> None:
    body = codec.encode({field: {"\x1b]52;c;cm0=\x1b\\": 1}})
    found = ServerStatus.decode(body)
    assert getattr(found, field) == {r"\x1b]52;c;cm0=\x1b" + "\\": 1}


def test_who_has_no_good_key_is_told_nothing(board: Board) -> None:
    board.attach("ann", 11)
    board.server.session.quotas._grant_of = lambda user: cast(Grant, None)
    asked = encode(Message(MessageType.STATUS, request=9))
    board.server.receive((b"route", "ann"), asked, 1.0)
    (frames,) = board.server.take_replies()
    error = ErrorBody.decode(decode(frames).body)
    assert error.code is ErrorCode.REFUSED
    assert board.status("local", 2.0).refusals == {"REFUSED": 1}


def test_what_leases_have_counted_stays_when_they_are_gone(board: Board) -> None:
    board.attach("ann", 11).steps[0] = 5
    leased = board.pools.pop(("ann", 11))
    board.board.add_closed(leased.pool.metrics.counts)
    assert board.status("local", 1.0).steps == 5


def test_a_histogram_estimates_between_its_bounds_and_subtracts() -> None:
    early = Histogram(bounds=(1.0, 2.0, 4.0), counts=(0, 2, 0, 0), sum=3.0)
    late = Histogram(bounds=(1.0, 2.0, 4.0), counts=(0, 4, 2, 2), sum=30.0)
    assert early.quantile(0.5) == 1.5
    assert late.quantile(0.75) == 4.0
    assert late.quantile(1.0) == 4.0  # above all bounds: the highest
    assert Histogram().quantile(0.5) is None
    assert (late - early) == Histogram(
        bounds=(1.0, 2.0, 4.0), counts=(0, 2, 2, 2), sum=27.0
    )
    assert (early - late) == early  # of a server that has started anew
    assert (Histogram(counts=()) - Histogram(counts=())).count == 0  # one that lies
