"""The exceptions of envserve. All of them derive from `EnvserveError`.

Messages state the expected value, the actual value, the location and the remedy.
"""

from __future__ import annotations

import builtins
import re
import sys
from functools import partial
from typing import Any, Final, Self

from envserve.text import exception_line

__all__ = [
    "ActionError",
    "AddressError",
    "CallError",
    "CodecError",
    "ConnectError",
    "EnvError",
    "EnvStartError",
    "EnvTimeout",
    "EnvsBusy",
    "EnvserveError",
    "KeyFileError",
    "LeaseLost",
    "LocalProtocolError",
    "ProtocolError",
    "ProtocolMismatch",
    "RemoteProtocolError",
    "ReproError",
    "SelfTestError",
    "ServerDraining",
    "ServerError",
    "ServerLost",
    "SpaceError",
    "UnknownEnv",
    "VideoError",
    "WorkerError",
    "WrapperError",
]


class EnvserveError(Exception):
    """Base class of all errors raised by envserve."""


class CodecError(EnvserveError, ValueError):
    """A value cannot be encoded, or bytes are not a valid encoding."""


class SpaceError(EnvserveError, TypeError, RuntimeError):
    """A space is not supported, a value is not in its space, or spaces differ.

    It is also a RuntimeError, because Gymnasium raises one if envs have different
    spaces.
    """


class ActionError(EnvserveError, ValueError, TypeError):
    """Actions have a wrong structure, shape or dtype, or are out of bounds."""


class UnknownEnv(EnvserveError, LookupError):
    """No env of that name is registered, or the server does not offer it.

    If gymnasium is imported, it is also a `gymnasium.error.UnregisteredEnv`.
    """

    def __new__(cls, *args: object) -> Self:
        """Make the error an instance of Gymnasium's class, too, if it is imported."""
        kind = getattr(sys.modules.get("gymnasium.error"), "UnregisteredEnv", cls)
        if not issubclass(cls, kind):
            cls = type(cls.__name__, (cls, kind), {"__module__": cls.__module__})
        error: Self = kind.__new__(cls, *args)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the original class instead of the class that `__new__` has derived."""
        return UnknownEnv, self.args


class WrapperError(EnvserveError, ValueError):
    """The wrapper is not registered, or one of its arguments is invalid."""


class EnvError(EnvserveError, RuntimeError):
    """An env raised an exception, or returned a value outside its spaces.

    If the env raised a built-in exception, such as ValueError, the error is also an
    instance of that class. If a constructor rejects its arguments, the error is
    also a TypeError.

    Attributes:
      message: The error without the traceback.
      env_index: Row of the env in its batch; None if the error concerns all rows.
      remote_traceback: Traceback text from the worker; empty if there is none.
    """

    def __new__(cls, message: str, **fields: Any) -> Self:
        """Make the error an instance of the env's built-in exception class, too."""
        cause = exception_line(fields.get("remote_traceback", ""))
        kind = _BUILTINS.get(cause.partition(":")[0], RuntimeError)
        if not cause and BAD_ARGUMENT.search(message):
            kind = TypeError
        if not issubclass(cls, kind):
            members = {"_plain": cls, "__module__": cls.__module__}
            cls = type(cls.__name__, (cls, kind), members)
        # MemoryError's own `__new__` does not accept subclasses with several bases.
        base = EnvserveError if kind is MemoryError else kind
        error: Self = base.__new__(cls, message)
        return error

    def __init__(
        self, message: str, *, env_index: int | None = None, remote_traceback: str = ""
    ) -> None:
        """Append the worker's traceback to the message."""
        text = message
        if remote_traceback:
            text = f"{message}\n\nIn the worker:\n{remote_traceback.rstrip()}"
        super().__init__(text)
        self.message = message
        self.env_index = env_index
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        """Return the text as it is; built-in exceptions such as KeyError quote it."""
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the original class instead of the class that `__new__` has derived."""
        fields = dict(env_index=self.env_index, remote_traceback=self.remote_traceback)
        return partial(getattr(self, "_plain", type(self)), self.message, **fields), ()


#: Built-in exceptions from which a class can inherit together with EnvError. The others
#: need more arguments than a message, or, like StopIteration, end the iteration in
#: which they are raised instead of being reported.
_BUILTINS: Final[dict[str, type[Exception]]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, ExceptionGroup | StopIteration | StopAsyncIteration)
}


#: Python's messages about missing or unexpected constructor arguments. The groups are
#: the name of the function and the unexpected argument.
BAD_ARGUMENT: Final = re.compile(
    r"([\w.<>]*)\(\) (?:missing \d|takes no arguments)"
    r"|got an unexpected keyword argument '(\w*)"
)


class EnvStartError(EnvError, ValueError):
    """An env could not be built or reset for the first time.

    It is also a ValueError, because Gymnasium raises one for unsupported spaces.
    """


class CallError(EnvError):
    """`call`, `get_attr` or `set_attr` failed, or the attribute is not exposed."""


class WorkerError(EnvserveError, RuntimeError):
    """A worker process violated its protocol, or cannot be started."""


class ReproError(EnvserveError, ValueError):
    """A file is not a repro file, or does not match the env that it names."""


class VideoError(EnvserveError, RuntimeError):
    """An env renders no frames, or its frames cannot be encoded as a video."""


class EnvTimeout(EnvserveError, TimeoutError):
    """An env, worker or server did not reply before the deadline."""


class KeyFileError(EnvserveError, RuntimeError):
    """A key file cannot be read or written, or is owned or readable by other users."""


class ServerError(EnvserveError, RuntimeError):
    """Base class of errors in the communication between a client and a server."""


class ConnectError(ServerError, ConnectionError):
    """The connection failed: no server replied in time, or its key is unknown."""


class AddressError(ConnectError, ValueError):
    """A server address is malformed, or its host cannot be resolved."""


class ServerLost(ServerError, ConnectionError):
    """A connected server has not replied for longer than allowed."""


class SelfTestError(ServerError):
    """A server's self-test at startup failed: it would accept unknown keys."""


class EnvsBusy(ServerError):
    """The server has fewer free envs than requested.

    Attributes:
      holder: Name of the client that has leased the most envs, such as "host:pid";
        "others" if the client belongs to another user; empty if no env is leased.
      held_seconds: Seconds for which the holder had leased its envs when the server
        replied; 0 for "others".
    """

    def __init__(
        self, message: str, *, holder: str = "", held_seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.holder = holder
        self.held_seconds = held_seconds


class ServerDraining(EnvsBusy):
    """The server no longer grants leases, because it is about to stop."""


class LeaseLost(ServerError):
    """The server ended this client's lease; the envs must be leased again."""


class ProtocolError(ServerError):
    """A message violates the protocol."""


class LocalProtocolError(ProtocolError):
    """This side attempted an operation that its protocol state does not allow."""


class RemoteProtocolError(ProtocolError):
    """The other side sent a message that the protocol does not allow."""


class ProtocolMismatch(ProtocolError):
    """Client and server have no protocol version in common."""


def raise_if_from_handler(error: OSError | ValueError) -> None:
    """Raise an OSError that a signal handler has raised, such as TimeoutError.

    The system call may have succeeded, so it must not be repeated. Errors of system
    calls have an error number.
    """
    if isinstance(error, OSError) and error.errno is None:
        raise error
