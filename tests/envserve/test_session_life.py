"""How sessions live and end: silence, pings, restarts, copies, and what comes late."""

from __future__ import annotations

import dataclasses

import pytest

from envserve.errors import ConnectError, LeaseLost, ServerError, ServerLost
from envserve.session.states import ClientState
from envserve.wire.constants import ErrorCode, Executed, MessageType
from envserve.wire.handshake import ErrorBody
from envserve.wire.message import Buffer, Message, decode, encode
from tests.envserve.session_fakes import (
    FakeServer,
    OneLease,
    absent,
    ask,
    attach,
    collect,
    exchange,
    make_client,
    pair,
    pass_time,
    state_of,
    take_outgoing,
)


@pytest.mark.parametrize("is_there", [False, True])
def test_no_answer_at_all_is_a_connect_error_at_the_deadline(is_there: bool) -> None:
    client = make_client()
    if is_there:
        client.record_connect(0.0)
    client.advance(9.9)
    assert not state_of(client).is_over
    assert pass_time(client, now=9.9) == 10.0
    assert isinstance(client.error, ConnectError)
    assert "tcp://fake:1" in str(client.error)
    assert "10 s" in str(client.error)


def test_pings_keep_an_idle_lease() -> None:
    server, client = pair()
    pass_time(client, server, until=200.0)
    assert state_of(client) is ClientState.READY
    assert server.pools


def test_a_silent_client_loses_its_lease() -> None:
    server = FakeServer()
    attach(server)
    assert server.session.next_deadline() == 60.0
    server.poll(59.9)
    assert server.pools
    server.poll(60.0)
    assert not server.pools
    assert server.session.leases.num_free_envs == 128


def test_a_silent_server_is_lost_and_all_in_flight_fails() -> None:
    _, client = pair()
    client.submit_step([0, 1], 5.0)
    assert pass_time(client, now=5.0) == 65.0
    outcomes = collect(client)
    assert [outcome.block for outcome in outcomes] == [0, 1]
    assert all(isinstance(outcome.error, ServerLost) for outcome in outcomes)


def test_a_long_step_is_neither_lost_nor_resent_while_pongs_report_it() -> None:
    server, client = pair()
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.0)
    steps = 0

    def count(frames: list[Buffer]) -> bool:
        nonlocal steps
        steps += decode(frames).type is MessageType.STEP
        return True

    now = pass_time(client, server, until=300.0, filter_request=count)
    assert steps <= 3
    assert not absent(client)
    assert state_of(client) is ClientState.READY
    server.finish_all(now)
    exchange(client, server, now)
    assert len(collect(client)) == 2
    assert len(server.pools["", 11].executed) == 2


def test_a_server_restarted_while_attaching_is_asked_anew() -> None:
    first, second = FakeServer(boot=1, builds_at_once=False), FakeServer(boot=2)
    client = ask(first)
    assert state_of(client) is ClientState.ATTACHING
    client.advance(1.0)
    exchange(client, second, 1.0)
    assert state_of(client) is ClientState.READY


def test_detaching_frees_the_envs_and_may_be_repeated() -> None:
    server, client = pair()
    client.begin_close(0.0)
    (frames,) = take_outgoing(client)
    server.receive((b"r", ""), frames, 0.0)
    assert server.session.leases.num_free_envs == 128
    server.receive((b"r", ""), frames, 0.0)
    first, second = server.take_replies()
    client.receive(first, 0.0)
    client.receive(second, 0.0)
    assert state_of(client) is ClientState.CLOSED


def test_envs_are_free_only_when_their_workers_are_gone() -> None:
    server = FakeServer()
    attach(server, num_envs=100)
    detach = Message(type=MessageType.DETACH, session=11, boot=77, request=9)
    decisions = server.session.receive((b"r", ""), encode(detach), 0.0)
    assert server.session.leases.num_free_envs == 28
    server.carry_out(decisions, 0.0)
    assert server.session.leases.num_free_envs == 128
    (reply,) = server.take_replies()
    assert decode(reply).type is MessageType.DETACHED


def test_messages_that_only_servers_send_are_dropped() -> None:
    server = FakeServer()
    for kind in MessageType:
        if kind >= 128:  # as of the protocol, from servers
            assert not server.hear(kind)


@pytest.mark.parametrize(
    "kind", [MessageType.STEP, MessageType.PING, MessageType.RESET, MessageType.CALL]
)
def test_unknown_sessions_are_told_that_they_have_nothing(kind: MessageType) -> None:
    (answer,) = FakeServer().hear(kind, attempt=0)
    body = ErrorBody.decode(answer.body)
    assert body.code is ErrorCode.LEASE_LOST
    assert body.executed == 0


def test_a_message_that_met_a_defect_is_answered_and_ends_its_session_only() -> None:
    server = FakeServer()
    attach(server)
    attach(server, session=12)
    ping = Message(type=MessageType.PING, session=11, boot=server.boot, request=7)
    decisions = server.session.receive_failed((b"r", ""), encode(ping))
    server.carry_out(decisions, 0.0)

    answer, farewell = map(decode, server.take_replies())
    assert (answer.request, answer.type) == (7, MessageType.ERROR)
    body = ErrorBody.decode(answer.body)
    assert (body.code, body.executed) == (ErrorCode.INTERNAL, Executed.UNKNOWN)
    assert ErrorBody.decode(farewell.body) == body
    assert list(server.pools) == [("", 12)]


def test_a_pool_that_broke_frees_its_envs_in_any_state() -> None:
    server = FakeServer()
    attach(server)
    decisions = server.session.pool_broken(("", 11), ServerError("it broke"))
    server.carry_out(decisions, 0.0)
    (reply,) = server.take_replies()
    assert "it broke" in ErrorBody.decode(decode(reply).body).text
    assert server.session.leases.num_free_envs == 128
    assert server.session.pool_broken(("", 11), ServerError("again")) == []


def test_a_client_that_missed_its_sessions_end_learns_it_from_any_answer() -> None:
    server = FakeServer()
    client = attach(server, kind=OneLease)
    decisions = server.session.pool_broken(("", 11), ServerError("it broke"))
    server.carry_out(decisions, 0.0)
    assert server.take_replies()  # and this one is lost
    client.submit_step([0], 1.0)
    exchange(client, server, 1.0)
    assert state_of(client) is ClientState.LOST
    assert isinstance(client.error, LeaseLost)
    assert "it broke" in str(client.error)


def test_a_lease_ends_at_the_very_deadline_that_was_asked_for() -> None:
    server = FakeServer()
    heard_at = 31.1  # adding 60 to it and taking it away again gives less than 60
    attach(server, heard_at)
    server.poll(server.session.next_deadline())
    assert not server.pools


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [MessageType.RESULT, MessageType.CALL_RESULT])
def test_a_result_answers_no_attach(kind: MessageType, is_first: bool) -> None:
    client = make_client() if is_first else attach(FakeServer(boot=1))
    server = FakeServer(boot=2)
    sent: list[Message] = []

    def note(frames: list[Buffer]) -> bool:
        sent.append(decode(frames))
        return sent[-1].type is MessageType.PING

    client.record_connect(1.0)
    exchange(client, server, 1.0, filter_request=note)
    hello = sent[-1]
    assert hello.type is MessageType.HELLO
    answer = Message(
        type=kind, session=hello.session, boot=server.boot, request=hello.request
    )
    client.receive(encode(answer), 1.0)
    assert client.num_late_messages == 1
    client.record_connect(1.1)
    exchange(client, server, 1.1)
    assert state_of(client) is ClientState.READY


def test_what_is_in_flight_is_sent_again_when_the_connection_is_made_anew() -> None:
    _, client = pair()
    client.submit_step([0, 1], 1.0)
    (first,) = take_outgoing(client)  # the connection swallows it
    client.record_connect(1.05)
    (second,) = take_outgoing(client)
    assert decode(second) == dataclasses.replace(decode(first), attempt=1)


def test_what_was_not_sent_yet_is_not_sent_twice() -> None:
    client = attach(FakeServer())
    client.submit_step([0, 1], 1.0)
    client.record_connect(1.05)
    (only,) = take_outgoing(client)
    assert decode(only).attempt == 0


def test_an_idle_client_pings_when_the_connection_is_made_anew() -> None:
    client = attach(FakeServer())
    assert client.next_deadline() > 0.1
    client.record_connect(0.1)
    (ping,) = take_outgoing(client)
    assert decode(ping).type is MessageType.PING
