"""Users of a server can neither use nor detect other users' sessions."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from envserve.wire.bodies import Attach
from envserve.wire.constants import MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Hello
from envserve.wire.message import Message, Peer, decode, encode
from tests.envserve.session_fakes import FakeServer, make_attach

A: Peer = (0, b"a", "ann")
B: Peer = (0, b"b", "bob")
ATTACH = make_attach().encode()
OTHER = make_attach(num_envs=1).encode()


def send(
    server: FakeServer, peer: Peer, kind: MessageType, **fields: object
) -> Message:
    """Send a user's message, by default of session 11; return the reply."""
    numbers: dict[str, object] = {"session": 11, "boot": server.boot}
    message = Message(type=kind, **{**numbers, **fields})  # type: ignore[arg-type]
    server.receive(peer, encode(message), 5.0)
    replies, server.replies = server.replies, []
    assert {reply.peer for reply in replies} == {peer}
    return decode([bytes(frame) for frame in replies[0].frames])


@pytest.fixture
def server() -> FakeServer:
    """Return a server on which Ann's session 11 has a lease."""
    server = FakeServer()
    assert send(server, A, MessageType.ATTACH, body=ATTACH).type is MessageType.GRANTED
    return server


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (MessageType.PING, {"epoch": 1}),
        (MessageType.PING, {"epoch": 7}),
        (MessageType.STEP, {"epoch": 1, "entries": ((0, 1), (1, 1))}),
        (MessageType.STEP, {"epoch": 1, "entries": ((0, 9),), "attempt": 1}),
        (MessageType.RESET, {"epoch": 1, "entries": ((0, 1),), "body": b"?"}),
        (MessageType.CALL, {"epoch": 1, "entries": ((0, 1),)}),
        (MessageType.DETACH, {}),
        (MessageType.DETACH, {"epoch": 1}),
        (MessageType.ATTACH, {"body": ATTACH}),
        (MessageType.ATTACH, {"body": OTHER}),
        (MessageType.ATTACH, {"body": b"?"}),
    ],
)
def test_a_session_number_of_another_user_is_answered_like_an_unknown_one(
    server: FakeServer, kind: MessageType, fields: dict[str, object]
) -> None:
    record = server.protocol.leases["ann", 11]
    before = dataclasses.astuple(dataclasses.replace(record, lease=None, machine=None))  # type: ignore[arg-type]
    executed = list(server.pools["ann", 11].executed)
    known, unknown = (
        send(server, B, kind, session=number, **fields) for number in (11, 12)
    )
    if (
        known.type is MessageType.GRANTED
    ):  # both are granted, with consecutive lease numbers
        assert (known.epoch, unknown.epoch) == (2, 3)
        known.epoch, known.body = unknown.epoch, unknown.body
    assert dataclasses.replace(known, session=12) == unknown
    record = server.protocol.leases["ann", 11]
    after = dataclasses.astuple(dataclasses.replace(record, lease=None, machine=None))  # type: ignore[arg-type]
    assert before == after
    assert server.pools["ann", 11].executed == executed
    assert send(server, A, MessageType.PING, epoch=1).type is MessageType.PONG


def test_two_users_may_use_the_same_session_number(server: FakeServer) -> None:
    assert send(server, B, MessageType.ATTACH, body=OTHER).type is MessageType.GRANTED
    assert send(server, B, MessageType.PING, epoch=2).type is MessageType.PONG
    assert send(server, B, MessageType.PING, epoch=1).type is MessageType.ERROR
    assert send(server, A, MessageType.PING, epoch=1).type is MessageType.PONG
    assert send(server, B, MessageType.DETACH).type is MessageType.DETACHED
    assert [*server.pools] == [("ann", 11)]


def test_a_message_that_fails_ends_no_session_of_another_user(
    server: FakeServer,
) -> None:
    ping = Message(type=MessageType.PING, session=11, boot=server.boot, epoch=1)
    (reply,) = server.protocol.receive_failed(B, encode(ping))
    assert reply.peer == B  # type: ignore[union-attr]
    assert send(server, A, MessageType.PING, epoch=1).type is MessageType.PONG


def test_many_ended_sessions_of_a_user_do_not_evict_those_of_others(
    server: FakeServer,
) -> None:
    send(server, A, MessageType.DETACH)
    for number in range(1000, 1300):
        send(server, B, MessageType.ATTACH, session=number, body=OTHER)
        send(server, B, MessageType.DETACH, session=number)
    reply = send(server, A, MessageType.ATTACH, body=ATTACH)
    assert reply.type is MessageType.DETACHED


def test_a_client_is_listed_by_its_user_and_the_name_that_it_sent(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "envserve.session")
    for number in range(1000, 1300):  # sessions that never attach
        hello = Hello(client="mallory").encode()
        send(server, A, MessageType.HELLO, session=number, body=hello)
    hello = Hello(client="gpu1:9").encode()
    send(server, B, MessageType.HELLO, body=hello)
    send(server, B, MessageType.ATTACH, body=OTHER)
    assert server.protocol.leases["bob", 11].client == "bob (gpu1:9)"
    assert "lease 2 of bob: 1 Fake-v0, attaching" in caplog.text


def test_envs_of_all_users_count_as_leased(server: FakeServer) -> None:
    body = Attach(env_name="Fake-v0", num_envs=125, seed=1).encode()
    reply = send(server, B, MessageType.ATTACH, body=body)
    assert "124 of 128 free" in ErrorBody.decode(reply.body).text
