"""A lease that is lost: envs anew, one lost row each, and nothing twice."""

from __future__ import annotations

import numpy as np
import pytest

from envserve.errors import LeaseLost, ServerError, ServerLost, UnknownEnv
from envserve.lane import Call, Outcome, Reset
from envserve.session import ClientSession, ClientState, Policy
from envserve.session.attachment import Attachment
from envserve.session.away import Away
from envserve.session.operations import Operations
from envserve.session.requests import Requests
from envserve.session.sender import Sender
from envserve.session.stored_rows import StoredRows
from envserve.slab import Status
from envserve.wire import Buffer, Message, MessageType, decode, encode
from tests.envserve.session_fakes import (
    FakeOffer,
    FakeServer,
    attach,
    exchange,
    make_client,
    state_of,
    take_outgoing,
)


def finish(client: ClientSession, server: FakeServer, now: float) -> list[Outcome]:
    """Lets everything come to its end."""
    for _ in range(3):
        client.advance(now)
        exchange(client, server, now)
        server.finish_all(now)
        exchange(client, server, now)
    return sorted(client.take_finished(), key=lambda item: item.block)


def step(
    client: ClientSession,
    server: FakeServer,
    now: float,
    action: int = 3,
    is_alone: bool = True,
) -> list[Outcome]:
    client.rows.action[0][:] = action
    client.submit_step([0, 1], now, is_alone=is_alone)
    return finish(client, server, now)


def attach_and_step(num_steps: int = 3, **changes: object) -> ClientSession:
    """A client that has seen some steps of the server with boot id 1."""
    server = FakeServer(boot=1)
    client = make_client(**changes)  # type: ignore[arg-type]
    client.connected(0.0)
    exchange(client, server, 0.0)
    client.submit_reset([Reset(0), Reset(1)], 0.0)
    finish(client, server, 0.0)
    for action in range(num_steps):
        step(client, server, 0.0, action)
    return client


def executed(server: FakeServer) -> list[tuple[int, tuple[int, ...] | None]]:
    (pool,) = server.pools.values()
    return pool.executed


def check_lost(client: ClientSession, outcomes: list[Outcome], last: int) -> None:
    """Checks that these are the lost rows of an episode of so many steps."""
    rows = client.rows
    assert [(item.block, item.error) for item in outcomes] == [(0, None), (1, None)]
    assert rows.status.tolist() == [Status.SERVER_LOST] * 4
    assert rows.truncated.all()
    assert not rows.terminated.any()
    assert not rows.reward.any()
    np.testing.assert_array_equal(rows.final_observation[0][:, 0], last)
    np.testing.assert_array_equal(rows.observation[0], 0)
    faults = [fault for item in outcomes for fault in item.faults]
    assert [fault.env_index for fault in faults] == [0, 1, 2, 3]
    assert {fault.status for fault in faults} == {Status.SERVER_LOST}


def test_a_restart_costs_each_row_one_lost_transition() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    outcomes = step(client, restarted, 1.0)
    check_lost(client, outcomes, last=3)
    assert "restarted" in outcomes[0].faults[0].text
    (pool,) = restarted.pools.values()
    assert pool.executed == [(0, None), (1, None)]  # resets; no step of before
    assert pool.config.first_incarnation > 0
    assert pool.config.seed == 5

    assert not any(item.faults for item in step(client, restarted, 1.0, 8))
    assert client.rows.status.tolist() == [Status.OK] * 4
    np.testing.assert_array_equal(client.rows.reward, 8)
    np.testing.assert_array_equal(client.rows.observation[0][:, 0], 1)
    assert client.stats()["reattaches"] == 1


def test_a_restart_between_steps_is_noticed_when_the_connection_is_made_anew() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    client.disconnected(1.0)
    client.connected(1.1)
    assert finish(client, restarted, 1.1) == []  # all is ready before the next step
    assert client.rows.observation[0][:, 0].tolist() == [3] * 4  # not touched yet
    client.submit_step([0, 1], 2.0)
    check_lost(client, client.take_finished(), last=3)


def test_each_lease_has_other_seeds() -> None:
    client = attach_and_step()
    seen = set()
    for boot in range(2, 6):
        server = FakeServer(boot=boot)
        check_lost(client, step(client, server, boot), last=0 if boot > 2 else 3)
        (pool,) = server.pools.values()
        seen.add(pool.config.first_incarnation)
    assert len(seen | {0}) == 5


def test_a_reset_of_all_rows_clears_what_was_lost() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    client.submit_reset([Reset(0), Reset(1)], 1.0)
    outcomes = finish(client, restarted, 1.0)
    assert [(o.block, o.error, list(o.faults)) for o in outcomes] == [
        (0, None, []),
        (1, None, []),
    ]
    assert executed(restarted) == [(0, None), (1, None)]  # once
    step(client, restarted, 1.0)
    assert client.rows.status.tolist() == [Status.OK] * 4


def test_a_reset_after_recovery_is_answered_by_that_of_the_recovery() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    client.connected(1.0)
    finish(client, restarted, 1.0)
    client.submit_reset([Reset(0), Reset(1)], 1.0)
    assert len(finish(client, restarted, 1.0)) == 2
    assert len(executed(restarted)) == 2
    np.testing.assert_array_equal(client.rows.observation[0], 0)
    step(client, restarted, 1.0)
    assert client.rows.status.tolist() == [Status.OK] * 4


@pytest.mark.parametrize("is_late", [False, True])
def test_a_reset_with_seeds_is_carried_out(is_late: bool) -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    if is_late:
        client.connected(1.0)
        finish(client, restarted, 1.0)
    resets = [Reset(0, (0, 1), (7, 8)), Reset(1, (2, 3), (9, 10))]
    client.submit_reset(resets, 1.0)
    client.advance(1.0)
    exchange(client, restarted, 1.0)
    (pool,) = restarted.pools.values()
    assert [pool.running[0], pool.running[1]] == resets
    finish(client, restarted, 1.0)
    step(client, restarted, 1.0)
    assert client.rows.status.tolist() == [Status.OK] * 4


def test_a_reset_of_some_rows_leaves_the_others_lost() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    client.submit_reset([Reset(0, (1,), (7,))], 1.0)
    (outcome,) = finish(client, restarted, 1.0)
    assert (outcome.block, outcome.error) == (0, None)
    assert client.rows.observation[0][:, 0].tolist() == [3, 0, 3, 3]
    step(client, restarted, 1.0)
    lost, pending = Status.SERVER_LOST, Status.PENDING
    assert client.rows.status.tolist() == [lost, pending, lost, lost]
    assert client.rows.truncated.tolist() == [True, False, True, True]
    assert client.rows.final_observation[0][[0, 2, 3], 0].tolist() == [3, 3, 3]
    step(client, restarted, 1.0)
    assert client.rows.status.tolist() == [Status.OK] * 4


def test_a_call_in_flight_fails_and_a_later_one_is_carried_out() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    client.submit_call(Call(0, "call", "render"), 1.0)
    (outcome,) = finish(client, restarted, 1.0)
    assert isinstance(outcome.error, ServerLost)
    client.submit_call(Call(3, "call", "render"), 1.0)
    (outcome,) = finish(client, restarted, 1.0)
    assert outcome.error is None
    check_lost(client, step(client, restarted, 1.0), last=3)


def test_a_call_while_envs_are_lost_waits_for_them() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2, builds_at_once=False)
    client.connected(1.0)
    exchange(client, restarted, 1.0)
    assert state_of(client) is ClientState.ATTACHING
    client.submit_call(Call(0, "call", "render"), 1.0)
    assert finish(client, restarted, 1.5) == []
    restarted.build(next(iter(restarted.pools)), 2.0)
    (outcome,) = finish(client, restarted, 2.0)
    assert outcome.error is None
    assert outcome.result


def test_steps_are_padding_until_the_envs_are_back_unless_alone() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2, builds_at_once=False)
    client.submit_step([0], 1.0, ticket=1)
    client.submit_step([1], 1.0, ticket=2, is_alone=True)
    exchange(client, restarted, 1.0)
    assert client.take_finished() == []
    assert client.next_deadline() <= 1.1
    client.advance(1.1)
    (outcome,) = client.take_finished()
    assert (outcome.block, outcome.ticket, outcome.is_padding) == (0, 1, True)
    assert client.rows.status.tolist()[:2] == [Status.PENDING] * 2
    assert client.rows.observation[0][:, 0].tolist() == [3] * 4
    client.submit_step([0], 1.2, ticket=3)  # and from now on at once
    (outcome,) = client.take_finished()
    assert (outcome.ticket, outcome.is_padding) == (3, True)

    restarted.build(next(iter(restarted.pools)), 2.0)
    (outcome,) = finish(client, restarted, 2.0)
    assert (outcome.block, outcome.ticket) == (1, 2)
    client.submit_step([0], 2.1, ticket=4)
    (other,) = client.take_finished()
    check_lost(client, [other, outcome], last=3)
    assert client.stats()["padded"] == 2


def test_steps_are_padding_while_a_slow_reset_of_lost_envs_runs() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    client.submit_step([0, 1], 1.0)
    exchange(client, restarted, 1.0)
    client.advance(1.1)
    assert [item.is_padding for item in client.take_finished()] == [True, True]
    client.submit_step([0, 1], 1.2)
    assert [item.is_padding for item in client.take_finished()] == [True, True]
    assert finish(client, restarted, 30.0) == []
    client.submit_step([0, 1], 30.0)
    check_lost(client, client.take_finished(), last=3)
    assert executed(restarted) == [(0, None), (1, None)]


def test_stale_answers_change_nothing_after_a_restart() -> None:
    """Of the old boot and session, whatever they are, and as often as they come."""
    server = FakeServer(boot=1)
    client = make_client()
    stale: list[list[Buffer]] = []

    def keep(frames: list[Buffer]) -> bool:
        stale.append(frames)
        return True

    client.connected(0.0)
    exchange(client, server, 0.0, filter_reply=keep)
    client.submit_reset([Reset(0), Reset(1)], 0.0)
    for _ in range(3):
        exchange(client, server, 0.0, filter_reply=keep)
        server.finish_all(0.0)
        client.submit_step([0, 1], 0.0) if not client.num_in_flight else None
    assert {decode(frames).type for frames in stale} >= {
        MessageType.WELCOME,
        MessageType.GRANTED,
        MessageType.RESULT,
    }
    client.take_finished()

    restarted = FakeServer(boot=2)

    def send_stale(frames: list[Buffer]) -> bool:
        for old in stale:
            client.receive(old, 1.0)
        return True

    client.connected(1.0)
    exchange(client, restarted, 1.0, filter_reply=send_stale)
    finish(client, restarted, 1.0)
    step(client, restarted, 1.0)
    for action in range(3):
        send_stale([])
        step(client, restarted, 1.0, action)
        assert client.rows.reward.tolist() == [action] * 4
        assert client.rows.status.tolist() == [Status.OK] * 4
    assert client.num_leases == 2
    assert len(restarted.pools) == 1


@pytest.mark.parametrize(
    "last", [MessageType.HELLO, MessageType.ATTACH, MessageType.RESET]
)
def test_a_restart_while_recovering_costs_no_more(last: MessageType) -> None:
    """At any stage: once a request of this type has come, its server is killed."""
    client = attach_and_step()
    client.submit_step([0, 1], 1.0, is_alone=True)
    second, third = FakeServer(boot=2), FakeServer(boot=3)
    is_dead = False

    def kill_after(frames: list[Buffer]) -> bool:
        nonlocal is_dead
        is_dead |= decode(frames).type is last
        return not is_dead

    exchange(client, second, 1.0, filter_request=kill_after)
    assert is_dead
    now = 1.0
    while not client.has_finished:
        now = max(now, client.next_deadline())
        assert now < 10.0
        client.connected(now)
        client.advance(now)
        exchange(client, third, now)
        third.finish_all(now)
        exchange(client, third, now)
    check_lost(client, sorted(client.take_finished()), last=3)
    assert set(executed(third)) == {(0, None), (1, None)}


def test_a_lease_lost_by_silence_is_replaced() -> None:
    server = FakeServer(boot=1, policy=Policy(num_workers=2, envs_per_worker=2))
    client = attach(server)
    step(client, server, 0.0)
    server.poll(60.0)
    server.take_replies()  # does not arrive
    assert not server.pools
    outcomes = step(client, server, 61.0)
    assert [item.faults[0].status for item in outcomes] == [Status.SERVER_LOST] * 2
    assert "silent for 60.0 s" in outcomes[0].faults[0].text
    assert step(client, server, 61.0)[0].error is None
    assert client.rows.status.tolist() == [Status.OK] * 4
    assert 11 not in server.pools


def run_until_over(client: ClientSession, server: FakeServer, now: float) -> float:
    while not client.state.is_over:
        now = max(now, client.next_deadline())
        assert now < 1000.0
        client.advance(now)
        exchange(client, server, now)
    return now


def test_who_comes_too_late_is_told_who_has_the_envs() -> None:
    policy = Policy(num_workers=2, envs_per_worker=2)
    server = FakeServer(boot=1, policy=policy)
    client = attach(server)
    server.poll(60.0)
    server.take_replies()
    other = attach(server, 61.0, session=12, num_envs=3)
    client.submit_step([0, 1], 62.0, is_alone=True)
    now = run_until_over(client, server, 62.0)
    assert 64.0 < now < 70.0
    outcomes = client.take_finished()
    assert [type(item.error) for item in outcomes] == [LeaseLost] * 2
    assert "silent for 60.0 s" in str(outcomes[0].error)
    assert "leased: 3 of Fake-v0" in str(outcomes[0].error)
    assert list(server.pools) == [12]
    assert other.state is ClientState.READY


def test_a_late_client_gets_envs_that_are_free_again_soon() -> None:
    policy = Policy(num_workers=2, envs_per_worker=2)
    server = FakeServer(boot=1, policy=policy)
    client = attach(server)
    server.poll(60.0)
    server.take_replies()
    other = attach(server, 61.0, session=12, num_envs=3)
    client.submit_step([0, 1], 62.0, is_alone=True)
    exchange(client, server, 62.0)
    other.begin_close(63.0)
    exchange(other, server, 63.0)
    outcomes = finish(client, server, 63.0)
    assert [item.faults[0].status for item in outcomes] == [Status.SERVER_LOST] * 2


def test_after_a_restart_busy_envs_are_waited_for() -> None:
    policy = Policy(num_workers=2, envs_per_worker=2)
    client = attach_and_step()
    restarted = FakeServer(boot=2, policy=policy)
    attach(restarted, 1.0, session=12, num_envs=3)
    client.submit_step([0, 1], 1.0, is_alone=True)
    now = run_until_over(client, restarted, 1.0)
    assert now == pytest.approx(61.0, abs=0.5)
    assert isinstance(client.error, ServerLost)


def test_a_refused_attach_is_asked_again_as_the_same_session() -> None:
    """A copy that comes late may get the envs: then they must be ours."""
    policy = Policy(num_workers=2, envs_per_worker=2)
    client = attach_and_step()
    restarted = FakeServer(boot=2, policy=policy)
    attach(restarted, 1.0, session=12, num_envs=3)
    sessions = set()

    def note(frames: list[Buffer]) -> bool:
        message = decode(frames)
        if message.type is MessageType.ATTACH:
            sessions.add(message.session)
        return True

    client.connected(1.0)
    now = 1.0
    while now < 5.0:
        exchange(client, restarted, now, filter_request=note)
        now = client.next_deadline()
        client.advance(now)
    assert len(sessions) == 1
    assert 11 not in sessions


def test_envs_that_break_while_they_are_built_anew_are_asked_for_once_more() -> None:
    """As another session: the server will not revive one that has ended."""
    client = attach_and_step()
    restarted = FakeServer(boot=2, builds_at_once=False)
    client.connected(1.0)
    exchange(client, restarted, 1.0)
    (session,) = restarted.pools
    error = ServerError("the pool broke")
    restarted.carry_out(restarted.session.pool_broken(session, error), 1.0)
    restarted.pools.clear()
    restarted.builds_at_once = True
    now = 1.0
    while now < 5.0 and state_of(client) is not ClientState.READY:
        exchange(client, restarted, now)
        now = client.next_deadline()
        client.advance(now)
    assert state_of(client) is ClientState.READY
    assert session not in restarted.pools


def test_other_envs_than_before_are_an_error() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2, policy=Policy(num_workers=4))
    client.submit_step([0, 1], 1.0)
    exchange(client, restarted, 1.0)
    assert state_of(client) is ClientState.LOST
    assert "expected envs as before" in str(client.error)
    assert "as many --workers" in str(client.error)
    assert not restarted.pools  # given back


def test_an_env_that_is_no_longer_on_offer_is_an_error() -> None:
    class OtherOffer(FakeOffer):
        names: tuple[str, ...] = ("Other-v0",)

    client = attach_and_step()
    restarted = FakeServer(boot=2)
    restarted.session._offer = OtherOffer()
    client.submit_step([0, 1], 1.0)
    exchange(client, restarted, 1.0)
    assert state_of(client) is ClientState.LOST
    assert isinstance(client.error, UnknownEnv)
    assert [type(item.error) for item in client.take_finished()] == [UnknownEnv] * 2


def test_a_server_that_never_comes_back_is_lost() -> None:
    client = attach_and_step()
    client.submit_step([0, 1], 1.0, is_alone=True)
    client.disconnected(1.0)
    now = 1.0
    while not client.state.is_over:
        now = client.next_deadline()
        client.advance(now)
    assert now == pytest.approx(61.0)
    outcomes = client.take_finished()
    assert [type(item.error) for item in outcomes] == [ServerLost] * 2
    with pytest.raises(ServerLost):
        client.submit_step([0], now)


def advance_to(client: ClientSession, now: float) -> None:
    while client.next_deadline() < now:
        client.advance(client.next_deadline())
    client.advance(now)


def test_or_its_rows_are_padding_for_as_long_as_it_takes() -> None:
    client = attach_and_step(pads_when_lost=True)
    client.submit_step([0, 1], 1.0)
    client.disconnected(1.0)
    advance_to(client, 2.0)
    assert [item.is_padding for item in client.take_finished()] == [True] * 2
    for now in range(3, 300):
        advance_to(client, now)
        client.submit_step([0, 1], now)
        client.advance(now)
        assert [item.is_padding for item in client.take_finished()] == [True] * 2
    assert not state_of(client).is_over
    restarted = FakeServer(boot=2)
    client.connected(300.0)
    finish(client, restarted, 301.0)
    client.submit_step([0, 1], 301.0)
    check_lost(client, client.take_finished(), last=3)
    step(client, restarted, 301.0)
    assert client.rows.status.tolist() == [Status.OK] * 4


def test_who_is_alone_does_not_wait_for_ever_even_then() -> None:
    client = attach_and_step(pads_when_lost=True)
    client.submit_step([0], 1.0, is_alone=True)
    client.submit_reset([Reset(1)], 1.0)
    client.disconnected(1.0)
    advance_to(client, 60.5)
    assert client.take_finished() == []
    advance_to(client, 61.0)
    outcomes = client.take_finished()
    assert [type(item.error) for item in outcomes] == [ServerLost] * 2
    client.submit_step([0, 1], 62.0, is_alone=True)
    assert [type(i.error) for i in client.take_finished()] == [ServerLost] * 2
    assert not state_of(client).is_over


def test_a_server_that_fails_again_and_again_is_not_asked_all_the_time() -> None:
    client = attach_and_step()
    client.submit_step([0, 1], 1.0, is_alone=True)
    num_hellos, now, boot = 0, 1.0, 2
    server = FakeServer(boot=boot, builds_at_once=False)

    def note(frames: list[Buffer]) -> bool:
        nonlocal num_hellos
        num_hellos += decode(frames).type is MessageType.HELLO
        return True

    while not client.state.is_over:
        exchange(client, server, now, filter_request=note)
        if server.pools:  # it crashes while it builds
            boot += 1
            server = FakeServer(boot=boot, builds_at_once=False)
            client.connected(now)
            continue
        now = client.next_deadline()
        client.advance(now)
    assert isinstance(client.error, ServerLost)
    assert now == pytest.approx(61.0, abs=1.0)
    assert 50 < num_hellos < 200


def test_a_slow_construction_is_waited_for_beyond_that() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2, builds_at_once=False)
    client.submit_step([0, 1], 1.0, is_alone=True)
    now = 1.0
    while now < 200.0:
        exchange(client, restarted, now)
        now = client.next_deadline()
        client.advance(now)
        restarted.poll(now)
    assert state_of(client) is ClientState.ATTACHING
    restarted.build(next(iter(restarted.pools)), now)
    check_lost(client, finish(client, restarted, now), last=3)


def test_a_server_that_falls_silent_while_it_builds_is_not_waited_for_longer() -> None:
    client = attach_and_step(server_lost_after_seconds=1.0)
    restarted = FakeServer(boot=2, builds_at_once=False)
    client.submit_step([0, 1], 1.0, is_alone=True)
    for now in (1.0, 1.5, 2.0, 2.5):
        advance_to(client, now)
        exchange(client, restarted, now)
        restarted.poll(now)
    assert state_of(client) is ClientState.ATTACHING  # longer than that, as it answers
    client.disconnected(2.5)
    while not client.state.is_over:
        now = client.next_deadline()
        client.advance(now)
    assert isinstance(client.error, ServerLost)
    assert 3.5 <= now <= 5.5  # 1 s from the next time that it was asked, at most 2 s on


def test_a_detached_session_is_replaced() -> None:
    server = FakeServer(boot=1)
    client = attach(server)
    detach = Message(type=MessageType.DETACH, session=11, boot=1, request=9)
    server.receive(b"r", encode(detach), 0.0)
    exchange(client, server, 0.0)
    assert state_of(client) is ClientState.READY
    assert client.num_leases == 2
    assert len(server.pools) == 1


def test_closing_while_recovering_gives_the_new_envs_back() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2, builds_at_once=False)
    client.connected(1.0)
    exchange(client, restarted, 1.0)
    assert restarted.pools
    client.begin_close(1.0)
    exchange(client, restarted, 1.0)
    assert state_of(client) is ClientState.CLOSED
    assert not restarted.pools


def test_what_was_in_flight_is_not_under_way_once_it_has_ended() -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    client.submit_step([0, 1], 1.0)
    exchange(client, restarted, 1.0)
    assert client.settle()
    client.advance(1.2)
    assert len(client.take_finished()) == 2
    assert not client.settle()  # though resets of our own are
    assert [p.type for p in client._requests] == [MessageType.RESET] * 2


def test_silence_after_recovery_is_waited_for_anew() -> None:
    """A lease that serves, but whose first answer has not come, is no loss of old."""
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    client.submit_step([0, 1], 1.0, is_alone=True)
    exchange(client, restarted, 1.0)
    now = 1.0
    while now < 90.0:  # a slow reset
        now = client.next_deadline()
        client.advance(now)
        exchange(client, restarted, now)
    assert state_of(client) is ClientState.READY
    check_lost(client, finish(client, restarted, now), last=3)


def test_what_is_given_up_is_not_waited_for_after_another_loss_either() -> None:
    client = attach_and_step(pads_when_lost=True)
    client.disconnected(1.0)
    client.submit_step([0, 1], 1.0, is_alone=True)
    advance_to(client, 62.0)
    assert [type(i.error) for i in client.take_finished()] == [ServerLost] * 2
    second, third = (FakeServer(boot=b, builds_at_once=False) for b in (2, 3))
    client.connected(63.0)
    exchange(client, second, 63.0)
    client.connected(64.0)
    exchange(client, third, 64.0)
    client.submit_step([0, 1], 64.0, is_alone=True)
    assert [type(i.error) for i in client.take_finished()] == [ServerLost] * 2


def test_what_was_given_up_is_waited_for_once_there_are_envs_again() -> None:
    client = attach_and_step(pads_when_lost=True)
    client.disconnected(1.0)
    client.submit_step([0, 1], 1.0)
    advance_to(client, 62.0)
    client.take_finished()
    restarted = FakeServer(boot=2)
    client.connected(63.0)
    exchange(client, restarted, 63.0)
    client.submit_step([0, 1], 63.0, is_alone=True)
    assert not client.has_finished
    check_lost(client, finish(client, restarted, 63.0), last=3)


def test_a_closing_client_that_pads_does_not_wait_for_ever() -> None:
    client = attach_and_step(pads_when_lost=True)
    client.begin_close(1.0)
    advance_to(client, 62.0)
    assert isinstance(client.error, ServerLost)


def test_a_lease_that_a_draining_server_refuses_is_asked_for_until_it_is_late() -> None:
    """Others cannot have the envs: another server may be started soon."""
    server = FakeServer(boot=1)
    client = attach(server)
    server.carry_out(server.session.begin_drain(1.0), 0.0)
    server.carry_out(server.session.stop("its grace period was over"), 1.0)
    client.submit_step([0, 1], 1.0, is_alone=True)
    now = run_until_over(client, server, 1.0)
    assert now == pytest.approx(61.0, abs=1.0)
    assert isinstance(client.error, ServerLost)


@pytest.mark.parametrize("answer", ["detached", "lease lost", "restart"])
def test_a_closing_client_does_not_attach_anew(answer: str) -> None:
    server = FakeServer(boot=1)
    client = attach(server)
    if answer == "lease lost":
        server.poll(60.0)
        server.take_replies()
    client.begin_close(61.0)
    exchange(client, FakeServer(boot=2) if answer == "restart" else server, 61.0)
    assert state_of(client) is ClientState.CLOSED
    assert not len(client.outbox)


# Interrupts.


def cut_short(
    patch: pytest.MonkeyPatch, owner: type, name: str, *, is_done: bool
) -> None:
    """Has Ctrl-C come as a method is called the next time, or as it has returned."""
    method = getattr(owner, name)

    def interrupt(*arguments: object, **options: object) -> None:
        patch.setattr(owner, name, method)
        if is_done:
            method(*arguments, **options)
        raise KeyboardInterrupt

    patch.setattr(owner, name, interrupt)


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Away, "lose"),
        (Requests, "clear"),
        (Sender, "change_session"),
        (Attachment, "say_hello"),
    ],
)
def test_a_recovery_that_was_interrupted_goes_on_at_once(
    owner: type, name: str, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    client.submit_step([0, 1], 1.0, is_alone=True)
    cut_short(monkeypatch, owner, name, is_done=is_done)
    with pytest.raises(KeyboardInterrupt):
        exchange(client, restarted, 1.0)
    assert client.next_deadline() <= 1.0
    check_lost(client, finish(client, restarted, 1.0), last=3)


@pytest.mark.parametrize("is_done", [False, True])
def test_what_an_interrupted_delivery_has_written_is_not_what_was_seen_last(
    is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    client.connected(1.0)
    finish(client, restarted, 1.0)
    cut_short(monkeypatch, StoredRows, "write_lost", is_done=is_done)
    with pytest.raises(KeyboardInterrupt):
        client.submit_step([0, 1], 1.0)
    assert client.settle()
    client.advance(1.0)
    check_lost(client, sorted(client.take_finished()), last=3)


def test_an_interrupt_never_makes_a_loss_come_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    client.connected(1.0)
    finish(client, restarted, 1.0)
    cut_short(monkeypatch, Operations, "finish_block", is_done=True)
    with pytest.raises(KeyboardInterrupt):
        client.submit_step([0], 1.0)
    (outcome,) = client.take_finished()
    assert [fault.status for fault in outcome.faults] == [Status.SERVER_LOST] * 2
    client.submit_step([0], 1.0)
    (outcome,) = finish(client, restarted, 1.0)
    assert not outcome.faults
    assert client.rows.status.tolist()[:2] == [Status.OK] * 2


@pytest.mark.parametrize("wants_reset", [False, True])
def test_a_reset_that_was_sent_as_an_interrupt_came_is_not_sent_again(
    wants_reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2, builds_at_once=False)
    client.connected(1.0)
    exchange(client, restarted, 1.0)
    if wants_reset:
        client.submit_reset([Reset(0), Reset(1)], 1.0)
    restarted.build(next(iter(restarted.pools)), 1.0)
    (granted,) = restarted.take_replies()
    cut_short(monkeypatch, Sender, "request", is_done=True)
    with pytest.raises(KeyboardInterrupt):
        client.receive(granted, 1.0)
    client.advance(1.0)
    requests = [decode(frames).entries for frames in take_outgoing(client)]
    assert requests == [((0, 1),), ((1, 1),)]


def test_an_interrupt_as_envs_are_asked_for_anew_only_delays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = attach_and_step()
    restarted = FakeServer(boot=2)
    client.submit_step([0, 1], 1.0, is_alone=True)
    cut_short(monkeypatch, Attachment, "ask_for_envs", is_done=False)
    with pytest.raises(KeyboardInterrupt):
        exchange(client, restarted, 1.0)
    assert client.next_deadline() <= 1.0
    check_lost(client, finish(client, restarted, 1.0), last=3)
