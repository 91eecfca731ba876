"""What a worker says besides the rows: its spaces; faults, infos, rebuilt envs.

Whatever env code has put into infos and exceptions, a report can be sent: what has no
plain form is left out by name.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from envserve.errors import SpaceError
from envserve.lane import Block, Fault, Outcome
from envserve.slab import Status
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec, describe, restore
from envserve.spaces.infos import InfoBudget, PackedInfo, encode_infos
from envserve.text import one_line
from envserve.worker.env_checks import SpaceViolation

__all__ = [
    "WorkerReport",
    "encode_report",
    "encode_spaces",
    "fault_of",
    "max_infos",
    "max_report",
    "read_report",
    "read_spaces",
    "sendable",
]

_MAX_SPACES_BYTES: Final = 16 << 20
_MAX_TEXT: Final = 16 << 10  # characters of a traceback
#: Bytes of the tracebacks of a report, together; and least bytes of one.
_MAX_TEXTS: Final = 32 << 10
_MIN_TEXT: Final = 64
#: What is noted in one report, and how much of each.
_MAX_NOTES: Final = 4
_MAX_NOTE: Final = 400
#: What is said of a row besides, at most.
_ROW_BYTES: Final = 64 + _MIN_TEXT
#: How often an env is rebuilt in one operation, at most: by a reset that fails twice.
_MOST_REBUILT: Final = 2
#: Values take time to read, however short they are: so many for each KiB that a row's
#: infos may have, and more for each row.
_VALUES_PER_KIB: Final = 256
_INFO_VALUES: Final = 64
#: A block's infos have room for so many rows that take all they may; and for no more
#: bytes than that.
_FULL_ROWS: Final = 16
_MAX_INFOS: Final = 32 << 20
_MAX_SPACES_VALUES: Final = 1 << 14


def encode_spaces(spec: EnvSpec) -> bytes:
    """Returns the payload of a READY; raises SpaceError if it is too long for one."""
    observation = describe(spec.observation_space)
    action = describe(spec.action_space)
    payload = codec.encode({"observation": observation, "action": action})
    if len(payload) >= _MAX_SPACES_BYTES:
        raise SpaceError(
            f"expected spaces whose description is below {_MAX_SPACES_BYTES} bytes; "
            f"got {len(payload)}; give large Boxes one low and one high for all"
        )
    return payload


def read_spaces(payload: bytes, env_name: str) -> EnvSpec:
    """Reads the payload of a READY; raises ValueError if it is none."""
    try:
        spaces = codec.decode(
            payload, max_bytes=_MAX_SPACES_BYTES, max_values=_MAX_SPACES_VALUES
        )
        both = restore(spaces["observation"]), restore(spaces["action"])
    except (codec.CodecError, SpaceError, TypeError, KeyError) as error:
        raise ValueError(error) from None
    return EnvSpec(env_name, *both)


class WorkerReport(msgspec.Struct):
    """What a worker reports of an operation, beside the rows.

    Attributes:
      faults: Faults of rows, whose envs were rebuilt after them.
      rebuilt: Rows whose envs were rebuilt for another reason.
      infos: Encoded info dicts by row.
      notes: Warnings about the envs.
    """

    faults: list[Fault]
    rebuilt: list[int]
    infos: dict[int, msgspec.Raw]
    notes: list[str]


def max_infos(num_rows: int, max_infos_kib: int) -> tuple[InfoBudget, InfoBudget]:
    """Returns what the infos of a row, and of so many rows, may take."""
    num_bytes, num_values = max_infos_kib << 10, max_infos_kib * _VALUES_PER_KIB
    total = min(min(num_rows, _FULL_ROWS) * num_bytes, _MAX_INFOS)
    total_values = num_values + num_rows * _INFO_VALUES
    return InfoBudget(num_bytes, num_values), InfoBudget(total, total_values)


def max_report(num_rows: int, max_infos_kib: int) -> int:
    """Returns how many bytes a report on so many rows may have."""
    _, infos = max_infos(num_rows, max_infos_kib)
    num_bytes = infos.num_bytes + _MAX_TEXTS + num_rows * _ROW_BYTES
    return num_bytes + 4 * _MAX_NOTES * _MAX_NOTE


def read_report(
    payload: bytes, block: Block, max_infos_kib: int
) -> tuple[Outcome, Sequence[int]]:
    """Read the payload of a DONE, unless it is so long that reading takes long.

    Returns:
      The outcome of the operation, and the rows whose envs were rebuilt.

    Raises:
      ValueError: It is no report on rows of this block.
    """
    if not payload:
        return Outcome(block.index), ()
    rows = block.rows
    _, room = max_infos(len(rows), max_infos_kib)
    if len(payload) > max_report(len(rows), max_infos_kib):
        raise ValueError(f"{len(payload)} bytes are too many for {len(rows)} rows")
    try:
        report = msgspec.msgpack.decode(payload, type=WorkerReport)
        packed, left, infos = {}, room.num_values, {}
        for row, raw in report.infos.items():
            encoded = bytes(raw)
            num_values = codec.check(encoded, left)
            left -= num_values
            packed[row] = PackedInfo(encoded, num_values)
            infos[row] = codec.unpack(encoded)
    except (msgspec.MsgspecError, codec.CodecError, RecursionError) as error:
        raise ValueError(repr(error)) from None
    if any(type(info) is not dict for info in infos.values()):
        raise ValueError("expected a dict for each row's info")
    failed = {fault.env_index for fault in report.faults}
    if len(failed) < len(report.faults):
        raise ValueError("expected at most one fault of a row")
    rebuilt = [*report.rebuilt, *failed]
    if len(rebuilt) > _MOST_REBUILT * len(rows):
        raise ValueError(f"{len(rebuilt)} envs of {len(rows)} rows were rebuilt")
    if strangers := {*rebuilt, *infos} - {*rows}:
        raise ValueError(f"rows {strangers} are not of block {block.index}")
    notes = [one_line(note, _MAX_NOTE) for note in report.notes[:_MAX_NOTES]]
    outcome = Outcome(
        block.index, infos, report.faults, notes=notes, packed_infos=packed
    )
    return outcome, rebuilt


def fault_of(row: int, error: Exception) -> Fault:
    """Return the fault of a row whose env has raised an error."""
    if isinstance(error, SpaceViolation):
        text, is_violation = str(error), not error.is_masked
    else:  # the traceback from the frame below the one that caught it
        inner = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, inner))
        is_violation = False
    return Fault(row, Status.ENV_ERROR, sendable(text), is_violation)


def sendable(text: str) -> str:
    """Returns the end of a text, with what UTF-8 cannot carry (surrogates) escaped."""
    return text[-_MAX_TEXT:].encode(errors="backslashreplace").decode()


def encode_report(
    num_rows: int,
    max_infos_kib: int,
    faults: Sequence[Fault] = (),
    infos: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    notes: Sequence[str] = (),
    rebuilt: Sequence[int] = (),
) -> bytes:
    """Encodes what goes beside the rows; nothing at all in the usual case."""
    if not faults and not infos and not rebuilt and not notes:
        return b""
    left, cut = _MAX_TEXTS, [*faults]
    shortest = sorted(range(len(cut)), key=lambda index: len(cut[index].text))
    for number, index in enumerate(shortest):
        kept = max(_MIN_TEXT, left // (len(cut) - number))
        text = cut[index].text.encode()[-kept:].decode(errors="ignore")
        cut[index] = cut[index]._replace(text=text)
        left -= len(text.encode())
    encoded = encode_infos(infos, *max_infos(num_rows, max_infos_kib))
    report = {"faults": cut, "rebuilt": rebuilt, "infos": msgspec.Raw(encoded)}
    return msgspec.msgpack.encode({**report, "notes": notes[:_MAX_NOTES]})
