"""The bodies of control messages, as typed structs with bounds.

`encode` returns the msgpack map at the end of frame 0. `decode` checks the type and
bounds of every field, ignores unknown fields, and raises only RemoteProtocolError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final, Self, TypeVar

from msgspec import Meta, Raw

from envserve.errors import RemoteProtocolError, SpaceError
from envserve.lane import Block, Call, CallKind, RenderedFrame
from envserve.settings import EnvRequest, convert
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec, describe, restore
from envserve.text import Name, one_line
from envserve.wire.constants import (
    MAX_ARGUMENT_BLOCKS,
    MAX_ATTACH_BYTES,
    MAX_ATTACH_VALUES,
    MAX_BODY_BYTES,
    MAX_CALL_BYTES,
    MAX_CALL_VALUES,
    MAX_ENTRIES,
    MAX_FRAME_ROWS,
    MAX_OPTIONS_BYTES,
    MAX_OPTIONS_VALUES,
)
from envserve.wire.handshake import (
    U32,
    U63,
    Body,
    Milliseconds,
    Row,
    Seconds,
    decode_struct,
)
from envserve.wrappers.specs import wrappers_to_plain

Type = TypeVar("Type")

_BlockIndex = Annotated[int, Meta(ge=0, lt=MAX_ENTRIES)]
_Options = dict[str, Any]
_NIL: Final = Raw(b"\xc0")


def decode_values(
    data: bytes | bytearray | memoryview, kind: type[Type], where: str, max_values: int
) -> Type:
    """Decode a value with `codec`, and convert it to a type.

    Args:
      data: Encoded value from a peer.
      kind: Type with bounds, for `settings.convert`.
      where: Name of the value, for error messages.
      max_values: Maximum number of values; see `codec.check`.

    Raises:
      RemoteProtocolError: The value is not valid or not of this type.
    """
    try:
        value = codec.decode(data, max_bytes=len(data), max_values=max_values)
        return convert(value, kind)
    except ValueError as error:
        raise RemoteProtocolError(f"{where}: {one_line(str(error), 500)}") from None


def _check_size(body: bytes, part: str, max_bytes: int, max_values: int) -> bytes:
    """Return an encoded body; raise CodecError if it exceeds a limit of the peer."""
    if len(body) > max_bytes:
        raise codec.CodecError(
            f"{part}: expected at most {max_bytes} bytes in the encoded body; "
            f"got {len(body)}"
        )
    try:
        codec.check(body, max_values)
    except codec.CodecError as error:
        raise codec.CodecError(
            f"{part}: {error}; send many numbers as one NumPy array"
        ) from None
    return body


@dataclass(frozen=True, kw_only=True)
class Attach(EnvRequest):
    """Request for envs (ATTACH)."""

    def encode(self) -> bytes:
        """Return the encoded body.

        Raises:
          CodecError: An argument cannot be sent.
        """
        wrappers = wrappers_to_plain(self.wrappers)
        body = codec.encode({**vars(self), "wrappers": wrappers}, keep_types=True)
        part = "env_kwargs and wrappers"
        return _check_size(body, part, MAX_ATTACH_BYTES, MAX_ATTACH_VALUES)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode a body.

        Raises:
          RemoteProtocolError: The body is not valid.
        """
        return decode_values(body, cls, "Attach", MAX_ATTACH_VALUES)


class Building(Body, frozen=True, kw_only=True):
    """The requested envs are still being built (BUILDING).

    Attributes:
      elapsed_ms: Time since the first ATTACH of the session.
    """

    elapsed_ms: Milliseconds


@dataclass(frozen=True, kw_only=True)
class Granted:
    """A granted lease (GRANTED), from which a client allocates its rows.

    Attributes:
      epoch: Number of the lease, which every request on the lease repeats.
      lease_seconds: Time without a message from the client after which the lease
        expires.
      spec: Spaces of every env.
      blocks: The blocks, which partition the rows.
    """

    epoch: int
    lease_seconds: float
    spec: EnvSpec
    blocks: tuple[Block, ...]

    def encode(self) -> bytes:
        """Return the encoded body.

        Raises:
          CodecError: The spaces are too large to send.
        """
        body = _Granted(
            epoch=self.epoch,
            lease_seconds=self.lease_seconds,
            env_name=self.spec.env_name,
            observation_space=Raw(codec.encode(describe(self.spec.observation_space))),
            action_space=Raw(codec.encode(describe(self.spec.action_space))),
            blocks=tuple((b.start, b.stop, b.worker, b.split) for b in self.blocks),
        ).encode()
        if len(body) > MAX_BODY_BYTES:
            raise codec.CodecError(
                f"expected spaces whose description fits into {MAX_BODY_BYTES} bytes; "
                f"got {len(body)}; pass scalar `low` and `high` to large Boxes"
            )
        return body

    @classmethod
    def decode(cls, body: bytes, num_envs: int) -> Self:
        """Decode a body, and check that its blocks partition `num_envs` rows."""
        fields = decode_struct(body, _Granted, "Granted")
        try:
            observation_space, action_space = (
                restore(codec.decode(memoryview(space), max_bytes=MAX_BODY_BYTES))
                for space in (fields.observation_space, fields.action_space)
            )
        except (codec.CodecError, SpaceError) as error:
            text = one_line(str(error), 500)
            raise RemoteProtocolError(f"Granted: {text}") from None
        starts = [block[0] for block in fields.blocks]
        edges = [0, *(block[1] for block in fields.blocks)]
        if edges != [*starts, num_envs] or any(a >= b for a, b in pairwise(edges)):
            raise RemoteProtocolError(
                f"Granted: blocks: expected one [start, stop, worker, split] per "
                f"block, and consecutive blocks that cover {num_envs} rows"
            )
        return cls(
            epoch=fields.epoch,
            lease_seconds=fields.lease_seconds,
            spec=EnvSpec(one_line(fields.env_name), observation_space, action_space),
            blocks=tuple(Block(i, *block) for i, block in enumerate(fields.blocks)),
        )


class _Granted(Body, frozen=True, kw_only=True):
    epoch: Annotated[int, Meta(ge=1, lt=2**32)]
    lease_seconds: Seconds
    env_name: Name
    observation_space: Raw
    action_space: Raw
    blocks: Annotated[
        tuple[tuple[U32, U32, U32, _BlockIndex], ...], Meta(max_length=MAX_ENTRIES)
    ]


class Pong(Body, frozen=True, kw_only=True):
    """Reply to a PING (PONG).

    Attributes:
      running: For each busy block, the time for which its operation has been running.
    """

    running: Annotated[Mapping[U32, Milliseconds], Meta(max_length=MAX_ENTRIES)]


class Drain(Body, frozen=True, kw_only=True):
    """The server grants no more leases, and is about to stop (DRAIN).

    A lease ends once each of its rows has completed an episode, at the latest when the
    server stops.

    Attributes:
      grace_ms: Time until the server stops.
    """

    grace_ms: Milliseconds


_Rows = Annotated[tuple[Row, ...], Meta(max_length=1 << 16)]
_Seeds = Annotated[tuple[U63 | None, ...], Meta(max_length=1 << 16)]


class ResetBody(Body, frozen=True, kw_only=True):
    """Request to reset rows of one or more blocks, with optional seeds (RESET).

    Attributes:
      resets: For each entry of the message, the rows of the lease (None for all rows of
        the block), and their seeds (None for no seeds); see `lane.Reset`.
      options: Options for the `reset` of these envs; see `pack_options`.
    """

    resets: Annotated[
        tuple[tuple[_Rows | None, _Seeds | None], ...], Meta(max_length=MAX_ENTRIES)
    ]
    options: Annotated[bytes, Meta(max_length=MAX_OPTIONS_BYTES)] = b""

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode a body; the options are checked, but remain encoded."""
        decoded = super().decode(body)
        if decoded.options:
            decode_values(decoded.options, _Options, "options", MAX_OPTIONS_VALUES)
        return decoded


def pack_options(options: Mapping[str, Any] | None) -> bytes:
    """Encode the options of `reset(options=...)`; b"" for None.

    Raises:
      CodecError: The options are too large, or not a dict of plain values with str
        keys.
    """
    if options is None:
        return b""
    try:
        convert(options, _Options)
        body = codec.encode(options, keep_types=True)
        return _check_size(body, "values", MAX_OPTIONS_BYTES, MAX_OPTIONS_VALUES)
    except ValueError as error:
        named = options if isinstance(options, Mapping) else {}
        raise codec.CodecError(f"options: {codec.explain(error, named)}") from None


class CallBody(Body, frozen=True, kw_only=True):
    """Attribute access on some envs (CALL); see `lane.Call`.

    Attributes:
      kind: "call", "get" or "set".
      name: Name of the attribute.
      calls: For each entry of the message, the rows of the lease and their arguments.
        The arguments are nil if they equal those of the previous entry.
    """

    kind: CallKind
    name: Name
    calls: Annotated[
        tuple[tuple[_Rows, Raw], ...],
        Meta(min_length=1, max_length=MAX_ARGUMENT_BLOCKS),
    ]

    @classmethod
    def from_calls(cls, calls: Sequence[Call]) -> Self:
        """Return one body for calls that differ only in rows and arguments."""
        previous, entries = b"", []
        for call in calls:
            is_same = call.arguments == previous
            entries.append((call.env_indices, _NIL if is_same else Raw(call.arguments)))
            previous = call.arguments
        return cls(kind=calls[0].kind, name=calls[0].name, calls=tuple(entries))

    def encode(self) -> bytes:
        """Return the encoded body.

        Raises:
          CodecError: The arguments cannot be sent.
        """
        body = super().encode()
        return _check_size(body, "arguments", MAX_CALL_BYTES, MAX_CALL_VALUES)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode a body; the arguments are checked, but remain encoded."""
        try:
            codec.check(body, MAX_CALL_VALUES)
        except codec.CodecError as error:
            raise RemoteProtocolError(f"CallBody: {error}") from None
        return super().decode(body)


class FrameRequest(Body, frozen=True, kw_only=True):
    """Request for rendered images of rows, or for the flight record of one row (FRAME).

    The server's workers keep rendering the rows for a few seconds after each request
    for images.

    Attributes:
      lease: Number of the lease; see `LeaseStatus`.
      rows: Rows of the lease.
      width: Maximum width of an image in pixels.
      after: For each row, the serial number of the latest image that the client has, or
        0. Missing numbers count as 0.
      record: Whether to send the flight record of the first row instead of images.
    """

    lease: U63
    rows: Annotated[tuple[Row, ...], Meta(max_length=MAX_FRAME_ROWS)]
    width: Annotated[int, Meta(ge=8, le=1024)] = 160
    after: Annotated[tuple[U63, ...], Meta(max_length=MAX_FRAME_ROWS)] = ()
    record: bool = False


class FrameResult(Body, frozen=True, kw_only=True):
    """New rendered images, in the order of the request (FRAME_RESULT).

    Attributes:
      pictures: Images that are newer than the client's, as many as fit.
    """

    pictures: Annotated[tuple[RenderedFrame, ...], Meta(max_length=MAX_FRAME_ROWS)] = ()
