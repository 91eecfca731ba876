"""The processing time of every message is bounded.

The values in a message are counted before it is decoded. The limits apply to CPU time
and are generous: the most expensive of these messages, which once took half a second,
takes less than 2 ms now.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from envserve.errors import CallError
from envserve.settings import HostSettings
from envserve.spaces import codec
from envserve.wire.bodies import ResetBody, pack_options
from envserve.wire.constants import BODY_LIMITS, MAX_ENTRIES, ErrorCode, MessageType
from envserve.wire.message import Buffer, Message, encode
from tests.envserve.raw_client import SESSION, RawClient, changed, errors_in
from tests.envserve.session_fakes import FakeServer, make_attach, make_call, make_pair

MAX_SECONDS = 0.02
MAX_ATTACH_VALUES = 256
MAX_CALL_VALUES, MAX_CALL_BYTES = 4096, 64 << 10
ENTRIES = ((0, 1), (1, 1))
#: Values with different costs per byte, which fill the messages.
ITEMS: dict[str, Any] = {
    "lists": [],
    "maps": {},
    "numbers": 1,
    "texts": "\u00e9",
    "pairs": {"a": 1},
    "nested": [[[[]]]],
    "arrays": np.zeros((), bool),
}


def filled(head: dict[str, Any], name: str, item: Any, limit: int) -> bytes:
    """Return a body of maximum length, filled with lists of copies of an item."""
    fields = b"".join(codec.encode(part) for pair in head.items() for part in pair)
    body = (0x81 + len(head)).to_bytes() + fields + codec.encode(name)
    encoded = codec.encode(item)
    lists = []
    room = limit - len(body) - 3
    while room > 3 + len(encoded):
        count = min(60_000, (room - 3) // len(encoded))
        lists.append(b"\xdc" + count.to_bytes(2) + encoded * count)
        room -= len(lists[-1])
    return body + b"\xdc" + len(lists).to_bytes(2) + b"".join(lists)


def costly_messages(raw: RawClient) -> Iterator[tuple[str, list[Buffer]]]:
    """Yield the most expensive messages of each type; those for 1,024 rows last."""
    boot = raw.server.boot
    numbers: dict[str, Any] = {"session": SESSION, "boot": boot, "epoch": 1}
    attach = dataclasses.replace(make_attach(), env_name="aeiorntl" * 25).encode()
    unknown_env = Message(MessageType.ATTACH, session=1, boot=boot, body=attach)
    yield "unknown env", encode(unknown_env)
    for kind in MessageType:
        for name, item in ITEMS.items():
            call = {"kind": "set", "name": "x"}
            head = call if kind is MessageType.CALL else {}
            last = {MessageType.CALL: "calls", MessageType.RESET: "resets"}
            body = filled(head, last.get(kind, "env_kwargs"), item, BODY_LIMITS[kind])
            listed = 1 if kind is MessageType.CALL else MAX_ENTRIES
            message = Message(kind, entries=((0, 1),) * listed, body=body, **numbers)
            if kind is MessageType.DETACH:
                message.session += 1
            yield f"{kind.name} of {name}", encode(message)
    whole = [list(range(1024)), [2**62] * 1024]
    body = codec.encode({"resets": [whole] * 50})
    reset = Message(MessageType.RESET, entries=((0, 1),), body=body, **numbers)
    yield "RESET of everything, often", encode(reset)
    yield "largest CALL", raw.call(0, "call", "x", ([0] * (MAX_CALL_VALUES - 20),))
    options = pack_options({"many": [0] * 500, "long": bytes(15 << 10)})
    body = ResetBody(resets=((None, None),) * 63, options=options).encode()
    rest = tuple((block, 1) for block in range(1, 64))
    yield "RESET with options", raw.frames(MessageType.RESET, rest, body)
    raw.finish()
    step = raw.step(1, seq=3)
    seqs = [3] + [2] * 63 + [1] * (raw.num_blocks - 64)
    entries = tuple(enumerate(seqs))
    replies = raw.send(changed(step, entries=((0, 2), *entries[1:])))
    assert not replies, errors_in(replies)
    yield "copy that differs", changed(step, entries=entries, attempt=1)


def test_every_message_is_handled_quickly() -> None:
    policy = HostSettings(num_workers=16, exposed=frozenset({"x"}))
    durations: dict[str, float] = {}
    for _ in range(4):  # the minimum excludes one-time costs
        server = FakeServer(policy)
        raw = RawClient(server, num_envs=1024, num_splits=64)
        for name, frames in costly_messages(raw):
            start = time.thread_time()
            server.receive(("",), frames, 0.0)
            seconds = time.thread_time() - start
            durations[name] = min(seconds, durations.get(name, seconds))
    worst = max(durations, key=lambda name: durations[name])
    assert durations[worst] < MAX_SECONDS, worst


def many_values(count: int) -> dict[str, Any]:
    return {"sizes": [0] * count}


def test_values_of_attach_are_counted_before_they_are_decoded() -> None:
    server = FakeServer(HostSettings(allowed_kwargs=frozenset({"sizes:any"})))
    few = codec.decode(make_attach().encode()) | {"env_kwargs": many_values(200)}
    assert not errors_in(server.replies_to(MessageType.ATTACH, body=codec.encode(few)))
    many = few | {"env_kwargs": many_values(MAX_ATTACH_VALUES)}
    (reply,) = server.replies_to(
        MessageType.ATTACH, session=12, body=codec.encode(many)
    )
    (error,) = errors_in([reply])
    assert error.code is ErrorCode.BAD_MESSAGE
    assert f"at most {MAX_ATTACH_VALUES} values" in error.text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([[0] * MAX_CALL_VALUES], f"at most {MAX_CALL_VALUES} values"),
        ([[np.zeros(1)] * (MAX_CALL_VALUES // 16)], "an array of numbers counts as 16"),
    ],
)
def test_values_of_a_call_are_counted_before_they_are_decoded(
    arguments: Any, text: str
) -> None:
    raw = RawClient(FakeServer(HostSettings(exposed=frozenset({"x"}))))
    call = {"env_index": 0, "kind": "set", "name": "x", "arguments": arguments}
    frames = raw.frames(MessageType.CALL, ((0, 1),), codec.encode(call))
    (error,) = errors_in(raw.send(frames))
    assert error.code is ErrorCode.BAD_MESSAGE
    assert text in error.text


def test_the_length_of_a_reset_is_limited_by_its_number_of_rows() -> None:
    raw = RawClient(FakeServer())  # four envs in two blocks
    short = ResetBody(resets=(((0, 1), (1, 2)), (None, None))).encode()
    allowed = 64 + 24 * 4
    fields = codec.decode(short)
    padding = allowed - len(codec.encode(fields | {"later": b""}))
    longest = codec.encode(fields | {"later": bytes(padding)})
    assert len(longest) == allowed
    longer = codec.encode(fields | {"later": bytes(padding + 1)})
    (error,) = errors_in(raw.send(raw.frames(MessageType.RESET, ENTRIES, longer)))
    assert error.code is ErrorCode.BAD_MESSAGE
    assert f"at most {allowed} bytes for 4 rows" in error.text
    assert not errors_in(raw.send(raw.frames(MessageType.RESET, ENTRIES, longest)))


@pytest.mark.parametrize("num_splits", [1, 2, 64])
def test_the_longest_reset_of_a_client_is_accepted(num_splits: int) -> None:
    policy = HostSettings(num_workers=2)
    raw = RawClient(FakeServer(policy), num_envs=128, num_splits=num_splits)
    resets = {}
    for block in raw.pool.blocks:
        rows = tuple(range(block.start, block.stop))
        resets[block.index] = rows, (2**63 - 1,) * len(rows)
    assert not errors_in(raw.send(raw.reset(resets)))


def test_a_client_does_not_send_a_too_large_attach() -> None:
    kwargs = many_values(MAX_ATTACH_VALUES)
    attach = dataclasses.replace(make_attach(), env_kwargs=kwargs)
    with pytest.raises(codec.CodecError, match=r"env_kwargs and wrappers: .* 256 val"):
        attach.encode()


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ([0] * MAX_CALL_VALUES, "arguments: expected at most 4096 values"),
        (np.zeros(MAX_CALL_BYTES, np.uint8), "arguments: expected at most 65536 bytes"),
    ],
)
def test_a_client_does_not_send_a_too_large_call(argument: Any, text: str) -> None:
    _, client = make_pair()
    with pytest.raises(CallError, match=f"tcp://fake:1: x: .*{text}"):
        client.submit_call([make_call([0], "call", "x", argument)], 0.0)
    assert not client.outbox
