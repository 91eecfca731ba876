"""The protocol between a client and a server, and the states of its two halves.

The protocol guarantees that a step is applied at most once, and that its result is
never paired with another action. This holds even if messages are lost, duplicated,
delayed or reordered, and even if client and server are suspended, killed or restarted
at any moment.

Five numbers in each message provide this guarantee. Each number is drawn at random or
counted by one side only:

* *session*, drawn by the client, identifies a lease from its ATTACH to its end. After a
  loss the client continues under a new session number, so a reply to the old session
  cannot be mistaken for a reply to the new one.
* *boot*, drawn by the server, identifies a start of the server. A reply with a
  different boot shows that the server was restarted, and that its envs are gone.
* *epoch*, counted by the server, is the number of the lease. The server rejects
  requests with a different epoch.
* *seq*, counted by the client, is the number of an operation (STEP, RESET or CALL) of a
  block: 1, 2, 3 ... within a lease. An answered request uses up its seq. If a request
  is rejected, the next request has the same seq.
* *attempt*, counted by the client, is 0 in a request that is sent for the first time,
  and 1, 2, 3 ... in its copies. The server replies to each attempt once.

The client's part: a block has at most one operation in flight. The client sends the
next one only after the reply, or after the lease is lost. Until then it resends the
same request. It never resends a request of a lost lease: the first request for each
block under the next lease is a RESET. If the lost request was a step, the caller gets a
row with status SERVER_LOST in place of its result. A lost reset is requested again. A
lost call fails, because the envs may have executed it already.

The server's part: the server executes a request that has the next seq of each of its
blocks. Copies that arrive while the request runs are not executed. Copies that arrive
later get the same reply. Older requests are ignored, and requests that skip a seq are
rejected. The server can send a reply again because it packs the reply from the blocks'
rows, which do not change before the request with the next seq (see the decision "The
slab is the reply cache").

Absence: the envs of a block in flight may be absent, because their worker or their
lease is lost, or because the server is unreachable. The client reports such blocks as
absent, and its caller decides how long to wait. The operation stays in flight.

Liveness: a client that sends nothing for long enough loses its lease. A client sends a
PING after a second without a message from the server. The client considers the server
unreachable after a few seconds of silence, and lost after a minute. The server stores
how a session ended, so that a delayed message does not revive the session.

The sections below define the states of clients, leases and blocks, and the allowed
transitions. Only `StateMachine.change_to` changes the state of a client or lease, and
only `Lease` changes the states of a lease's blocks. A client's blocks have no state
machine: each block is idle, in flight, or has a result that its caller has not
collected yet (see `ClientBlocks`).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import Final, Generic, TypeVar

from envserve.errors import LocalProtocolError

State = TypeVar("State", bound=enum.Enum)
_Transitions = Mapping[enum.Enum, Collection[enum.Enum]]


class StateMachine(Generic[State]):
    """A state machine that rejects transitions that are not allowed.

    Attributes:
      state: The current state, which only `change_to` changes.
    """

    __slots__ = ("state",)

    def __init__(self, start: State) -> None:
        self.state = start

    def change_to(self, state: State) -> None:
        """Change to another state; raise LocalProtocolError if this is not allowed."""
        allowed = _TRANSITIONS[self.state]
        if state not in allowed:
            names = ", ".join(each.name for each in allowed) or "none"
            raise LocalProtocolError(
                f"{type(state).__name__}: expected a transition from "
                f"{self.state.name} to one of: {names}; got {state.name}"
            )
        self.state = state


# Client sessions.


class ClientState(enum.Enum):
    """State of a client's session."""

    CONNECTING = enum.auto()
    """No connection has been established yet."""
    HELLO_SENT = enum.auto()
    """HELLO was sent, or its next attempt is scheduled."""
    ATTACHING = enum.auto()
    """ATTACH was sent, or its next attempt is scheduled; the server builds the envs."""
    READY = enum.auto()
    """The server has granted a lease."""
    CLOSING = enum.auto()
    """DETACH was sent."""
    CLOSED = enum.auto()
    """The envs were returned to the server, or there were none."""
    LOST = enum.auto()
    """The session has failed; its `error` is the reason."""

    @property
    def is_over(self) -> bool:
        """Whether this state is final."""
        return self in (ClientState.CLOSED, ClientState.LOST)

    @property
    def has_envs(self) -> bool:
        """Whether a lease was granted, and is not known to be lost."""
        return self in (ClientState.READY, ClientState.CLOSING)


#: Allowed transitions of clients. The comments name the events that cause them.
_CLIENT_TRANSITIONS: Final[_Transitions] = {
    ClientState.CONNECTING: (
        ClientState.HELLO_SENT,  # connected
        ClientState.CLOSED,  # there are no envs to return
        ClientState.LOST,  # no server replied
    ),
    ClientState.HELLO_SENT: (
        ClientState.HELLO_SENT,  # next attempt
        ClientState.ATTACHING,  # WELCOME
        ClientState.CLOSED,
        ClientState.LOST,
    ),
    ClientState.ATTACHING: (
        ClientState.ATTACHING,  # next attempt, because the envs were busy
        ClientState.HELLO_SENT,  # the server was restarted, or the session has ended
        ClientState.READY,  # GRANTED
        ClientState.CLOSING,
        ClientState.LOST,
    ),
    ClientState.READY: (
        ClientState.HELLO_SENT,  # the lease is lost
        ClientState.CLOSING,
        ClientState.LOST,
    ),
    ClientState.CLOSING: (
        ClientState.CLOSED,  # DETACHED, or an ERROR that implies that the lease is gone
        ClientState.LOST,  # no server replied
    ),
    ClientState.CLOSED: (),
    ClientState.LOST: (),
}


# Server side of a lease.


class LeaseState(enum.Enum):
    """State of a lease, from the ATTACH that requests it until its envs are free."""

    BUILDING = enum.auto()
    """Its envs are being built, or their build is queued."""
    GRANTED = enum.auto()
    """The client can use the envs."""
    CLOSING = enum.auto()
    """Its workers are being stopped."""
    ENDED = enum.auto()
    """Its envs are free."""


#: Allowed transitions of leases. The comments name the events that cause them.
_LEASE_TRANSITIONS: Final[_Transitions] = {
    LeaseState.BUILDING: (
        LeaseState.GRANTED,  # the envs are built
        LeaseState.CLOSING,  # the build has failed, or was cancelled
    ),
    LeaseState.GRANTED: (
        LeaseState.CLOSING,  # DETACH, a silent client, a failed pool, or a shutdown
    ),
    LeaseState.CLOSING: (LeaseState.ENDED,),
    LeaseState.ENDED: (),
}

_TRANSITIONS: Final[_Transitions] = {**_CLIENT_TRANSITIONS, **_LEASE_TRANSITIONS}


# Server side of a block.


class BlockState(enum.IntEnum):  # hashes faster than an Enum
    """State of a block's latest request.

    A request changes IDLE or DONE to RUNNING. The pool changes RUNNING to DONE,
    possibly after ABSENT.
    """

    IDLE = 0
    """There has been no request yet."""
    RUNNING = 1
    """The pool executes the request."""
    ABSENT = 2
    """Like RUNNING, but the client was notified that the envs are absent."""
    DONE = 3
    """The rows contain the reply, until the next request."""
