"""The worked example of docs/protocol.md is what the code makes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envserve import codec
from envserve.encoded import encode_row
from envserve.lane import Call, make_blocks
from envserve.slab import Rows
from envserve.spec import EnvSpec, leaves_of
from envserve.wire import (
    Attach,
    Buffer,
    CallBody,
    ErrorCode,
    Granted,
    Hello,
    Message,
    MessageType,
    ResetBody,
    RowCodec,
    RowPart,
    Welcome,
    constants,
    encode,
    pack_options,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
SESSION, BOOT = 0x1122334455667788, 0x99AABBCCDDEEFF01
SPEC = EnvSpec("Tiny-v0", spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2))


def example() -> dict[str, list[Buffer]]:
    """Two envs in two blocks, HELLO to RESULT: an episode ends, then a worker dies."""
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
    kinds = MessageType
    messages = {
        "HELLO": say(kinds.HELLO, 1, Hello(client="docs").encode(), boot=0, epoch=0),
        "WELCOME": say(kinds.WELCOME, 1, welcome.encode(), epoch=0),
        "ATTACH": say(kinds.ATTACH, 2, attach.encode(), epoch=0),
        "GRANTED": say(kinds.GRANTED, 2, granted.encode()),
        "STEP": say(kinds.STEP, 3, actions, entries=entries),
        "RESULT": say(kinds.RESULT, 3, body, entries=entries),
        "ABSENT": say(kinds.ABSENT, 4, entries=((1, 2),)),
        "RESULT of block 0": say(kinds.RESULT, 4, later_body, entries=((0, 2),)),
        "CALL": say(
            kinds.CALL, 6, CallBody.of(calls).encode(), entries=((0, 3), (1, 4))
        ),
        "CALL_RESULT of block 1": say(
            kinds.CALL_RESULT, 6, entries=((1, 4),), payload=codec.encode([{}])
        ),
        "RESET": say(kinds.RESET, 5, reset.encode(), entries=((1, 3),)),
    }
    return {name: encode(message) for name, message in messages.items()}


def say(kind: MessageType, request: int, body: bytes = b"", **changes: Any) -> Message:
    numbers = {"session": SESSION, "boot": BOOT, "epoch": 1, "request": request}
    return Message(type=kind, body=body, **{**numbers, **changes})


def hex_lines(frame: Buffer) -> str:
    return "\n".join(
        bytes(frame[at : at + 16]).hex(" ") for at in range(0, len(frame), 16)
    )


def documented(name: str) -> list[str]:
    """The hex blocks below the heading of a message in the example."""
    text = DOCUMENT.read_text()
    section = re.search(rf"^### {name}: .*?(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)
    assert section is not None, f"no example of {name}"
    return re.findall(r"```hex\n(.*?)\n```", section.group(), re.DOTALL)


@pytest.mark.parametrize("name", example())
def test_the_example_is_what_the_code_makes(name: str) -> None:
    assert documented(name) == [hex_lines(frame) for frame in example()[name]]


def test_the_row_of_a_text_is_what_the_code_makes() -> None:
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
        *("MAX_REPORT_BYTES", "MAX_TEXT_BYTES", "MAX_TRACEBACK_BYTES"),
        *("MAX_ATTACH_VALUES", "MAX_CALL_BYTES", "MAX_CALL_VALUES"),
        *("RESET_BYTES", "RESET_ROW_BYTES"),
        *("MAX_OPTIONS_BYTES", "MAX_OPTIONS_VALUES", "MAX_TOLD_BLOCKS"),
        *("MAX_TOLD_BYTES",),
    ):
        assert f"{getattr(constants, name):,}" in text, name
