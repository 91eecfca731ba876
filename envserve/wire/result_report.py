"""Encode the report of a result: infos, faults, and errors of individual blocks.

If a report exceeds its limit, it is shortened in this order. First, the largest info
values are omitted, and their keys are listed. Then texts are truncated. Finally, only
one text of each kind of fault and only one error are kept. The rows and blocks that
failed are always listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from envserve.errors import EnvserveError, RemoteProtocolError
from envserve.lane import Fault, Outcome
from envserve.slab import Status
from envserve.spaces import codec
from envserve.spaces.info_columns import (
    InfoColumns,
    RowInfos,
    join_columns,
    read_columns,
    split_columns,
)
from envserve.spaces.infos import InfoBudget, PackedInfo, encode_infos, join_infos
from envserve.text import one_line, printable
from envserve.wire.bodies import decode_values
from envserve.wire.constants import (
    MAX_ENTRIES,
    MAX_REPORT_BYTES,
    MAX_REPORT_VALUES,
    MAX_TEXT_BYTES,
    Executed,
)
from envserve.wire.error_body import ErrorBody, clip, exception_of
from envserve.wire.handshake import Body, Row, decode_struct
from envserve.wire.message import Buffer

#: Lengths in bytes to which texts are cut, tried in this order until the report fits.
_TEXT_BYTES: Final = (MAX_TEXT_BYTES, 1024, 256, 64)
#: Length in bytes of texts after merging, chosen so that 6 kinds of faults of up to
#: 65,536 rows and one error always fit.
_MERGED_TEXT_BYTES: Final = 256
#: Maximum number of rows or blocks in a set that is sent as numbers. A larger set is
#: sent as a bitmap (bit i % 8 of byte i // 8 is index i), so that its size is bounded.
_MAX_LISTED: Final = 64

#: Info values in columns, and the encoded map from rows to all other info values.
_EncodedInfos = tuple[Sequence[InfoColumns], bytes]
_NO_INFOS: Final[_EncodedInfos] = (), b"\x80"

#: Maps (status, is_violation, text) of a fault to the rows that have this fault.
_Faults = dict[tuple[Status, bool, str], list[int]]
#: Maps each error to the blocks that failed with it.
_Errors = dict["ErrorBody", list[int]]

#: Maximum number of notes (warnings about the envs) in a report, and maximum length of
#: a note.
_MAX_NOTES: Final = 4
_MAX_NOTE_LENGTH: Final = 1024
_Note = Annotated[str, Meta(max_length=_MAX_NOTE_LENGTH)]
_Indices = tuple[Row, ...] | Annotated[bytes, Meta(max_length=(1 << 16) // 8)]


class _FaultGroup(Struct, array_like=True):
    status: Status
    is_violation: bool
    text: str
    rows: _Indices

    def __post_init__(self) -> None:
        self.text = printable(self.text)


class _ReportBody(Body, frozen=True, kw_only=True):
    """A report on the wire.

    Faults and errors are grouped by text, because one text often concerns all rows of a
    worker.
    """

    infos: Raw
    columns: Sequence[tuple[Row, bytes, bytes]] = ()
    faults: Sequence[_FaultGroup]
    errors: Sequence[tuple[_Indices, ErrorBody]]
    notes: Annotated[tuple[_Note, ...], Meta(max_length=_MAX_NOTES)] = ()


@dataclass(frozen=True, kw_only=True)
class ResultReport:
    """The infos, faults, errors and notes of a RESULT.

    Attributes:
      infos: Maps rows to info dicts.
      faults: Faults of rows.
      errors: Maps blocks to errors, for operations that failed as a whole.
      notes: Warnings about the envs (see `Outcome`), each to be logged once.
      packed_infos: Maps rows to the encoded info values that are not in columns, so
        that a sender need not encode them again. Ignored unless it contains every row
        that has such values; empty in decoded reports.
    """

    infos: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    faults: Sequence[Fault] = ()
    errors: Mapping[int, ErrorBody] = field(default_factory=dict)
    notes: Sequence[str] = ()
    packed_infos: Mapping[int, PackedInfo] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return a frame of at most MAX_REPORT_BYTES; b"" for an empty report."""
        if not (self.infos or self.faults or self.errors or self.notes):
            return b""
        notes = tuple(dict.fromkeys(self.notes))[:_MAX_NOTES]
        faults: _Faults = {}
        for fault in self.faults:
            key = (fault.status, fault.is_violation, fault.text)
            faults.setdefault(key, []).append(fault.env_index)
        errors: _Errors = {}
        for block, error in self.errors.items():
            errors.setdefault(error, []).append(block)
        if max(len(faults), len(errors)) <= MAX_ENTRIES:
            for text_bytes in _TEXT_BYTES:
                frame = _pack(_NO_INFOS, faults, errors, notes, text_bytes)
                budget = InfoBudget(MAX_REPORT_BYTES - len(frame), MAX_REPORT_VALUES)
                if budget.num_bytes > 0:
                    infos = self._encode_infos(budget)
                    return _pack(infos, faults, errors, notes, text_bytes)
        faults, errors = _merge_faults(faults), _merge_errors(errors)
        return _pack(_NO_INFOS, faults, errors, notes, _MERGED_TEXT_BYTES)

    def _encode_infos(self, budget: InfoBudget) -> _EncodedInfos:
        columns, others = split_columns(self.infos)
        columns = join_columns(columns)
        remaining = budget.without(columns)
        if remaining.within(half := budget.half()) != half:
            # The columns are too large. Encode their values in the map instead, because
            # `encode_infos` can omit single values.
            return [], encode_infos(self.infos, budget, budget)
        if len(self.packed_infos) == len(others):
            return columns, join_infos(self.packed_infos, others, remaining)
        return columns, encode_infos(others, remaining, remaining)

    @classmethod
    def decode(cls, frame: Buffer) -> ResultReport:
        """Decode a frame.

        Raises:
          RemoteProtocolError: The frame is not valid, or contains a row or block twice.
        """
        if not frame:
            return cls()
        report = decode_struct(frame, _ReportBody, "report")
        rows = _unpack_disjoint([group.rows for group in report.faults], "faults")
        blocks = _unpack_disjoint([blocks for blocks, _ in report.errors], "errors")
        try:
            columns = read_columns(report.columns)
        except codec.CodecError as error:
            raise RemoteProtocolError(f"report.columns: {error}") from None
        others = decode_values(
            memoryview(report.infos),
            dict[Row, Mapping[Any, Any]],
            "report.infos",
            MAX_REPORT_VALUES - sum(part.cost[1] for part in columns),
        )
        return cls(
            infos=RowInfos(columns, others).simplified(),
            faults=tuple(
                Fault(row, group.status, group.text, group.is_violation)
                for group, indices in zip(report.faults, rows, strict=True)
                for row in indices
            ),
            errors={
                block: error
                for (_, error), indices in zip(report.errors, blocks, strict=True)
                for block in indices
            },
            notes=tuple(map(one_line, report.notes)),
        )

    def outcomes(
        self,
        entries: Sequence[tuple[int, int]],
        row_blocks: Sequence[int],
        address: str,
    ) -> dict[int, Outcome]:
        """Return the outcome of each block of a RESULT from the server at `address`.

        The entries are those of the RESULT, and `row_blocks` contains the block of each
        row.

        Raises:
          RemoteProtocolError: The report contains rows or blocks that are not in the
            RESULT.
        """
        infos = {block: RowInfos() for block, _ in entries}
        faults: dict[int, list[Fault]] = {block: [] for block in infos}
        errors: dict[int, EnvserveError | None] = dict.fromkeys(infos)
        # Create each exception only once, because thousands of blocks may share it.
        exceptions = {
            body: exception_of(body, address) for body in {*self.errors.values()}
        }
        errors.update({block: exceptions[body] for block, body in self.errors.items()})
        try:
            columns, others = split_columns(self.infos)
            for part in columns:
                rows = range(part.start, part.stop)
                for block, group in groupby(rows, row_blocks.__getitem__):
                    infos[block].columns.append(part.part([*group]))
            for row, info in others.items():
                infos[row_blocks[row]].others[row] = info
            for fault in self.faults:
                faults[row_blocks[fault.env_index]].append(fault)
        except LookupError:  # a row outside the lease, or of another block
            errors.clear()
        if infos.keys() != errors.keys():
            raise RemoteProtocolError(
                "report: expected only rows and blocks of the RESULT; got others"
            )
        outcomes = {
            block: Outcome(block, part.simplified(), faults[block], error=errors[block])
            for block, part in infos.items()
        }
        if self.notes:
            first = entries[0][0]
            outcomes[first] = outcomes[first]._replace(warnings=self.notes)
        return outcomes


def _pack(
    infos: _EncodedInfos,
    faults: _Faults,
    errors: _Errors,
    notes: tuple[str, ...],
    text_bytes: int,
) -> bytes:
    return _ReportBody(
        notes=tuple(clip(note, _MAX_NOTE_LENGTH) for note in notes),
        infos=Raw(infos[1]),
        columns=[(part.start, part.layout.encoded, part.data) for part in infos[0]],
        faults=[
            _FaultGroup(
                status,
                is_violation,
                clip(text, text_bytes, keep_end=status is Status.ENV_ERROR),
                _pack_indices(rows),
            )
            for (status, is_violation, text), rows in faults.items()
        ],
        errors=[
            (_pack_indices(blocks), error.clipped(text_bytes, text_bytes))
            for error, blocks in errors.items()
        ],
    ).encode()


def _merge_faults(faults: _Faults) -> _Faults:
    """Merge faults that differ only in their text, keeping the first text."""
    merged: dict[tuple[Status, bool], tuple[str, list[int]]] = {}
    for (status, is_violation, text), rows in faults.items():
        kind = (status, is_violation and status is Status.ENV_ERROR)
        merged.setdefault(kind, (text, []))[1].extend(rows)
    return {(*kind, text): rows for kind, (text, rows) in merged.items()}


def _merge_errors(errors: _Errors) -> _Errors:
    """Merge all errors into one that counts the blocks and quotes the first error."""
    if len(errors) < 2:
        return errors
    first = next(iter(errors))
    blocks = [block for group in errors.values() for block in group]
    text = f"{len(blocks)} blocks failed, the first one with: {first.text}"
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
    unpacked: list[int] = np.flatnonzero(bits).tolist()
    return unpacked


def _unpack_disjoint(sets: Sequence[_Indices], where: str) -> list[Sequence[int]]:
    """Unpack sets of indices; raise RemoteProtocolError if an index occurs twice.

    A peer could otherwise send the same bitmap many times, and its unpacked indices
    would take far more memory than the message.
    """
    seen: set[int] = set()
    unpacked, count = [], 0
    for indices in sets:
        unpacked.append(_unpack_indices(indices))
        seen.update(unpacked[-1])
        count += len(unpacked[-1])
        if count > len(seen):
            raise RemoteProtocolError(f"report.{where}: expected each index once")
    return unpacked
