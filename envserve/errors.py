"""The exceptions of envserve. All of them derive from `EnvserveError`.

Messages state the expected and the found value, the place, and the remedy.
"""

from __future__ import annotations

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

    It is a RuntimeError too, because Gymnasium raises one for envs whose spaces differ.
    """


class ActionError(EnvserveError, ValueError, TypeError):
    """Actions have a wrong structure, shape or dtype, or are out of bounds."""


class UnknownEnv(EnvserveError, LookupError):
    """No env of that name is registered, or the server does not offer it."""


class WrapperError(EnvserveError, ValueError):
    """No wrapper of that name is registered, or one of its arguments is wrong."""


class EnvError(EnvserveError, RuntimeError):
    """An env raised an exception, or returned a value outside its spaces.

    Attributes:
      message: The error without the traceback.
      env_index: Row of the env in its batch; None if the error concerns all rows.
      remote_traceback: Traceback text from the worker; empty if there is none.
    """

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


class EnvStartError(EnvError):
    """An env could not be built or reset for the first time."""


class CallError(EnvError):
    """`call`, `get_attr` or `set_attr` failed, or the attribute is not exposed."""


class WorkerError(EnvserveError, RuntimeError):
    """A worker process violated its protocol, or cannot be started."""


class ReproError(EnvserveError, ValueError):
    """A file is not a repro file, or does not match the env that it names."""


class VideoError(EnvserveError, RuntimeError):
    """An env renders no frames, or they cannot be encoded as a video."""


class EnvTimeout(EnvserveError, TimeoutError):
    """An env, worker or server did not answer before the deadline."""


class KeyFileError(EnvserveError, RuntimeError):
    """A key file cannot be read or written, or other users can read or own it."""


class ServerError(EnvserveError, RuntimeError):
    """Base class of errors between a client and a server."""


class ConnectError(ServerError, ConnectionError):
    """No connection: no server answered in time, or its key is not known."""


class AddressError(ConnectError, ValueError):
    """A server address is malformed, or its host cannot be resolved."""


class ServerLost(ServerError, ConnectionError):
    """A server that had answered was silent for longer than allowed."""


class SelfTestError(ServerError):
    """The self-test of a starting server failed: it would accept unknown keys."""


class EnvsBusy(ServerError):
    """The server has fewer free envs than requested.

    Attributes:
      holder: The client that has leased the most envs: its name, such as "host:pid", if
        it belongs to the same user, and "others" if not; empty if no env is leased.
      held_seconds: For how long the holder had leased them when the server answered;
        0 for "others".
    """

    def __init__(
        self, message: str, *, holder: str = "", held_seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.holder = holder
        self.held_seconds = held_seconds


class ServerDraining(EnvsBusy):
    """The server grants no leases any more, because it is about to stop."""


class LeaseLost(ServerError):
    """The server ended this client's lease; the envs must be leased again."""


class ProtocolError(ServerError):
    """A message violates the protocol."""


class LocalProtocolError(ProtocolError):
    """This side attempted something that the protocol does not allow now."""


class RemoteProtocolError(ProtocolError):
    """The other side sent something that the protocol does not allow."""


class ProtocolMismatch(ProtocolError):
    """Client and server have no protocol version in common."""
