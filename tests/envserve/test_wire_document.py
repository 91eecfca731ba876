"""The worked example in docs/protocol.md equals the encoder's output."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envserve.lane import Call, RenderedFrame, make_blocks
from envserve.slab import Rows
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import leaves_of
from envserve.spaces.variable_length import encode_row
from envserve.wire import constants
from envserve.wire.bodies import (
    Attach,
    Building,
    CallBody,
    Drain,
    FrameRequest,
    FrameResult,
    Granted,
    Pong,
    ResetBody,
    pack_options,
)
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Hello, Join, Welcome
from envserve.wire.message import Buffer, Message, decode, encode
from envserve.wire.rows import RowCodec, RowPart
from envserve.wire.status import Histogram, LeaseStatus, ServerStatus

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
SESSION, BOOT = 0x1122334455667788, 0x99AABBCCDDEEFF01
SPEC = EnvSpec("Tiny-v0", spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2))


#: Body classes by message type.
BODIES: dict[MessageType, Any] = {
    MessageType.HELLO: Hello,
    MessageType.WELCOME: Welcome,
    MessageType.ATTACH: Attach,
    MessageType.GRANTED: Granted,
    MessageType.BUILDING: Building,
    MessageType.RESET: ResetBody,
    MessageType.CALL: CallBody,
    MessageType.PONG: Pong,
    MessageType.DRAIN: Drain,
    MessageType.ERROR: ErrorBody,
    MessageType.JOIN: Join,
    MessageType.STATUS_RESULT: ServerStatus,
    MessageType.FRAME: FrameRequest,
    MessageType.FRAME_RESULT: FrameResult,
}


def example() -> dict[str, list[Buffer]]:
    """Return the messages for two envs in two blocks, from HELLO to RESULT.

    An episode ends, then a worker dies.
    """
    blocks = make_blocks(2, 2, 1)
    rows = Rows.allocate(SPEC, 2)
    rows.action[0][:] = [1, 0]
    rows.reward[:] = [0.5, -1.0]
    rows.observation[0][:] = [[0.25, 0.5], [0.0, 0.125]]
    rows.terminated[1] = True
    rows.final_observation[0][1] = [1.0, -1.0]
    later = Rows.allocate(SPEC, 2)
    later.reward[0] = 1.0
    later.observation[0][0] = [0.5, 0.5]
    entries = ((0, 1), (1, 1))
    welcome = Welcome(
        max_message_bytes=1 << 20,
        lease_seconds=60.0,
        env_names=("Tiny-v0",),
        num_names=1,
        total_envs=128,
        free_envs=128,
    )
    attach = Attach(env_name="Tiny-v0", num_envs=2, seed=7)
    granted = Granted(epoch=1, lease_seconds=60.0, spec=SPEC, blocks=blocks)
    body, _ = RowPart(RowCodec(rows), [(0, 2)]).pack_results()
    later_body, _ = RowPart(RowCodec(later), [(0, 1)]).pack_results()
    calls = [Call(block, (block,), "get", "metadata") for block in range(2)]
    actions = rows.action[0].tobytes()
    reset = ResetBody(resets=(((1,), (5,)),), options=pack_options({"level": 3}))
    looked = FrameRequest(lease=1, rows=(0, 1), width=120, after=(0, 77))
    picture = RenderedFrame(
        row=0, serial=78, text="no picture", seed=7, episode_steps=2
    )
    shown = FrameResult(pictures=(picture,))
    kinds, invited = MessageType, partial(make_message, session=0, epoch=0)
    messages = {
        "HELLO": make_message(
            kinds.HELLO, 1, Hello(client="docs").encode(), boot=0, epoch=0
        ),
        "WELCOME": make_message(kinds.WELCOME, 1, welcome.encode(), epoch=0),
        "ATTACH": make_message(kinds.ATTACH, 2, attach.encode(), epoch=0),
        "GRANTED": make_message(kinds.GRANTED, 2, granted.encode()),
        "STEP": make_message(kinds.STEP, 3, actions, entries=entries),
        "RESULT": make_message(kinds.RESULT, 3, body, entries=entries),
        "ABSENT": make_message(kinds.ABSENT, 4, entries=((1, 2),)),
        "RESULT of block 0": make_message(
            kinds.RESULT, 4, later_body, entries=((0, 2),)
        ),
        "CALL": make_message(
            kinds.CALL, 7, CallBody.from_calls(calls).encode(), entries=((0, 3), (1, 4))
        ),
        "CALL_RESULT of block 1": make_message(
            kinds.CALL_RESULT, 7, entries=((1, 4),), payload=codec.encode([{}])
        ),
        "STATUS": make_message(kinds.STATUS, 7, boot=0, epoch=0),
        "STATUS_RESULT": make_message(
            kinds.STATUS_RESULT, 7, make_status().encode(), epoch=0
        ),
        "FRAME": make_message(
            kinds.FRAME, 8, looked.encode(), session=0, boot=0, epoch=0
        ),
        "FRAME_RESULT": make_message(
            kinds.FRAME_RESULT, 8, shown.encode(), session=0, epoch=0
        ),
        "ASK_DRAIN": make_message(
            kinds.ASK_DRAIN, 7, b"drain", session=0, boot=0, epoch=0
        ),
        "DRAIN": make_message(
            kinds.DRAIN, 7, Drain(grace_ms=8000).encode(), session=0, epoch=0
        ),
        "RESET": make_message(kinds.RESET, 6, reset.encode(), entries=((1, 3),)),
        "BUILDING": make_message(
            kinds.BUILDING, 2, Building(elapsed_ms=250).encode(), epoch=0
        ),
        "PING": make_message(kinds.PING, 5),
        "PONG": make_message(kinds.PONG, 5, Pong(running={1: 1500}).encode()),
        "ERROR": make_message(kinds.ERROR, 8, make_error().encode(), entries=((0, 6),)),
        "DETACH": make_message(kinds.DETACH, 9),
        "DETACHED": make_message(kinds.DETACHED, 9),
        "JOIN": invited(kinds.JOIN, 1, Join(public=bytes(range(32))).encode(), boot=0),
        "JOINED": invited(kinds.JOINED, 1),
    }
    return {name: encode(message) for name, message in messages.items()}


def make_error() -> ErrorBody:
    """Return the error for a STEP whose seq is not block 0's next one."""
    return ErrorBody(code=ErrorCode.GAP, text="block 0: expected seq 4; got 6")


def make_status() -> ServerStatus:
    """Return the status after one step of both rows, which ends row 1's episode."""
    waits = Histogram(bounds=(0.001, 0.01), counts=(2, 0, 0), sum=0.001)
    counts: dict[str, Any] = {"steps": 2, "rows": {"OK": 2}, "batch_seconds": waits}
    lease = LeaseStatus(
        number=1,
        user="ann",
        client="ann (docs)",
        env_name="Tiny-v0",
        num_envs=2,
        seconds=2.5,
        env_seconds=0.0005,
        num_episodes=1,
        episodes=((1, 1, -1.0, 1),),
        **counts,
    )
    return ServerStatus(
        version="1.0", host="sim1", pid=42, num_leases=1, leases=(lease,), **counts
    )


def make_message(
    kind: MessageType, request: int, body: bytes = b"", **changes: Any
) -> Message:
    numbers = {"session": SESSION, "boot": BOOT, "epoch": 1, "request": request}
    return Message(type=kind, body=body, **{**numbers, **changes})


def hex_lines(frame: Buffer) -> str:
    return "\n".join(
        bytes(frame[at : at + 16]).hex(" ") for at in range(0, len(frame), 16)
    )


def documented_frames(name: str) -> list[str]:
    """Return the hex blocks below a message's heading in the example."""
    text = DOCUMENT.read_text()
    section = re.search(rf"^### {name}: .*?(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)
    assert section is not None, f"no example of {name}"
    return re.findall(r"```hex\n(.*?)\n```", section.group(), re.DOTALL)


@pytest.mark.parametrize("name", example())
def test_encoding_produces_the_documented_example(name: str) -> None:
    assert documented_frames(name) == [hex_lines(frame) for frame in example()[name]]


@pytest.mark.parametrize("name", example())
def test_the_documented_example_decodes_and_encodes_to_the_same_bytes(
    name: str,
) -> None:
    frames = [bytes.fromhex(frame) for frame in documented_frames(name)]
    message = decode(frames)
    assert message.type is MessageType[name.split()[0]]
    assert encode(message) == frames
    body = BODIES.get(MessageType(message.type))
    if body is Granted:
        assert Granted.decode(message.body, 2).encode() == message.body
    elif body is not None:
        assert body.decode(message.body).encode() == message.body
    elif message.type is MessageType.RESULT:
        rows = Rows.allocate(SPEC, 2)
        part = RowPart(RowCodec(rows), [(0, len(message.entries))])
        part.unpack_results(message.body)
        assert part.pack_results() == (message.body, b"")


def test_every_message_type_has_an_example() -> None:
    shown = {name.split()[0] for name in example()}
    assert shown == {kind.name for kind in MessageType}


def test_the_documented_text_row_is_what_encode_row_returns() -> None:
    (leaf,) = leaves_of(spaces.Text(3))
    assert hex_lines(encode_row(leaf, "ab").data) in DOCUMENT.read_text()


def test_every_type_code_and_limit_is_documented() -> None:
    text = DOCUMENT.read_text()
    for kind in MessageType:
        assert re.search(rf"^\| {kind.value} \| {kind.name} \|", text, re.MULTILINE)
    for code in ErrorCode:
        assert re.search(rf"^\| {code.value} \| {code.name} \|", text, re.MULTILINE)
    for name in (
        *("MAX_ENTRIES", "MAX_BODY_BYTES", "MAX_ATTACH_BYTES", "MAX_NAMES"),
        *(
            "MAX_REPORT_BYTES",
            "MAX_STATUS_BYTES",
            "MAX_TEXT_BYTES",
            "MAX_TRACEBACK_BYTES",
        ),
        *("MAX_ATTACH_VALUES", "MAX_CALL_BYTES", "MAX_CALL_VALUES"),
        *("RESET_BYTES", "RESET_ROW_BYTES"),
        *("MAX_OPTIONS_BYTES", "MAX_OPTIONS_VALUES", "MAX_ARGUMENT_BLOCKS"),
        *(
            "MAX_ARGUMENT_BYTES",
            "MAX_FRAMES_BYTES",
            "MAX_FRAME_ROWS",
            "MAX_RECORD_BYTES",
        ),
    ):
        assert f"{getattr(constants, name):,}" in text, name
