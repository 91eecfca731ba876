"""Frames and bodies: round trips, limits, and malformed input."""

from __future__ import annotations

import dataclasses
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from envserve.errors import RemoteProtocolError
from envserve.lane import make_blocks
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.bodies import (
    Attach,
    Building,
    CallBody,
    Granted,
    Pong,
    ResetBody,
    pack_options,
)
from envserve.wire.constants import (
    BODY_LIMITS,
    MAX_ATTACH_BYTES,
    MAX_ENTRIES,
    MAX_REPORT_BYTES,
    MAX_TEXT_BYTES,
    ErrorCode,
    Executed,
    MessageType,
)
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Hello
from envserve.wire.message import Message, decode, encode, peek, set_attempt
from envserve.wrappers.specs import WrapperSpec
from tests.envserve.session_fakes import make_call, make_welcome
from tests.oracle.probe_envs import SPACES

U16, U32, U64 = 2**16 - 1, 2**32 - 1, 2**64 - 1

ATTACH = Attach(
    env_name="A-v0",
    num_envs=16,
    num_splits=2,
    seed=2**63 - 1,
    first_env_index=48,
    env_kwargs={"gravity": 9.8, "sizes": [1, 2]},
    wrappers=(
        WrapperSpec("ActionRepeat", {"amount": 4}),
        WrapperSpec("FrameHistory", {"flatten": True, "past_indices": [0, 2]}),
    ),
    autoreset="next_step",
    infos="all",
    spare_envs=True,
    nonfinite="mask",
    vectorized=True,
)
BODIES: list[Any] = [
    Hello(client="host:1"),
    make_welcome(env_names=("A-v0", "B-v0"), num_names=2),
    ATTACH,
    Building(elapsed_ms=5),
    Pong(running={0: 12, 3: 4000}),
    ResetBody(resets=((None, None), ((1, 2), None), ((3, 4), (2**63 - 1, None)))),
    ResetBody(resets=((None, None),), options=pack_options({"level": 3})),
    CallBody.from_calls([make_call([3], "set", "gravity", 1.5)] * 2),
    ErrorBody(
        code=ErrorCode.CALL_FAILED,
        executed=Executed.YES,
        text="no",
        traceback="Traceback",
        env_index=3,
    ),
]


@given(
    type_=st.sampled_from(list(MessageType)),
    flags=st.integers(0, U16),
    session=st.integers(0, U64),
    boot=st.integers(0, U64),
    epoch=st.integers(0, U32),
    request=st.integers(0, U64),
    attempt=st.integers(0, U16),
    entries=st.lists(st.tuples(st.integers(0, U32), st.integers(0, U64)), max_size=5),
    payload=st.binary(max_size=20),
    report=st.binary(max_size=20),
)
def test_decoding_an_encoded_message_returns_it(
    type_: MessageType, entries: list[tuple[int, int]], **fields: Any
) -> None:
    body = b"x" * min(3, BODY_LIMITS[type_])
    message = Message(type=type_, entries=tuple(entries), body=body, **fields)
    assert decode(encode(message)) == message


def test_set_attempt_changes_only_the_attempt() -> None:
    message = Message(type=MessageType.STEP, request=5, entries=((0, 1),))
    (frame,) = encode(message)
    assert decode([set_attempt(frame, 3)]) == dataclasses.replace(message, attempt=3)
    assert decode([set_attempt(frame, 10**6)]).attempt == U16


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_decoding_an_encoded_body_returns_it(body: Any) -> None:
    assert type(body).decode(body.encode()) == body


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_unknown_fields_of_bodies_are_ignored(body: Any) -> None:
    fields = codec.decode(body.encode())
    fields["from_the_future"] = {"deep": [1, 2, 3]}
    assert type(body).decode(codec.encode(fields)) == body


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
@given(
    value=st.sampled_from(
        [None, -1, 2**64 - 1, 1.5, float("nan"), "x", b"x", [], {}, [[]]]
        + [np.zeros(shape, dtype) for shape in ((), (0,), (3,)) for dtype in "?ld"]
    )
)
def test_body_fields_of_a_wrong_type_raise_only_protocol_errors(
    body: Any, value: Any
) -> None:
    """For any field value, decoding succeeds or raises RemoteProtocolError."""
    fields = codec.decode(body.encode())
    for name in fields:
        wrong = codec.encode({**fields, name: value})
        try:
            type(body).decode(wrong)
        except RemoteProtocolError as error:
            assert any(word in str(error) for word in (name, "expected"))  # noqa: PT017
    with pytest.raises(RemoteProtocolError):
        type(body).decode(codec.encode([value]))


@pytest.mark.parametrize("name", SPACES)
def test_granted_transfers_every_kind_of_space(name: str) -> None:
    spec = EnvSpec("A-v0", SPACES[name], SPACES[name])
    blocks = make_blocks(16, 4, 2)
    granted = Granted(epoch=1, lease_seconds=60.0, spec=spec, blocks=blocks)
    again = Granted.decode(granted.encode(), 16)
    assert not spec.differences(again.spec)
    assert again.blocks == granted.blocks
    assert len(granted.encode()) < 2000


@pytest.mark.parametrize(
    "value", [[["X", 1]], [["X", {}]] * 17, [["X" * 201, {}]], {"X": {}}, "X"]
)
def test_malformed_wrappers_raise_protocol_errors(value: Any) -> None:
    fields = codec.decode(ATTACH.encode())
    assert fields["wrappers"][0] == ["ActionRepeat", {"amount": 4}]
    with pytest.raises(RemoteProtocolError, match=r"Attach: expected a .*\.wrappers"):
        Attach.decode(codec.encode({**fields, "wrappers": value}))


@pytest.mark.parametrize(
    "blocks",
    [
        [[0, 3, 0, 0], [3, 6, 1, 0], [6, 7, 1, 0]],
        [[0, 3, 0, 0], [2, 6, 1, 0]],
        [[0, 0, 0, 0], [0, 6, 0, 0]],
        [[0, 6, 0, MAX_ENTRIES]],
        [[0, 6, 0]],
        [3],
        [],
    ],
)
def test_granted_blocks_must_partition_the_requested_rows(blocks: Any) -> None:
    spec = EnvSpec("A-v0", spaces.Discrete(2), spaces.Discrete(2))
    rows = make_blocks(6, 2, 1)
    granted = Granted(epoch=1, lease_seconds=1.0, spec=spec, blocks=rows)
    assert Granted.decode(granted.encode(), 6) == granted
    fields = {**codec.decode(granted.encode()), "blocks": blocks}
    with pytest.raises(RemoteProtocolError, match="blocks"):
        Granted.decode(codec.encode(fields), 6)


def test_encoding_spaces_with_too_long_descriptions_raises_codec_error() -> None:
    values = range(200_000)
    space = spaces.MultiDiscrete([value + 1 for value in values])
    spec = EnvSpec("A-v0", space, space)
    granted = Granted(epoch=1, lease_seconds=1.0, spec=spec, blocks=())
    with pytest.raises(codec.CodecError, match="pass scalar `low` and `high`"):
        granted.encode()


# Malformed frames.

STEP = encode(
    Message(type=MessageType.STEP, session=1, entries=((0, 1),), payload=b"12345678")
)


def patched(offset: int, form: str, value: object) -> list[Any]:
    frame = bytearray(STEP[0])
    struct.pack_into(form, frame, offset, value)
    return [bytes(frame), *STEP[1:]]


MALFORMED: dict[str, list[Any]] = {
    "no frames": [],
    "empty frame": [b""],
    "short prefix": [STEP[0][:43]],
    "frame cut": [STEP[0][:-1], STEP[1]],
    "frame too long": [bytes(STEP[0]) + b"x", STEP[1]],
    "four frames": [*STEP, b"", b""],
    "report too long": [*STEP, bytes(MAX_REPORT_BYTES + 1)],
    "magic": patched(0, "<4s", b"HTTP"),
    "more entries than bytes": patched(38, "<H", 2),
    "too many entries": encode(
        Message(type=MessageType.STEP, entries=((0, 1),) * (MAX_ENTRIES + 1))
    ),
    "body beyond the frame": patched(40, "<I", 1),
    "endless body": patched(40, "<I", U32),
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED)
def test_malformed_frames_raise_protocol_errors(frames: list[Any]) -> None:
    with pytest.raises(RemoteProtocolError, match="expected"):
        decode(frames)


def test_messages_of_unknown_type_or_version_are_decoded_without_entries_and_body() -> (
    None
):
    for frames in (patched(5, "<B", 200), patched(4, "<B", 7)):
        message = decode(frames)
        assert (message.session, message.entries, message.body) == (1, (), b"")


@pytest.mark.parametrize("version", [1, 9])
def test_an_error_of_any_version_can_be_decoded(version: int) -> None:
    body = ErrorBody(code=ErrorCode.VERSION_MISMATCH, text="no").encode()
    error = Message(MessageType.ERROR, version, entries=((1, 2),), body=body)
    assert decode(encode(error)).body == body


def test_peek_decodes_the_prefix_of_a_malformed_message() -> None:
    assert peek([]) is peek([b"short"]) is peek([b"x" * 44]) is None
    message = peek(patched(40, "<I", U32))
    assert message is not None
    assert (message.type, message.session) == (MessageType.STEP, 1)


@pytest.mark.parametrize("name", ["arguments", "not_known"])
@pytest.mark.parametrize("head", [b"\x91", b"\xdd\x00\x0f\x00\x00"], ids=bytes.hex)
def test_very_deep_nesting_raises_a_protocol_error(name: str, head: bytes) -> None:
    body = b"\x81" + codec.encode(name) + head * 100_000 + b"\x90"
    with pytest.raises(RemoteProtocolError):
        CallBody.decode(body)
    with pytest.raises(RemoteProtocolError):
        Hello.decode(body)


def test_too_long_env_kwargs_raise_codec_error() -> None:
    attach = dataclasses.replace(ATTACH, env_kwargs={"map": bytes(MAX_ATTACH_BYTES)})
    with pytest.raises(codec.CodecError, match="env_kwargs"):
        attach.encode()


def test_error_texts_are_cut_and_tracebacks_keep_their_end() -> None:
    body = ErrorBody(
        code=ErrorCode.CALL_FAILED,
        text="t" * 9000,
        traceback="first" + "." * 40_000 + "ValueError: last",
    )
    again = ErrorBody.decode(body.encode())
    assert again.text == "t" * MAX_TEXT_BYTES
    assert again.traceback.endswith("ValueError: last")
    assert "first" not in again.traceback


def test_several_threads_can_decode_a_type_for_the_first_time_at_once() -> None:
    code = """
import os, sys, threading
from envserve.wire.status import LeaseStatus, ServerStatus
sys.setswitchinterval(1e-6)
body = ServerStatus(leases=(LeaseStatus(number=1, rows={"ok": 4}),)).encode()
codes = set()
for _ in range(50):  # in processes that have decoded nothing yet
    if not (pid := os.fork()):
        start = threading.Barrier(6)
        decode = lambda: (start.wait(), ServerStatus.decode(body))
        threads = [threading.Thread(target=decode) for _ in range(6)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        os._exit(0)
    codes.add(os.waitpid(pid, 0)[1])
print(codes)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "{0}\n"
