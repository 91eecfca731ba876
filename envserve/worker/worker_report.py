"""The reports of workers: data outside the rows (spaces, faults, infos, warnings).

A report can always be encoded, whatever an env's infos and exceptions contain: values
that `codec` cannot encode are omitted, and their keys are listed. The pool decodes
reports in the loop that serves all workers, so reports are limited in bytes and in
values.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType, TracebackType
from typing import Any, Final

import msgspec

from envserve.errors import SpaceError
from envserve.lane import Block, Fault, Outcome
from envserve.slab import Status
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec, describe, restore
from envserve.spaces.info_columns import RowInfos, read_columns, split_infos
from envserve.spaces.infos import InfoBudget, PackedInfo, encode_infos
from envserve.text import exception_line, message_of, one_line
from envserve.worker.env_checks import SpaceViolation

_MAX_SPACES_BYTES: Final = 16 << 20
#: Names of modules that call the env or build it. Their frames at the start of a
#: traceback are omitted.
_CALLERS: Final = re.compile(r"envserve\.|importlib|gymnasium\.envs\.registration$")
_MAX_TRACEBACK_CHARS: Final = 16 << 10
#: Maximum length of an exception's message in a traceback, so that the lines of the
#: frames before the message are kept.
_MAX_MESSAGE_CHARS: Final = 1 << 10
#: Maximum total size of the tracebacks in a report. If it is exceeded, the longest ones
#: are cut, but not to less than the minimum size.
_MAX_TRACEBACK_BYTES: Final = 32 << 10
_MIN_TRACEBACK_BYTES: Final = 64
#: Maximum number of warnings in a report, and maximum length of a warning.
_MAX_WARNINGS: Final = 4
_MAX_WARNING_CHARS: Final = 400
#: Maximum size of the fault of a row whose traceback was cut to the minimum size.
_ROW_BYTES: Final = 64 + _MIN_TRACEBACK_BYTES
#: Maximum number of rebuilds per row in one operation. The worst case is a reset that
#: fails, is retried on a new env, and fails again.
_MAX_REBUILDS_PER_ROW: Final = 2
#: Maximum number of values in the info of a row, per KiB of its maximum size. The
#: number is limited because even short values take time to decode.
_VALUES_PER_KIB: Final = 256
#: The infos of a block may contain as many values as the info of one row, and in
#: addition this number per row of the block.
_VALUES_PER_ROW: Final = 64
#: The infos of a block may take as many bytes as this number of infos of maximum size,
#: and at most `_MAX_INFOS_BYTES`.
_NUM_FULL_ROWS: Final = 16
_MAX_INFOS_BYTES: Final = 32 << 20
_MAX_SPACES_VALUES: Final = 1 << 14


def encode_spaces(spec: EnvSpec) -> bytes:
    """Encode the spaces of a worker's envs, the payload of READY.

    Raises:
      SpaceError: The payload is too large.
    """
    observation = describe(spec.observation_space)
    action = describe(spec.action_space)
    payload = codec.encode({"observation": observation, "action": action})
    if len(payload) >= _MAX_SPACES_BYTES:
        raise SpaceError(
            f"expected spaces whose description is below {_MAX_SPACES_BYTES} bytes; "
            f"got {len(payload)}; pass scalar `low` and `high` to large Boxes"
        )
    return payload


def decode_spaces(payload: bytes, env_name: str) -> EnvSpec:
    """Decode the spaces of a worker's envs from the payload of READY.

    Raises:
      ValueError: The payload is not valid.
    """
    try:
        spaces = codec.decode(
            payload, max_bytes=_MAX_SPACES_BYTES, max_values=_MAX_SPACES_VALUES
        )
        observation_space = restore(spaces["observation"])
        action_space = restore(spaces["action"])
    except (codec.CodecError, SpaceError, TypeError, KeyError) as error:
        raise ValueError(error) from None
    return EnvSpec(env_name, observation_space, action_space)


class WorkerReport(msgspec.Struct):
    """The report of an operation: results that are not in the rows of the slab.

    Attributes:
      faults: Faults of rows whose envs failed and were rebuilt. The status of a fault
        is OK if a reset failed and was then repeated successfully with the new env.
      rebuilt: Rows whose envs were rebuilt without a fault, once per rebuild.
      infos: Maps rows to encoded info dicts without the numbers in `columns`.
      warnings: Warnings about the envs.
      columns: Numbers in the infos of adjacent rows, as tuples of the first row, the
        encoded layout and the records; see `info_columns`.
    """

    faults: list[Fault]
    rebuilt: list[int]
    infos: dict[int, msgspec.Raw]
    warnings: list[str]
    columns: list[tuple[int, bytes, bytes]]


@lru_cache(maxsize=64)
def info_budgets(num_rows: int, max_infos_kib: int) -> tuple[InfoBudget, InfoBudget]:
    """Return the budgets for the infos of one row, and of `num_rows` rows together."""
    num_bytes, num_values = max_infos_kib << 10, max_infos_kib * _VALUES_PER_KIB
    total = min(min(num_rows, _NUM_FULL_ROWS) * num_bytes, _MAX_INFOS_BYTES)
    total_values = num_values + num_rows * _VALUES_PER_ROW
    return InfoBudget(num_bytes, num_values), InfoBudget(total, total_values)


@lru_cache(maxsize=64)
def max_report_bytes(num_rows: int, max_infos_kib: int) -> int:
    """Return the maximum size of a report about `num_rows` rows, in bytes."""
    _, infos = info_budgets(num_rows, max_infos_kib)
    num_bytes = infos.num_bytes + _MAX_TRACEBACK_BYTES + num_rows * _ROW_BYTES
    return num_bytes + 4 * _MAX_WARNINGS * _MAX_WARNING_CHARS


def decode_report(
    payload: bytes, block: Block, max_infos_kib: int
) -> tuple[Outcome, Sequence[int]]:
    """Decode the report of an operation from the payload of DONE.

    Returns:
      The outcome of the operation, and the rows whose envs were rebuilt, once per
      rebuild.

    Raises:
      ValueError: The payload is too large, or not a valid report about this block.
    """
    if not payload:
        return Outcome(block.index), ()
    rows = block.rows
    _, budget = info_budgets(len(rows), max_infos_kib)
    if len(payload) > max_report_bytes(len(rows), max_infos_kib):
        raise ValueError(
            f"the report has too many bytes for {len(rows)} rows: {len(payload)}"
        )
    try:
        report = msgspec.msgpack.decode(payload, type=WorkerReport)
        columns = read_columns(report.columns)
        packed, infos = {}, {}
        values_left = budget.without(columns).num_values
        if values_left < 0:
            raise ValueError("the columns of infos contain too many values")
        for row, raw in report.infos.items():
            encoded = bytes(raw)
            num_values = codec.check(encoded, values_left)
            values_left -= num_values
            packed[row] = PackedInfo(encoded, num_values)
            infos[row] = codec.unpack(encoded)
    except (msgspec.MsgspecError, codec.CodecError, RecursionError) as error:
        raise ValueError(repr(error)) from None
    if columns and (columns[0].start < block.start or columns[-1].stop > block.stop):
        raise ValueError(f"columns contain rows that are not in block {block.index}")
    if not (infos or report.faults or report.rebuilt or report.warnings):
        return Outcome(block.index, RowInfos(columns)), ()  # the usual case
    if any(type(info) is not dict for info in infos.values()):
        raise ValueError("expected a dict as the info of each row")
    failed = {fault.env_index for fault in report.faults}
    if len(failed) < len(report.faults):
        raise ValueError("expected at most one fault per row")
    rebuilt = [*report.rebuilt, *failed]
    if len(rebuilt) > _MAX_REBUILDS_PER_ROW * len(rows):
        raise ValueError(
            f"expected at most {_MAX_REBUILDS_PER_ROW} rebuilds for each of "
            f"{len(rows)} rows; got {len(rebuilt)} in total"
        )
    if unknown := {*rebuilt, *infos} - {*rows}:
        raise ValueError(f"rows {unknown} are not in block {block.index}")
    warnings = [
        one_line(warning, _MAX_WARNING_CHARS)
        for warning in report.warnings[:_MAX_WARNINGS]
    ]
    outcome = Outcome(
        block.index,
        RowInfos(columns, infos) if columns else infos,
        [fault for fault in report.faults if fault.status != Status.OK],
        warnings=warnings,
        packed_infos=packed,
        retried=[fault for fault in report.faults if fault.status == Status.OK],
    )
    return outcome, rebuilt


def fault_from_error(row: int, error: Exception) -> Fault:
    """Return the fault of a row whose env has raised an exception.

    Remove the frames that call the env from the exception: the traceback of a successor
    that also fails includes them.
    """
    if isinstance(error, SpaceViolation):
        text, is_violation, frames = str(error), not error.is_masked, None
    else:
        text, is_violation, frames = traceback_of(error), False, _env_frames(error)
    # The class of the exception may forbid assignments, as a frozen dataclass does.
    BaseException.with_traceback(error, frames)
    return Fault(row, Status.ENV_ERROR, utf8_tail(text), is_violation)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an env's exception, without the frames that call the env.

    If there are only such frames, return the whole traceback.
    """
    inner = _env_frames(error)
    try:
        report = traceback.TracebackException(type(error), error, inner)
        previous, texts = report.__context__, [*report.format(chain=False)]
        # The successor of a failed env often fails with the same error.
        if previous is not None and [*previous.format(chain=False)] == texts:
            report.__context__ = None
        texts = [*report.format()]
    except Exception:  # reading an attribute of the exception raised
        header = "Traceback (most recent call last):\n"
        texts = [header, *traceback.format_tb(inner), _last_line_of(error)]
    limit, parts = _MAX_MESSAGE_CHARS, []
    for part in texts:
        is_long = len(part) > limit
        end = f"... ({len(part) - limit} more characters)\n" if is_long else ""
        parts.append(part[:limit] + end)
    return "".join(parts)


def _env_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback without its first frames, those that call the env."""
    inner = error.__traceback__
    while inner and _CALLERS.match(inner.tb_frame.f_globals.get("__name__", "")):
        inner = inner.tb_next
    return inner or error.__traceback__


def _last_line_of(error: BaseException) -> str:
    """Return the last line of a traceback; read only the class and the message."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("__main__", "builtins"):
        name = f"{kind.__module__}.{name}"
    return f"{name}: {message_of(error)}\n"


def utf8_tail(text: str) -> str:
    """Return the end of the text; escape characters that UTF-8 cannot encode."""
    return text[-_MAX_TRACEBACK_CHARS:].encode(errors="backslashreplace").decode()


def _clip(text: str, num_bytes: int) -> str:
    """Return the end of a traceback, or only its exception if the end lacks frames."""
    data = text.encode()
    if len(data) <= num_bytes:
        return text
    tail, line = data[-num_bytes:].decode(errors="ignore"), exception_line(text)
    if exception_line(tail) == line:
        return tail
    return line.encode()[:num_bytes].decode(errors="ignore")


def encode_report(
    num_rows: int,
    max_infos_kib: int,
    faults: Sequence[Fault] = (),
    infos: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    warnings: Sequence[str] = (),
    rebuilt: Sequence[int] = (),
) -> bytes:
    """Encode the report of an operation, the payload of DONE; b"" if it is empty."""
    if not faults and not infos and not rebuilt and not warnings:
        return b""
    bytes_left, clipped = _MAX_TRACEBACK_BYTES, [*faults]
    shortest = sorted(range(len(clipped)), key=lambda index: len(clipped[index].text))
    for number, index in enumerate(shortest):
        length = max(_MIN_TRACEBACK_BYTES, bytes_left // (len(clipped) - number))
        text = _clip(clipped[index].text, length)
        clipped[index] = clipped[index]._replace(text=text)
        bytes_left -= len(text.encode())
    row_budget, budget = info_budgets(num_rows, max_infos_kib)
    columns, others = split_infos(infos, *budget.half())
    free = budget.without(columns)
    report = {
        "faults": clipped,
        "rebuilt": rebuilt,
        "infos": msgspec.Raw(encode_infos(others, row_budget.within(free), free)),
        "warnings": warnings[:_MAX_WARNINGS],
        "columns": [(part.start, part.layout.encoded, part.data) for part in columns],
    }
    return msgspec.msgpack.encode(report)
