"""`SendBudget` limits the total size of large replies that clients have not read."""

from __future__ import annotations

from envserve.server.zmq_guards.send_budget import LARGE_FRAME_BYTES, SendBudget
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer, Message, encode

MIB = 1 << 20
PEER = (1, b"route", "")


def reply(
    num_bytes: int, *, session: int = 1, block: int = 0, report: bytes = b""
) -> list[Buffer]:
    return encode(
        Message(
            type=MessageType.RESULT,
            session=session,
            entries=((block, 1),),
            payload=bytes(num_bytes),
            report=report,
        )
    )


def test_a_sent_reply_frees_its_share_of_the_budget() -> None:
    budget = SendBudget(4 * MIB, 100 * MIB)
    waiting = [budget.admit(PEER, reply(MIB)) for _ in range(5)]
    assert [frames is None for frames in waiting] == [False] * 4 + [True]
    waiting.pop(1)
    assert budget.admit(PEER, reply(MIB)) is not None


def test_a_block_without_an_unread_reply_gets_one_of_any_size() -> None:
    budget = SendBudget(MIB, MIB)
    admitted = [budget.admit(PEER, reply(9 * MIB, block=block)) for block in range(3)]
    admitted += [budget.admit(PEER, reply(9 * MIB, session=2))]
    assert None not in admitted
    assert budget.admit(PEER, reply(9 * MIB, block=1)) is None


def test_the_limit_of_a_user_covers_all_of_its_sessions() -> None:
    budget = SendBudget(4 * MIB, 100 * MIB)
    keyless = [budget.admit(PEER, reply(3 * MIB, session=n)) for n in range(4)]
    assert budget.admit(PEER, reply(MIB, session=3)) is not None
    with_key = (1, b"route", "trainer-1")
    users = [budget.admit(with_key, reply(3 * MIB, session=n)) for n in range(2)]
    assert budget.admit(with_key, reply(MIB, session=1)) is None
    assert None not in keyless + users


def test_all_users_share_a_total_limit() -> None:
    budget = SendBudget(4 * MIB, 8 * MIB)
    admitted = [budget.admit(PEER, reply(2 * MIB, session=n // 2)) for n in range(10)]
    assert [frames is None for frames in admitted[:4]] == [False] * 4
    assert [frames is None for frames in admitted[4:]] == [False, True] * 3


def test_large_frames_are_not_copied_at_any_position() -> None:
    frames = reply(MIB, report=b"r" * 100)
    admitted = SendBudget(MIB, MIB).admit(PEER, frames)
    assert admitted is not None
    head, rows, report = admitted
    assert isinstance(rows, memoryview)
    assert rows.obj is frames[1]
    assert [head, report] == [frames[0], frames[2]]
    assert len(rows) >= LARGE_FRAME_BYTES
