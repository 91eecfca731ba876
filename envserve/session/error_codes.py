"""Errors between exceptions and the wire's closed set of codes.

A client raises the same class of exception that a pool in its own process would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

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
from envserve.lane import Fault, Outcome
from envserve.wire import ErrorBody, ErrorCode, Executed, Message, Report
from envserve.wire.constants import MAX_TEXT_BYTES, MAX_TRACEBACK_BYTES

__all__ = ["body_of", "exception_of", "outcomes_of"]

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


def outcomes_of(
    message: Message, block_of_row: Sequence[int], address: str
) -> dict[int, Outcome]:
    """Returns what the report of a RESULT says of each block that is answered.

    Raises:
      RemoteProtocolError: It is none, or says something of others.
    """
    report = Report.decode(message.report)
    infos: dict[int, dict[int, Any]] = {block: {} for block, _ in message.entries}
    faults: dict[int, list[Fault]] = {block: [] for block in infos}
    errors: dict[int, EnvserveError | None] = dict.fromkeys(infos)
    # One error may be that of thousands of blocks.
    known = {body: exception_of(body, address) for body in {*report.errors.values()}}
    errors.update({block: known[body] for block, body in report.errors.items()})
    try:
        for row, info in report.infos.items():
            infos[block_of_row[row]][row] = info
        for fault in report.faults:
            faults[block_of_row[fault.env_index]].append(fault)
    except LookupError:
        errors.clear()  # there is a row of another block, or of none
    if infos.keys() != errors.keys():
        raise RemoteProtocolError(
            "report: expected rows and blocks that are answered; got others"
        )
    return {b: Outcome(b, infos[b], faults[b], error=errors[b]) for b in infos}
