"""The server's answers as messages, each addressed to where its request came from."""

from __future__ import annotations

from dataclasses import replace

from envserve.session.decisions import Reply
from envserve.wire import (
    MIN_VERSION,
    VERSION,
    Building,
    Drain,
    ErrorBody,
    ErrorCode,
    Executed,
    Message,
    MessageType,
    Pong,
    Welcome,
    encode,
)

__all__ = ["Answers", "refused", "versions"]


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
        body: Welcome | Building | Drain | Pong | ErrorBody | None = None,
    ) -> Reply:
        """Answers a message with another that repeats its numbers."""
        message = Message(
            type=type_,
            session=asked.session,
            boot=self._boot,
            epoch=asked.epoch,
            request=asked.request,
            attempt=asked.attempt,
            entries=asked.entries,
            body=b"" if body is None else body.encode(),
        )
        return Reply(route, encode(message))

    def error(self, route: bytes, asked: Message, body: ErrorBody) -> Reply:
        """Answers with an ERROR."""
        return self.reply(route, asked, MessageType.ERROR, body)

    def bad_message(self, route: bytes, asked: Message, error: Exception) -> Reply:
        """Says what is wrong with a message."""
        body = refused(asked, str(error), ErrorCode.BAD_MESSAGE)
        return self.error(route, asked, body)

    def fenced(self, route: bytes, asked: Message, what: str) -> Reply:
        """Says that a message belongs to a lease or server of the past."""
        text = f"this request is from before the {what}; attach anew"
        return self.error(route, asked, refused(asked, text, ErrorCode.FENCED))

    def granted(
        self, route: bytes, session: int, epoch: int, request: int, body: bytes
    ) -> Reply:
        """Grants a lease."""
        message = Message(
            type=MessageType.GRANTED,
            session=session,
            boot=self._boot,
            epoch=epoch,
            request=request,
            body=body,
        )
        return Reply(route, encode(message))

    def farewell(self, route: bytes, asked: Message, ending: ErrorBody | None) -> Reply:
        """Says that, or why, a session has no envs any more."""
        is_about_session = asked.type in (MessageType.DETACH, MessageType.ATTACH)
        if ending is not None:
            if not is_about_session:  # or only this request would seem to have failed
                ending = replace(ending, code=ErrorCode.LEASE_LOST)
            return self.error(route, asked, ending)
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


def versions(theirs: object) -> str:
    """Says that client and server share no version."""
    return (
        f"the server speaks protocol versions {MIN_VERSION} to {VERSION}, the client "
        f"{theirs}; install the same release of envserve on both sides"
    )
