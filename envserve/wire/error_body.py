"""The body of ERROR, and its conversion from and to exceptions."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta
from msgspec.structs import force_setattr, replace

from envserve.errors import (
    ActionError,
    CallError,
    EnvError,
    EnvsBusy,
    EnvserveError,
    EnvStartError,
    LeaseLost,
    LocalProtocolError,
    ProtocolMismatch,
    ServerDraining,
    ServerError,
    UnknownEnv,
    WrapperError,
)
from envserve.text import Name, exception_line, one_line, printable
from envserve.wire.constants import (
    MAX_TEXT_BYTES,
    MAX_TRACEBACK_BYTES,
    ErrorCode,
    Executed,
)
from envserve.wire.handshake import Body, Milliseconds, Row


class ErrorBody(Body, frozen=True, kw_only=True):
    """Failure of a request (ERROR).

    Attributes:
      code: Kind of error.
      executed: Whether envs have received the request.
      text: Error message.
      traceback: Traceback from a worker; empty if there is none.
      env_index: Row of the lease that the error concerns; None if the error does not
        concern a single row.
      holder: In ENVS_BUSY, the client that has leased the most envs.
      held_ms: In ENVS_BUSY, the time since that client leased its envs.
      is_draining: In ENVS_BUSY, whether the server grants no more leases.
    """

    code: ErrorCode
    executed: Executed = Executed.NO
    text: Annotated[str, Meta(max_length=MAX_TEXT_BYTES)]
    traceback: Annotated[str, Meta(max_length=MAX_TRACEBACK_BYTES)] = ""
    env_index: Row | None = None
    holder: Name = ""
    held_ms: Milliseconds = 0
    is_draining: bool = False

    def __post_init__(self) -> None:
        """Escape unprintable characters, because a peer may have written the texts."""
        for name, fit in _SANITIZERS.items():
            force_setattr(self, name, fit(getattr(self, name)))

    @property
    def summary(self) -> str:
        """The first line of the error, and the exception of its traceback, if any."""
        text, exception = self.text.partition("\n")[0], exception_line(self.traceback)
        return text if exception in text else f"{text}: {exception}"

    def encode(self) -> bytes:
        """Return the body, with texts cut to their limits."""
        return Body.encode(self.clipped(MAX_TEXT_BYTES, MAX_TRACEBACK_BYTES))

    def clipped(self, text_bytes: int, traceback_bytes: int) -> ErrorBody:
        """Return a copy with `text` and `traceback` cut to these numbers of bytes."""
        traceback = clip(self.traceback, traceback_bytes, keep_end=True)
        return replace(self, text=clip(self.text, text_bytes), traceback=traceback)


_SANITIZERS: Final = {"text": printable, "traceback": printable, "holder": one_line}


def clip(text: str, max_bytes: int, *, keep_end: bool = False) -> str:
    """Cut text to at most `max_bytes` bytes of UTF-8; with `keep_end`, keep its end.

    Keep the end of a traceback, because its last line names the error.
    """
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    part = data[-max_bytes:] if keep_end else data[:max_bytes]
    return part.decode(errors="ignore")


#: Exceptions that have the same type on the server and the client; subclasses first.
_SHARED_ERRORS: Final[dict[ErrorCode, type[EnvserveError]]] = {
    ErrorCode.ENV_START_FAILED: EnvStartError,
    ErrorCode.CALL_FAILED: CallError,
    ErrorCode.ENV_FAILED: EnvError,
    ErrorCode.INVALID_ACTION: ActionError,
    ErrorCode.UNKNOWN_ENV: UnknownEnv,
    ErrorCode.BAD_WRAPPER: WrapperError,
}
_EXCEPTIONS: Final[dict[ErrorCode, type[EnvserveError]]] = {
    **_SHARED_ERRORS,
    ErrorCode.BAD_MESSAGE: LocalProtocolError,
    ErrorCode.UNSUPPORTED: ProtocolMismatch,
    ErrorCode.VERSION_MISMATCH: ProtocolMismatch,
    ErrorCode.LEASE_LOST: LeaseLost,
    ErrorCode.FENCED: LeaseLost,
    ErrorCode.GAP: LocalProtocolError,
    ErrorCode.INTERNAL: ServerError,
}


def error_body_of(error: EnvserveError) -> ErrorBody:
    """Return the ERROR that reports a server's exception."""
    codes = (code for code, kind in _SHARED_ERRORS.items() if isinstance(error, kind))
    code = next(codes, ErrorCode.INTERNAL)
    if not isinstance(error, EnvError):
        return ErrorBody(code=code, executed=Executed.UNKNOWN, text=str(error))
    return ErrorBody(
        code=code,
        executed=Executed.UNKNOWN,
        text=error.message,
        traceback=error.remote_traceback,
        env_index=error.env_index,
    )


def exception_of(body: ErrorBody, address: str) -> EnvserveError:
    """Return the exception that a client raises for an ERROR from a server."""
    text = f"{address}: {body.text[:MAX_TEXT_BYTES]}"
    if body.code is ErrorCode.ENVS_BUSY:
        busy = ServerDraining if body.is_draining else EnvsBusy
        return busy(text, holder=body.holder, held_seconds=body.held_ms / 1000)
    if body.code is ErrorCode.REFUSED:
        if body.env_index is None:
            return EnvStartError(text)
        return CallError(text, env_index=body.env_index)
    kind = _EXCEPTIONS[body.code]
    if issubclass(kind, EnvError):
        traceback = body.traceback[-MAX_TRACEBACK_BYTES:]
        return kind(text, env_index=body.env_index, remote_traceback=traceback)
    return kind(text)
