"""A server that cannot be reached: padding, late results, and what waits for them."""

from __future__ import annotations

import numpy as np
import pytest

from envserve.errors import ActionError
from envserve.lane import Call, Fault, Outcome, Reset
from envserve.session import ClientSession, ClientState
from envserve.slab import Status
from envserve.wire import Buffer, MessageType, decode
from tests.envserve.session_fakes import (
    FakeServer,
    attach,
    exchange,
    state_of,
    take_outgoing,
)


def advance_to(client: ClientSession, now: float) -> None:
    while client.next_deadline() < now:
        client.advance(client.next_deadline())
    client.advance(now)


def make_overdue(
    server: FakeServer, client: ClientSession, action: int = 50
) -> list[Outcome]:
    """Steps at 1 s, with no answer until 5 s; the server has it, and executes it."""
    client.rows.action[0][:] = action
    client.submit_step([0, 1], 1.0, ticket=1)
    for frames in take_outgoing(client):
        server.receive(b"r", frames, 1.0)
    server.finish_all(1.0)
    server.take_replies()
    advance_to(client, 5.0)
    return client.take_finished()


def statuses(client: ClientSession) -> list[Status]:
    return [Status(value) for value in client.rows.status]


def test_a_step_without_answer_is_padding_after_some_seconds() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_step([0, 1], 1.0, ticket=7)
    take_outgoing(client)
    advance_to(client, 4.4)
    assert not client.has_finished
    advance_to(client, 4.6)
    outcomes = client.take_finished()
    assert [(o.block, o.ticket, o.is_padding) for o in outcomes] == [
        (0, 7, True),
        (1, 7, True),
    ]
    assert statuses(client) == [Status.PENDING] * 4
    assert client.num_in_flight == 0
    assert not client.settle()
    assert state_of(client) is ClientState.READY


def test_a_step_on_a_broken_connection_is_padding_after_a_second() -> None:
    client = attach(FakeServer())
    client.disconnected(1.0)
    client.submit_step([0, 1], 1.2)
    client.advance(1.9)
    assert not client.has_finished
    assert client.next_deadline() <= 2.0
    client.advance(2.0)
    assert [item.is_padding for item in client.take_finished()] == [True, True]


def test_a_connection_that_is_mended_in_time_costs_nothing() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_step([0, 1], 1.0)
    take_outgoing(client)
    client.disconnected(1.1)
    client.connected(1.3)
    client.advance(2.5)
    exchange(client, server, 2.5)
    server.finish_all(2.5)
    exchange(client, server, 2.5)
    assert [item.is_padding for item in client.take_finished()] == [False, False]


def test_who_is_alone_waits() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_step([0, 1], 1.0, is_alone=True)
    take_outgoing(client)
    client.disconnected(1.0)
    advance_to(client, 50.0)
    assert not client.has_finished
    client.connected(50.0)
    exchange(client, server, 50.0)
    server.finish_all(50.0)
    exchange(client, server, 50.0)
    assert statuses(client) == [Status.OK] * 4


def test_a_long_step_is_not_overdue_while_the_server_answers() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_step([0, 1], 0.0)
    now = 0.0
    while now < 100.0:
        exchange(client, server, now)
        now = client.next_deadline()
        client.advance(now)
    assert not client.has_finished


def test_a_late_result_is_delivered_by_the_next_step_which_is_not_sent() -> None:
    server = FakeServer()
    client = attach(server)
    assert [item.is_padding for item in make_overdue(server, client)] == [True, True]
    np.testing.assert_array_equal(client.rows.observation[0], 0)
    exchange(client, server, 6.0)
    np.testing.assert_array_equal(client.rows.observation[0], 0)  # not touched yet

    client.rows.action[0][:] = 60
    client.submit_step([0, 1], 6.0, ticket=3)
    assert [(o.block, o.ticket) for o in client.take_finished()] == [(0, 3), (1, 3)]
    assert statuses(client) == [Status.LATE] * 4
    np.testing.assert_array_equal(client.rows.reward, 50)
    np.testing.assert_array_equal(client.rows.observation[0], [[1, 50]] * 4)
    client.rows.action[0][:] = 70
    client.submit_step([0, 1], 6.0, ticket=4)
    exchange(client, server, 6.0)
    server.finish_all(6.0)
    exchange(client, server, 6.0)
    assert statuses(client) == [Status.OK] * 4
    actions = [actions for _, actions in server.pools[11].executed]
    assert actions == [(50, 50)] * 2 + [(70, 70)] * 2
    assert client.stats()["late_results"] == 2


def test_until_then_further_steps_are_padding_and_not_sent() -> None:
    server = FakeServer()
    client = attach(server)
    make_overdue(server, client)
    for now in (6.0, 7.0):
        client.rows.action[0][:] = 60
        client.submit_step([0], now)
        (outcome,) = client.take_finished()
        assert outcome.is_padding
    exchange(client, server, 8.0)
    assert [actions for _, actions in server.pools[11].executed] == [(50, 50)] * 2


def test_who_is_alone_by_then_waits_for_the_late_result() -> None:
    server = FakeServer()
    client = attach(server)
    make_overdue(server, client)
    client.submit_step([1, 0], 6.0, ticket=3, is_alone=True)
    assert not client.has_finished
    assert client.settle()
    exchange(client, server, 8.0)
    assert sorted(item.block for item in client.take_finished()) == [0, 1]
    assert statuses(client) == [Status.LATE] * 4


def test_the_blocks_of_an_overdue_step_may_be_stepped_one_by_one() -> None:
    server = FakeServer()
    client = attach(server)
    make_overdue(server, client)
    exchange(client, server, 6.0)
    for action in (60, 61):
        client.rows.action[0][:2] = action
        client.submit_step([0], 6.0)
        exchange(client, server, 6.0)
        server.finish_all(6.0)
        exchange(client, server, 6.0)
    assert statuses(client)[:2] == [Status.OK] * 2
    np.testing.assert_array_equal(client.rows.observation[0][:2], [[2, 61]] * 2)
    client.submit_step([1], 6.0)
    assert statuses(client)[2:] == [Status.LATE] * 2
    np.testing.assert_array_equal(client.rows.observation[0][2:], [[1, 50]] * 2)


def test_a_late_row_that_is_not_valid_keeps_its_status_and_its_fault() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_step([0], 1.0)
    for frames in take_outgoing(client):
        server.receive(b"r", frames, 1.0)
    advance_to(client, 5.0)
    assert client.take_finished()[0].is_padding
    fault = Fault(1, Status.ENV_ERROR, "it failed")
    finished = server.pools[11].finish(0, faults=[fault])
    server.pools[11].rows.status[1] = Status.ENV_ERROR
    server.carry_out(server.session.pool_finished(11, [finished]), 5.0)
    exchange(client, server, 5.0)
    client.submit_step([0], 6.0)
    (outcome,) = client.take_finished()
    assert list(outcome.faults) == [fault]
    assert statuses(client)[:2] == [Status.LATE, Status.ENV_ERROR]


def test_a_late_result_that_is_padding_itself_costs_nothing_more() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_step([0], 1.0)
    for frames in take_outgoing(client):
        server.receive(b"r", frames, 1.0)
    advance_to(client, 5.0)
    client.take_finished()
    finished = server.pools[11].finish(0)._replace(is_padding=True)
    server.pools[11].rows.status[:2] = Status.PENDING
    server.carry_out(server.session.pool_finished(11, [finished]), 5.0)
    exchange(client, server, 5.0)
    client.submit_step([0], 6.0)
    exchange(client, server, 6.0)
    server.finish_all(6.0)
    exchange(client, server, 6.0)
    (outcome,) = client.take_finished()
    assert not outcome.is_padding
    assert statuses(client)[:2] == [Status.OK] * 2


def test_padding_of_the_server_is_told_by_block() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_step([0, 1], 1.0)
    exchange(client, server, 1.0)
    pool = server.pools[11]
    padded, other = pool.finish(0)._replace(is_padding=True), pool.finish(1)
    pool.rows.status[:2] = Status.PENDING
    server.carry_out(server.session.pool_finished(11, [padded, other]), 1.0)
    exchange(client, server, 1.0)
    assert [(o.block, o.is_padding) for o in client.take_finished()] == [
        (0, True),
        (1, False),
    ]


def test_a_late_refusal_is_raised_by_the_next_step() -> None:
    server = FakeServer()
    client = attach(server)
    client.rows.action[0][:] = 100
    client.submit_step([0], 1.0)
    for frames in take_outgoing(client):
        server.receive(b"r", frames, 1.0)
    replies = server.take_replies()
    advance_to(client, 5.0)
    client.take_finished()
    for frames in replies:
        client.receive(frames, 5.0)
    client.rows.action[0][:] = 1
    client.submit_step([0], 6.0)
    (outcome,) = client.take_finished()
    assert isinstance(outcome.error, ActionError)
    client.submit_step([0], 6.0)
    exchange(client, server, 6.0)
    server.finish_all(6.0)
    exchange(client, server, 6.0)
    assert statuses(client)[:2] == [Status.OK] * 2


@pytest.mark.parametrize("kind", ["reset", "call"])
def test_resets_and_calls_wait_for_the_overdue_step(kind: str) -> None:
    server = FakeServer()
    client = attach(server)
    make_overdue(server, client)
    types: list[MessageType | int] = []

    def note(frames: list[Buffer]) -> bool:
        types.append(decode(frames).type)
        return True

    if kind == "reset":
        client.submit_reset([Reset(0), Reset(1)], 6.0, ticket=5)
    else:
        client.submit_call(Call(0, "call", "render"), 6.0, ticket=5)
    assert not {decode(f).type for f in take_outgoing(client)} & {
        MessageType.RESET,
        MessageType.CALL,
    }
    advance_to(client, 10.0)
    exchange(client, server, 10.0, filter_request=note)
    server.finish_all(10.0)
    exchange(client, server, 10.0)
    outcomes = client.take_finished()
    assert {item.ticket for item in outcomes} == {5}
    client.submit_step([0, 1], 11.0)
    exchange(client, server, 11.0)
    server.finish_all(11.0)
    exchange(client, server, 11.0)
    if kind == "reset":
        assert statuses(client) == [Status.OK] * 4
        assert client.rows.observation[0][:, 0].tolist() == [1] * 4
    else:
        assert outcomes[0].result
        assert statuses(client) == [Status.LATE] * 4


def test_a_reset_of_some_rows_leaves_the_late_result_of_the_others() -> None:
    server = FakeServer()
    client = attach(server)
    make_overdue(server, client)
    client.submit_reset([Reset(0, (1,))], 6.0)
    exchange(client, server, 6.0)
    pool = server.pools[11]
    server.finish_all(6.0)
    pool.rows.observation[0][0] = [1, 50]  # as a real pool leaves what is not reset
    exchange(client, server, 6.0)
    assert len(client.take_finished()) == 1
    client.submit_step([0], 7.0)
    assert statuses(client)[:2] == [Status.LATE, Status.PENDING]
    assert client.rows.reward[:2].tolist() == [50, 0]
    assert client.rows.observation[0][1].tolist() == [0, 0]


def test_a_server_that_was_restarted_meanwhile_costs_one_lost_row() -> None:
    server = FakeServer(boot=1)
    client = attach(server)
    make_overdue(server, client)
    restarted = FakeServer(boot=2)
    client.connected(6.0)
    for _ in range(2):
        exchange(client, restarted, 6.0)
        restarted.finish_all(6.0)
    client.submit_step([0, 1], 7.0)
    assert len(client.take_finished()) == 2
    assert statuses(client) == [Status.SERVER_LOST] * 4
    assert [a for p in restarted.pools.values() for _, a in p.executed] == [None] * 2


def test_a_late_result_that_was_not_taken_is_gone_with_a_lost_lease() -> None:
    server = FakeServer(boot=1)
    client = attach(server)
    make_overdue(server, client)
    exchange(client, server, 6.0)  # the late result is here
    restarted = FakeServer(boot=2)
    client.connected(6.5)
    for _ in range(2):
        exchange(client, restarted, 6.5)
        restarted.finish_all(6.5)
    client.submit_step([0, 1], 7.0)
    assert len(client.take_finished()) == 2
    assert statuses(client) == [Status.SERVER_LOST] * 4
    np.testing.assert_array_equal(client.rows.final_observation[0], 0)


def test_a_client_that_was_stopped_itself_does_not_pad() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_step([0, 1], 1.0)
    exchange(client, server, 1.0)
    client.advance(1.5)
    server.finish_all(1.5)
    client.advance(2.0)  # asks for a sign of life, and is stopped
    client.advance(100.0)
    assert not client.has_finished
    exchange(client, server, 100.0)
    assert [item.is_padding for item in client.take_finished()] == [False, False]


def test_seconds_without_an_answer_are_counted() -> None:
    server = FakeServer()
    client = attach(server)
    make_overdue(server, client)
    exchange(client, server, 6.0)
    assert client.stats()["unreachable_ms"] == 5000


def test_a_break_before_a_client_was_stopped_does_not_count_either() -> None:
    client = attach(FakeServer())
    client.advance(1.0)
    client.disconnected(1.0)
    client.submit_step([0, 1], 1.1)
    client.advance(100.0)
    assert not client.has_finished
    client.advance(101.0)
    assert [item.is_padding for item in client.take_finished()] == [True, True]


def test_a_break_counts_from_the_first_time_that_it_is_told() -> None:
    client = attach(FakeServer())
    client.submit_step([0, 1], 1.0)
    client.disconnected(1.0)
    client.disconnected(1.9)
    client.advance(2.0)
    assert [item.is_padding for item in client.take_finished()] == [True, True]


def test_the_usual_wait_for_an_answer_is_no_silence() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_step([0, 1], 1.0)
    exchange(client, server, 1.9)
    server.finish_all(1.9)
    exchange(client, server, 1.9)
    assert client.stats()["unreachable_ms"] == 0


def test_a_reset_is_never_overdue() -> None:
    client = attach(FakeServer())
    client.submit_reset([Reset(0)], 1.0)
    client.submit_step([1], 1.0)
    take_outgoing(client)
    advance_to(client, 10.0)
    assert [item.block for item in client.take_finished()] == [1]


def test_a_server_that_does_not_answer_is_a_line_in_the_log_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = FakeServer()
    client = attach(server)
    for began_at in (1.0, 101.0):
        client.disconnected(began_at)
        for now in (began_at, began_at + 1.0, began_at + 2.0):
            client.advance(now)
        client.connected(began_at + 3.0)
        exchange(client, server, began_at + 3.0)
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "tcp://fake:1: no answer, or no connection"
    ] * 2
