"""The theory of the conversation, and where each of its halves can be.

What is promised: a step is applied at most once, and its result is never paired with
another action; though messages may be lost, copied, late and out of order, and though
either side may be stopped, or killed and started anew, at any moment.

Five numbers do that. Each is drawn, or counted, by one side only:

* *session*, drawn by the client: one claim on envs. After a loss the client goes on
  under another, so no answer to the old one can be mistaken for one to the new.
* *boot*, drawn by the server when it starts. An answer with another boot says that the
  server was restarted, and its envs are gone.
* *epoch*, counted by the server: one lease. A request of another epoch is refused.
* *seq*, counted by the client: one operation of one block; 1, 2, 3 ... within a lease.
  An answer uses its seq up; a request that was refused leaves it to the next one.
* *attempt*, counted by the client: one copy of a request. Each is answered once.

What the client promises. A block has one operation at a time. The next one is sent when
the last was answered, or its lease is lost. Until then the same request is sent again
and again. Nothing of a lost lease is sent again: the first request of each block under
the next one is a RESET. In place of a step, the caller gets the lost row from it; a
reset is asked for anew; a call fails, since it may have been carried out.

What the server promises. A block's next seq is carried out. A copy of the last one
joins it while it runs, and is answered again when it is done; older ones are ignored,
later ones refused. The answer is the block's rows, which stay as they are until its
next seq (docs/decisions.md: "The slab is the reply cache").

What is absent. Envs of a block in flight may not be there: their worker or their lease
is lost, or the server is silent. The client says so, and leaves it to its caller how
long to wait. The operation stays in flight all the while.

Who is silent. A client loses its lease. A server is asked for a sign of life after a
second, is unreachable after a few, and lost after a minute. How a session has ended is
remembered, so that a late message does not revive it.

Below is a section per machine: its states, and its legal moves. Only `Machine.move`,
and for blocks `Lease._move`, writes a state. A block of the client needs none: it is
idle, in flight, or ended and not collected, see `Operations`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import Final, Generic, TypeVar

from envserve.errors import LocalProtocolError

__all__ = ["BLOCK_MOVES", "BlockState", "ClaimState", "ClientState", "Machine"]

State = TypeVar("State", bound=enum.Enum)
_Moves = Mapping[enum.Enum, Collection[enum.Enum]]


class Machine(Generic[State]):
    """Where something is.

    Attributes:
      state: To be read only: `move` writes it.
    """

    __slots__ = ("state",)

    def __init__(self, start: State) -> None:
        self.state = start

    def move(self, state: State) -> None:
        """Goes to another state; raises LocalProtocolError if that is not legal."""
        moves = _MOVES[self.state]
        if state not in moves:
            legal = ", ".join(item.name for item in moves) or "none"
            raise LocalProtocolError(
                f"{type(state).__name__}: expected a move from {self.state.name} to "
                f"one of: {legal}; got {state.name}"
            )
        self.state = state


# A client.


class ClientState(enum.Enum):
    """What a client does at the moment."""

    CONNECTING = enum.auto()  # no transport yet
    HELLO_SENT = enum.auto()  # or about to be sent again, after a loss
    ATTACHING = enum.auto()  # the server knows us, and builds envs
    READY = enum.auto()  # envs are granted
    CLOSING = enum.auto()  # they are given back
    CLOSED = enum.auto()
    LOST = enum.auto()  # the session's `error` says why

    @property
    def is_over(self) -> bool:
        """Whether nothing follows any more."""
        return self in (ClientState.CLOSED, ClientState.LOST)

    @property
    def has_envs(self) -> bool:
        """Whether envs are granted, and the server has not taken them back."""
        return self in (ClientState.READY, ClientState.CLOSING)


_CLIENT_MOVES: Final[_Moves] = {
    ClientState.CONNECTING: (
        ClientState.HELLO_SENT,  # there is a connection
        ClientState.CLOSED,  # nothing to give back
        ClientState.LOST,  # nobody answers
    ),
    ClientState.HELLO_SENT: (
        ClientState.HELLO_SENT,  # lost once more
        ClientState.ATTACHING,  # WELCOME
        ClientState.CLOSED,
        ClientState.LOST,
    ),
    ClientState.ATTACHING: (
        ClientState.ATTACHING,  # it was busy, and is asked again
        ClientState.HELLO_SENT,  # restarted, or what was building is broken
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
        ClientState.CLOSED,  # DETACHED, or whatever else says that the envs are free
        ClientState.LOST,  # nobody answers
    ),
    ClientState.CLOSED: (),
    ClientState.LOST: (),
}


# A claim, on the server.


class ClaimState(enum.Enum):
    """Where a client's claim on envs is, from its ATTACH on."""

    BUILDING = enum.auto()
    GRANTED = enum.auto()  # it has a lease
    CLOSING = enum.auto()  # its workers are being ended
    ENDED = enum.auto()  # its envs are free


_CLAIM_MOVES: Final[_Moves] = {
    ClaimState.BUILDING: (
        ClaimState.GRANTED,  # the envs are built
        ClaimState.CLOSING,  # they cannot be, or nobody wants them any more
    ),
    ClaimState.GRANTED: (ClaimState.CLOSING,),  # DETACH, silence, a fault, the end
    ClaimState.CLOSING: (ClaimState.ENDED,),
    ClaimState.ENDED: (),
}

_MOVES: Final[_Moves] = {**_CLIENT_MOVES, **_CLAIM_MOVES}


# A block of a lease, on the server.


class BlockState(enum.IntEnum):  # an int: its hash is looked up at every step
    """What became of a block's latest request."""

    IDLE = 0  # there was none yet
    RUNNING = 1
    ABSENT = 2  # running, and its client was told that its envs are not there
    DONE = 3  # the rows are its answer, until the next request


#: `Lease._move` holds many blocks at once to it.
BLOCK_MOVES: Final[_Moves] = {
    BlockState.IDLE: (BlockState.RUNNING,),
    BlockState.RUNNING: (BlockState.ABSENT, BlockState.DONE),
    BlockState.ABSENT: (BlockState.DONE,),
    BlockState.DONE: (BlockState.RUNNING,),
}
