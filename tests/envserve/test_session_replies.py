"""The replies that a client accepts, and when it resends requests."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from envserve.errors import ActionError, LocalProtocolError
from envserve.session.client.client_session import ClientSession
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer, decode
from tests.envserve.raw_client import changed
from tests.envserve.session_fakes import (
    collect,
    exchange,
    executed,
    make_pair,
    take_outgoing,
)


def step_frames(client: ClientSession, action: Any, now: float = 0.0) -> list[Buffer]:
    client.rows.action[0][:] = action
    client.submit_step(range(len(client.blocks)), now)
    (frames,) = take_outgoing(client)
    return frames


def test_a_step_is_executed_once_and_a_resend_fetches_its_lost_reply() -> None:
    server, client = make_pair()
    server.receive((b"r", ""), step_frames(client, [3, 1, 4, 1]), 0.0)
    server.finish_all(0.0)
    server.take_replies()  # lost
    client.advance(1.0)
    exchange(client, server, 1.0)

    assert [outcome.block for outcome in client.collect()] == [0, 1]
    assert client.num_in_flight == 0
    assert len(executed(server)) == 2
    np.testing.assert_array_equal(client.rows.reward, [3, 1, 4, 1])
    np.testing.assert_array_equal(client.rows.observation[0][:, 0], [1, 1, 1, 1])


def test_a_late_reply_is_not_paired_with_the_next_step() -> None:
    server, client = make_pair()
    server.receive((b"r", ""), step_frames(client, 1), 0.0)
    server.finish_all(0.0)
    (late,) = server.take_replies()
    client.receive(late, 0.0)
    client.collect()
    server.receive((b"r", ""), step_frames(client, 2), 0.0)

    client.receive(late, 0.0)

    assert client.num_late_messages == 1
    assert client.num_in_flight == 2
    assert not client.collect()


def test_a_rejected_action_is_an_error_and_does_not_use_up_a_seq() -> None:
    server, client = make_pair()
    client.rows.action[0][:] = [1, 1, 100, 1]
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.0)
    outcomes = collect(client)
    assert [type(outcome.error) for outcome in outcomes] == [ActionError, ActionError]
    assert "Env 2" in str(outcomes[0].error)
    assert "tcp://fake:1" in str(outcomes[0].error)
    assert not executed(server)
    client.rows.action[0][:] = 5
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.0)
    assert len(executed(server)) == 2


def test_submitting_a_block_in_flight_raises_in_the_client() -> None:
    _, client = make_pair()
    step_frames(client, 1)
    with pytest.raises(LocalProtocolError, match="block 0 is in flight"):
        client.submit_step([0], 0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"session": 12},
        {"epoch": 2},
        {"request": 99},
        {"entries": ((0, 2),)},
        {"entries": ((0, 2), (1, 2))},
        {"type": MessageType.CALL_RESULT},
    ],
    ids=str,
)
def test_a_reply_to_another_request_is_dropped(fields: dict[str, Any]) -> None:
    server, client = make_pair()
    server.receive((b"r", ""), step_frames(client, 1), 0.0)
    server.finish_all(0.0)
    (reply,) = server.take_replies()
    client.receive(changed(reply, **fields), 0.0)
    assert client.num_late_messages == 1
    assert not client.collect()
    client.receive(reply, 0.0)
    assert len(client.collect()) == 2


def test_the_usual_reply_is_recognised_without_decoding_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, client = make_pair()
    server.receive((b"r", ""), step_frames(client, [3, 1, 4, 1]), 0.0)
    server.finish_all(0.0)
    (reply,) = server.take_replies()
    monkeypatch.delattr("envserve.session.client.client_session.decode")
    client.receive(reply, 0.0)
    assert len(client.collect()) == 2
    np.testing.assert_array_equal(client.rows.reward, [3, 1, 4, 1])
    assert client.requests.next_resend() == math.inf


@pytest.mark.parametrize("has_payload", [False, True])
@pytest.mark.parametrize("num_bytes", [-1, 1])
def test_a_reply_of_a_wrong_length_is_dropped(
    num_bytes: int, has_payload: bool
) -> None:
    server, client = make_pair()
    server.receive((b"r", ""), step_frames(client, 1), 0.0)
    server.finish_all(0.0)
    ((reply,),) = server.take_replies()
    wrong = bytes(reply[:num_bytes]) if num_bytes < 0 else bytes(reply) + b"x"
    client.receive([wrong, b"x"] if has_payload else [wrong], 0.0)
    assert client.num_late_messages == 1
    assert not client.collect()
    client.receive([reply], 0.0)
    assert len(client.collect()) == 2


def test_a_usual_reply_ends_the_absence_of_a_silent_server() -> None:
    server, client = make_pair()
    server.receive((b"r", ""), step_frames(client, 1), 0.0)
    for second in range(1, 6):
        client.advance(float(second))
    assert client.client_blocks.is_ready(2)
    assert client.client_blocks.absent == {0, 1}
    server.finish_all(5.0)
    (reply,) = server.take_replies()
    client.receive(reply, 5.0)
    assert not client.requests.liveness.is_unreachable
    assert len(collect(client)) == 2
    assert not client.client_blocks.absent


def test_resends_back_off_and_count_their_attempts() -> None:
    _, client = make_pair()
    step_frames(client, 1, now=0.0)
    sent = []
    while client.next_deadline() < 20.0:
        now = client.next_deadline()
        client.advance(now)
        for message in map(decode, take_outgoing(client)):
            if message.type is MessageType.STEP:
                sent.append((now, message.attempt))
    assert sent == [(1, 1), (3, 2), (7, 3), (11, 4), (15, 5), (19, 6)]
