"""Messages outside a session: HELLO, WELCOME, JOIN and ERROR.

This module does not import NumPy, so that a health probe starts fast.
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

Type = TypeVar("Type")

_Version = Annotated[int, Meta(ge=0, le=255)]
U32 = Annotated[int, Meta(ge=0, lt=2**32)]
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, lt=2.0**63)]
Milliseconds = U63
#: Index of a row of a lease.
Row = Annotated[int, Meta(ge=0, lt=1 << 16)]

#: Encodes NumPy integers as integers.
_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=operator.index)
#: msgspec may crash if two threads decode a type for the first time concurrently.
_DECODE_LOCK: Final = threading.Lock()


def decode_struct(
    data: bytes | bytearray | memoryview, kind: type[Type], where: str
) -> Type:
    """Decode msgpack data as a value of the given type.

    Raises:
      RemoteProtocolError: The data is not valid; the error text begins with `where`.
    """
    try:
        with _DECODE_LOCK:
            return msgspec.msgpack.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"{where}: {one_line(str(error), 500)}") from None


class Body(Struct, frozen=True, kw_only=True):
    """Base class of message bodies."""

    def encode(self) -> bytes:
        """Return the encoded body."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode a body.

        Raises:
          RemoteProtocolError: The body is not valid.
        """
        return decode_struct(body, cls, cls.__name__)


class Hello(Body, frozen=True, kw_only=True):
    """Request for the server's protocol versions and capacity (HELLO).

    Attributes:
      min_version: Lowest protocol version that the client supports.
      max_version: Highest protocol version that the client supports.
      client: Name of the client, for the server's log.
    """

    min_version: _Version = MIN_VERSION
    max_version: _Version = VERSION
    client: Name = ""


class Welcome(Body, frozen=True, kw_only=True):
    """Protocol versions of a server, and its capacity for the client (WELCOME).

    Attributes:
      min_version: Lowest protocol version that the server supports.
      max_version: Highest protocol version that the server supports.
      max_message_bytes: Maximum size of a frame that the server accepts.
      lease_seconds: Time without a message from a client after which its lease expires.
      env_names: Names of the offered envs, at most 1,000.
      num_names: Total number of offered envs.
      total_envs: Number of envs that the client may lease in total.
      free_envs: Number of envs that the client may lease now.
      is_starting: Whether the server cannot start workers yet.
      is_draining: Whether no new leases are granted, because the server is about to
        stop.
      loop_lag_ms: Largest recent delay of the server's event loop.
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
    """Request to replace an invitation's key with the client's own key (JOIN).

    Attributes:
      public: Raw public key of the client.
    """

    public: Annotated[bytes, Meta(min_length=32, max_length=32)]


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

    def encode(self) -> bytes:
        """Return the body, with texts cut to their limits."""
        return Body.encode(self.clipped(MAX_TEXT_BYTES, MAX_TRACEBACK_BYTES))

    def clipped(self, text_bytes: int, traceback_bytes: int) -> ErrorBody:
        """Return a copy with `text` and `traceback` cut to these numbers of bytes."""
        traceback = clip(self.traceback, traceback_bytes, keep_end=True)
        return replace(self, text=clip(self.text, text_bytes), traceback=traceback)


_SANITIZERS: Final = {"text": printable, "traceback": printable, "holder": one_line}


def clip(text: str, max_bytes: int, *, keep_end: bool = False) -> str:
    """Cut text to at most `max_bytes` bytes of UTF-8.

    Args:
      text: The text.
      max_bytes: Maximum size of the result.
      keep_end: Whether to keep the end instead of the beginning. Use it for tracebacks,
        because their last line names the error.
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


def check_versions(welcome: Welcome, address: str) -> None:
    """Raise ProtocolMismatch if client and server have no version in common."""
    if welcome.min_version > VERSION or welcome.max_version < MIN_VERSION:
        raise ProtocolMismatch(
            f"{address}: the server speaks protocol {welcome.min_version} to "
            f"{welcome.max_version}, this client {MIN_VERSION} to {VERSION}; install "
            f"the same release"
        )


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
    """Return the exception that a client raises for an ERROR.

    Args:
      body: Body of the ERROR.
      address: Address of the server, for the message.
    """
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
