"""What a server still holds of long answers, as far as frames tell."""

from __future__ import annotations

from envserve.server.zmq_guards.send_budget import LARGE_FRAME_BYTES, SendBudget
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer, Message, encode

MIB = 1 << 20
PEER = (1, b"route", "")


def answer(
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


def test_what_has_left_makes_room_again() -> None:
    unread = SendBudget(4 * MIB, 100 * MIB)
    waiting = [unread.admit(PEER, answer(MIB)) for _ in range(5)]
    assert [frames is None for frames in waiting] == [False] * 4 + [True]
    waiting.pop(1)
    assert unread.admit(PEER, answer(MIB)) is not None


def test_who_has_no_answer_gets_one_of_any_length() -> None:
    unread = SendBudget(MIB, MIB)
    kept = [unread.admit(PEER, answer(9 * MIB, block=block)) for block in range(3)]
    kept += [unread.admit(PEER, answer(9 * MIB, session=2))]
    assert None not in kept
    assert unread.admit(PEER, answer(9 * MIB, block=1)) is None


def test_a_user_is_one_whatever_sessions_it_has() -> None:
    unread = SendBudget(4 * MIB, 100 * MIB)
    strangers = [unread.admit(PEER, answer(3 * MIB, session=n)) for n in range(4)]
    assert unread.admit(PEER, answer(MIB, session=3)) is not None
    known = (1, b"route", "trainer-1")
    users = [unread.admit(known, answer(3 * MIB, session=n)) for n in range(2)]
    assert unread.admit(known, answer(MIB, session=1)) is None
    assert None not in strangers + users


def test_there_is_a_bound_for_all_together() -> None:
    unread = SendBudget(4 * MIB, 8 * MIB)
    kept = [unread.admit(PEER, answer(2 * MIB, session=n // 2)) for n in range(10)]
    assert [frames is None for frames in kept[:4]] == [False] * 4
    assert [frames is None for frames in kept[4:]] == [False, True] * 3


def test_long_frames_are_sent_from_where_they_are_wherever_they_stand() -> None:
    frames = answer(MIB, report=b"r" * 100)
    admitted = SendBudget(MIB, MIB).admit(PEER, frames)
    assert admitted is not None
    head, rows, report = admitted
    assert isinstance(rows, memoryview)
    assert rows.obj is frames[1]
    assert [head, report] == [frames[0], frames[2]]
    assert len(rows) >= LARGE_FRAME_BYTES
