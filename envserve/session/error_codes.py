"""Errors between exceptions and the wire's closed set of codes.

A client raises the same class of exception that a pool in its own process would.
"""

from __future__ import annotations

from typing import Final

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
    ServerDraining,
    ServerError,
    UnknownEnv,
    WrapperError,
)
from envserve.wire import ErrorBody, ErrorCode, Executed

__all__ = ["body_of", "exception_of"]

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
    text = f"{address}: {body.text}"
    if body.code is ErrorCode.ENVS_BUSY:
        busy = ServerDraining if body.is_draining else EnvsBusy
        return busy(text, holder=body.holder, since=body.held_ms / 1000)
    if body.code is ErrorCode.REFUSED:
        if body.env_index is None:
            return EnvStartError(text)
        return CallError(text, env_index=body.env_index)
    kind = _EXCEPTIONS[body.code]
    if issubclass(kind, EnvError):
        return kind(text, env_index=body.env_index, remote_traceback=body.traceback)
    return kind(text)
