"""Every exception that envserve raises on purpose, in one tree.

Catch `EnvserveError` for all of them. Messages say what was expected, what came,
where, and what to do.
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
    """A value that cannot be encoded, or bytes that are not a valid encoding."""


class SpaceError(EnvserveError, TypeError, RuntimeError):
    """A space that we cannot carry, a value that is not of it, or spaces that differ.

    A RuntimeError too, which Gymnasium raises for envs whose spaces differ.
    """


class ActionError(EnvserveError, ValueError, TypeError):
    """Actions with a wrong structure, shape, dtype or value."""


class UnknownEnv(EnvserveError, LookupError):
    """No env of that name is registered, or the server does not offer it."""


class WrapperError(EnvserveError, ValueError):
    """No wrapper of that name is known, or an argument of it is wrong."""


class EnvError(EnvserveError, RuntimeError):
    """Code of an env raised, or returned something its spaces do not allow.

    Attributes:
      message: What went wrong, without the traceback.
      env_index: Row of the env in its batch, or None when all are concerned.
      remote_traceback: Traceback text from the worker; empty when there is none.
    """

    def __init__(
        self, message: str, *, env_index: int | None = None, remote_traceback: str = ""
    ) -> None:
        """Joins the worker's traceback to the message, where a user looks first."""
        text = message
        if remote_traceback:
            text = f"{message}\n\nIn the worker:\n{remote_traceback.rstrip()}"
        super().__init__(text)
        self.message = message
        self.env_index = env_index
        self.remote_traceback = remote_traceback


class EnvStartError(EnvError):
    """An env could not be built or first reset."""


class CallError(EnvError):
    """`call`, `get_attr` or `set_attr` failed, or names an attribute not exposed."""


class WorkerError(EnvserveError, RuntimeError):
    """A worker process broke its side of the conversation, or cannot be started."""


class ReproError(EnvserveError, ValueError):
    """A file that is no repro file, or does not fit to the env that it names."""


class VideoError(EnvserveError, RuntimeError):
    """An env gives no frames, or they cannot be made a video of."""


class EnvTimeout(EnvserveError, TimeoutError):
    """An env, worker or server did not answer before the deadline."""


class KeyFileError(EnvserveError, RuntimeError):
    """A file of keys that others can read or own, or that cannot be read."""


class ServerError(EnvserveError, RuntimeError):
    """Base class of what can go wrong between a client and a server."""


class ConnectError(ServerError, ConnectionError):
    """No server answered at the address before the deadline."""


class AddressError(ConnectError, ValueError):
    """A word that is no address of a server, or names a host that nobody knows."""


class ServerLost(ServerError, ConnectionError):
    """A server that had answered is silent for longer than allowed."""


class SelfTestError(ServerError):
    """A server that is about to start would not refuse whom it should."""


class EnvsBusy(ServerError):
    """The server has fewer free envs than asked for.

    Attributes:
      holder: Who has most of the others: a client of ours, like "host:pid", or
        "others"; empty if nobody has.
      since: For how many seconds it has had them, when the server answered; 0 for
        others.
    """

    def __init__(self, message: str, *, holder: str = "", since: float = 0.0) -> None:
        """Keeps who has the envs; the message names all."""
        super().__init__(message)
        self.holder = holder
        self.since = since


class ServerDraining(EnvsBusy):
    """The server gives out no envs any more, since it is about to stop."""


class LeaseLost(ServerError):
    """The server gave this client's envs up; they must be attached anew."""


class ProtocolError(ServerError):
    """A message breaks the protocol."""


class LocalProtocolError(ProtocolError):
    """This side tried something that the protocol does not allow now."""


class RemoteProtocolError(ProtocolError):
    """The other side sent something that the protocol does not allow."""


class ProtocolMismatch(ProtocolError):
    """Client and server share no protocol version."""
