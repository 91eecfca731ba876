"""Absent blocks on the server: clients are notified, and other blocks continue."""

from __future__ import annotations

from typing import Any, Final

import pytest

from envserve.errors import LocalProtocolError
from envserve.session.states import LeaseState, StateMachine
from envserve.settings import HostSettings
from envserve.wire.bodies import Pong
from envserve.wire.constants import MessageType
from envserve.wire.message import Message
from tests.envserve.raw_client import RawClient, blocks_of, changed
from tests.envserve.session_fakes import FakeServer

RESULT: Final = MessageType.RESULT
ABSENT: Final = MessageType.ABSENT


@pytest.fixture
def client() -> RawClient:
    return RawClient(FakeServer())


def kinds_and_blocks(messages: list[Message]) -> list[tuple[Any, list[int]]]:
    return [(message.type, blocks_of(message)) for message in messages]


def test_a_finished_block_is_answered_although_another_is_absent(
    client: RawClient,
) -> None:
    client.send(client.step(1))
    assert not client.finish(0)
    replies = client.finish(absent=[1])
    assert kinds_and_blocks(replies) == [(ABSENT, [1]), (RESULT, [0])]
    assert {message.request for message in replies} == {replies[0].request}
    assert not replies[0].body
    assert not client.finish(absent=[1])  # already reported
    (result,) = client.finish(1)
    assert blocks_of(result) == [1]
    client.send(client.step(1, seq=2))
    assert kinds_and_blocks(client.finish()) == [(RESULT, [0, 1])]


def test_a_copy_is_answered_with_the_state_of_each_block(client: RawClient) -> None:
    frames = client.step(1)
    client.send(frames)
    client.finish(0, absent=[1])
    replies = client.send(changed(frames, attempt=3))
    assert kinds_and_blocks(replies) == [(ABSENT, [1]), (RESULT, [0])]
    assert [message.attempt for message in replies] == [3, 3]
    for attempt in (3, 4):  # the second copy is sent too soon
        assert not client.send(changed(frames, attempt=attempt), after=0.4)
    client.finish(1)
    again = client.send(changed(frames, attempt=5))
    assert kinds_and_blocks(again) == [(RESULT, [0]), (RESULT, [1])]
    assert len(client.pool.executed) == 2


def test_absent_blocks_of_a_reset_and_a_call_are_reported(client: RawClient) -> None:
    client.send(client.reset({0: (None, None)}), b"one")
    client.send(client.call(2, "call", "render"), b"two")
    replies = client.finish(absent=[0, 1])
    assert kinds_and_blocks(replies) == [(ABSENT, [0]), (ABSENT, [1])]
    done = client.finish(0, 1)
    kinds = [(RESULT, [0]), (MessageType.CALL_RESULT, [1])]
    assert kinds_and_blocks(done) == kinds


def test_a_pong_lists_absent_blocks_as_running(client: RawClient) -> None:
    client.send(client.step(1))
    client.finish(0, absent=[1])
    client.server.receive((b"r", ""), client.frames(MessageType.PING, ()), 4.5)
    (pong,) = client.take_replies()
    assert Pong.decode(pong.body).running == {1: 2500}


# States.


def test_a_block_without_a_running_request_cannot_finish(client: RawClient) -> None:
    client.send(client.step(1, blocks=[0]))
    outcome = client.pool.finish(0)
    client.deliver_outcomes([outcome])
    with pytest.raises(LocalProtocolError, match="block 0: DONE cannot follow DONE"):
        client.deliver_outcomes([outcome])


def test_a_lease_moves_only_forward() -> None:
    machine = StateMachine(LeaseState.BUILDING)
    for state in (LeaseState.GRANTED, LeaseState.CLOSING, LeaseState.ENDED):
        machine.change_to(state)
        with pytest.raises(LocalProtocolError, match=f"from {state.name}"):
            machine.change_to(LeaseState.BUILDING)


def test_repeated_replies_start_with_other_blocks() -> None:
    policy = HostSettings(num_workers=1, envs_per_worker=64)
    client = RawClient(FakeServer(policy), num_envs=40, num_splits=40)
    frames = client.step(1)
    client.send(frames)
    replies = client.finish(*range(39), absent=[39])
    again = client.send(changed(frames, attempt=1))
    orders = [
        [blocks_of(m)[0] for m in each if m.type is RESULT] for each in (replies, again)
    ]
    assert orders[0] == list(range(39))
    assert orders[1] == [*range(32, 39), *range(32)]
