"""Errors, and the report of a result: its infos, faults and errors of single blocks.

A report that would exceed its limit loses its infos, and says so by a flag; then the
ends of its texts; at last, all but one text per kind of fault, and all but one error.
Which rows and blocks have failed is never lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta, Raw, Struct
from msgspec.structs import force_setattr, replace

from envserve import codec
from envserve.errors import RemoteProtocolError
from envserve.lane import Fault
from envserve.settings import Name
from envserve.slab import Status
from envserve.text import one_line, printable
from envserve.wire.bodies import Body, Milliseconds, Row, read, read_values
from envserve.wire.constants import (
    MAX_ENTRIES,
    MAX_REPORT_BYTES,
    MAX_TEXT_BYTES,
    MAX_TRACEBACK_BYTES,
    ErrorCode,
    Executed,
)
from envserve.wire.message import Buffer

__all__ = ["ErrorBody", "Report"]

#: To how many bytes texts are cut, one after the other, until the report fits.
_TEXT_BYTES: Final = (MAX_TEXT_BYTES, 1024, 256, 64)
#: The same when there is one text per kind only: 6 kinds of at most 65,536 rows, and
#: one error, are then surely below the limit.
_MERGED_TEXT_BYTES: Final = 256
#: Longest set of rows or blocks that goes as numbers. Longer ones go as a bitmap: bit
#: i % 8 of byte i // 8 is index i, so that a set has a bound however it is scattered.
_MAX_LISTED: Final = 64

#: Rows by status, is_violation and text; blocks by error.
_Faults = dict[tuple[Status, bool, str], list[int]]
_Errors = dict["ErrorBody", list[int]]

_Indices = tuple[Row, ...] | Annotated[bytes, Meta(max_length=(1 << 16) // 8)]


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
        traceback = _clip(self.traceback, traceback_bytes, keep_end=True)
        return replace(self, text=_clip(self.text, text_bytes), traceback=traceback)


_FITS: Final = {"text": printable, "traceback": printable, "holder": one_line}


class _FaultGroup(Struct, array_like=True):
    status: Status
    is_violation: bool
    text: str
    rows: _Indices

    def __post_init__(self) -> None:
        self.text = printable(self.text)


class _Report(Body, frozen=True, kw_only=True):
    """A report on the wire: one text often concerns all rows of a worker."""

    infos: Raw
    faults: Sequence[_FaultGroup]
    errors: Sequence[tuple[_Indices, ErrorBody]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a RESULT says beyond its rows.

    Attributes:
      infos: Info dict by row.
      faults: Faults, by row.
      errors: By block: the operation failed as a whole there.
    """

    infos: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    faults: Sequence[Fault] = ()
    errors: Mapping[int, ErrorBody] = field(default_factory=dict)

    def encode(self) -> tuple[bytes, bool]:
        """Returns the frame, empty if there is nothing to say; if infos are lost."""
        if not (self.infos or self.faults or self.errors):
            return b"", False
        faults: _Faults = {}
        for fault in self.faults:
            key = (fault.status, fault.is_violation, fault.text)
            faults.setdefault(key, []).append(fault.env_index)
        errors: _Errors = {}
        for block, error in self.errors.items():
            errors.setdefault(error, []).append(block)
        if max(len(faults), len(errors)) <= MAX_ENTRIES:
            frame = _pack(self.infos, faults, errors, MAX_TEXT_BYTES)
            if len(frame) <= MAX_REPORT_BYTES:
                return frame, False
            for text_bytes in _TEXT_BYTES:
                frame = _pack({}, faults, errors, text_bytes)
                if len(frame) <= MAX_REPORT_BYTES:
                    return frame, bool(self.infos)
        merged = _merge_faults(faults), _merge_errors(errors)
        return _pack({}, *merged, _MERGED_TEXT_BYTES), bool(self.infos)

    @classmethod
    def decode(cls, frame: Buffer) -> Report:
        """Reads a frame, of no row or block twice; raises RemoteProtocolError."""
        if not frame:
            return cls()
        report = read(frame, _Report, "report")
        rows = _unpack_disjoint([group.rows for group in report.faults], "faults")
        blocks = _unpack_disjoint([blocks for blocks, _ in report.errors], "errors")
        return cls(
            infos=read_values(
                memoryview(report.infos), dict[Row, Mapping[str, Any]], "report.infos"
            ),
            faults=tuple(
                Fault(row, group.status, group.text, group.is_violation)
                for group, listed in zip(report.faults, rows, strict=True)
                for row in listed
            ),
            errors={
                block: error
                for (_, error), listed in zip(report.errors, blocks, strict=True)
                for block in listed
            },
        )


def _pack(
    infos: Mapping[int, Mapping[str, Any]],
    faults: _Faults,
    errors: _Errors,
    text_bytes: int,
) -> bytes:
    return _Report(
        infos=Raw(codec.encode(infos)),
        faults=[
            _FaultGroup(
                status, is_violation, _clip(text, text_bytes), _pack_indices(rows)
            )
            for (status, is_violation, text), rows in faults.items()
        ],
        errors=[
            (_pack_indices(blocks), error.clipped(text_bytes, text_bytes))
            for error, blocks in errors.items()
        ],
    ).encode()


def _merge_faults(faults: _Faults) -> _Faults:
    """Leaves one text, the first, for each kind of fault."""
    merged: dict[tuple[Status, bool], tuple[str, list[int]]] = {}
    for (status, is_violation, text), rows in faults.items():
        kind = (status, is_violation and status is Status.ENV_ERROR)
        merged.setdefault(kind, (text, []))[1].extend(rows)
    return {(*kind, text): rows for kind, (text, rows) in merged.items()}


def _merge_errors(errors: _Errors) -> _Errors:
    """Leaves one error for all blocks."""
    if len(errors) < 2:
        return errors
    first = next(iter(errors))
    blocks = [block for group in errors.values() for block in group]
    text = f"{len(blocks)} blocks failed, the first one so: {first.text}"
    error = replace(first, executed=Executed.UNKNOWN, text=text, env_index=None)
    return {error: blocks}


def _pack_indices(indices: Sequence[int]) -> tuple[int, ...] | bytes:
    if len(indices) <= _MAX_LISTED:
        return tuple(indices)
    bits = np.zeros(max(indices) + 1, np.uint8)
    bits[list(indices)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _unpack_indices(indices: tuple[int, ...] | bytes) -> Sequence[int]:
    if isinstance(indices, tuple):
        return indices
    bits = np.unpackbits(np.frombuffer(indices, np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def _unpack_disjoint(sets: Sequence[_Indices], where: str) -> list[Sequence[int]]:
    """Unpacks sets, as long as no index comes twice: each takes far more than a bit."""
    seen: set[int] = set()
    found, count = [], 0
    for indices in sets:
        found.append(_unpack_indices(indices))
        seen.update(found[-1])
        count += len(found[-1])
        if count > len(seen):
            raise RemoteProtocolError(f"report.{where}: expected each index once")
    return found


def _clip(text: str, max_bytes: int, *, keep_end: bool = False) -> str:
    """Cuts a text to so many bytes of UTF-8; a traceback's end is what counts."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    part = data[-max_bytes:] if keep_end else data[:max_bytes]
    return part.decode(errors="ignore")
