"""Where a client's conversation with a server is.

CONNECTING -> HELLO_SENT -> ATTACHING -> READY -> CLOSING -> CLOSED, or LOST from any.
A lease that is lost leads from READY to HELLO_SENT, for the same envs anew.
"""

from __future__ import annotations

import enum

__all__ = ["ClientState"]


class ClientState(enum.Enum):
    """What a client does at the moment."""

    CONNECTING = enum.auto()  # no transport yet
    HELLO_SENT = enum.auto()
    ATTACHING = enum.auto()  # the server knows us, and builds envs
    READY = enum.auto()
    CLOSING = enum.auto()
    CLOSED = enum.auto()
    LOST = enum.auto()  # `error` says why

    @property
    def is_over(self) -> bool:
        """Whether nothing follows any more."""
        return self in (ClientState.CLOSED, ClientState.LOST)

    @property
    def is_asking(self) -> bool:
        """Whether the server knows that we want envs, or is about to."""
        return self in (ClientState.HELLO_SENT, ClientState.ATTACHING)

    @property
    def has_envs(self) -> bool:
        """Whether envs are granted, and not given back yet."""
        return self in (ClientState.READY, ClientState.CLOSING)
