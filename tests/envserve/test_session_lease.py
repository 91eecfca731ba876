"""Messages for a lease's operations: copies, gaps, rejections and results."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest

from envserve.errors import EnvStartError
from envserve.lane import Fault, Reset
from envserve.session.server.decisions import Reply
from envserve.slab import Rows, Status
from envserve.spaces import codec
from envserve.wire.constants import ErrorCode, Executed, MessageType
from envserve.wire.message import Message
from envserve.wire.result_report import ResultReport
from envserve.wire.rows import RowCodec, RowPart
from tests.envserve.raw_client import SESSION, RawClient, blocks_of, changed, errors_in
from tests.envserve.session_fakes import SPEC, FakeServer, make_attach


@pytest.fixture
def client() -> RawClient:
    return RawClient(FakeServer())


def unpack(message: Message) -> Rows:
    """Return the rows in a RESULT for both blocks."""
    rows = Rows.allocate(SPEC, 4)
    RowPart(RowCodec(rows), [(0, 4)]).unpack_results(message.body, message.payload)
    return rows


def test_the_result_of_a_step_contains_the_rows(client: RawClient) -> None:
    frames = client.step(0)
    actions = np.array([3, 1, 4, 1], np.int64).tobytes()
    assert not client.send(changed(frames, body=actions))
    (result,) = client.finish()
    rows = unpack(result)
    np.testing.assert_array_equal(rows.reward, [3, 1, 4, 1])
    np.testing.assert_array_equal(rows.observation[0][:, 0], [1, 1, 1, 1])


def test_the_result_of_ended_rows_contains_final_observations(
    client: RawClient,
) -> None:
    for action in range(7):
        client.send(client.step(action, seq=1 + action))
        (result,) = client.finish()
    rows = unpack(result)
    assert rows.terminated.all()
    np.testing.assert_array_equal(rows.final_observation[0][0], [1007, 1006])


def test_a_step_is_answered_when_all_its_blocks_are_done(client: RawClient) -> None:
    client.send(client.step(1))
    assert not client.finish(1)
    (result,) = client.finish(0)
    assert blocks_of(result) == [0, 1]


# Copies.


@pytest.mark.parametrize("attempts", [(0, 1), (0, 2, 1)])
def test_copies_of_a_running_request_are_not_executed_and_the_newest_is_answered(
    client: RawClient, attempts: tuple[int, ...]
) -> None:
    frames = client.step(1)
    for attempt in attempts:
        is_newest = attempt == max(attempts)
        route = b"new route" if is_newest else b"old route"
        client.send(changed(frames, attempt=attempt), route)
    client.server.finish_all(0.0)
    assert len(client.pool.executed) == 2  # once per block
    (reply,) = client.server.replies
    assert reply.peer == (b"new route", "")
    (result,) = client.take_replies()
    assert result.attempt == max(attempts)


def test_a_copy_of_a_finished_request_gets_the_same_reply(client: RawClient) -> None:
    frames = client.step(1)
    client.send(frames)
    (first,) = client.finish()
    (second,) = client.send(changed(frames, attempt=1))
    assert second == dataclasses.replace(first, attempt=1)
    assert len(client.pool.executed) == 2


def test_each_attempt_is_answered_once(client: RawClient) -> None:
    frames = client.step(1)
    client.send(frames)
    replies = client.finish()
    for attempt in [0, 0, 2, 2, 1, 0, 3, 3]:
        replies += client.send(changed(frames, attempt=attempt))
    assert [reply.attempt for reply in replies] == [0, 2, 3]


def test_a_reply_is_repeated_every_second_and_after_eight_copies_every_minute(
    client: RawClient,
) -> None:
    frames = client.step(1)
    client.send(frames)
    client.finish()
    repeated = []
    for attempt in range(1, 2000):
        if client.send(changed(frames, attempt=attempt), after=0.25):
            repeated.append(client.now)
    assert len(repeated) == 8 + 8
    gaps = np.diff(repeated)
    assert gaps[:7].tolist() == [1.0] * 7
    assert gaps[7:].tolist() == [60.0] * 8


def test_a_grant_is_repeated_every_second(client: RawClient) -> None:
    attach = client.frames(MessageType.ATTACH, (), make_attach().encode())
    replies = [client.send(attach, after=0.5) for _ in range(5)]
    types = [MessageType.GRANTED, MessageType.BUILDING] * 2
    assert [one.type for (one,) in replies] == [*types, MessageType.GRANTED]


def test_a_late_copy_is_ignored(client: RawClient) -> None:
    first = client.step(1)
    client.send(first)
    client.finish()
    client.send(client.step(2, seq=2))
    assert not client.send(changed(first, attempt=1))
    assert client.pool.executed[2:] == [(0, (2, 2)), (1, (2, 2))]


def test_a_late_copy_is_ignored_if_one_of_its_blocks_runs_a_later_request(
    client: RawClient,
) -> None:
    first = client.step(1)
    client.send(first)
    client.finish()
    client.send(client.step(2, seq=2, blocks=[0]))
    assert not client.send(changed(first, attempt=1))


def test_a_call_is_answered_again_but_not_executed_again(client: RawClient) -> None:
    frames = client.call(3, "call", "render")
    client.send(frames)
    (first,) = client.finish()
    (second,) = client.send(changed(frames, attempt=1))
    assert second == dataclasses.replace(first, attempt=1)
    assert client.pool.executed == [(1, None)]
    assert codec.decode(bytes(first.payload)) == [[3]]


# Rejections.


@pytest.mark.parametrize(
    ("fields", "code", "executed"),
    [
        ({"entries": ((0, 3), (1, 3))}, ErrorCode.GAP, Executed.NO),
        ({"entries": ((0, 1), (1, 2))}, ErrorCode.GAP, Executed.NO),
        ({"epoch": 9, "attempt": 1}, ErrorCode.FENCED, Executed.UNKNOWN),
        ({"boot": 9, "attempt": 1}, ErrorCode.FENCED, Executed.UNKNOWN),
        ({"entries": ()}, ErrorCode.BAD_MESSAGE, Executed.NO),
        ({"entries": ((0, 1), (0, 1))}, ErrorCode.BAD_MESSAGE, Executed.NO),
        ({"entries": ((2, 1),)}, ErrorCode.BAD_MESSAGE, Executed.NO),
        ({"entries": ((0, 1), (4000, 1))}, ErrorCode.BAD_MESSAGE, Executed.NO),
        ({"body": b""}, ErrorCode.BAD_MESSAGE, Executed.NO),
        ({"body": bytes(31)}, ErrorCode.BAD_MESSAGE, Executed.NO),
        ({"body": bytes(33)}, ErrorCode.BAD_MESSAGE, Executed.NO),
    ],
    ids=str,
)
def test_an_invalid_step_is_rejected_and_not_executed(
    client: RawClient, fields: dict[str, Any], code: ErrorCode, executed: Executed
) -> None:
    (error,) = errors_in(client.send(changed(client.step(1), **fields)))
    assert (error.code, error.executed) == (code, executed)
    assert not client.pool.executed


def test_the_next_seq_of_a_running_block_is_rejected(client: RawClient) -> None:
    client.send(client.step(1))
    (error,) = errors_in(client.send(client.step(1, seq=2)))
    assert error.code is ErrorCode.GAP
    assert len(client.pool.executed) == 2


def test_an_invalid_action_is_rejected_and_does_not_use_up_a_seq(
    client: RawClient,
) -> None:
    actions = np.array([1, 1, 100, 1], np.int64).tobytes()
    (error,) = errors_in(client.send(changed(client.step(1), body=actions)))
    assert error.code is ErrorCode.INVALID_ACTION
    assert error.executed is Executed.NO
    assert "Env 2" in error.text
    assert not client.pool.executed
    client.send(client.step(5))
    assert len(client.pool.executed) == 2


def test_a_copy_of_a_rejected_request_does_not_match_a_later_request(
    client: RawClient,
) -> None:
    rejected = client.step(100)
    assert errors_in(client.send(rejected))
    client.send(client.step(5))
    assert not client.send(changed(rejected, attempt=1))
    assert [actions for _, actions in client.pool.executed] == [(5, 5), (5, 5)]
    client.finish()
    assert not client.send(changed(rejected, attempt=2))


@pytest.mark.parametrize("attempt", [0, 1])
def test_the_error_for_a_malformed_copy_leaves_open_whether_the_request_was_executed(
    client: RawClient, attempt: int
) -> None:
    good = client.step(1)
    bad_body = changed(good, body=b"", attempt=attempt)
    undecodable = [bytes(changed(good, attempt=attempt)[0]) + b"x"]
    for frames in (bad_body, undecodable):
        (error,) = errors_in(client.send(frames))
        assert error.code is ErrorCode.BAD_MESSAGE
        assert error.executed is (Executed.UNKNOWN if attempt else Executed.NO)


def test_a_request_with_a_running_and_an_idle_block_is_ignored(
    client: RawClient,
) -> None:
    client.send(client.step(1, blocks=[0]))
    assert not client.send(client.step(1))
    assert client.pool.executed == [(0, (1, 1))]
    client.send(client.step(1, blocks=[1]))
    assert client.pool.executed == [(0, (1, 1)), (1, (1, 1))]


# Resets and calls.


def test_a_reset_of_some_rows_with_seeds(client: RawClient) -> None:
    client.send(client.reset({1: ((3,), (7,)), 0: (None, None)}))
    assert client.pool.running == {1: Reset(1, (3,), (7,)), 0: Reset(0)}
    (result,) = client.finish()
    assert blocks_of(result) == [1, 0]
    infos = ResultReport.decode(result.report).infos
    assert infos == {row: {"reset": True} for row in (0, 1, 3)}


@pytest.mark.parametrize(
    "resets",
    [{0: ((2,), None)}, {0: ((0, 0), None)}, {0: ((0,), (1, 2))}],
    ids=["another block's row", "a row twice", "too many seeds"],
)
def test_resets_that_do_not_fit_the_block_are_rejected(
    client: RawClient, resets: dict[int, Any]
) -> None:
    (error,) = errors_in(client.send(client.reset(resets)))
    assert error.code is ErrorCode.BAD_MESSAGE
    assert not client.pool.executed


def test_a_call_that_raises_fails_and_uses_up_its_seq() -> None:
    server = FakeServer()
    server.policy = dataclasses.replace(server.policy, exposed=frozenset({"broken"}))
    server.__post_init__()
    client = RawClient(server)
    for seq in (1, 2):
        client.send(client.call(0, "call", "broken", seq=seq))
        (reply,) = client.finish()
        error = ResultReport.decode(reply.report).errors[0]
        assert error.code is ErrorCode.CALL_FAILED
    assert client.pool.executed == [(0, None), (0, None)]


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
def test_attributes_that_are_not_exposed_are_rejected(
    client: RawClient, kind: str, name: str
) -> None:
    (error,) = errors_in(client.send(client.call(0, kind, name, (1,))))
    assert error.code is ErrorCode.REFUSED
    is_valid = name in ("step", "render_mode", "render")
    assert ("--expose" in error.text) is is_valid
    assert not client.pool.executed


def test_faults_and_errors_of_blocks_are_part_of_the_result(client: RawClient) -> None:
    client.send(client.step(1))
    faults = [Fault(row, Status.WORKER_DIED, "was killed", False) for row in (0, 1)]
    error = EnvStartError("gave up", remote_traceback="Traceback: boom")
    pool = client.pool
    (result,) = client.deliver_outcomes(
        [pool.finish(0, faults=faults), pool.finish(1, error=error)]
    )
    report = ResultReport.decode(result.report)
    assert list(report.faults) == faults
    assert list(report.errors) == [1]
    assert report.errors[1].code is ErrorCode.ENV_START_FAILED
    assert report.errors[1].traceback == "Traceback: boom"


# Costs.


def test_a_step_makes_few_function_calls(client: RawClient) -> None:
    """Calls cause cache misses, because simulations run between two steps."""
    protocol, counts = client.server.protocol, []
    for seq in range(1, 21):
        frames = client.step(1, seq=seq)
        calls: list[Any] = []

        def record(frame: Any, event: str, _: Any, calls: list[Any] = calls) -> None:
            if event == "call":
                calls.append(frame.f_code)

        sys.setprofile(record)
        decisions = protocol.receive((b"r", ""), frames, 0.0)
        sys.setprofile(None)
        client.server.carry_out(decisions, 0.0)
        outcomes = [client.pool.finish(block) for block in (0, 1)]
        sys.setprofile(record)
        (reply,) = protocol.pool_finished(("", SESSION), outcomes)
        sys.setprofile(None)
        assert isinstance(reply, Reply)
        counts.append((len(calls), len(set(calls))))
    num_calls, num_functions = min(counts)
    assert num_calls <= 14
    assert num_functions <= 14
