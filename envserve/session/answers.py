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
    encode,
)

__all__ = [
    "Answers",
    "lease_lost",
    "no_new_leases",
    "refused",
    "server_drained",
    "versions_differ",
]


class Answers:
    """Makes the answers of one start of a server."""

    def __init__(self, boot: int) -> None:
        """Takes the boot id that every answer carries."""
        self._boot = boot

    def reply(
        self,
        route: bytes,
        asked: Message,
        type_: MessageType,
        body: bytes = b"",
        *,
        entries: tuple[tuple[int, int], ...] | None = None,
        flags: int = 0,
        payload: Buffer = b"",
        report: bytes = b"",
    ) -> Reply:
        """Answers a message with another that repeats its numbers.

        Args:
          route: Where to send it.
          asked: What is answered.
          type_: Type of the answer.
          body: Its body.
          entries: The blocks that it is about; None for those of `asked`.
          flags: Its flags.
          payload: Its second frame.
          report: Its third frame.
        """
        message = Message(
            type=type_,
            flags=flags,
            session=asked.session,
            boot=self._boot,
            epoch=asked.epoch,
            request=asked.request,
            attempt=asked.attempt,
            entries=asked.entries if entries is None else entries,
            body=body,
            payload=payload,
            report=report,
        )
        return Reply(route, encode(message))

    def error(self, route: bytes, asked: Message, body: ErrorBody) -> Reply:
        """Answers with an ERROR."""
        return self.reply(route, asked, MessageType.ERROR, body.encode())

    def bad_message(self, route: bytes, asked: Message, error: Exception) -> Reply:
        """Says what is wrong with a message."""
        body = refused(asked, str(error), ErrorCode.BAD_MESSAGE)
        return self.error(route, asked, body)

    def fenced(self, route: bytes, asked: Message, what: str) -> Reply:
        """Says that a message belongs to a lease or server of the past."""
        text = f"this request is from before the {what}; attach anew"
        return self.error(route, asked, refused(asked, text, ErrorCode.FENCED))

    def session_ended(
        self, route: bytes, asked: Message, reason: ErrorBody | None
    ) -> Reply:
        """Says that a session has no envs any more, and why; None for a DETACH."""
        is_about_session = asked.type in (MessageType.DETACH, MessageType.ATTACH)
        if reason is not None:
            if not is_about_session:  # or only this request would seem to have failed
                reason = replace(reason, code=ErrorCode.LEASE_LOST)
            return self.error(route, asked, reason)
        if is_about_session:
            return self.reply(route, asked, MessageType.DETACHED)
        body = ErrorBody(code=ErrorCode.LEASE_LOST, text="this session has detached")
        return self.error(route, asked, body)


def refused(
    asked: Message, text: str, code: ErrorCode = ErrorCode.LEASE_LOST
) -> ErrorBody:
    """Says that a request, or this copy of it, was refused."""
    # An earlier copy may have been whole, and executed, by a lease that is no more.
    executed = Executed.UNKNOWN if asked.attempt else Executed.NO
    return ErrorBody(code=code, executed=executed, text=text)


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


def server_drained(why: str) -> ErrorBody:
    """Says the same while, or after, the server is drained."""
    return lease_lost(f"the server was drained: {why}")


def no_new_leases() -> Refusal:
    """Says that the server is about to stop."""
    return Refusal(
        ErrorCode.ENVS_BUSY,
        "the server is draining: it gives out no envs any more, and is about to stop; "
        "attach to another, or again once it was restarted",
        is_draining=True,
    )
