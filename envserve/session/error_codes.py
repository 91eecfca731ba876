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
    RemoteProtocolError,
    ServerDraining,
    ServerError,
    UnknownEnv,
    WrapperError,
)
from envserve.wire import ErrorBody, ErrorCode, Executed

__all__ = ["body_of", "exception_of"]

_CODES: Final = (
    (EnvStartError, ErrorCode.ENV_START_FAILED),
    (CallError, ErrorCode.CALL_FAILED),
    (EnvError, ErrorCode.ENV_FAILED),
    (ActionError, ErrorCode.INVALID_ACTION),
    (UnknownEnv, ErrorCode.UNKNOWN_ENV),
    (WrapperError, ErrorCode.BAD_WRAPPER),
    (RemoteProtocolError, ErrorCode.BAD_MESSAGE),
)

_ENV_ERRORS: Final[dict[ErrorCode, type[EnvError]]] = {
    ErrorCode.ENV_START_FAILED: EnvStartError,
    ErrorCode.CALL_FAILED: CallError,
    ErrorCode.ENV_FAILED: EnvError,
}
_OTHER_ERRORS: Final[dict[ErrorCode, type[EnvserveError]]] = {
    ErrorCode.BAD_MESSAGE: LocalProtocolError,
    ErrorCode.UNSUPPORTED: ProtocolMismatch,
    ErrorCode.VERSION_MISMATCH: ProtocolMismatch,
    ErrorCode.UNKNOWN_ENV: UnknownEnv,
    ErrorCode.LEASE_LOST: LeaseLost,
    ErrorCode.FENCED: LeaseLost,
    ErrorCode.GAP: LocalProtocolError,
    ErrorCode.INVALID_ACTION: ActionError,
    ErrorCode.INTERNAL: ServerError,
    ErrorCode.BAD_WRAPPER: WrapperError,
}


def body_of(error: EnvserveError, executed: Executed) -> ErrorBody:
    """Returns what to send for an exception on the server."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    if isinstance(error, EnvError):
        return ErrorBody(
            code=code or ErrorCode.ENV_FAILED,
            executed=executed,
            text=error.message,
            traceback=error.remote_traceback,
            env_index=error.env_index,
        )
    return ErrorBody(
        code=code or ErrorCode.INTERNAL, executed=executed, text=str(error)
    )


def exception_of(body: ErrorBody, address: str) -> EnvserveError:
    """Returns what to raise on the client; the text names the server."""
    text = f"{address}: {body.text}"
    if body.code in _ENV_ERRORS:
        return _ENV_ERRORS[body.code](
            text, env_index=body.env_index, remote_traceback=body.traceback
        )
    if body.code is ErrorCode.ENVS_BUSY:
        kind = ServerDraining if body.is_draining else EnvsBusy
        return kind(text, holder=body.holder, since=body.held_ms / 1000)
    if body.code is ErrorCode.REFUSED:
        if body.env_index is None:
            return EnvStartError(text)
        return CallError(text, env_index=body.env_index)
    return _OTHER_ERRORS[body.code](text)
