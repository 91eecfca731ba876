"""Servers that reply to PING, but neither finish an operation nor report it as running.

A client treats such a server as lost. It never does so with an honest server that is
slow, paused or restarted, or that is behind a network that loses messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from envserve.errors import ServerLost
from envserve.lane import Reset
from envserve.session.client.client_session import ClientSession
from envserve.session.client.liveness import Timeouts
from envserve.session.states import ClientState
from envserve.slab import Status
from envserve.wire.bodies import Pong
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer, Message, decode, encode
from tests.envserve.session_fakes import (
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
    make_pair,
    pass_time,
    state_of,
    step_all,
    take_outgoing,
)

PADS = Timeouts(pads_lost_rows=True)


def dropping(*kinds: MessageType) -> Callable[[list[Buffer]], bool]:
    """Return a filter that drops messages of these types."""
    return lambda frames: decode(frames).type not in kinds


def submit(client: ClientSession, kind: MessageType, now: float) -> None:
    """Submit an operation of both blocks."""
    if kind is MessageType.STEP:
        client.submit_step([0, 1], now)
    elif kind is MessageType.RESET:
        client.submit_reset([Reset(0), Reset(1)], now)
    else:
        calls = [make_call([2 * i], "call", "render", block=i) for i in range(2)]
        client.submit_call(calls, now)


def pong(client: ClientSession, number: int, *running: int) -> list[Buffer]:
    body = Pong(running=dict.fromkeys(running, 5)).encode()
    epoch = client.requests.epoch
    message = Message(MessageType.PONG, session=11, boot=77, epoch=epoch, body=body)
    message.request = number
    return encode(message)


OPERATIONS = [MessageType.RESET, MessageType.STEP, MessageType.CALL]


# Requests that the server ignores.


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_server_that_ignores_a_request_but_replies_to_pings_is_lost_after_a_minute(
    kind: MessageType,
) -> None:
    server, client = make_pair()
    submit(client, kind, 0.0)
    now = pass_time(client, server, filter_request=dropping(kind))
    assert 60.0 <= now <= 63.0
    assert isinstance(client.error, ServerLost)
    text = f"the server replies, but ignores {kind.name} of block 0: 17 attempts in 61"
    assert text in str(client.error)
    assert "server_lost_after" in str(client.error)
    outcomes = collect(client)
    assert [type(outcome.error) for outcome in outcomes] == [ServerLost] * 2


@pytest.mark.parametrize("seconds", [1.5, 3.0, 20.0])
def test_a_server_that_ignores_requests_is_not_lost_before_the_third_copy(
    seconds: float,
) -> None:
    server = FakeServer()
    client = attach(server, timeouts=Timeouts(lost_seconds=seconds))
    client.submit_step([0, 1], 0.0)
    now = pass_time(client, server, filter_request=dropping(MessageType.STEP))
    assert now == 1.0 + max(8.0, seconds)
    assert "ignores STEP" in str(client.error)


def test_lost_results_count_like_lost_requests() -> None:
    server, client = make_pair()
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.0)
    server.finish_all(0.0)
    now = pass_time(client, server, filter_reply=dropping(MessageType.RESULT))
    assert 60.0 <= now <= 63.0
    assert "ignores STEP" in str(client.error)


def test_ignored_blocks_become_absent_after_seconds_and_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, client = make_pair()
    submit(client, MessageType.RESET, 0.0)
    drop = dropping(MessageType.RESET)
    advance_to(client, 1.0)
    exchange(client, server, 1.0, filter_request=drop)
    advance_to(client, 2.9)
    exchange(client, server, 2.9, filter_request=drop)
    assert not absent_blocks(client)
    pass_time(client, server, 3.0, until=30.0, filter_request=drop)
    assert absent_blocks(client) == {0, 1}
    assert caplog.messages == [
        "tcp://fake:1: the server replies, but ignores RESET of block 0: "
        "3 attempts in 3 s"
    ]
    exchange(client, server, 30.0)
    assert len(finish(client, server, 40.0)) == 2
    assert not absent_blocks(client)
    assert state_of(client) is ClientState.READY


def test_an_ignored_block_is_found_while_other_blocks_are_stepped() -> None:
    """The messages of the other blocks are no reason to send fewer PINGs."""
    server, client = make_pair()
    client.submit_step([1], 0.0)
    take_outgoing(client)  # lost
    ignored = {1}

    def is_kept(frames: list[Buffer]) -> bool:
        return ignored.isdisjoint(block for block, _ in decode(frames).entries)

    now = 0.0
    while not client.state.is_over:
        now += 0.05
        assert now < 70.0
        client.submit_step([0], now)
        client.advance(now)
        exchange(client, server, now, filter_request=is_kept)
        server.finish_all(now)
        exchange(client, server, now, filter_request=is_kept)
        collect(client)
    assert "ignores STEP of block 1" in str(client.error)


def test_with_padding_a_client_has_given_up_until_the_server_replies() -> None:
    """A new lease from the same server is no reason to wait for it again."""
    client = attach_and_step(timeouts=PADS)
    server = FakeServer(boot=1)
    client.record_connect(1.0)
    finish(client, server, 1.0)
    drop = dropping(MessageType.RESET)
    client.submit_step([0, 1], 1.0)
    now = pass_time(client, server, 1.0, until=65.0, filter_request=drop)
    assert state_of(client) is ClientState.READY
    assert client.stats()["reattaches"] == 2
    assert "ignores RESET of block 0" in str(client.give_up_error)
    assert absent_blocks(client) == {0, 1}
    now = pass_time(client, server, now, until=130.0, filter_request=drop)
    assert client.give_up_error is not None
    check_lost(client, finish(client, server, now + 4.0), last=3)
    assert client.give_up_error is None
    step_all(client, server, now)
    assert client.rows.status.tolist() == [Status.OK] * 4


def test_another_server_is_needed_shortly_before_the_server_counts_as_lost() -> None:
    server, client = make_pair()
    client.submit_step([0, 1], 0.0)
    drop = dropping(MessageType.STEP)
    pass_time(client, server, until=57.0, filter_request=drop)
    assert client.attachment.needs_server_since(57.0) is None
    now = pass_time(client, server, 57.0, until=59.0, filter_request=drop)
    assert client.attachment.needs_server_since(now) == pytest.approx(58.0)
    client.attachment.move_to("tcp://other:1", now)
    assert "ignores STEP" in str(client.attachment.lost_lease.error)  # type: ignore[union-attr]
    other = FakeServer(boot=2)
    assert len(finish(client, other, now)) == 2
    assert client.rows.status.tolist() == [Status.SERVER_LOST] * 4


# Operations and builds without end.


@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize("is_absent", [False, True])
def test_an_operation_that_is_always_running_ends_at_the_limit(
    kind: MessageType, is_absent: bool
) -> None:
    server = FakeServer()
    client = attach(server, timeouts=Timeouts(operation_seconds=200.0))
    submit(client, kind, 0.0)
    exchange(client, server, 0.0)
    if is_absent:
        server.carry_out(server.protocol.pool_finished(("", 11), [], {0, 1}), 0.0)
    assert pass_time(client, server) == 200.0
    assert isinstance(client.error, ServerLost)
    text = f"the server has not finished {kind.name} of block 0 within 200 s"
    assert text in str(client.error)
    assert "operation_timeout" in str(client.error)


def test_by_default_an_operation_may_take_longer_than_a_server_allows() -> None:
    server, client = make_pair()
    submit(client, MessageType.RESET, 0.0)
    now = pass_time(client, server, until=990.0)
    assert not absent_blocks(client)
    assert len(finish(client, server, now)) == 2
    assert Timeouts().operation_seconds > 6 * 2 * server.policy.reset_timeout_seconds


def test_envs_that_are_built_without_end_are_waited_for_until_the_limit() -> None:
    client = attach_and_step(timeouts=Timeouts(operation_seconds=200.0))
    restarted = FakeServer(boot=2, builds_at_once=False)
    client.submit_step([0, 1], 1.0)
    now = pass_time(client, restarted, 1.0)
    assert 200.0 <= now <= 204.0
    assert "no new envs for 200 s" in str(client.error)
    assert "operation_timeout" in str(client.error)


# Honest servers.


def test_a_pong_that_was_requested_before_the_latest_copy_does_not_count() -> None:
    _, client = make_pair()
    client.advance(1.0)
    (first_ping,) = take_outgoing(client)
    client.submit_step([0, 1], 1.5)
    late = decode(first_ping).request
    for now in (1.6, 3.0, 5.0, 9.0, 20.0, 40.0, 62.0):
        advance_to(client, now)
        take_outgoing(client)
        client.receive(pong(client, late), now)
        client.receive(pong(client, 0), now)
    assert not absent_blocks(client)
    assert state_of(client) is ClientState.READY


def test_a_ping_follows_the_copies_that_it_asks_about() -> None:
    _, client = make_pair()
    client.submit_step([0], 0.5)
    client.submit_step([1], 0.6)
    advance_to(client, 20.0)  # nothing was sent, because there was no connection
    kinds = [decode(frames).type for frames in take_outgoing(client)]
    assert kinds == [MessageType.STEP, MessageType.STEP, MessageType.PING]


def test_each_copy_counts_once_however_many_pongs_arrive() -> None:
    _, client = make_pair()
    client.submit_step([0, 1], 0.0)
    advance_to(client, 1.0)
    number = decode(take_outgoing(client)[-1]).request
    for repeated in range(20):
        client.receive(pong(client, number + repeated), 1.1)
    assert not absent_blocks(client)


def test_a_pong_that_lists_one_block_covers_the_whole_request() -> None:
    """The blocks of a request are answered together, unless one becomes absent."""
    server, client = make_pair()
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.0)
    server.finish(("", 11), 0, 0.0)
    now = pass_time(client, server, until=300.0)
    assert not absent_blocks(client)
    server.finish(("", 11), 1, now)
    exchange(client, server, now)
    assert len(collect(client)) == 2


def test_ignored_copies_from_before_a_reply_do_not_count() -> None:
    server, client = make_pair()
    drop = dropping(MessageType.STEP)
    client.submit_step([0, 1], 0.0)
    now = pass_time(client, server, until=50.0, filter_request=drop)
    advance_to(client, now := now + 5.0)
    exchange(client, server, now)  # the server has the request now
    now = pass_time(client, server, now, until=300.0)
    assert not absent_blocks(client)
    server.finish_all(now)
    now = pass_time(
        client, server, now, until=340.0, filter_reply=dropping(MessageType.RESULT)
    )
    assert state_of(client) is ClientState.READY
    advance_to(client, now + 30.0)
    exchange(client, server, now + 30.0)
    assert len(collect(client)) == 2


def test_a_slow_block_is_not_ignored_while_other_blocks_are_stepped() -> None:
    server, client = make_pair()
    client.submit_step([1], 0.0)
    for tick in range(1, 2000):
        now = 0.05 * tick
        client.submit_step([0], now)
        client.advance(now)
        exchange(client, server, now)
        server.finish(("", 11), 0, now)
        exchange(client, server, now)
        assert [outcome.block for outcome in collect(client)] == [0]
        assert not client.client_blocks.absent
    assert len(finish(client, server, 100.0)) == 1


def test_a_paused_server_is_not_mistaken_for_a_faulty_one() -> None:
    server, client = make_pair()
    client.submit_step([0, 1], 0.0)
    waiting = []
    for now in range(50):  # all messages wait until the server continues
        advance_to(client, float(now))
        waiting += take_outgoing(client)
    for frames in waiting:
        server.receive((b"r", ""), frames, 50.0)
    for frames in server.take_replies():
        client.receive(frames, 50.0)
    assert not absent_blocks(client)
    pass_time(client, server, 50.0, until=200.0)
    assert len(finish(client, server, 200.0)) == 2


def test_time_in_which_the_client_was_suspended_does_not_count() -> None:
    server = FakeServer()
    client = attach(server, timeouts=Timeouts(operation_seconds=200.0))
    client.submit_step([0, 1], 0.0)
    drop = dropping(MessageType.STEP)
    now = pass_time(client, server, until=30.0, filter_request=drop)
    client.advance(now := now + 500.0)
    assert state_of(client) is ClientState.READY
    exchange(client, server, now)
    now = pass_time(client, server, now, until=now + 150.0)
    assert not absent_blocks(client)
    assert len(finish(client, server, now)) == 2


def test_copies_that_broken_connections_lose_do_not_count() -> None:
    server, client = make_pair()
    client.submit_step([0, 1], 0.0)
    now, drop = 0.0, dropping(MessageType.STEP)
    for _ in range(50):
        now = pass_time(client, server, now, until=now + 2.0, filter_request=drop)
        client.record_disconnect(now)
        client.record_connect(now)
        assert not absent_blocks(client)
    assert len(finish(client, server, now)) == 2


def test_a_restarted_server_is_not_mistaken_for_a_faulty_one() -> None:
    """The late first reply of the new lease does not count as the earlier loss."""
    client, restarted = attach_and_restart()
    client.submit_step([0, 1], 1.0)
    now = pass_time(client, restarted, 1.0, until=300.0)  # a slow reset
    check_lost(client, finish(client, restarted, now), last=3)


@pytest.mark.parametrize("loss", [0.05, 0.2])
def test_a_network_that_loses_messages_is_not_mistaken_for_a_faulty_server(
    loss: float, random_seed: int
) -> None:
    source = random.Random(random_seed)
    server, client = make_pair()
    now, num_steps = 0.0, 0

    def arrives(frames: list[Buffer]) -> bool:
        return source.random() >= loss

    for _ in range(100):
        client.submit_step([0, 1], now)
        is_slow, outcomes = source.random() < 0.1, 0
        finish_at = now + (100.0 if is_slow else 0.1)
        while outcomes < 2:
            exchange(client, server, now, filter_request=arrives, filter_reply=arrives)
            if now >= finish_at:
                server.finish_all(now)
                exchange(
                    client, server, now, filter_request=arrives, filter_reply=arrives
                )
            outcomes += len(collect(client))
            assert state_of(client) is ClientState.READY, client.error
            now = min(client.next_deadline(), now + 0.5)
            client.advance(now)
        num_steps += 1
    (pool,) = server.pools.values()
    assert len(pool.executed) == 2 * num_steps
