"""Answers: messages that repeat the numbers of what they answer; and their texts."""

from __future__ import annotations

from msgspec.structs import replace

from envserve.session.decisions import Reply
from envserve.session.policy import Refusal
from envserve.wire import (
    MIN_VERSION,
    VERSION,
    Buffer,
    ErrorBody,
    ErrorCode,
    Executed,
    Message,
    MessageType,
    pack,
)

__all__ = [
    "Answers",
    "lease_lost",
    "no_new_leases",
    "versions_differ",
]


class Answers:
    """Makes the answers of one start of a server."""

    def __init__(self, boot: int) -> None:
        """Takes the boot id that every answer carries."""
        self._boot = boot

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
        return Reply(asked.route, frames)

    def error(self, asked: Message, body: ErrorBody) -> Reply:
        """Answers with an ERROR."""
        return self.reply(asked, MessageType.ERROR, body.encode())

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
