"""Errors, and the report of a result: its infos, faults and errors of single blocks.

A report that would exceed its limit loses its infos, and says so by a flag; then the
ends of its texts; at last, all but one text per kind of fault, and all but one error.
Which rows and blocks have failed is never lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from envserve import codec
from envserve.errors import RemoteProtocolError
from envserve.lane import Fault
from envserve.slab import Status
from envserve.wire.constants import (
    MAX_ENTRIES,
    MAX_NAME_LENGTH,
    MAX_REPORT_BYTES,
    MAX_TEXT_BYTES,
    MAX_TRACEBACK_BYTES,
    ErrorCode,
    Executed,
)
from envserve.wire.fields import Fields, clip
from envserve.wire.indices import pack_indices, unpack_indices
from envserve.wire.message import Buffer

__all__ = ["ErrorBody", "Report"]

_MAX_ROW: Final = 1 << 16
_MAX_MS: Final = 2**63 - 1
#: To how many bytes texts are cut, one after the other, until the report fits.
_TEXT_BYTES: Final = (MAX_TEXT_BYTES, 1024, 256, 64)
#: The same when there is one text per kind only: 6 kinds of at most 65,536 rows, and
#: one error, are then surely below the limit.
_MERGED_TEXT_BYTES: Final = 256

#: Rows by status, is_violation and text; blocks by error.
_Faults = dict[tuple[Status, bool, str], list[int]]
_Errors = dict["ErrorBody", list[int]]


@dataclass(frozen=True, kw_only=True)
class ErrorBody:
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
    text: str
    traceback: str = ""
    env_index: int | None = None
    holder: str = ""
    held_ms: int = 0
    is_draining: bool = False

    def encode(self) -> bytes:
        """Returns the body of an ERROR."""
        return codec.encode(self.as_map(MAX_TEXT_BYTES, MAX_TRACEBACK_BYTES))

    def as_map(self, text_bytes: int, traceback_bytes: int) -> dict[str, Any]:
        """Returns the fields, with texts cut to so many bytes."""
        fields: dict[str, Any] = {
            "code": int(self.code),
            "executed": int(self.executed),
            "text": clip(self.text, text_bytes),
            "traceback": clip(self.traceback, traceback_bytes, keep_end=True),
            "env_index": self.env_index,
        }
        for name in ("holder", "held_ms", "is_draining"):
            if value := getattr(self, name):
                fields[name] = value
        return fields

    @classmethod
    def decode(cls, body: bytes) -> ErrorBody:
        """Reads the body of an ERROR; raises RemoteProtocolError."""
        return cls.from_fields(Fields.decode(body, "ERROR"))

    @classmethod
    def from_fields(cls, fields: Fields) -> ErrorBody:
        """Reads the fields; raises RemoteProtocolError."""
        has_env = fields.anything("env_index") is not None
        return cls(
            code=ErrorCode(fields.integer("code", 1, max(ErrorCode))),
            executed=Executed(fields.integer("executed", 0, max(Executed))),
            text=fields.text("text", MAX_TEXT_BYTES),
            traceback=fields.text("traceback", MAX_TRACEBACK_BYTES, default=""),
            env_index=fields.integer("env_index", 0, _MAX_ROW) if has_env else None,
            holder=fields.text("holder", MAX_NAME_LENGTH, default=""),
            held_ms=fields.integer("held_ms", 0, _MAX_MS, default=0),
            is_draining=fields.boolean("is_draining", default=False),
        )


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
        """Returns the frame, empty if there is nothing to say; and if infos are lost.

        One text often concerns all rows of a worker; it is sent once.
        """
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
        """Reads a frame; raises RemoteProtocolError."""
        if not frame:
            return cls()
        fields = Fields.decode(frame, "report")
        infos = fields.anything("infos")
        if not isinstance(infos, dict) or not all(
            _is_row(row) and isinstance(info, dict) for row, info in infos.items()
        ):
            raise RemoteProtocolError("report.infos: expected a map by row")
        faults = [
            fault
            for item in fields.items("faults", _MAX_ROW)
            for fault in _read_faults(item)
        ]
        errors = {}
        for item in fields.items("errors", _MAX_ROW):
            if not isinstance(item, list) or len(item) != 2:
                raise RemoteProtocolError("report.errors: expected [blocks, error]")
            error = ErrorBody.from_fields(Fields(item[1], "report.errors"))
            for block in unpack_indices(item[0], _MAX_ROW, "report.errors"):
                errors[block] = error
        return cls(infos=infos, faults=tuple(faults), errors=errors)


def _pack(
    infos: Mapping[int, Mapping[str, Any]],
    faults: _Faults,
    errors: _Errors,
    text_bytes: int,
) -> bytes:
    return codec.encode(
        {
            "infos": infos,
            "faults": [
                [int(status), is_violation, clip(text, text_bytes), pack_indices(rows)]
                for (status, is_violation, text), rows in faults.items()
            ],
            "errors": [
                [pack_indices(blocks), error.as_map(text_bytes, text_bytes)]
                for error, blocks in errors.items()
            ],
        }
    )


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


def _is_row(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_ROW


def _read_faults(item: Any) -> list[Fault]:
    if not (
        isinstance(item, list)
        and len(item) == 4
        and _is_row(item[0])
        and item[0] <= max(Status)
        and isinstance(item[1], bool)
        and isinstance(item[2], str)
    ):
        raise RemoteProtocolError(
            "report.faults: expected [status, is_violation, text, rows]"
        )
    status, is_violation, text, rows = item
    return [
        Fault(row, Status(status), text, is_violation)
        for row in unpack_indices(rows, _MAX_ROW, "report.faults")
    ]
