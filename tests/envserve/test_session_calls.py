"""Calls to several blocks, on the server."""

from __future__ import annotations

from typing import Any

import pytest

from envserve.errors import CallError
from envserve.lane import Call, Outcome
from envserve.settings import HostSettings
from envserve.spaces import codec
from envserve.wire.bodies import CallBody
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.result_report import ResultReport
from tests.envserve.raw_client import RawClient, blocks_of, changed, errors_in
from tests.envserve.session_fakes import FakeServer, attach, collect, exchange

RENDER = codec.encode([["big"], {}])


@pytest.fixture
def client() -> RawClient:
    """Return a client with four envs in two blocks."""
    return RawClient(FakeServer())


def call_of(client: RawClient, *listed: tuple[int, tuple[int, ...]]) -> Any:
    calls = [Call(block, rows, "call", "render", RENDER) for block, rows in listed]
    entries = tuple((block, 1) for block, _ in listed)
    return client.frames(MessageType.CALL, entries, CallBody.from_calls(calls).encode())


def test_call_results_are_cached_up_to_a_limit() -> None:
    policy = HostSettings(num_workers=1, envs_per_worker=8, max_buffered_mib=1)
    client = RawClient(FakeServer(policy), num_envs=8, num_splits=8)
    frames = call_of(client, *((block, (block,)) for block in range(8)))
    client.send(frames)
    picture = codec.encode([bytes(300_000)])
    for block in range(8):
        (reply,) = client.deliver_outcomes([Outcome(block, result=picture)])
        assert bytes(reply.payload) == picture
    (lease,) = [record.lease for record in client.server.protocol.leases.values()]
    assert lease is not None
    assert lease.result_cache.num_bytes == 3 * len(picture)
    again = client.send(changed(frames, attempt=1))
    cached = [blocks_of(each)[0] for each in again if each.payload]
    assert cached == [5, 6, 7]
    (lost,) = ResultReport.decode(again[0].report).errors.values()
    assert lost.code is ErrorCode.CALL_FAILED
    assert "its reply of 300006 bytes was lost" in lost.text
    client.pool.running.clear()
    client.send(client.step(5, seq=2))
    assert not lease.result_cache.num_bytes


def test_a_call_result_above_the_limit_of_the_cache_is_returned() -> None:
    client = RawClient(FakeServer(HostSettings(num_workers=2, max_buffered_mib=1)))
    client.send(call_of(client, (0, (0,))))
    picture = codec.encode([bytes(2 << 20)])
    (reply,) = client.deliver_outcomes([Outcome(0, result=picture)])
    assert bytes(reply.payload) == picture


def test_a_call_is_answered_block_by_block(client: RawClient) -> None:
    frames = call_of(client, (1, (3, 2)), (0, (0,)))
    assert client.send(frames) == []
    (first,) = client.finish(0)
    assert (first.type, blocks_of(first)) == (MessageType.CALL_RESULT, [0])
    assert client.send(changed(frames, attempt=1)) == [changed_attempt(first)]
    error = CallError("it died, during a call")
    (second,) = client.deliver_outcomes([Outcome(1, error=error)])
    assert blocks_of(second) == [1]
    assert ResultReport.decode(second.report).errors[1].code is ErrorCode.CALL_FAILED
    assert client.pool.executed == [(1, None), (0, None)]


def changed_attempt(message: Any) -> Any:
    message.attempt = 1
    return message


def test_an_absent_block_does_not_delay_the_other(client: RawClient) -> None:
    client.send(call_of(client, (0, (0, 1)), (1, (2,))))
    replies = client.finish(0, absent=[1])
    assert {reply.type for reply in replies} == {
        MessageType.CALL_RESULT,
        MessageType.ABSENT,
    }
    (late,) = client.finish(1)
    assert codec.decode(bytes(late.payload)) == [[2, "big"]]


@pytest.mark.parametrize(
    "listed",
    [[(0, (2,))], [(0, ())], [(0, (0, 0))], [(0, (0,)), (1, (0,))]],
    ids=["another block's", "none", "twice", "another block's, of two"],
)
def test_rows_outside_of_their_block_are_rejected(
    client: RawClient, listed: list[tuple[int, tuple[int, ...]]]
) -> None:
    (error,) = errors_in(client.send(call_of(client, *listed)))
    assert error.code is ErrorCode.BAD_MESSAGE
    assert "expected distinct rows in range" in error.text
    assert not client.pool.executed


def test_calls_and_resets_with_options_have_at_most_64_blocks() -> None:
    raw = RawClient(FakeServer(), num_envs=65, num_splits=65)
    entries = tuple((block, 1) for block in range(65))
    calls = [[[block], [[], {}]] for block in range(65)]
    body = {"kind": "call", "name": "render", "calls": calls}
    frames = raw.frames(MessageType.CALL, entries, codec.encode(body))
    (error,) = errors_in(raw.send(frames))
    assert "length <= 64" in error.text
    resets = {"resets": [[None, None]] * 65, "options": codec.encode({"level": 1})}
    frames = raw.frames(MessageType.RESET, entries, codec.encode(resets))
    (error,) = errors_in(raw.send(frames))
    assert "at most 64 blocks in a RESET with options" in error.text
    assert not raw.pool.executed


def test_arguments_of_several_blocks_count_once_per_block() -> None:
    server = FakeServer(HostSettings(num_workers=1, envs_per_worker=200))
    long = codec.encode([["x" * 60_000], {}])
    calls = [Call(row, (row,), "call", "render", long) for row in range(64)]
    raw = RawClient(server, num_envs=64, num_splits=64)
    entries = tuple((block, 1) for block in range(64))
    body = CallBody.from_calls(calls).encode()
    (error,) = errors_in(raw.send(raw.frames(MessageType.CALL, entries, body)))
    assert "at most 1048576 bytes of arguments in total" in error.text
    assert not raw.pool.executed
    client = attach(server, num_envs=64, num_splits=64)
    client.submit_call(calls, 0.0)
    assert len(client.outbox) == 4


def test_a_client_splits_a_call_of_many_blocks_into_messages() -> None:
    server = FakeServer(HostSettings(num_workers=1, envs_per_worker=200))
    client = attach(server, num_envs=130, num_splits=130)
    calls = [Call(row, (row,), "call", "render", RENDER) for row in range(130)]
    client.submit_call(calls, 0.0)
    assert len(client.outbox) == 3
    exchange(client, server, 0.0)
    server.finish_all(0.0)
    exchange(client, server, 0.0)
    results = [codec.decode(outcome.result) for outcome in collect(client)]
    assert results == [[[row, "big"]] for row in range(130)]


@pytest.mark.parametrize("options", [b"\xc0", codec.encode({1: 2}), b"\x81"])
def test_options_that_are_not_a_dict_are_rejected(
    client: RawClient, options: bytes
) -> None:
    body = codec.encode({"resets": [[None, None]], "options": options})
    frames = client.frames(MessageType.RESET, ((0, 1),), body)
    (error,) = errors_in(client.send(frames))
    assert error.code is ErrorCode.BAD_MESSAGE
    assert error.text.startswith("options: ")
    assert not client.pool.executed
