"""Who gets envs anew after a loss, how long that is tried, and when it is given up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envserve.errors import LeaseLost, ServerError, ServerLost, UnknownEnv
from envserve.lane import Reset
from envserve.session.client.client_session import ClientSession
from envserve.session.client.liveness import Timeouts
from envserve.session.server.server_session import ServerSession
from envserve.session.states import ClientState
from envserve.settings import HostSettings, PoolSettings
from envserve.slab import Status
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer, decode
from tests.envserve.session_fakes import (
    FakePool,
    FakeServer,
    advance_to,
    attach,
    attach_and_step,
    check_lost,
    collect,
    exchange,
    finish,
    pair,
    pass_time,
    restart,
    state_of,
    step_all,
)

OK = [Status.OK] * 4
#: Room for one of two leases.
NARROW = HostSettings(num_workers=2, envs_per_worker=2)


def lose_to_another() -> tuple[FakeServer, ClientSession, ClientSession]:
    """A server whose first client has lost its envs, and who has most of them now."""
    server, client = pair(boot=1, policy=NARROW)
    server.poll(60.0)
    server.take_replies()  # it does not hear of it
    return server, client, attach(server, 61.0, session=12, num_envs=3)


def test_a_lease_lost_by_silence_is_replaced() -> None:
    server, client = pair(boot=1, policy=NARROW)
    step_all(client, server, 0.0)
    server.poll(60.0)
    server.take_replies()  # does not arrive
    assert not server.pools
    outcomes = step_all(client, server, 61.0)
    assert [item.faults[0].status for item in outcomes] == [Status.SERVER_LOST] * 2
    assert "silent for 60.0 s" in outcomes[0].faults[0].text
    assert step_all(client, server, 61.0)[0].error is None
    assert client.rows.status.tolist() == OK
    assert ("", 11) not in server.pools


def test_the_next_server_is_given_its_time() -> None:
    client = attach_and_step()
    client.record_disconnect(1.0)
    assert client.attachment.needs_server_since(3.0) == 1.0
    client.attachment.move_to("tcp://fake:2", 3.0)
    client.record_disconnect(3.0)
    assert client.attachment.needs_server_since(3.0) is None
    assert client.attachment.needs_server_since(4.0) == 3.0


def test_who_comes_too_late_is_told_who_has_the_envs() -> None:
    server, client, other = lose_to_another()
    client.submit_step([0, 1], 62.0)
    now = pass_time(client, server, 62.0)
    assert 64.0 < now < 70.0
    outcomes = collect(client)
    assert [type(item.error) for item in outcomes] == [LeaseLost] * 2
    assert "silent for 60.0 s" in str(outcomes[0].error)
    assert "leased: 3 of Fake-v0" in str(outcomes[0].error)
    assert list(server.pools) == [("", 12)]
    assert other.state is ClientState.READY


def test_after_a_restart_busy_envs_are_waited_for() -> None:
    client, restarted = restart(policy=NARROW)
    attach(restarted, 1.0, session=12, num_envs=3)
    client.submit_step([0, 1], 1.0)
    now = pass_time(client, restarted, 1.0)
    assert now == pytest.approx(61.0, abs=0.5)
    assert isinstance(client.error, ServerLost)


def test_a_lease_that_a_draining_server_refuses_is_asked_for_until_it_is_late() -> None:
    """Others cannot have the envs: another server may be started soon."""
    server, client = pair(boot=1)
    server.carry_out(server.session.begin_drain(1.0), 0.0)
    server.carry_out(server.session.stop("its grace period was over"), 1.0)
    client.submit_step([0, 1], 1.0)
    now = pass_time(client, server, 1.0)
    assert now == pytest.approx(61.0, abs=1.0)
    assert isinstance(client.error, ServerLost)


def test_a_refused_attach_is_asked_again_as_the_same_session() -> None:
    """A copy that comes late may get the envs: then they must be ours."""
    client, restarted = restart(policy=NARROW)
    attach(restarted, 1.0, session=12, num_envs=3)
    sessions = set()

    def note(frames: list[Buffer]) -> bool:
        message = decode(frames)
        if message.type is MessageType.ATTACH:
            sessions.add(message.session)
        return True

    client.record_connect(1.0)
    pass_time(client, restarted, 1.0, until=5.0, filter_request=note)
    assert len(sessions) == 1
    assert 11 not in sessions


def test_envs_that_break_while_they_are_built_anew_are_asked_for_once_more() -> None:
    """As another session: the server will not revive one that has ended."""
    client, restarted = restart(builds_at_once=False)
    client.record_connect(1.0)
    exchange(client, restarted, 1.0)
    (session,) = restarted.pools
    error = ServerError("the pool broke")
    restarted.carry_out(restarted.session.pool_broken(session, error), 1.0)
    restarted.pools.clear()
    restarted.builds_at_once = True
    pass_time(client, restarted, 1.0, until=5.0)
    assert state_of(client) is ClientState.READY
    assert session not in restarted.pools


class OwnCut(FakePool):
    """Cuts rows as it likes, as a server may that does not know better."""

    def __init__(self, config: PoolSettings) -> None:
        super().__init__(replace(config, blocks_per_split=0))


def test_other_envs_than_before_are_an_error() -> None:
    client, restarted = restart(policy=HostSettings(num_workers=4), pool=OwnCut)
    client.submit_step([0, 1], 1.0)
    exchange(client, restarted, 1.0)
    assert state_of(client) is ClientState.LOST
    assert "expected the same envs as before" in str(client.error)
    assert "as many --workers" in str(client.error)
    assert not restarted.pools  # given back


def test_an_env_that_is_no_longer_on_offer_is_an_error() -> None:
    client, restarted = restart()
    restarted.session = ServerSession(restarted.policy, ("Other-v0",), boot=2)
    client.submit_step([0, 1], 1.0)
    exchange(client, restarted, 1.0)
    assert state_of(client) is ClientState.LOST
    assert isinstance(client.error, UnknownEnv)
    assert [type(item.error) for item in collect(client)] == [UnknownEnv] * 2


# How long it is tried.


def test_a_server_that_never_comes_back_is_lost() -> None:
    client = attach_and_step()
    client.submit_step([0, 1], 1.0)
    client.record_disconnect(1.0)
    assert pass_time(client, now=1.0) == pytest.approx(61.0)
    outcomes = collect(client)
    assert [type(item.error) for item in outcomes] == [ServerLost] * 2
    with pytest.raises(ServerLost):
        client.submit_step([0], 61.0)


def test_or_is_tried_for_ever_though_it_is_given_up() -> None:
    """What is in flight stays so; whether to wait for it is for others to say."""
    client = attach_and_step(timeouts=Timeouts(pads_lost_rows=True))
    client.submit_step([0], 1.0)
    client.submit_reset([Reset(1)], 1.0)
    client.record_disconnect(1.0)
    advance_to(client, 60.5)
    assert client.give_up_error is None
    advance_to(client, 61.0)
    assert isinstance(client.give_up_error, ServerLost)
    advance_to(client, 300.0)
    assert not state_of(client).is_over
    assert collect(client) == []
    assert client.client_blocks.absent == {0, 1}
    restarted = FakeServer(boot=2)
    client.record_connect(300.0)
    first, second = finish(client, restarted, 301.0)
    assert [len(first.faults), len(second.faults)] == [2, 0]
    assert client.give_up_error is None
    step_all(client, restarted, 301.0)
    assert client.rows.status.tolist() == OK


def test_what_is_given_up_is_so_after_another_loss_until_there_are_envs() -> None:
    client = attach_and_step(timeouts=Timeouts(pads_lost_rows=True))
    client.record_disconnect(1.0)
    client.submit_step([0, 1], 1.0)
    advance_to(client, 62.0)
    second, third = (FakeServer(boot=b, builds_at_once=False) for b in (2, 3))
    client.record_connect(63.0)
    exchange(client, second, 63.0)
    client.record_connect(64.0)
    exchange(client, third, 64.0)
    assert isinstance(client.give_up_error, ServerLost)
    advance_to(client, 65.0)
    exchange(client, third, 65.0)
    third.build(next(iter(third.pools)), 65.0)
    exchange(client, third, 65.0)
    assert client.give_up_error is None
    check_lost(client, finish(client, third, 65.0), last=3)


def test_a_server_that_fails_again_and_again_is_not_asked_all_the_time() -> None:
    client = attach_and_step()
    client.submit_step([0, 1], 1.0)
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
            client.record_connect(now)
            continue
        now = client.next_deadline()
        client.advance(now)
    assert isinstance(client.error, ServerLost)
    assert now == pytest.approx(61.0, abs=1.0)
    assert 50 < num_hellos < 200


def test_a_slow_construction_is_waited_for_beyond_that() -> None:
    client, restarted = restart(builds_at_once=False)
    client.submit_step([0, 1], 1.0)
    now = pass_time(client, restarted, 1.0, until=200.0)
    assert state_of(client) is ClientState.ATTACHING
    restarted.build(next(iter(restarted.pools)), now)
    check_lost(client, finish(client, restarted, now), last=3)


def test_a_server_that_falls_silent_while_it_builds_is_not_waited_for_longer() -> None:
    client = attach_and_step(timeouts=Timeouts(lost_seconds=1.0))
    restarted = FakeServer(boot=2, builds_at_once=False)
    client.submit_step([0, 1], 1.0)
    for now in (1.0, 1.5, 2.0, 2.5):
        advance_to(client, now)
        exchange(client, restarted, now)
        restarted.poll(now)
    assert state_of(client) is ClientState.ATTACHING  # longer than that, as it answers
    client.record_disconnect(2.5)
    # 1 s from the next time that it was asked, at most 2 s on
    assert 3.5 <= pass_time(client, now=2.5) <= 5.5
    assert isinstance(client.error, ServerLost)


def test_silence_after_recovery_is_waited_for_anew() -> None:
    """A lease that serves, but whose first answer has not come, is no loss of old."""
    client, restarted = restart()
    client.submit_step([0, 1], 1.0)
    now = pass_time(client, restarted, 1.0, until=90.0)  # a slow reset
    assert state_of(client) is ClientState.READY
    check_lost(client, finish(client, restarted, now), last=3)


def test_a_loss_that_nobody_has_noticed_does_not_count_for_the_next() -> None:
    """Nothing was in flight, so nothing was answered under the lease in between."""
    client = attach_and_step()
    client.record_connect(1.0)
    second = FakeServer(boot=2)
    finish(client, second, 1.0)
    now = pass_time(client, second, 1.0, until=100.0)
    third = FakeServer(boot=3)
    client.record_connect(now)
    check_lost(client, step_all(client, third, now), last=3)


# Closing.


def test_closing_while_recovering_gives_the_new_envs_back() -> None:
    client, restarted = restart(builds_at_once=False)
    client.record_connect(1.0)
    exchange(client, restarted, 1.0)
    assert restarted.pools
    client.begin_close(1.0)
    exchange(client, restarted, 1.0)
    assert state_of(client) is ClientState.CLOSED
    assert not restarted.pools


def test_a_closing_client_that_would_try_for_ever_does_not() -> None:
    client = attach_and_step(timeouts=Timeouts(pads_lost_rows=True))
    client.begin_close(1.0)
    advance_to(client, 62.0)
    assert isinstance(client.error, ServerLost)


@pytest.mark.parametrize("answer", ["detached", "lease lost", "restart"])
def test_a_closing_client_does_not_attach_anew(answer: str) -> None:
    server, client = pair(boot=1)
    if answer == "lease lost":
        server.poll(60.0)
        server.take_replies()
    client.begin_close(61.0)
    exchange(client, FakeServer(boot=2) if answer == "restart" else server, 61.0)
    assert state_of(client) is ClientState.CLOSED
    assert not client.outbox
