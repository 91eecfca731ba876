"""Users of one server: what one has under a number does not exist for another."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from envserve.wire.bodies import Attach
from envserve.wire.constants import MessageType
from envserve.wire.handshake import ErrorBody, Hello
from envserve.wire.message import Message, Peer, decode, encode
from tests.envserve.session_fakes import FakeServer, make_attach

A: Peer = (0, b"a", "ann")
B: Peer = (0, b"b", "bob")
ATTACH = make_attach().encode()
OTHER = make_attach(num_envs=1).encode()


def say(server: FakeServer, peer: Peer, kind: MessageType, **fields: object) -> Message:
    """Has a user say something under the number 11, by default; returns the answer."""
    numbers: dict[str, object] = {"session": 11, "boot": server.boot}
    message = Message(type=kind, **{**numbers, **fields})  # type: ignore[arg-type]
    server.receive(peer, encode(message), 5.0)
    replies, server.replies = server.replies, []
    assert {reply.peer for reply in replies} == {peer}
    return decode([bytes(frame) for frame in replies[0].frames])


@pytest.fixture
def server() -> FakeServer:
    """Ann has envs under the number 11."""
    server = FakeServer()
    assert say(server, A, MessageType.ATTACH, body=ATTACH).type is MessageType.GRANTED
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
def test_a_number_of_another_user_is_answered_like_one_that_nobody_has(
    server: FakeServer, kind: MessageType, fields: dict[str, object]
) -> None:
    record = server.session.leases["ann", 11]
    before = dataclasses.astuple(dataclasses.replace(record, lease=None, machine=None))  # type: ignore[arg-type]
    executed = list(server.pools["ann", 11].executed)
    known, unknown = (
        say(server, B, kind, session=number, **fields) for number in (11, 12)
    )
    if known.type is MessageType.GRANTED:  # of envs of its own; leases have numbers
        assert (known.epoch, unknown.epoch) == (2, 3)
        known.epoch, known.body = unknown.epoch, unknown.body
    assert dataclasses.replace(known, session=12) == unknown
    record = server.session.leases["ann", 11]
    after = dataclasses.astuple(dataclasses.replace(record, lease=None, machine=None))  # type: ignore[arg-type]
    assert before == after
    assert server.pools["ann", 11].executed == executed
    assert say(server, A, MessageType.PING, epoch=1).type is MessageType.PONG


def test_two_users_may_have_envs_under_one_number(server: FakeServer) -> None:
    assert say(server, B, MessageType.ATTACH, body=OTHER).type is MessageType.GRANTED
    assert say(server, B, MessageType.PING, epoch=2).type is MessageType.PONG
    assert say(server, B, MessageType.PING, epoch=1).type is MessageType.ERROR
    assert say(server, A, MessageType.PING, epoch=1).type is MessageType.PONG
    assert say(server, B, MessageType.DETACH).type is MessageType.DETACHED
    assert [*server.pools] == [("ann", 11)]


def test_a_message_that_fails_ends_no_session_of_another_user(
    server: FakeServer,
) -> None:
    ping = Message(type=MessageType.PING, session=11, boot=server.boot, epoch=1)
    (answer,) = server.session.receive_failed(B, encode(ping))
    assert answer.peer == B  # type: ignore[union-attr]
    assert say(server, A, MessageType.PING, epoch=1).type is MessageType.PONG


def test_who_ends_many_sessions_has_no_others_forgotten(server: FakeServer) -> None:
    say(server, A, MessageType.DETACH)
    for number in range(1000, 1300):
        say(server, B, MessageType.ATTACH, session=number, body=OTHER)
        say(server, B, MessageType.DETACH, session=number)
    answer = say(server, A, MessageType.ATTACH, body=ATTACH)
    assert answer.type is MessageType.DETACHED


def test_users_are_named_and_what_they_call_themselves_is_beside(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "envserve.session")
    for number in range(1000, 1300):  # names that nobody will ask for
        hello = Hello(client="mallory").encode()
        say(server, A, MessageType.HELLO, session=number, body=hello)
    hello = Hello(client="gpu1:9").encode()
    say(server, B, MessageType.HELLO, body=hello)
    say(server, B, MessageType.ATTACH, body=OTHER)
    assert server.session.leases["bob", 11].client == "bob (gpu1:9)"
    assert "lease 2 of bob: 1 Fake-v0, attaching" in caplog.text


def test_envs_of_all_users_count(server: FakeServer) -> None:
    body = Attach(env_name="Fake-v0", num_envs=125, seed=1).encode()
    answer = say(server, B, MessageType.ATTACH, body=body)
    assert "124 of 128 free" in ErrorBody.decode(answer.body).text
