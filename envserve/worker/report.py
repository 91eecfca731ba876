"""What a worker says besides the rows: its spaces; faults, infos, rebuilt envs.

Whatever env code has put into infos and exceptions, a report can be sent: what has no
plain form is left out by name.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from envserve import codec
from envserve.errors import SpaceError
from envserve.lane import Block, Fault
from envserve.slab import Status
from envserve.spec import EnvSpec, describe, restore

__all__ = [
    "Report",
    "describe_error",
    "encode_report",
    "encode_spaces",
    "error_message",
    "max_report",
    "printable",
    "read_report",
    "read_spaces",
]

_MAX_SPACES_BYTES: Final = 16 << 20
_MAX_TEXT: Final = 16 << 10  # characters of a traceback
#: Bytes of the tracebacks of a report, together; and least bytes of one.
_MAX_TEXTS: Final = 32 << 10
_MIN_TEXT: Final = 64
#: What is said of a row besides, at most.
_ROW_BYTES: Final = 64 + _MIN_TEXT
_ROW_VALUES: Final = 16
#: Values take time to read, however short they are.
_VALUES_PER_KIB: Final = 256
_MAX_SPACES_VALUES: Final = 1 << 14


def encode_spaces(spec: EnvSpec) -> bytes:
    """Returns the payload of a READY."""
    observation = describe(spec.observation_space)
    action = describe(spec.action_space)
    return codec.encode({"observation": observation, "action": action})


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


@dataclass(frozen=True)
class Report:
    """What a worker says of an operation besides the rows.

    Attributes:
      faults: Rows that failed.
      infos: Info dicts by row.
      rebuilt: Rows whose env is another one now.
    """

    faults: list[Fault]
    infos: Mapping[int, Mapping[str, Any]]
    rebuilt: list[int]


def max_report(num_rows: int, max_infos_kib: int) -> tuple[int, int]:
    """Returns how many bytes and values a report on so many rows may have."""
    num_bytes = (max_infos_kib << 10) + _MAX_TEXTS + num_rows * _ROW_BYTES
    return num_bytes, (max_infos_kib + 1) * _VALUES_PER_KIB + num_rows * _ROW_VALUES


def read_report(payload: bytes, block: Block, max_infos_kib: int) -> Report:
    """Reads the payload of a DONE, unless it is so long that reading takes long.

    Raises:
      ValueError: It is no report on rows of this block.
    """
    if not payload:
        return Report([], {}, [])
    try:
        num_bytes, num_values = max_report(block.stop - block.start, max_infos_kib)
        report = codec.decode(payload, max_bytes=num_bytes, max_values=num_values)
        faults = [
            Fault(f["row"], Status(f["status"]), f["text"], f["violation"])
            for f in report["faults"]
        ]
        infos = dict(report["infos"])
        rebuilt = [*report["rebuilt"], *(fault.env_index for fault in faults)]
        strangers = {*rebuilt, *infos} - {*range(block.start, block.stop)}
    except (codec.CodecError, KeyError, TypeError) as error:
        raise ValueError(repr(error)) from None
    if strangers:
        raise ValueError(f"rows {strangers} are not of block {block.index}")
    return Report(faults, infos, rebuilt)


def describe_error(error: Exception) -> str:
    """Returns the traceback from the frame below the one that caught it."""
    inner = error.__traceback__.tb_next if error.__traceback__ else None
    return printable("".join(traceback.format_exception(type(error), error, inner)))


def error_message(error: Exception) -> str:
    """Returns the text of an exception, or at least its name."""
    try:
        return printable(str(error)[:_MAX_TEXT])
    except Exception:  # an env's exception class may do anything
        return type(error).__name__


def printable(text: str) -> str:
    """Returns the end of a text, with what UTF-8 cannot carry (surrogates) escaped."""
    return text[-_MAX_TEXT:].encode(errors="backslashreplace").decode()


def encode_report(
    faults: list[dict[str, Any]],
    infos: dict[int, Mapping[str, Any]],
    rebuilt: Sequence[int],
    num_rows: int,
    max_infos_kib: int,
) -> bytes:
    """Encodes what goes beside the rows; nothing at all in the usual case."""
    if not faults and not infos and not rebuilt:
        return b""
    for fault in faults:
        kept = max(_MIN_TEXT, _MAX_TEXTS // len(faults))
        fault["text"] = fault["text"].encode()[-kept:].decode(errors="ignore")
    report = {"faults": faults, "rebuilt": rebuilt}
    try:
        encoded = codec.encode({**report, "infos": infos})
    except codec.CodecError:
        plain = {row: _plain_items(info) for row, info in infos.items()}
        encoded = codec.encode({**report, "infos": plain})
    limits = max_report(num_rows, max_infos_kib)
    if _exceeds(encoded, *limits):
        nothing = {row: {"omitted": _names(info)} for row, info in infos.items()}
        encoded = codec.encode({**report, "infos": nothing})
    if _exceeds(encoded, *limits):
        encoded = codec.encode({**report, "infos": {}})
    return encoded


def _exceeds(report: bytes, num_bytes: int, num_values: int) -> bool:
    if 4 * len(report) <= num_values:  # the usual case: so few bytes hold no more
        return False
    try:
        codec.check(report, num_values)
    except codec.CodecError:
        return True
    return len(report) > num_bytes


def _plain_items(info: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what cannot be sent, and says so under the key "omitted"."""
    plain: dict[str, Any] = {}
    omitted = []
    for key, value in info.items():
        try:
            codec.encode([[{key: value}]])  # as deep as it will be in the report
        except codec.CodecError:
            omitted.append(key)
        else:
            plain[str(key)] = value
    return {**plain, "omitted": _names(omitted)}


def _names(keys: Iterable[Any]) -> list[str]:
    return [printable(str(key)) for key in keys]
