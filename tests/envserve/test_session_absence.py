"""Absent blocks on the client: when blocks become absent, and their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envserve.errors import LocalProtocolError
from envserve.lane import Outcome, Reset
from envserve.session.client.client_session import ClientSession
from envserve.session.states import ClientState
from envserve.slab import Status
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer, Message, decode, encode
from tests.envserve.session_fakes import (
    FakeServer,
    absent_blocks,
    advance_to,
    attach,
    attach_and_step,
    collect,
    exchange,
    finish,
    make_pair,
    pass_time,
    state_of,
    step_all,
    take_outgoing,
)

OK = [Status.OK] * 4


def step_without_reply(
    server: FakeServer, client: ClientSession, action: int = 50
) -> list[list[Buffer]]:
    """Step at 1 s, and advance to 5 s; return the server's undelivered replies."""
    client.rows.action[0][:] = action
    client.submit_step([0, 1], 1.0)
    for frames in take_outgoing(client):
        server.receive((b"r", ""), frames, 1.0)
    server.finish_all(1.0)
    replies = server.take_replies()
    advance_to(client, 5.0)
    return replies


# Unresponsive servers.


def test_a_step_without_a_reply_becomes_absent_after_some_seconds() -> None:
    client = attach_and_step()
    client.submit_step([0, 1], 1.0)
    take_outgoing(client)
    advance_to(client, 3.4)
    assert not client.client_blocks.is_ready(1)
    advance_to(client, 4.6)
    assert client.client_blocks.is_ready(1)
    assert client.client_blocks.absent == {0, 1}
    assert not client.client_blocks.is_ready(1)  # reported only once per block
    assert collect(client) == []
    assert client.num_in_flight == 2
    assert state_of(client) is ClientState.READY
    assert client.rows.final_observation[0][:, 0].tolist() == [3] * 4


def test_a_step_on_a_broken_connection_becomes_absent_after_a_second() -> None:
    client = attach(FakeServer())
    client.record_disconnect(0.1)
    client.record_connect(0.3)  # after less than a second, so the block is not absent
    client.record_disconnect(1.0)
    client.submit_step([0, 1], 1.2)
    client.record_disconnect(1.8)  # the time is measured from the first call
    client.advance(1.9)
    assert not absent_blocks(client)
    assert client.next_deadline() <= 2.0
    client.advance(2.0)
    assert absent_blocks(client) == {0, 1}
    client.record_connect(2.1)
    assert absent_blocks(client) == {0, 1}  # until the server's next message


def test_operations_submitted_to_an_unreachable_server_are_absent_at_once() -> None:
    server, client = make_pair()
    client.submit_step([0], 1.0)
    take_outgoing(client)
    advance_to(client, 5.0)
    assert absent_blocks(client) == {0}
    client.submit_reset([Reset(1)], 5.0)
    assert client.client_blocks.is_ready(1)
    assert client.client_blocks.absent == {0, 1}
    with pytest.raises(LocalProtocolError, match="block 0 is in flight"):
        client.submit_step([0], 5.0)
    exchange(client, server, 6.0)  # the reply arrives
    assert absent_blocks(client) == set()


def test_a_late_result_belongs_to_the_action_that_was_sent() -> None:
    server, client = make_pair()
    replies = step_without_reply(server, client)
    client.rows.action[0][:] = 60  # the step has already been sent
    for frames in replies:
        client.receive(frames, 6.0)
    np.testing.assert_array_equal(client.rows.observation[0], 0)  # not written yet
    outcomes = collect(client)
    assert [outcome.block for outcome in outcomes] == [0, 1]
    assert not client.client_blocks.absent
    np.testing.assert_array_equal(client.rows.reward, 50)
    np.testing.assert_array_equal(client.rows.observation[0], [[1, 50]] * 4)
    step_all(client, server, 6.0, 70)
    assert client.rows.status.tolist() == OK
    actions = [actions for _, actions in server.pools["", 11].executed]
    assert actions == [(50, 50)] * 2 + [(70, 70)] * 2


def test_time_in_which_the_client_was_suspended_does_not_count_as_silence() -> None:
    server, client = make_pair()
    client.submit_step([0, 1], 1.0)
    exchange(client, server, 1.0)
    client.advance(1.5)
    server.finish_all(1.5)
    client.advance(2.0)  # sends a PING, and is suspended
    client.advance(100.0)
    assert not absent_blocks(client)
    exchange(client, server, 100.0)
    assert len(collect(client)) == 2
    client.record_disconnect(100.0)
    client.submit_step([0, 1], 100.1)
    client.advance(600.0)  # suspended again
    assert not absent_blocks(client)
    assert state_of(client) is ClientState.READY
    client.advance(601.0)
    assert absent_blocks(client) == {0, 1}


def test_unreachable_time_counts_silences_of_more_than_a_second() -> None:
    server, client = make_pair()
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.9)
    assert len(finish(client, server, 0.9)) == 2
    assert client.stats()["unreachable_ms"] == 0
    step_without_reply(server, client)
    exchange(client, server, 6.0)
    assert client.stats()["unreachable_ms"] == 5000


def test_each_silence_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    server, client = make_pair()
    for start in (1.0, 101.0):
        client.record_disconnect(start)
        for now in (start, start + 1.0, start + 2.0):
            client.advance(now)
        client.record_connect(start + 3.0)
        exchange(client, server, start + 3.0)
    assert (
        caplog.messages
        == [
            "tcp://fake:1: no connection for 1 s; waiting for the server",
            "tcp://fake:1: the server replies again",
        ]
        * 2
    )


# ABSENT messages.


def split_pair(**options: Any) -> tuple[FakeServer, ClientSession]:
    """Return a pair after a step at 1 s; block 0 is done, and block 1 is absent."""
    server, client = make_pair(**options)
    client.rows.action[0][:] = 5
    client.submit_step([0, 1], 1.0)
    exchange(client, server, 1.0)
    server.carry_out(server.protocol.pool_finished(("", 11), [], {1}), 1.0)
    server.finish(("", 11), 0, 1.0)
    return server, client


def blocks_of(outcomes: list[Outcome]) -> list[int]:
    return [outcome.block for outcome in outcomes]


def test_an_absent_block_does_not_delay_the_other_blocks_of_its_request() -> None:
    server, client = split_pair()
    exchange(client, server, 1.0)
    assert blocks_of(collect(client)) == [0]
    assert client.client_blocks.absent == {1}
    assert client.rows.reward.tolist() == [5, 5, 0, 0]
    client.submit_step([0], 2.0)
    assert blocks_of(finish(client, server, 2.0)) == [0, 1]
    assert not client.client_blocks.absent
    assert client.rows.reward.tolist() == [5] * 4
    step_all(client, server, 2.0)
    assert client.rows.status.tolist() == OK


@pytest.mark.parametrize("num_lost", [1, 2, 3])
def test_a_lost_result_is_requested_again_while_another_block_is_absent(
    num_lost: int,
) -> None:
    server, client = split_pair()
    lost: list[list[Buffer]] = []

    def is_kept(frames: list[Buffer]) -> bool:
        if decode(frames).type is MessageType.RESULT and len(lost) < num_lost:
            lost.append(frames)
            return False
        return True

    pass_time(client, server, 1.0, until=20.0, filter_reply=is_kept)
    assert len(lost) == num_lost
    assert blocks_of(collect(client)) == [0]
    assert client.client_blocks.absent == {1}


def test_a_reply_to_a_whole_request_is_dropped_after_a_reply_to_one_block() -> None:
    server, client = split_pair()
    exchange(client, server, 1.0)
    collect(client)
    (request,) = client.requests.unanswered.values()
    reply = Message(
        type=MessageType.RESULT,
        session=11,
        boot=server.boot,
        epoch=client.requests.epoch,
        request=request.id,
        entries=request.entries,
        body=bytes(4 * (8 + 3 + 16)),
    )
    client.receive(encode(reply), 1.0)
    assert client.num_late_messages == 1
    assert collect(client) == []


@pytest.mark.parametrize("field", ["request", "epoch", "session"])
def test_an_absent_message_of_another_request_is_ignored(field: str) -> None:
    server, client = split_pair()
    absent_message, _ = server.take_replies()
    message = decode(absent_message)
    assert message.type is MessageType.ABSENT
    setattr(message, field, getattr(message, field) + 1)
    client.receive(encode(message), 1.0)
    assert not absent_blocks(client)
    assert client.num_late_messages == 1
