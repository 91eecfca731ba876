"""The worked example of docs/protocol.md is what the code makes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from envserve.lane import make_blocks
from envserve.slab import Rows
from envserve.spec import EnvSpec
from envserve.wire import (
    Attach,
    Buffer,
    ErrorCode,
    Granted,
    Hello,
    Message,
    MessageType,
    RowCodec,
    Welcome,
    constants,
    encode,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
SESSION, BOOT = 0x1122334455667788, 0x99AABBCCDDEEFF01
SPEC = EnvSpec("Tiny-v0", spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2))


def example() -> dict[str, list[Buffer]]:
    """Two envs in two blocks: HELLO to RESULT; the second env's episode ends."""
    blocks = make_blocks(2, 2, 1)
    rows = Rows.allocate(SPEC, 2)
    rows.action[0][:] = [1, 0]
    rows.reward[:] = [0.5, -1.0]
    rows.observation[0][:] = [[0.25, 0.5], [0.0, 0.125]]
    rows.terminated[1] = True
    rows.final_observation[0][1] = [1.0, -1.0]
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
    part = RowCodec(rows).part([(0, 2)])
    messages = {
        "HELLO": Message(
            type=MessageType.HELLO,
            session=SESSION,
            request=1,
            body=Hello(client="docs").encode(),
        ),
        "WELCOME": Message(
            type=MessageType.WELCOME,
            session=SESSION,
            boot=BOOT,
            request=1,
            body=welcome.encode(),
        ),
        "ATTACH": Message(
            type=MessageType.ATTACH,
            session=SESSION,
            boot=BOOT,
            request=2,
            body=attach.encode(),
        ),
        "GRANTED": Message(
            type=MessageType.GRANTED,
            session=SESSION,
            boot=BOOT,
            epoch=1,
            request=2,
            body=granted.encode(),
        ),
        "STEP": Message(
            type=MessageType.STEP,
            session=SESSION,
            boot=BOOT,
            epoch=1,
            request=3,
            entries=entries,
            body=b"".join(part.action_buffers()),
        ),
        "RESULT": Message(
            type=MessageType.RESULT,
            session=SESSION,
            boot=BOOT,
            epoch=1,
            request=3,
            entries=entries,
            body=b"".join(part.result_buffers()),
        ),
    }
    return {name: encode(message) for name, message in messages.items()}


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


def test_every_type_code_and_limit_is_documented() -> None:
    text = DOCUMENT.read_text()
    for kind in MessageType:
        assert re.search(rf"^\| {kind.value} \| {kind.name} \|", text, re.MULTILINE)
    for code in ErrorCode:
        assert re.search(rf"^\| {code.value} \| {code.name} \|", text, re.MULTILINE)
    for name in ("MAX_ENTRIES", "MAX_BODY_BYTES", "MAX_ATTACH_BYTES", "MAX_NAMES"):
        assert f"{getattr(constants, name):,}" in text, name
    for name in ("MAX_REPORT_BYTES", "MAX_TEXT_BYTES", "MAX_TRACEBACK_BYTES"):
        assert f"{getattr(constants, name):,}" in text, name
