"""Attribute access on many envs at once, on local and remote lanes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.client.attribute_access import values_of
from envserve.client.link.connection import Connection
from envserve.client.vector_env import VectorEnv
from envserve.errors import CallError, CodecError, LocalProtocolError
from envserve.lane import Block
from envserve.spaces import codec
from envserve.wire.constants import MessageType
from envserve.wire.message import decode
from envserve.worker.attribute_calls import (
    CallRequest,
    decode_results,
    encode_call,
    run_call,
    run_call_on_vector_env,
)
from tests.oracle.probe_envs import MODULE

from .conftest import MakeBatch
from .pool_driver import LEDGER
from .session_fakes import make_call


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The request numbers of the CALL messages that clients have sent."""
    numbers = set()
    send = Connection.send

    def record(self: Connection, frames: Any) -> bool:
        message = decode(frames)
        if message.type is MessageType.CALL:
            numbers.add(message.request)
        return send(self, frames)

    monkeypatch.setattr(Connection, "send", record)
    return numbers


def test_an_attribute_of_64_envs_takes_one_message(
    make_batch: MakeBatch, asked: set[int], lane_kind: str
) -> None:
    batch = make_batch.and_reset(LEDGER, 64, 2)
    for ask in (
        lambda: batch.get_attr("difficulty"),
        lambda: batch.set_attr("difficulty", range(64)),
        lambda: batch.call_each("echo", 1),
        lambda: batch.render(),
    ):
        asked.clear()
        ask()
        assert len(asked) == (lane_kind != "local")
    assert batch.get_attr("difficulty") == [*range(64)]


def test_each_env_returns_its_own_value(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(LEDGER, 5, 2)
    batch.set_attr("difficulty", ["a", "b", "c", "d", "e"])
    rows = [3, 0, 4]
    assert batch.call_each("difficulty", env_indices=rows) == ["d", "a", "e"]
    assert batch.call_each("echo", 1, env_indices=[]) == []
    assert batch.call(2, "echo", 1, *"ab") == [1, "a", "b"]
    step = np.arange(5)
    batch.step(step)
    assert [image.max() for image in batch.render([4, 1])] == [1, 1]
    assert batch.render(2).shape == (2, 3, 3)


def test_a_method_is_read_as_a_function_that_calls_it(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(LEDGER, 2, 1)
    assert [echo(7) for echo in batch.get_attr("echo")] == [[7], [7]]


def test_a_value_that_cannot_be_encoded_raises_a_one_line_error() -> None:
    with BatchEnv.local(LEDGER, 2, 1, import_modules=[MODULE]) as batch:
        error = r"^Env 0 \(local\): unwrapped: cannot encode a value of type Ledger"
        with pytest.raises(CallError, match=error):
            batch.get_attr("unwrapped")


def test_keyword_arguments_are_passed_to_methods(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(LEDGER, 3, 2)
    with pytest.raises(CallError, match=r"Env 1 .*: complain: ValueError: too dark"):
        batch.call(1, "complain", text="too dark")
    with pytest.raises(CallError, match=r"Env 0 .*unexpected keyword argument 'x'"):
        batch.call_each("echo", x=1)
    assert batch.step(np.zeros(3, np.int64)).valid.all()


def test_arguments_that_cannot_be_sent_do_not_affect_the_envs(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch.and_reset(LEDGER, 2, 1)
    remedy = r".*; pass a plain value, or, .* in env_kwargs"
    argument: Any
    for argument in (lambda: None, [0] * 70_000, {(1, 2): 3}, np.array([object()])):
        with pytest.raises(CallError, match=rf"^Env 1: echo: arguments\[1\]: {remedy}"):
            batch.call(1, "echo", 0, argument)
        with pytest.raises(CallError, match=rf"^Env 1: echo: x: {remedy}"):
            batch.call(1, "echo", 0, x=argument)
        with pytest.raises(CallError, match=rf"^Env 1: difficulty: value: {remedy}"):
            batch.set_attr("difficulty", [0, argument])
    assert batch.step(np.zeros(2, np.int64)).valid.all()


def test_a_pending_call_must_be_received_before_the_next_step(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch.and_reset(LEDGER, 2, 1)
    batch.send_call("echo", 1)
    for step in (batch.step, batch.send):
        with pytest.raises(LocalProtocolError, match=r"call recv_call\(\) first"):
            step(np.zeros(2, np.int64))
    assert batch.recv_call() == [[1], [1]]


def test_the_name_of_an_attribute_must_be_a_str(make_batch: MakeBatch) -> None:
    envs = VectorEnv(make_batch(LEDGER, 2, 1, infos="all"))
    name: Any
    for name in (1, None, b"echo", ["echo"]):
        for use in (envs.get_attr, envs.call, partial(envs.set_attr, values=1)):
            with pytest.raises(
                TypeError, match=r"name of type str; got .*(1|None|echo)"
            ):
                use(name)
    assert envs.call("echo", 1) == ([1], [1])


def test_values_that_are_too_long_for_one_message_are_set(
    make_batch: MakeBatch, asked: set[int]
) -> None:
    batch = make_batch(LEDGER, 8, 2)
    values = [[row] * 1500 for row in range(8)]
    batch.set_attr("difficulty", values)
    assert len(asked) <= 8
    assert batch.get_attr("difficulty") == values


def test_a_block_calls_as_many_envs_as_fit_into_one_reply() -> None:
    block = Block(0, 4, 8, 0, 0)
    task = CallRequest.decode(encode_call(make_call([4, 6, 7], "call", "x", "y")))
    called = []

    def value_of(position: int) -> Any:
        called.append(position)
        assert task.arguments_for(position) == (["y"], {})
        if position == 0:
            raise ValueError("not that one")
        return bytes(5 << 20)

    outcome = decode_results(run_call(task, value_of), block)
    (fault,), values = outcome.faults, outcome.result
    assert (fault.env_index, fault.text.splitlines()[-1]) == (
        4,
        "ValueError: not that one",
    )
    assert called == [0, 1]
    first, second = codec.decode(values, max_bytes=len(values))
    assert (first, len(second)) == (None, 5 << 20)
    for wrong in (b"", b"\xff\xff\xff\xff", b"\4\0\0\0rows"):
        with pytest.raises(ValueError, match=r"reply|Codec|Validation"):
            decode_results(wrong, block)


def test_the_size_limit_of_a_reply_is_divided_among_the_blocks() -> None:
    task = CallRequest.decode(encode_call(make_call([4, 5], "call", "x"), 64))
    reply = run_call(task, lambda _: bytes(1 << 20))
    assert len(reply) < 2 << 20


def test_a_vector_env_is_called_once_even_if_its_results_are_too_large() -> None:
    block = Block(0, 0, 3, 0, 0)
    task = CallRequest.decode(
        encode_call(make_call([0, 1, 2], "call", "take", 5 << 20))
    )
    called: list[int] = []

    class Env:
        def take(self, size: int) -> bytes:
            called.append(size)
            return bytes(size)

    reply = run_call_on_vector_env(task, Env(), range(3), {})
    fault, _ = decode_results(reply, block).faults
    assert "expected at most 4 MiB" in fault.text
    assert (fault.env_index, called) == (1, [5 << 20])


def test_metadata_is_returned_without_values_that_are_not_plain() -> None:
    metadata = {"render_fps": 30, "x": object(), (1, 2): 0, "modes": [{"y": print}]}
    for name, expected in (("metadata", [{"render_fps": 30}]), ("x", [None])):
        task = CallRequest.decode(encode_call(make_call([0], "get", name)))
        outcome = decode_results(
            run_call(task, lambda _: metadata), Block(0, 0, 1, 0, 0)
        )
        assert values_of(outcome.result) == expected


def test_the_number_of_values_in_a_result_is_limited() -> None:
    block = Block(0, 0, 5, 0, 0)
    task = CallRequest.decode(encode_call(make_call([0, 1, 2, 3, 4], "get", "x")))
    odd: list[Any] = [[{}] * 60_000] * 3
    given = [odd, *[[0] * 60_000] * 4]
    outcome = decode_results(run_call(task, given.__getitem__), block)
    (fault,), values = outcome.faults, outcome.result
    assert "expected at most 131072 values" in fault.text
    assert values_of(values) == [None, *given[1:4]]
    with pytest.raises(CodecError, match="expected at most 262144 values"):
        values_of(codec.encode([*odd, *odd]))
