"""Messages outside a session (HELLO, WELCOME, JOIN), and the base of all bodies.

This module does not import NumPy, so that a health probe starts fast.
"""

from __future__ import annotations

import operator
import threading
from typing import Annotated, Final, Self, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from envserve.errors import ProtocolMismatch, RemoteProtocolError
from envserve.text import Name, one_line
from envserve.wire.constants import MAX_NAMES, MIN_VERSION, VERSION

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
_DECODE_LOCK: Final = threading.RLock()


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


def check_versions(welcome: Welcome, address: str) -> None:
    """Raise ProtocolMismatch if client and server have no version in common."""
    if welcome.min_version > VERSION or welcome.max_version < MIN_VERSION:
        raise ProtocolMismatch(
            f"{address}: the server speaks protocol {welcome.min_version} to "
            f"{welcome.max_version}, this client {MIN_VERSION} to {VERSION}; install "
            f"the same release"
        )
