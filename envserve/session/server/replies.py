"""Answers: messages that repeat the numbers of what they answer; and their texts."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from envserve.session.server.decisions import Reply
from envserve.session.server.policy import Refusal
from envserve.text import without_folders
from envserve.wire.bodies import Building
from envserve.wire.constants import (
    MIN_VERSION,
    VERSION,
    ErrorCode,
    Executed,
    MessageType,
)
from envserve.wire.handshake import ErrorBody
from envserve.wire.message import Buffer, Message, pack


class ReplyBuilder:
    """Makes the answers of one start of a server.

    Attributes:
      refusals: ERRORs, by the name of their code.
    """

    def __init__(self, boot: int, *, shows_paths: bool = False) -> None:
        """Takes the boot id, and whether clients may know where files here are."""
        self._boot = boot
        self.refusals: Counter[str] = Counter()
        self._shows_paths = shows_paths

    def reply(
        self,
        request: Message,
        type_: MessageType,
        body: bytes = b"",
        *,
        entries: tuple[tuple[int, int], ...] | None = None,
        payload: Buffer = b"",
        report: bytes = b"",
        version: int = VERSION,
    ) -> Reply:
        """Answers a message with another that repeats its numbers, and its entries.

        Those are replaced by `entries`, if given; all else is as for `wire.pack`.
        """
        frames = pack(
            type_,
            (request.session, self._boot, request.epoch),
            request.request,
            request.entries if entries is None else entries,
            body,
            payload,
            report,
            version=version,
            attempt=request.attempt,
        )
        return Reply(request.peer, frames)

    def building(self, request: Message, seconds: float = 0.0) -> Reply:
        """Says that the envs are still being built, for so long."""
        body = Building(elapsed_ms=int(1000 * seconds)).encode()
        return self.reply(request, MessageType.BUILDING, body)

    def error(self, request: Message, body: ErrorBody) -> Reply:
        """Answers with an ERROR, as the client's version has it."""
        self.refusals[body.code.name] += 1
        error = self.redacted_error(body).encode()
        return self.reply(request, MessageType.ERROR, error, version=request.version)

    def redacted(self, text: str) -> str:
        """Returns what clients may know of a text of an env's."""
        return text if self._shows_paths else without_folders(text)

    def redacted_error(self, body: ErrorBody) -> ErrorBody:
        """Returns what they may know of an error."""
        text, traceback = self.redacted(body.text), self.redacted(body.traceback)
        return replace(body, text=text, traceback=traceback)

    def refused(self, request: Message, code: ErrorCode, text: str) -> Reply:
        """Says that a request, or this copy of it, was refused."""
        # An earlier one may have been whole, and executed, by a lease that is no more.
        executed = Executed.UNKNOWN if request.attempt else Executed.NO
        return self.error(request, ErrorBody(code=code, executed=executed, text=text))

    def fenced(self, request: Message, what: str) -> Reply:
        """Says that a message belongs to a lease or server of the past."""
        text = f"this request is from before the {what}; attach anew"
        return self.refused(request, ErrorCode.FENCED, text)

    def session_ended(self, request: Message, reason: ErrorBody | None) -> Reply:
        """Says that a session has no envs any more, and why; None for a DETACH."""
        is_about_session = request.type in (MessageType.DETACH, MessageType.ATTACH)
        if reason is not None:
            if not is_about_session:  # or only this request would seem to have failed
                reason = replace(reason, code=ErrorCode.LEASE_LOST)
            return self.error(request, reason)
        if is_about_session:
            return self.reply(request, MessageType.DETACHED)
        body = ErrorBody(code=ErrorCode.LEASE_LOST, text="this session has detached")
        return self.error(request, body)


def version_mismatch(theirs: object) -> Refusal:
    """Says that client and server share no version."""
    return Refusal(
        ErrorCode.VERSION_MISMATCH,
        f"the server speaks {MIN_VERSION} to {VERSION}, this client {theirs}; "
        f"install the same release",
    )


def lease_lost(text: str) -> ErrorBody:
    """Says why a client's envs are gone by the server's will."""
    return ErrorBody(code=ErrorCode.LEASE_LOST, executed=Executed.UNKNOWN, text=text)


def server_draining() -> Refusal:
    """Says that the server is about to stop."""
    return Refusal(
        ErrorCode.ENVS_BUSY,
        "the server is draining: it gives out no envs any more, and is about to stop; "
        "attach to another, or again once it was restarted",
        is_draining=True,
    )
