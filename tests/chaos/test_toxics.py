"""Toxics without a network: what they do to a row of messages, and to bytes."""

from __future__ import annotations

import numpy as np
import pytest

from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer, Message, decode, encode
from tests.chaos.toxics import Direction, Toxics
from tests.chaos.zmtp import Piece, Splitter, first_frame

NUM_MESSAGES = 400
GREETING = bytes(64)
READY = b"\x04\x05READY"


def frame(data: Buffer, flags: int = 0) -> bytes:
    """One frame as ZMTP has it on the wire."""
    if len(data) < 256:
        return bytes([flags, len(data)]) + data
    return bytes([flags | 2]) + len(data).to_bytes(8, "big") + data


def on_wire(*frames: Buffer) -> bytes:
    return b"".join(frame(f, 1) for f in frames[:-1]) + frame(frames[-1])


def request(number: int, type_: MessageType = MessageType.STEP) -> bytes:
    message = Message(type=type_, request=number, entries=((0, number),))
    return on_wire(*encode(message), b"rows")


def run(toxics: Toxics, messages: list[bytes]) -> tuple[list[bytes], Direction]:
    direction = Direction(toxics, seed=5)
    going = [out for message in messages for out in direction.take(message)]
    return going + direction.release(), direction


@pytest.mark.parametrize(
    ("toxics", "extra"),
    [
        (Toxics(drop=0.3), -1),
        (Toxics(duplicate=0.3), 1),
        (Toxics(stale_copy=0.3), 1),
        (Toxics(reorder=0.3), 0),
        (Toxics(retry=0.3), 1),
    ],
    ids=["drop", "duplicate", "stale_copy", "reorder", "retry"],
)
def test_a_toxic_strikes_as_often_as_it_should_and_says_how_often(
    toxics: Toxics, extra: int
) -> None:
    messages = [request(i) for i in range(NUM_MESSAGES)]
    going, direction = run(toxics, messages)
    ((_, num_messages), (_, strikes)) = sorted(
        direction.counts.items(), key=lambda item: item[0] != "messages"
    )
    assert num_messages == NUM_MESSAGES
    assert 0.2 * NUM_MESSAGES < strikes < 0.4 * NUM_MESSAGES
    assert len(going) == NUM_MESSAGES + extra * strikes
    assert run(toxics, messages)[0] == going  # the same seed, the same mishaps


@pytest.mark.parametrize(
    ("toxics", "expected", "strikes"),
    [
        (Toxics(), [1, 2, 3], {}),
        (Toxics(drop=1.0), [], {"drop": 3}),
        (Toxics(duplicate=1.0), [1, 1, 2, 2, 3, 3], {"duplicate": 3}),
        # Nothing has overtaken the last one.
        (Toxics(reorder=1.0), [2, 1, 3], {"reorder": 1}),
    ],
)
def test_messages_pass_are_gone_come_twice_or_are_overtaken(
    toxics: Toxics, expected: list[int], strikes: dict[str, int]
) -> None:
    going, direction = run(toxics, [request(n) for n in (1, 2, 3)])
    assert going == [request(n) for n in expected]
    assert direction.counts == {"messages": 3, **strikes}


def test_a_stale_copy_comes_after_up_to_twenty_others() -> None:
    direction = Direction(Toxics(stale_copy=1.0), seed=5)
    first = request(1)
    assert direction.take(first) == [first]
    direction.toxics = Toxics()
    going = [out for i in range(2, 23) for out in direction.take(request(i))]
    assert going.count(first) == 1
    assert len(going) == 22


def test_a_retry_is_the_same_request_with_a_higher_attempt() -> None:
    first, answer = request(1), request(2, MessageType.RESULT)
    going, _ = run(Toxics(retry=1.0), [first, answer, on_wire(b"")])
    assert going[0] == first
    assert going[2:] == [answer, on_wire(b"")]  # requests only
    contents = going[1][first_frame(going[1])]
    original = first[first_frame(first)]
    message, expected = decode([contents]), decode([original])
    assert message.attempt == 1
    message.attempt = 0
    assert message == expected
    assert len(going[1]) == len(first)


def test_resets_come_after_the_mean_number_of_bytes() -> None:
    direction = Direction(Toxics(bytes_until_reset=1000.0), seed=5)
    cuts = [direction.draw_reset(100) for _ in range(10_000)]
    places = [cut for cut in cuts if cut is not None]
    assert direction.counts["reset"] == len(places)
    assert 800 < len(places) < 1200
    assert len(set(places)) > 90
    assert set(places) <= set(range(100))


def test_delays_lie_between_latency_and_jitter() -> None:
    toxics = Toxics(latency_seconds=1.0, jitter_seconds=0.5)
    direction = Direction(toxics, seed=5)
    delays = [direction.draw_delay() for _ in range(1000)]
    assert 1.0 <= min(delays) < 1.1
    assert 1.4 < max(delays) <= 1.5


def test_a_splitter_finds_messages_however_the_bytes_come(
    random_generator: np.random.Generator,
) -> None:
    messages = [
        on_wire(*(random_generator.bytes(size) for size in sizes))
        for sizes in ([0], [1, 0], [255], [256], [70_000, 3, 300], [44])
    ]
    expected = [Piece(READY, False), *(Piece(m, True) for m in messages)]
    wire = GREETING + READY + b"".join(messages)
    for most in (1, 7, 5_000, len(wire)):
        splitter = Splitter()
        pieces: list[Piece] = []
        at = 0
        while at < len(wire):
            size = int(random_generator.integers(1, most + 1))
            pieces += splitter.feed(wire[at : at + size])
            at += size
        greeting = [p for p in pieces if p not in expected]
        assert b"".join(p.data for p in greeting) == GREETING
        assert pieces[len(greeting) :] == expected


def test_a_greeting_is_not_held_back() -> None:
    assert Splitter().feed(GREETING[:10]) == [Piece(GREETING[:10], False)]


def test_the_first_frame_of_less_than_a_message_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected a whole message"):
        first_frame(b"\x00")
