"""Answers: messages that repeat the numbers of what they answer; and their texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from envserve import codec
from envserve.errors import RemoteProtocolError
from envserve.session.decisions import Decision, Reply
from envserve.session.policy import Refusal
from envserve.text import without_folders
from envserve.wire import (
    MIN_VERSION,
    VERSION,
    Buffer,
    ErrorBody,
    ErrorCode,
    Executed,
    Join,
    Message,
    MessageType,
    pack,
)

__all__ = [
    "Answers",
    "Repeats",
    "lease_lost",
    "no_new_leases",
    "versions_differ",
]

#: Between copies of an answer: the first ones, and later ones.
_SECONDS: Final = 1.0
_LATER_SECONDS: Final = 60.0
_MAX_REPEATS: Final = 8
#: How the result of a call begins that has failed, and how long it may be.
_FAILED: Final = b"\x82" + codec.encode("error")
_MAX_FAILED_BYTES: Final = 1 << 18


@dataclass(slots=True)
class Repeats:
    """How often an answer was given again.

    Whoever reads asks again because an answer was lost, and that happens seldom. What
    nobody reads stays in memory.
    """

    count: int = 0
    next_at: float = -math.inf

    def allow(self, now: float) -> bool:
        """Tells whether to give it again: once a second, after 8 times once a minute.

        It never ends: a client whose answers were all lost must not wait for ever.
        """
        if now < self.next_at:
            return False
        self.count += 1
        self.next_at = now + (_SECONDS if self.count < _MAX_REPEATS else _LATER_SECONDS)
        return True


class Answers:
    """Makes the answers of one start of a server."""

    def __init__(self, boot: int, *, shows_folders: bool = False) -> None:
        """Takes the boot id that every answer carries.

        Args:
          boot: The boot id.
          shows_folders: Whether clients may know where this host's files are.
        """
        self._boot = boot
        self._shows_folders = shows_folders

    def reply(
        self,
        asked: Message,
        type_: MessageType,
        body: bytes = b"",
        *,
        entries: tuple[tuple[int, int], ...] | None = None,
        flags: int = 0,
        payload: Buffer = b"",
        report: bytes = b"",
    ) -> Reply:
        """Answers a message with another that repeats its numbers, and its entries.

        Those are replaced by `entries`, if given; all else is as for `wire.pack`.
        """
        frames = pack(
            type_,
            (asked.session, self._boot, asked.epoch),
            asked.request,
            asked.entries if entries is None else entries,
            body,
            payload,
            report,
            flags=flags,
            attempt=asked.attempt,
        )
        return Reply(asked.peer, frames)

    def join(
        self, asked: Message, enrol: Callable[[str, bytes], None] | None
    ) -> list[Decision]:
        """Answers a JOIN, and nothing else that comes by the key of an invitation.

        `enrol` puts a public key in that one's place; None where no keys are used.
        """
        if asked.type is not MessageType.JOIN:
            return []
        if asked.version != VERSION:
            raise versions_differ(asked.version)
        if enrol is None:
            raise RemoteProtocolError("this server uses no keys")
        enrol(asked.peer[-1], Join.decode(asked.body).public)
        return [self.reply(asked, MessageType.JOINED)]

    def error(self, asked: Message, body: ErrorBody) -> Reply:
        """Answers with an ERROR."""
        return self.reply(asked, MessageType.ERROR, self.shown_error(body).encode())

    def shown(self, text: str) -> str:
        """Returns what clients may know of a text of an env's."""
        return text if self._shows_folders else without_folders(text)

    def shown_error(self, body: ErrorBody) -> ErrorBody:
        """Returns what they may know of an error."""
        text, traceback = self.shown(body.text), self.shown(body.traceback)
        return replace(body, text=text, traceback=traceback)

    def shown_result(self, result: bytes) -> bytes:
        """Returns what they may know of what came of a call, which is encoded."""
        if not result.startswith(_FAILED) or self._shows_folders:
            return result
        try:
            answer = codec.decode(result, max_bytes=_MAX_FAILED_BYTES, max_values=4)
            shown = {key: self.shown(str(text)) for key, text in answer.items()}
        except codec.CodecError as error:  # worker processes run code of others
            shown = {"error": f"the worker's answer: {error}", "traceback": ""}
        return codec.encode(shown)

    def refuse(self, asked: Message, code: ErrorCode, text: str) -> Reply:
        """Says that a request, or this copy of it, was refused."""
        # An earlier one may have been whole, and executed, by a lease that is no more.
        executed = Executed.UNKNOWN if asked.attempt else Executed.NO
        return self.error(asked, ErrorBody(code=code, executed=executed, text=text))

    def fence(self, asked: Message, what: str) -> Reply:
        """Says that a message belongs to a lease or server of the past."""
        text = f"this request is from before the {what}; attach anew"
        return self.refuse(asked, ErrorCode.FENCED, text)

    def session_ended(self, asked: Message, reason: ErrorBody | None) -> Reply:
        """Says that a session has no envs any more, and why; None for a DETACH."""
        is_about_session = asked.type in (MessageType.DETACH, MessageType.ATTACH)
        if reason is not None:
            if not is_about_session:  # or only this request would seem to have failed
                reason = replace(reason, code=ErrorCode.LEASE_LOST)
            return self.error(asked, reason)
        if is_about_session:
            return self.reply(asked, MessageType.DETACHED)
        body = ErrorBody(code=ErrorCode.LEASE_LOST, text="this session has detached")
        return self.error(asked, body)


def versions_differ(theirs: object) -> Refusal:
    """Says that client and server share no version."""
    return Refusal(
        ErrorCode.VERSION_MISMATCH,
        f"the server speaks protocol versions {MIN_VERSION} to {VERSION}, the client "
        f"{theirs}; install the same release of envserve on both sides",
    )


def lease_lost(text: str) -> ErrorBody:
    """Says why a client's envs are gone by the server's will."""
    return ErrorBody(code=ErrorCode.LEASE_LOST, executed=Executed.UNKNOWN, text=text)


def no_new_leases() -> Refusal:
    """Says that the server is about to stop."""
    return Refusal(
        ErrorCode.ENVS_BUSY,
        "the server is draining: it gives out no envs any more, and is about to stop; "
        "attach to another, or again once it was restarted",
        is_draining=True,
    )
