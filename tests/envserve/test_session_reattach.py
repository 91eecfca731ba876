"""When, how often and for how long a client requests a new lease after a loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envserve.errors import (
    EnvStartError,
    LeaseLost,
    RemoteProtocolError,
    ServerError,
    ServerLost,
    UnknownEnv,
)
from envserve.lane import Outcome, Reset
from envserve.session.client.client_session import ClientSession
from envserve.session.client.liveness import Timeouts
from envserve.session.server.server_protocol import ServerProtocol
from envserve.session.states import ClientState
from envserve.settings import HostSettings, PoolSettings
from envserve.slab import Status
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer, decode, encode
from tests.envserve.session_fakes import (
    SPEC,
    FakePool,
    FakeServer,
    absent_blocks,
    advance_to,
    attach,
    attach_and_restart,
    attach_and_step,
    check_lost,
    collect,
    exchange,
    finish,
    make_call,
    make_client,
    make_pair,
    pass_time,
    state_of,
    step_all,
)

OK = [Status.OK] * 4
#: Settings for a server with four envs, enough for one lease.
NARROW = HostSettings(num_workers=2, envs_per_worker=2)


def lose_envs_to_another_client(
    **options: Any,
) -> tuple[FakeServer, ClientSession, ClientSession]:
    """Return a server, a client with an expired lease, and the envs' new client."""
    server = FakeServer(boot=1, policy=NARROW)
    client = attach(server, **options)
    server.poll(60.0)
    server.take_replies()  # the client does not receive the ERROR
    return server, client, attach(server, 61.0, session=12, num_envs=3)


def test_a_lease_that_expired_is_replaced() -> None:
    server, client = make_pair(boot=1, policy=NARROW)
    step_all(client, server, 0.0)
    server.poll(60.0)
    server.take_replies()  # the client does not receive the ERROR
    assert not server.pools
    outcomes = step_all(client, server, 61.0)
    assert [item.faults[0].status for item in outcomes] == [Status.SERVER_LOST] * 2
    assert "silent for 60.0 s" in outcomes[0].faults[0].text
    assert step_all(client, server, 61.0)[0].error is None
    assert client.rows.status.tolist() == OK
    assert ("", 11) not in server.pools


def test_the_next_server_gets_a_second_to_reply() -> None:
    client = attach_and_step()
    client.record_disconnect(1.0)
    assert client.attachment.needs_server_since(3.0) == 1.0
    client.attachment.move_to("tcp://fake:2", 3.0)
    client.record_disconnect(3.0)
    assert client.attachment.needs_server_since(3.0) is None
    assert client.attachment.needs_server_since(4.0) == 3.0


def test_the_reason_why_a_lease_of_another_session_ended_is_raised() -> None:
    client, _ = attach_and_restart(is_noticed=True)
    server, successor = make_pair(boot=3)
    client.attachment.move_to("tcp://fake:2", 4.0)
    client.attachment.adopt_lease(successor.attachment, 4.0)
    error = EnvStartError("no simulator licence")
    server.carry_out(server.protocol.pool_failed(("", 11), error), 5.0)
    exchange(client, server, 5.0)
    assert isinstance(client.error, EnvStartError)


def test_a_client_whose_envs_were_leased_to_another_one_fails_with_its_name() -> None:
    server, client, other = lose_envs_to_another_client()
    client.submit_step([0, 1], 62.0)
    now = pass_time(client, server, 62.0)
    assert 64.0 < now < 70.0
    outcomes = collect(client)
    assert [type(item.error) for item in outcomes] == [LeaseLost] * 2
    assert "silent for 60.0 s" in str(outcomes[0].error)
    assert "leased: 3 of Fake-v0" in str(outcomes[0].error)
    assert list(server.pools) == [("", 12)]
    assert other.state is ClientState.READY


def test_with_padding_a_client_waits_for_envs_that_another_one_has_leased() -> None:
    timeouts = Timeouts(pads_lost_rows=True)
    server, client, other = lose_envs_to_another_client(timeouts=timeouts)
    client.submit_step([0, 1], 62.0)
    now = pass_time(client, server, 62.0, until=90.0)
    other.begin_close(now)
    exchange(other, server, now)
    check_lost(client, finish(client, server, now + 1.0), last=0)


@pytest.mark.parametrize("is_drained", [False, True])
def test_after_a_restart_a_client_waits_for_busy_envs(is_drained: bool) -> None:
    client, restarted = attach_and_restart(policy=NARROW)
    attach(restarted, 1.0, session=12, num_envs=3)
    if is_drained:  # the server notifies the client before the restart
        client.attachment.lose_lease(LeaseLost("the server was drained"), 1.0)
    client.submit_step([0, 1], 1.0)
    now = pass_time(client, restarted, 1.0)
    assert now == pytest.approx(61.0, abs=0.5)
    assert isinstance(client.error, ServerLost)
    assert str(client.error).startswith("tcp://fake:1: 4 envs requested, 1 of 4 free ")


def test_the_error_begins_with_the_present_state_not_with_a_drain_long_past() -> None:
    _, client = make_pair(boot=1)
    error = ServerLost("tcp://fake:1: the server was drained")
    client.attachment.lose_lease(error, 1.0)
    client.record_disconnect(2.0)
    for now in range(3, 63):
        client.advance(now)
    assert client.error is not None
    text = "tcp://fake:1: no connection for 59 s; no new envs for 60 s after the loss "
    assert str(client.error).startswith(f"{text}of the lease (the server was drained")


def test_a_new_lease_after_a_loss_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    client, restarted = attach_and_restart()
    client.submit_step([0, 1], 1.0)
    exchange(client, restarted, 3.5)
    assert "the server was restarted, so its envs are gone; " in caplog.messages[0]
    assert caplog.messages[1:] == ["tcp://fake:1: granted a new lease after a loss"]


def test_losses_are_logged_once_per_second(caplog: pytest.LogCaptureFixture) -> None:
    server, client = make_pair(boot=1)
    for loss in range(20):
        client.invalidate("the envs are gone", 1.0 + loss / 100)
        exchange(client, server, 1.0 + loss / 100)
    assert client.state is ClientState.READY
    assert len(caplog.messages) == 2, caplog.messages


def test_a_client_of_a_draining_server_retries_until_the_server_counts_as_lost() -> (
    None
):
    """Nobody else can lease the envs, and a new server may start soon."""
    server, client = make_pair(boot=1)
    server.carry_out(server.protocol.begin_drain(1.0), 0.0)
    server.carry_out(server.protocol.stop(1.0, "its grace period was over"), 1.0)
    client.submit_step([0, 1], 1.0)
    now = pass_time(client, server, 1.0)
    assert now == pytest.approx(61.0, abs=1.0)
    assert isinstance(client.error, ServerLost)


def test_a_rejected_attach_is_retried_under_the_same_session() -> None:
    """If a late copy of the ATTACH is granted, this client must own the lease."""
    client, restarted = attach_and_restart(policy=NARROW)
    attach(restarted, 1.0, session=12, num_envs=3)
    sessions = set()

    def record(frames: list[Buffer]) -> bool:
        message = decode(frames)
        if message.type is MessageType.ATTACH:
            sessions.add(message.session)
        return True

    client.record_connect(1.0)
    pass_time(client, restarted, 1.0, until=5.0, filter_request=record)
    assert len(sessions) == 1
    assert 11 not in sessions


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_build_that_the_server_fails_after_a_restart_is_requested_again(
    is_broken: bool,
) -> None:
    """The request uses a new session, because the server has ended the first one."""
    client, restarted = attach_and_restart(builds_at_once=False)
    client.record_connect(1.0)
    exchange(client, restarted, 1.0)
    (session,) = restarted.pools
    protocol, error = restarted.protocol, ServerError("no descriptors are left")
    fail = protocol.pool_broken if is_broken else protocol.pool_failed
    restarted.carry_out(fail(session, error), 1.0)
    restarted.pools.clear()
    restarted.builds_at_once = True
    pass_time(client, restarted, 1.0, until=5.0)
    assert state_of(client) is ClientState.READY
    assert session not in restarted.pools


def test_an_env_that_raises_after_a_restart_is_an_error() -> None:
    client, restarted = attach_and_restart(builds_at_once=False)
    client.record_connect(1.0)
    exchange(client, restarted, 1.0)
    (session,) = restarted.pools
    error = EnvStartError("no luck", remote_traceback="Traceback: boom")
    restarted.carry_out(restarted.protocol.pool_failed(session, error), 1.0)
    exchange(client, restarted, 1.0)
    assert isinstance(client.error, EnvStartError)
    assert client.error.remote_traceback == "Traceback: boom"


class DifferentBlocks(FakePool):
    """A pool on an older server, which ignores the requested number of blocks."""

    def __init__(self, config: PoolSettings) -> None:
        super().__init__(replace(config, blocks_per_split=0))


def test_envs_with_other_blocks_than_before_are_an_error() -> None:
    client, restarted = attach_and_restart(
        policy=HostSettings(num_workers=4), pool=DifferentBlocks
    )
    client.submit_step([0, 1], 1.0)
    exchange(client, restarted, 1.0)
    assert state_of(client) is ClientState.LOST
    assert "expected the same envs as before" in str(client.error)
    assert "the same number of --workers" in str(client.error)
    assert not restarted.pools  # the client has returned the lease


class OtherBounds(FakePool):
    """A pool whose observations have other bounds than those of `FakePool`."""

    space = spaces.Box(-9, 9, (2,), np.float64)
    spec = EnvSpec(SPEC.env_name, space, SPEC.action_space)


@pytest.mark.parametrize("mode", ["same", "different"])
def test_envs_may_have_other_bounds_than_before_if_bounds_may_differ(mode: str) -> None:
    client = attach_and_step(observation_mode=mode)
    restarted = FakeServer(boot=2, pool=OtherBounds)
    client.submit_step([0, 1], 1.0)
    outcomes = finish(client, restarted, 1.0)
    if mode == "different":
        check_lost(client, outcomes, last=3)
    else:
        assert state_of(client) is ClientState.LOST
        assert "expected the same envs as before" in str(client.error)


def test_an_env_that_is_no_longer_offered_is_an_error() -> None:
    client, restarted = attach_and_restart()
    restarted.protocol = ServerProtocol(restarted.policy, ("Other-v0",), boot=2)
    client.submit_step([0, 1], 1.0)
    exchange(client, restarted, 1.0)
    assert state_of(client) is ClientState.LOST
    assert isinstance(client.error, UnknownEnv)
    errors = [item.error for item in collect(client)]
    assert [isinstance(error, UnknownEnv) for error in errors] == [True, True]


def test_an_invalid_result_of_a_former_server_does_not_reject_the_next_one() -> None:
    server, client = make_pair(boot=1)
    client.submit_step([0, 1], 1.0)
    exchange(client, server, 1.0)
    server.finish_all(1.0)
    for frames in server.take_replies():
        message = decode(frames)
        message.body = b"\xff" * len(message.body)
        client.receive(encode(message), 1.0)
    client.attachment.move_to("tcp://other:1", 2.0)
    errors = [type(outcome.error) for outcome in collect(client)]
    assert errors == [RemoteProtocolError] * 2
    assert not client.attachment.is_rejected
    client.submit_step([0, 1], 2.0)
    check_lost(client, finish(client, FakeServer(boot=2), 2.0), last=0)


# Time limits.


def test_a_server_that_does_not_reply_for_a_minute_is_lost() -> None:
    client = attach_and_step()
    client.submit_step([0, 1], 1.0)
    client.record_disconnect(1.0)
    assert pass_time(client, now=1.0) == pytest.approx(61.0)
    outcomes = collect(client)
    assert [type(item.error) for item in outcomes] == [ServerLost] * 2
    with pytest.raises(ServerLost):
        client.submit_step([0], 61.0)


def test_with_padding_a_client_retries_after_it_has_given_up() -> None:
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
    assert collect(client) == [Outcome(1)]
    assert absent_blocks(client) == {0}
    restarted = FakeServer(boot=2)
    client.record_connect(300.0)
    (outcome,) = finish(client, restarted, 301.0)
    assert len(outcome.faults) == 2
    assert client.give_up_error is None
    client.submit_step([1], 301.0)
    (outcome,) = finish(client, restarted, 301.0)
    assert len(outcome.faults) == 2
    step_all(client, restarted, 301.0)
    assert client.rows.status.tolist() == OK


@pytest.mark.parametrize("is_early", [True, False])
def test_after_giving_up_resets_do_nothing_and_calls_fail(is_early: bool) -> None:
    client = attach_and_step(timeouts=Timeouts(pads_lost_rows=True))
    before = client.rows.observation[0].copy()
    client.invalidate("for the test", 1.0)
    client.record_disconnect(1.0)
    times = (1.0, 61.0) if is_early else (61.0, 61.0)
    advance_to(client, times[0])
    client.submit_reset([Reset(0)], times[0])
    client.submit_call([make_call([2], "call", "render", block=1)], times[0])
    advance_to(client, times[1])
    reset, call = collect(client)
    assert reset == Outcome(0)
    assert (call.block, call.error) == (1, client.give_up_error)
    assert client.num_in_flight == 0
    assert (client.rows.observation[0] == before).all()
    client.record_connect(62.0)
    restarted = FakeServer(boot=2)
    exchange(client, restarted, 62.0)
    assert client.give_up_error is None
    client.submit_step([0, 1], 62.0)
    check_lost(client, finish(client, restarted, 62.0), last=3)


def test_a_client_that_has_given_up_remains_so_until_the_next_lease() -> None:
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


def test_retries_after_repeated_crashes_are_delayed() -> None:
    client = attach_and_step()
    client.submit_step([0, 1], 1.0)
    num_hellos, now, boot = 0, 1.0, 2
    server = FakeServer(boot=boot, builds_at_once=False)

    def record(frames: list[Buffer]) -> bool:
        nonlocal num_hellos
        num_hellos += decode(frames).type is MessageType.HELLO
        return True

    while not client.state.is_over:
        exchange(client, server, now, filter_request=record)
        if server.pools:  # the server crashes during the build
            boot += 1
            server = FakeServer(boot=boot, builds_at_once=False)
            client.record_connect(now)
            continue
        now = client.next_deadline()
        client.advance(now)
    assert isinstance(client.error, ServerLost)
    assert now == pytest.approx(61.0, abs=1.0)
    assert 50 < num_hellos < 200


def test_a_client_waits_for_a_slow_build_for_more_than_a_minute() -> None:
    client, restarted = attach_and_restart(builds_at_once=False)
    client.submit_step([0, 1], 1.0)
    now = pass_time(client, restarted, 1.0, until=200.0)
    assert state_of(client) is ClientState.ATTACHING
    restarted.build(next(iter(restarted.pools)), now)
    check_lost(client, finish(client, restarted, now), last=3)


def test_a_server_that_becomes_silent_during_a_build_is_lost_in_time() -> None:
    client = attach_and_step(timeouts=Timeouts(lost_seconds=1.0))
    restarted = FakeServer(boot=2, builds_at_once=False)
    client.submit_step([0, 1], 1.0)
    for now in (1.0, 1.5, 2.0, 2.5):
        advance_to(client, now)
        exchange(client, restarted, now)
        restarted.poll(now)
    # The session is not lost despite the delay, because the server replies.
    assert state_of(client) is ClientState.ATTACHING
    client.record_disconnect(2.5)
    # The session is lost 1 s after the next request, which is sent within 1 s.
    assert 3.5 <= pass_time(client, now=2.5) <= 4.5
    assert isinstance(client.error, ServerLost)


def test_an_earlier_loss_without_operations_in_flight_does_not_count() -> None:
    """The second lease gets no reply, which would end the first loss."""
    client = attach_and_step()
    client.record_connect(1.0)
    second = FakeServer(boot=2)
    finish(client, second, 1.0)
    now = pass_time(client, second, 1.0, until=100.0)
    third = FakeServer(boot=3)
    client.record_connect(now)
    check_lost(client, step_all(client, third, now), last=3)


def test_time_in_which_the_client_was_suspended_does_not_count_after_a_loss() -> None:
    client, restarted = attach_and_restart()
    client.submit_step([0, 1], 1.0)

    def is_not_hello(frames: list[Buffer]) -> bool:
        return decode(frames).type is not MessageType.HELLO

    advance_to(client, 3.0)
    exchange(client, restarted, 3.0, filter_request=is_not_hello)
    assert state_of(client) is ClientState.HELLO_SENT
    client.advance(300.0)
    check_lost(client, finish(client, restarted, 300.0), last=3)


def test_the_first_lease_of_rows_that_waited_for_a_server_may_be_lost_at_once() -> None:
    """The time without a server does not count as a loss."""
    server = FakeServer()
    attach(server)
    client = make_client(session=12)
    like: Any = server.pools["", 11]
    client.attachment.start_vacant(like, 0.0)
    client.submit_step([0, 1], 0.0)
    client.attachment.move_to("tcp://fake:2", 300.0)
    for boot, now in ((2, 300.0), (3, 301.0)):
        server = FakeServer(boot=boot)
        client.record_connect(now)
        exchange(client, server, now)
    outcomes = finish(client, server, 302.0)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert client.rows.status.tolist() == [Status.SERVER_LOST] * 4


# Closing.


def test_closing_during_recovery_returns_the_new_envs() -> None:
    client, restarted = attach_and_restart(builds_at_once=False)
    client.record_connect(1.0)
    exchange(client, restarted, 1.0)
    assert restarted.pools
    client.begin_close(1.0)
    exchange(client, restarted, 1.0)
    assert state_of(client) is ClientState.CLOSED
    assert not restarted.pools


def test_a_closing_client_does_not_retry_for_ever() -> None:
    client = attach_and_step(timeouts=Timeouts(pads_lost_rows=True))
    client.begin_close(1.0)
    advance_to(client, 62.0)
    assert isinstance(client.error, ServerLost)


@pytest.mark.parametrize("reason", ["detached", "lease lost", "restart"])
def test_a_closing_client_does_not_attach_again(reason: str) -> None:
    server, client = make_pair(boot=1)
    if reason == "lease lost":
        server.poll(60.0)
        server.take_replies()
    client.begin_close(61.0)
    exchange(client, FakeServer(boot=2) if reason == "restart" else server, 61.0)
    assert state_of(client) is ClientState.CLOSED
    assert not client.outbox
