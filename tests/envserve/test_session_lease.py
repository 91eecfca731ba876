"""At most once: copies, gaps, joins and refusals, seen through both halves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from envserve import codec
from envserve.errors import ActionError, CallError, EnvStartError, LocalProtocolError
from envserve.lane import Call, Fault, Reset
from envserve.session import ClientSession
from envserve.slab import Status
from envserve.wire import (
    Buffer,
    ErrorBody,
    ErrorCode,
    Executed,
    Message,
    MessageType,
    decode,
    encode,
)
from tests.envserve.session_fakes import (
    FakePool,
    FakeServer,
    attach,
    exchange,
    take_outgoing,
)


def step_frames(client: ClientSession, action: int, now: float = 0.0) -> list[Buffer]:
    client.rows.action[0][:] = action
    client.submit_step(range(len(client.blocks)), now)
    (frames,) = take_outgoing(client)
    return frames


def pool_of(server: FakeServer) -> FakePool:
    (pool,) = server.pools.values()
    return pool


def reply_errors(server: FakeServer) -> list[ErrorBody]:
    messages = [decode(frames) for frames in server.take_replies()]
    return [ErrorBody.decode(m.body) for m in messages if m.type is MessageType.ERROR]


def changed(frames: list[Buffer], **fields: object) -> list[Buffer]:
    return encode(dataclasses.replace(decode(frames), **fields))  # type: ignore[arg-type]


def test_a_step_runs_and_its_result_lands_in_the_rows() -> None:
    server = FakeServer()
    client = attach(server)
    client.rows.action[0][:] = [3, 1, 4, 1]
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.0)
    server.finish_all(0.0)
    exchange(client, server, 0.0)

    assert [finished.block for finished in client.take_finished()] == [0, 1]
    np.testing.assert_array_equal(client.rows.reward, [3, 1, 4, 1])
    np.testing.assert_array_equal(client.rows.observation[0][:, 0], [1, 1, 1, 1])
    assert client.num_in_flight == 0


def test_final_observations_come_with_ended_rows() -> None:
    server = FakeServer()
    client = attach(server)
    for action in range(7):
        client.rows.action[0][:] = action
        client.submit_step([0, 1], 0.0)
        exchange(client, server, 0.0)
        server.finish_all(0.0)
        exchange(client, server, 0.0)

    assert client.rows.terminated.all()
    np.testing.assert_array_equal(client.rows.final_observation[0][0], [1007, 1006])


def test_one_result_answers_a_request_when_all_its_blocks_are_done() -> None:
    server = FakeServer()
    client = attach(server)
    server.receive(b"r", step_frames(client, 1), 0.0)
    server.finish(11, 1, 0.0)
    assert not server.replies
    server.finish(11, 0, 0.0)
    (frames,) = server.take_replies()
    assert [block for block, _ in decode(frames).entries] == [0, 1]


def test_a_copy_of_a_running_request_joins_it() -> None:
    server = FakeServer()
    client = attach(server)
    frames = step_frames(client, 1)
    server.receive(b"old route", frames, 0.0)
    server.receive(b"new route", changed(frames, attempt=1), 0.0)
    server.finish_all(0.0)

    assert len(pool_of(server).executed) == 2  # two blocks, each once
    (reply,) = server.replies
    assert reply.route == b"new route"
    assert decode(reply.frames).attempt == 1


def test_a_copy_of_a_done_request_is_answered_again_with_the_same_bytes() -> None:
    server = FakeServer()
    client = attach(server)
    frames = step_frames(client, 1)
    server.receive(b"r", frames, 0.0)
    server.finish_all(0.0)
    server.receive(b"r", changed(frames, attempt=1), 0.0)

    first, second = server.take_replies()
    assert second == changed(first, attempt=1)
    assert len(pool_of(server).executed) == 2


def test_a_copy_is_answered_once_however_often_it_comes() -> None:
    server = FakeServer()
    client = attach(server)
    frames = step_frames(client, 1)
    server.receive(b"r", frames, 0.0)
    server.finish_all(0.0)
    for attempt in [0, 0, 2, 2, 1, 0, 3, 3]:
        server.receive(b"r", changed(frames, attempt=attempt), 0.0)

    attempts = [decode(reply).attempt for reply in server.take_replies()]
    assert attempts == [0, 2, 3]


def test_an_older_copy_does_not_take_the_answer_of_a_newer_one() -> None:
    server = FakeServer()
    client = attach(server)
    frames = step_frames(client, 1)
    server.receive(b"r", frames, 0.0)
    server.receive(b"new route", changed(frames, attempt=2), 0.0)
    server.receive(b"old route", changed(frames, attempt=1), 0.0)
    server.finish_all(0.0)

    (reply,) = server.replies
    assert reply.route == b"new route"
    assert decode(reply.frames).attempt == 2


def test_a_lost_reply_is_fetched_by_the_resend() -> None:
    server = FakeServer()
    client = attach(server)
    server.receive(b"r", step_frames(client, 9), 0.0)
    server.finish_all(0.0)
    server.take_replies()  # lost
    client.advance(1.0)
    exchange(client, server, 1.0)

    assert len(client.take_finished()) == 2
    assert len(pool_of(server).executed) == 2
    np.testing.assert_array_equal(client.rows.reward, [9, 9, 9, 9])


def test_a_late_copy_is_ignored_and_counted() -> None:
    server = FakeServer()
    client = attach(server)
    first = step_frames(client, 1)
    server.receive(b"r", first, 0.0)
    server.finish_all(0.0)
    exchange(client, server, 0.0)
    client.take_finished()
    server.receive(b"r", step_frames(client, 2), 0.0)
    server.take_replies()

    server.receive(b"r", first, 0.0)

    assert not server.replies
    assert pool_of(server).executed[2:] == [(0, (2, 2)), (1, (2, 2))]


def test_a_late_reply_is_not_taken_for_that_of_the_next_step() -> None:
    server = FakeServer()
    client = attach(server)
    server.receive(b"r", step_frames(client, 1), 0.0)
    server.finish_all(0.0)
    (late,) = server.take_replies()
    client.receive(late, 0.0)
    client.take_finished()
    server.receive(b"r", step_frames(client, 2), 0.0)

    client.receive(late, 0.0)

    assert not client.has_finished
    assert client.late_messages == 1
    assert client.num_in_flight == 2


def test_a_gap_is_an_error_and_nothing_runs() -> None:
    server = FakeServer()
    client = attach(server)
    frames = changed(step_frames(client, 1), entries=((0, 3), (1, 3)))
    server.receive(b"r", frames, 0.0)

    (error,) = reply_errors(server)
    assert error.code is ErrorCode.GAP
    assert error.executed is Executed.NO
    assert not pool_of(server).executed


def test_the_next_seq_of_a_running_block_is_a_gap() -> None:
    server = FakeServer()
    client = attach(server)
    frames = step_frames(client, 1)
    server.receive(b"r", frames, 0.0)
    server.receive(b"r", changed(frames, request=99, entries=((0, 2), (1, 2))), 0.0)

    (error,) = reply_errors(server)
    assert error.code is ErrorCode.GAP
    assert len(pool_of(server).executed) == 2


def test_another_epoch_is_fenced() -> None:
    server = FakeServer()
    client = attach(server)
    server.receive(b"r", changed(step_frames(client, 1), epoch=9, attempt=1), 0.0)

    (error,) = reply_errors(server)
    assert error.code is ErrorCode.FENCED
    assert error.executed is Executed.UNKNOWN
    assert not pool_of(server).executed


def test_another_boot_is_fenced() -> None:
    server = FakeServer()
    client = attach(server)
    server.receive(b"r", changed(step_frames(client, 1), boot=9), 0.0)

    (error,) = reply_errors(server)
    assert error.code is ErrorCode.FENCED
    assert not pool_of(server).executed


def test_an_invalid_action_is_refused_and_uses_up_no_seq() -> None:
    server = FakeServer()
    client = attach(server)
    client.rows.action[0][:] = [1, 1, 100, 1]
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.0)
    outcomes = client.take_finished()

    assert [type(outcome.error) for outcome in outcomes] == [ActionError, ActionError]
    assert "Env 2" in str(outcomes[0].error)
    assert "tcp://fake:1" in str(outcomes[0].error)
    assert not pool_of(server).executed
    client.rows.action[0][:] = 5
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.0)
    assert len(pool_of(server).executed) == 2


def test_a_copy_of_a_refused_request_cannot_take_the_seq_of_the_next() -> None:
    server = FakeServer()
    client = attach(server)
    refused = step_frames(client, 100)
    server.receive(b"r", refused, 0.0)
    for frames in server.take_replies():
        client.receive(frames, 0.0)
    client.take_finished()
    server.receive(b"r", step_frames(client, 5), 0.0)

    server.receive(b"r", refused, 0.0)

    assert not server.replies
    assert [actions for _, actions in pool_of(server).executed] == [(5, 5), (5, 5)]
    server.finish_all(0.0)
    server.take_replies()
    server.receive(b"r", refused, 0.0)
    assert not server.replies


@pytest.mark.parametrize("size", [0, 31, 33])
def test_actions_of_a_wrong_size_are_a_bad_message(size: int) -> None:
    server = FakeServer()
    client = attach(server)
    server.receive(b"r", changed(step_frames(client, 1), body=bytes(size)), 0.0)

    (error,) = reply_errors(server)
    assert error.code is ErrorCode.BAD_MESSAGE
    assert not pool_of(server).executed


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_bad_copy_of_a_request_does_not_deny_that_another_was_executed(
    attempt: int,
) -> None:
    server = FakeServer()
    client = attach(server)
    good = step_frames(client, 1)
    bad_payload = changed(good, body=b"", attempt=attempt)
    undecodable = [bytes(changed(good, attempt=attempt)[0]) + b"x"]
    for frames in (bad_payload, undecodable):
        server.receive(b"r", frames, 0.0)
        (error,) = reply_errors(server)
        assert error.code is ErrorCode.BAD_MESSAGE
        assert error.executed is (Executed.UNKNOWN if attempt else Executed.NO)


@pytest.mark.parametrize(
    "entries", [(), ((0, 1), (0, 1)), ((2, 1),), ((0, 1), (4000, 1))]
)
def test_blocks_that_do_not_fit_are_a_bad_message(
    entries: tuple[tuple[int, int], ...],
) -> None:
    server = FakeServer()
    client = attach(server)
    server.receive(b"r", changed(step_frames(client, 1), entries=entries), 0.0)

    (error,) = reply_errors(server)
    assert error.code is ErrorCode.BAD_MESSAGE
    assert not pool_of(server).executed


def test_blocks_of_different_requests_cannot_be_mixed() -> None:
    server = FakeServer()
    client = attach(server)
    client.rows.action[0][:] = 1
    client.submit_step([0], 0.0)
    exchange(client, server, 0.0)
    client.submit_step([1], 0.0)
    (frames,) = take_outgoing(client)
    both = Message(
        type=MessageType.STEP,
        session=11,
        boot=server.boot,
        epoch=1,
        request=50,
        entries=((0, 1), (1, 1)),
        payload=bytes(32),
    )
    server.receive(b"r", encode(both), 0.0)
    assert pool_of(server).executed == [(0, (1, 1))]
    server.receive(b"r", frames, 0.0)
    assert pool_of(server).executed == [(0, (1, 1)), (1, (1, 1))]


def test_reset_of_some_rows_with_seeds() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_reset([Reset(1, (3,), (7,)), Reset(0)], 0.0)
    exchange(client, server, 0.0)
    assert pool_of(server).running == {1: Reset(1, (3,), (7,)), 0: Reset(0)}
    server.finish_all(0.0)
    exchange(client, server, 0.0)
    outcomes = {outcome.block: outcome for outcome in client.take_finished()}
    assert outcomes[0].infos == {0: {"reset": True}}
    assert outcomes[1].infos == {2: {"reset": True}}


@pytest.mark.parametrize(
    "reset", [Reset(0, (2,)), Reset(0, (0, 0)), Reset(0, (0,), (1, 2))]
)
def test_resets_that_do_not_fit_the_block_are_refused(reset: Reset) -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_reset([reset], 0.0)
    exchange(client, server, 0.0)
    (outcome,) = client.take_finished()
    assert isinstance(outcome.error, LocalProtocolError)
    assert not pool_of(server).executed


def test_a_call_is_answered_again_without_being_executed_again() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_call(Call(3, "call", "render"), 0.0)
    (frames,) = take_outgoing(client)
    server.receive(b"r", frames, 0.0)
    server.finish_all(0.0)
    server.receive(b"r", changed(frames, attempt=1), 0.0)

    first, second = server.take_replies()
    assert second == changed(first, attempt=1)
    assert pool_of(server).executed == [(1, None)]
    client.receive(first, 0.0)
    client.receive(second, 0.0)
    (outcome,) = client.take_finished()
    assert codec.decode(outcome.result) == ["render"]


def test_a_call_that_raises_fails_and_uses_up_its_seq() -> None:
    server = FakeServer()
    server.policy = dataclasses.replace(server.policy, exposed=frozenset({"broken"}))
    server.__post_init__()
    client = attach(server)
    for _ in range(2):
        client.submit_call(Call(0, "call", "broken"), 0.0)
        exchange(client, server, 0.0)
        server.finish_all(0.0)
        exchange(client, server, 0.0)
        (outcome,) = client.take_finished()
        assert isinstance(outcome.error, CallError)
    assert pool_of(server).executed == [(0, None), (0, None)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("call", "step"),
        ("get", "__class__"),
        ("set", "render_mode"),
        ("get", "render"),
        ("get", "unwrapped.x"),
        ("get", ""),
    ],
)
def test_attributes_that_are_not_exposed_are_refused(kind: str, name: str) -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_call(Call(0, kind, name, (1,)), 0.0)  # type: ignore[arg-type]
    exchange(client, server, 0.0)
    (outcome,) = client.take_finished()
    assert isinstance(outcome.error, CallError)
    assert "--expose" in str(outcome.error)
    assert not pool_of(server).executed


def test_faults_and_errors_of_single_blocks_come_with_the_result() -> None:
    server = FakeServer()
    client = attach(server)
    server.receive(b"r", step_frames(client, 1), 0.0)
    pool = pool_of(server)
    faults = [Fault(row, Status.WORKER_DIED, "was killed", False) for row in (0, 1)]
    error = EnvStartError("gave up", remote_traceback="Traceback: boom")
    finished = [pool.finish(0, faults=faults), pool.finish(1, error=error)]
    server.carry_out(server.session.pool_finished(11, finished), 0.0)
    exchange(client, server, 0.0)

    first, second = client.take_finished()
    assert first.faults == faults
    assert first.error is None
    assert isinstance(second.error, EnvStartError)
    assert second.error.remote_traceback == "Traceback: boom"
    assert "tcp://fake:1" in str(second.error)


def test_submitting_a_block_in_flight_is_an_error_here() -> None:
    server = FakeServer()
    client = attach(server)
    step_frames(client, 1)
    with pytest.raises(LocalProtocolError, match="block 0 is in flight"):
        client.submit_step([0], 0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"session": 12},
        {"epoch": 2},
        {"request": 99},
        {"entries": ((0, 1),)},
        {"entries": ((0, 2), (1, 2))},
        {"type": MessageType.CALL_RESULT},
    ],
    ids=str,
)
def test_an_answer_to_something_else_is_dropped(fields: dict[str, object]) -> None:
    server = FakeServer()
    client = attach(server)
    server.receive(b"r", step_frames(client, 1), 0.0)
    server.finish_all(0.0)
    (answer,) = server.take_replies()
    client.receive(changed(answer, **fields), 0.0)
    assert not client.has_finished
    assert client.late_messages == 1
    client.receive(answer, 0.0)
    assert len(client.take_finished()) == 2


def test_resends_back_off_and_count_their_attempts() -> None:
    server = FakeServer()
    client = attach(server)
    step_frames(client, 1, now=0.0)
    sent = []
    while client.next_deadline() < 20.0:
        now = client.next_deadline()
        client.advance(now)
        for message in map(decode, take_outgoing(client)):
            if message.type is MessageType.STEP:
                sent.append((now, message.attempt))
    assert sent == [(1, 1), (3, 2), (7, 3), (11, 4), (15, 5), (19, 6)]
