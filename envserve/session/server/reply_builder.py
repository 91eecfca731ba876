"""Builds the server's replies, and the errors that several modules share."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from envserve.session.server.decisions import Reply
from envserve.session.server.permissions import Rejection
from envserve.text import without_folders
from envserve.wire.bodies import Building
from envserve.wire.constants import (
    MIN_VERSION,
    VERSION,
    ErrorCode,
    Executed,
    MessageType,
)
from envserve.wire.error_body import ErrorBody
from envserve.wire.message import Buffer, Message, pack


class ReplyBuilder:
    """Builds replies, which repeat the session and request numbers of their requests.

    Attributes:
      refusals: Number of ERRORs built, by name of the error code.
    """

    def __init__(self, boot: int, *, shows_paths: bool = False) -> None:
        """Create a builder; with `shows_paths`, errors may contain file paths."""
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
        """Return a reply to a request.

        Args:
          request: The request, or the header of a notice.
          type_: Type of the reply.
          body: Body of the reply.
          entries: Pairs (block, seq) of the reply; by default those of the request.
          payload: Payload frame, such as rows.
          report: Report frame of a RESULT.
          version: Protocol version of the reply.
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
        # Faster than the constructor, because this runs at every step.
        return tuple.__new__(Reply, (request.peer, frames, None))

    def building(self, request: Message, seconds: float = 0.0) -> Reply:
        """Return a BUILDING message with the seconds since the build was requested."""
        body = Building(elapsed_ms=int(1000 * seconds)).encode()
        return self.reply(request, MessageType.BUILDING, body)

    def error(self, request: Message, body: ErrorBody) -> Reply:
        """Return an ERROR in the client's version of the protocol, and count it."""
        self.refusals[body.code.name] += 1
        error = self.redacted_error(body).encode()
        return self.reply(request, MessageType.ERROR, error, version=request.version)

    def redacted(self, text: str) -> str:
        """Return the text without paths, unless clients may see paths."""
        return text if self._shows_paths else without_folders(text)

    def redacted_error(self, body: ErrorBody) -> ErrorBody:
        """Return an error with its text and traceback redacted."""
        text, traceback = self.redacted(body.text), self.redacted(body.traceback)
        return replace(body, text=text, traceback=traceback)

    def rejection(self, request: Message, code: ErrorCode, text: str) -> Reply:
        """Return an ERROR for a request that was not executed.

        If the request is a copy, an earlier copy may have been executed under a lease
        that has since ended, so the ERROR reports `Executed.UNKNOWN`.
        """
        executed = Executed.UNKNOWN if request.attempt else Executed.NO
        return self.error(request, ErrorBody(code=code, executed=executed, text=text))

    def fenced(self, request: Message, event: str) -> Reply:
        """Return the ERROR for a request with an outdated boot id or epoch.

        It was sent before an event, such as "server was started".
        """
        text = f"this request was sent before the {event}; attach again"
        return self.rejection(request, ErrorCode.FENCED, text)

    def session_ended(self, request: Message, reason: ErrorBody | None) -> Reply:
        """Return the reply to a request of a session that has ended.

        `reason` is None after a DETACH.
        """
        concerns_session = request.type in (MessageType.DETACH, MessageType.ATTACH)
        if reason is not None:
            # With any other code, the client would assume that only this request has
            # failed.
            if not concerns_session:
                reason = replace(reason, code=ErrorCode.LEASE_LOST)
            return self.error(request, reason)
        if concerns_session:
            return self.reply(request, MessageType.DETACHED)
        body = ErrorBody(code=ErrorCode.LEASE_LOST, text="this session has detached")
        return self.error(request, body)


def version_mismatch(client: object) -> Rejection:
    """Return the rejection of a client that supports other versions (`client`)."""
    return Rejection(
        ErrorCode.VERSION_MISMATCH,
        f"the server speaks protocol {MIN_VERSION} to {VERSION}, this client {client}; "
        f"install the same release",
    )


def lease_lost(text: str) -> ErrorBody:
    """Return the error for a client whose lease the server has ended."""
    return ErrorBody(code=ErrorCode.LEASE_LOST, executed=Executed.UNKNOWN, text=text)


def server_draining() -> Rejection:
    """Return the rejection of an ATTACH that arrives while the server drains."""
    return Rejection(
        ErrorCode.ENVS_BUSY,
        "the server is draining: it grants no new leases, and will stop; attach to "
        "another server, or attach again after this one was restarted",
        is_draining=True,
    )
