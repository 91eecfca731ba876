"""What is said before there is a session, and why there is none: HELLO, WELCOME, ERROR.

Loads no NumPy, so that to ask a server for its health costs little.
"""

from __future__ import annotations

import operator
import threading
from typing import Annotated, Final, Self, TypeVar

import msgspec
from msgspec import Meta, Struct
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
    RemoteProtocolError,
    ServerDraining,
    ServerError,
    UnknownEnv,
    WrapperError,
)
from envserve.text import Name, one_line, printable
from envserve.wire.constants import (
    MAX_NAMES,
    MAX_TEXT_BYTES,
    MAX_TRACEBACK_BYTES,
    MIN_VERSION,
    VERSION,
    ErrorCode,
    Executed,
)

__all__ = [
    "U32",
    "U63",
    "Body",
    "ErrorBody",
    "Hello",
    "Join",
    "Milliseconds",
    "Row",
    "Seconds",
    "Welcome",
    "body_of",
    "check_versions",
    "clip",
    "exception_of",
    "read",
]

Type = TypeVar("Type")

_Version = Annotated[int, Meta(ge=0, le=255)]
U32 = Annotated[int, Meta(ge=0, lt=2**32)]
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, lt=2.0**63)]
Milliseconds = U63
#: One of a lease.
Row = Annotated[int, Meta(ge=0, lt=1 << 16)]

#: NumPy's integers go as integers.
_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=operator.index)
#: Where two threads are the first to decode a type, msgspec ends the process.
_ONE: Final = threading.Lock()


def read(data: bytes | bytearray | memoryview, kind: type[Type], where: str) -> Type:
    """Decodes what is of some type; RemoteProtocolError names the place where not."""
    try:
        with _ONE:
            return msgspec.msgpack.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"{where}: {one_line(str(error), 500)}") from None


class Body(Struct, frozen=True, kw_only=True):
    """What all bodies do."""

    def encode(self) -> bytes:
        """Returns the body."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Reads a body."""
        return read(body, cls, cls.__name__)


class Hello(Body, frozen=True, kw_only=True):
    """Opens a conversation.

    Attributes:
      min_version: Lowest protocol version that the client speaks.
      max_version: Highest.
      client: Who asks, for the server's log.
    """

    min_version: _Version = MIN_VERSION
    max_version: _Version = VERSION
    client: Name = ""


class Welcome(Body, frozen=True, kw_only=True):
    """What the server is and has.

    Attributes:
      min_version: Lowest protocol version that the server speaks.
      max_version: Highest.
      max_message_bytes: Longest frame that the server accepts.
      lease_seconds: Silence after which it gives a client's envs up.
      env_names: Names on offer, at most 1,000 of them.
      num_names: How many there are.
      total_envs: How many envs it can host at once.
      free_envs: How many of them nobody has leased.
      is_starting: Whether workers cannot be started yet.
      is_draining: Whether it gives out no envs any more, since it is about to stop.
      loop_lag_ms: How late its serving loop was lately, at worst.
    """

    min_version: _Version = MIN_VERSION
    max_version: _Version = VERSION
    max_message_bytes: U63
    lease_seconds: Seconds
    env_names: Annotated[tuple[Name, ...], Meta(max_length=MAX_NAMES)]
    num_names: U32
    total_envs: U32
    free_envs: U32
    is_starting: bool = False
    is_draining: bool = False
    loop_lag_ms: Milliseconds = 0

    def __post_init__(self) -> None:
        force_setattr(self, "env_names", tuple(map(one_line, self.env_names)))


class Join(Body, frozen=True, kw_only=True):
    """Asks that a client's public key takes the place of its invitation's."""

    public: Annotated[bytes, Meta(min_length=32, max_length=32)]


class ErrorBody(Body, frozen=True, kw_only=True):
    """Why a request failed.

    Attributes:
      code: Kind of error.
      executed: Whether envs have seen the request.
      text: What happened, for a person.
      traceback: Traceback from a worker; empty when there is none.
      env_index: Row of the lease that it concerns; None for all, or none.
      holder: Of ENVS_BUSY: the client that has most of the envs.
      held_ms: Of ENVS_BUSY: for how long it has had them.
      is_draining: Of ENVS_BUSY: the server gives out none any more.
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
        """Makes texts fit to be shown, whoever wrote them."""
        for name, fit in _FITS.items():
            force_setattr(self, name, fit(getattr(self, name)))

    def encode(self) -> bytes:
        """Returns the body of an ERROR, with texts that fit."""
        return Body.encode(self.clipped(MAX_TEXT_BYTES, MAX_TRACEBACK_BYTES))

    def clipped(self, text_bytes: int, traceback_bytes: int) -> ErrorBody:
        """Returns the same with texts of at most so many bytes."""
        traceback = clip(self.traceback, traceback_bytes, keep_end=True)
        return replace(self, text=clip(self.text, text_bytes), traceback=traceback)


_FITS: Final = {"text": printable, "traceback": printable, "holder": one_line}


def clip(text: str, max_bytes: int, *, keep_end: bool = False) -> str:
    """Cuts a text to so many bytes of UTF-8; a traceback's end is what counts."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    part = data[-max_bytes:] if keep_end else data[:max_bytes]
    return part.decode(errors="ignore")


#: What crosses the wire as it is; the more special first.
_SAME: Final[dict[ErrorCode, type[EnvserveError]]] = {
    ErrorCode.ENV_START_FAILED: EnvStartError,
    ErrorCode.CALL_FAILED: CallError,
    ErrorCode.ENV_FAILED: EnvError,
    ErrorCode.INVALID_ACTION: ActionError,
    ErrorCode.UNKNOWN_ENV: UnknownEnv,
    ErrorCode.BAD_WRAPPER: WrapperError,
}
_EXCEPTIONS: Final[dict[ErrorCode, type[EnvserveError]]] = {
    **_SAME,
    ErrorCode.BAD_MESSAGE: LocalProtocolError,
    ErrorCode.UNSUPPORTED: ProtocolMismatch,
    ErrorCode.VERSION_MISMATCH: ProtocolMismatch,
    ErrorCode.LEASE_LOST: LeaseLost,
    ErrorCode.FENCED: LeaseLost,
    ErrorCode.GAP: LocalProtocolError,
    ErrorCode.INTERNAL: ServerError,
}


def check_versions(welcome: Welcome, address: str) -> None:
    """Raises ProtocolMismatch for a server that does not speak our version."""
    if welcome.min_version > VERSION or welcome.max_version < MIN_VERSION:
        raise ProtocolMismatch(
            f"{address}: the server speaks {welcome.min_version} to "
            f"{welcome.max_version}, this client {MIN_VERSION} to {VERSION}; install "
            f"the same release"
        )


def body_of(error: EnvserveError, executed: Executed) -> ErrorBody:
    """Returns what to send for an exception on the server."""
    codes = (code for code, kind in _SAME.items() if isinstance(error, kind))
    code = next(codes, ErrorCode.INTERNAL)
    if not isinstance(error, EnvError):
        return ErrorBody(code=code, executed=executed, text=str(error))
    return ErrorBody(
        code=code,
        executed=executed,
        text=error.message,
        traceback=error.remote_traceback,
        env_index=error.env_index,
    )


def exception_of(body: ErrorBody, address: str) -> EnvserveError:
    """Returns what to raise on the client; the text names the server."""
    text = f"{address}: {body.text[:MAX_TEXT_BYTES]}"
    if body.code is ErrorCode.ENVS_BUSY:
        busy = ServerDraining if body.is_draining else EnvsBusy
        return busy(text, holder=body.holder, since=body.held_ms / 1000)
    if body.code is ErrorCode.REFUSED:
        if body.env_index is None:
            return EnvStartError(text)
        return CallError(text, env_index=body.env_index)
    kind = _EXCEPTIONS[body.code]
    if issubclass(kind, EnvError):
        traceback = body.traceback[-MAX_TRACEBACK_BYTES:]
        return kind(text, env_index=body.env_index, remote_traceback=traceback)
    return kind(text)
