"""The lifetime of sessions: pings, expiry, restarts, reconnection and closing."""

from __future__ import annotations

import dataclasses
import math

import pytest

from envserve.errors import ConnectError, LeaseLost, RemoteProtocolError, ServerError
from envserve.session.states import ClientState
from envserve.wire.constants import ErrorCode, Executed, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.message import Buffer, Message, decode, encode
from tests.envserve.session_fakes import (
    FakeServer,
    SingleLeaseSession,
    absent_blocks,
    attach,
    collect,
    exchange,
    make_client,
    make_pair,
    pass_time,
    state_of,
    take_outgoing,
    try_to_attach,
)


@pytest.mark.parametrize("is_connected", [False, True])
def test_without_any_reply_a_client_fails_with_a_connect_error(
    is_connected: bool,
) -> None:
    client = make_client()
    if is_connected:
        client.record_connect(0.0)
    client.advance(9.9)
    assert not state_of(client).is_over
    assert pass_time(client, now=9.9) == 10.0
    assert isinstance(client.error, ConnectError)
    assert "tcp://fake:1" in str(client.error)
    assert "10 s" in str(client.error)


def test_pings_keep_an_idle_lease_alive() -> None:
    server, client = make_pair()
    pass_time(client, server, until=200.0)
    assert state_of(client) is ClientState.READY
    assert server.pools


def test_a_silent_client_loses_its_lease() -> None:
    server = FakeServer()
    attach(server)
    assert server.protocol.next_deadline() == 60.0
    server.poll(59.9)
    assert server.pools
    server.poll(60.0)
    assert not server.pools
    assert server.protocol.leases.num_free_envs == 128


def test_a_long_step_is_not_resent_while_pongs_report_it() -> None:
    server, client = make_pair()
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.0)
    steps = 0

    def count(frames: list[Buffer]) -> bool:
        nonlocal steps
        steps += decode(frames).type is MessageType.STEP
        return True

    now = pass_time(client, server, until=300.0, filter_request=count)
    assert steps <= 3
    assert not absent_blocks(client)
    assert state_of(client) is ClientState.READY
    server.finish_all(now)
    exchange(client, server, now)
    assert len(collect(client)) == 2
    assert len(server.pools["", 11].executed) == 2


def test_a_client_attaches_again_if_the_server_restarts_during_the_build() -> None:
    first, second = FakeServer(boot=1, builds_at_once=False), FakeServer(boot=2)
    client = try_to_attach(first)
    assert state_of(client) is ClientState.ATTACHING
    client.advance(1.0)
    exchange(client, second, 1.0)
    assert state_of(client) is ClientState.READY


def test_a_server_that_restarts_again_and_again_during_the_build_is_an_error() -> None:
    client = try_to_attach(FakeServer(boot=1, builds_at_once=False))
    for boot in range(2, 18):
        assert not state_of(client).is_over
        client.advance(boot)
        exchange(client, FakeServer(boot=boot, builds_at_once=False), boot)
    assert "was restarted 16 times before it granted the envs" in str(client.error)


def test_a_session_that_has_ended_ignores_protocol_violations() -> None:
    """The driver may find another one in the same run, such as too long a message."""
    server, client = make_pair()
    client.begin_close(0.0)
    exchange(client, server, 0.0)
    client.abort(RemoteProtocolError("too long"))
    assert state_of(client) is ClientState.CLOSED
    assert not client.outbox


def test_a_detach_frees_the_envs_and_may_be_repeated() -> None:
    server, client = make_pair()
    client.begin_close(0.0)
    (frames,) = take_outgoing(client)
    server.receive((b"r", ""), frames, 0.0)
    assert server.protocol.leases.num_free_envs == 128
    server.receive((b"r", ""), frames, 0.0)
    first, second = server.take_replies()
    client.receive(first, 0.0)
    client.receive(second, 0.0)
    assert state_of(client) is ClientState.CLOSED


def test_envs_are_free_only_when_their_workers_have_exited() -> None:
    server = FakeServer()
    attach(server, num_envs=100)
    detach = Message(type=MessageType.DETACH, session=11, boot=77, request=9)
    decisions = server.protocol.receive((b"r", ""), encode(detach), 0.0)
    assert server.protocol.leases.num_free_envs == 28
    assert server.protocol.next_deadline() == math.inf
    server.carry_out(decisions, 0.0)
    assert server.protocol.leases.num_free_envs == 128
    (reply,) = server.take_replies()
    assert decode(reply).type is MessageType.DETACHED


@pytest.mark.parametrize(
    "kind", [MessageType.STEP, MessageType.PING, MessageType.RESET, MessageType.CALL]
)
def test_requests_of_unknown_sessions_are_answered_with_lease_lost(
    kind: MessageType,
) -> None:
    (reply,) = FakeServer().replies_to(kind, attempt=0)
    body = ErrorBody.decode(reply.body)
    assert body.code is ErrorCode.LEASE_LOST
    assert body.executed == 0


def test_an_exception_while_handling_a_message_ends_only_its_session() -> None:
    server = FakeServer()
    attach(server)
    attach(server, session=12)
    ping = Message(type=MessageType.PING, session=11, boot=server.boot, request=7)
    decisions = server.protocol.receive_failed((b"r", ""), encode(ping))
    server.carry_out(decisions, 0.0)

    reply, session_error = map(decode, server.take_replies())
    assert (reply.request, reply.type) == (7, MessageType.ERROR)
    body = ErrorBody.decode(reply.body)
    assert (body.code, body.executed) == (ErrorCode.INTERNAL, Executed.UNKNOWN)
    assert ErrorBody.decode(session_error.body) == body
    assert list(server.pools) == [("", 12)]


def test_a_broken_pool_frees_its_envs() -> None:
    server = FakeServer()
    attach(server)
    decisions = server.protocol.pool_broken(("", 11), ServerError("it broke"))
    server.carry_out(decisions, 0.0)
    (reply,) = server.take_replies()
    assert "it broke" in ErrorBody.decode(decode(reply).body).text
    assert server.protocol.leases.num_free_envs == 128
    assert server.protocol.pool_broken(("", 11), ServerError("again")) == []


def test_any_request_reveals_a_missed_end_of_the_session() -> None:
    server = FakeServer()
    client = attach(server, kind=SingleLeaseSession)
    decisions = server.protocol.pool_broken(("", 11), ServerError("it broke"))
    server.carry_out(decisions, 0.0)
    assert server.take_replies()  # the reply is lost
    client.submit_step([0], 1.0)
    exchange(client, server, 1.0)
    assert state_of(client) is ClientState.LOST
    assert isinstance(client.error, LeaseLost)
    assert "it broke" in str(client.error)


def test_a_lease_expires_exactly_at_the_next_deadline() -> None:
    server = FakeServer()
    attached_at = 31.1  # in floating point, (31.1 + 60) - 31.1 < 60
    attach(server, attached_at)
    server.poll(server.protocol.next_deadline())
    assert not server.pools


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [MessageType.RESULT, MessageType.CALL_RESULT])
def test_a_result_is_not_a_reply_to_a_hello(kind: MessageType, is_first: bool) -> None:
    client = make_client() if is_first else attach(FakeServer(boot=1))
    server = FakeServer(boot=2)
    sent: list[Message] = []

    def record(frames: list[Buffer]) -> bool:
        sent.append(decode(frames))
        return sent[-1].type is MessageType.PING

    client.record_connect(1.0)
    exchange(client, server, 1.0, filter_request=record)
    hello = sent[-1]
    assert hello.type is MessageType.HELLO
    reply = Message(
        type=kind, session=hello.session, boot=server.boot, request=hello.request
    )
    client.receive(encode(reply), 1.0)
    assert client.num_late_messages == 1
    client.record_connect(1.1)
    exchange(client, server, 1.1)
    assert state_of(client) is ClientState.READY


def test_a_flood_of_detached_messages_during_the_build_ends_the_session() -> None:
    client = try_to_attach(FakeServer(builds_at_once=False))
    detached = encode(Message(type=MessageType.DETACHED, session=11, boot=77))
    for _ in range(2000):
        client.receive(detached, 1.0)
    assert isinstance(client.error, RemoteProtocolError)
    assert "DETACHED" in str(client.error)


def test_requests_in_flight_are_resent_after_a_reconnect() -> None:
    _, client = make_pair()
    client.submit_step([0, 1], 1.0)
    (first,) = take_outgoing(client)  # lost with the connection
    client.record_connect(1.05)
    (second,) = take_outgoing(client)
    assert decode(second) == dataclasses.replace(decode(first), attempt=1)


def test_a_request_that_was_not_sent_yet_is_sent_once_after_a_reconnect() -> None:
    client = attach(FakeServer())
    client.submit_step([0, 1], 1.0)
    client.record_connect(1.05)
    (only,) = take_outgoing(client)
    assert decode(only).attempt == 0


def test_an_idle_client_pings_after_a_reconnect() -> None:
    client = attach(FakeServer())
    assert client.next_deadline() > 0.1
    client.record_connect(0.1)
    (ping,) = take_outgoing(client)
    assert decode(ping).type is MessageType.PING
