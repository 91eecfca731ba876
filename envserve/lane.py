"""The words in which pools, sessions and lanes speak of blocks.

A block is a range of rows that one worker steps in lockstep: the unit that is
submitted, answered, numbered and lost. At most one operation on it runs at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from envserve.errors import EnvserveError
from envserve.slab import Rows, Status
from envserve.spec import EnvSpec

__all__ = [
    "Block",
    "Call",
    "Fault",
    "Lane",
    "Outcome",
    "Reset",
    "make_blocks",
]


@dataclass(frozen=True)
class Block:
    """Rows `start` to `stop` (exclusive) of a lane, stepped by one worker.

    Attributes:
      index: Position in the lane's `blocks`.
      start: First row.
      stop: Row after the last.
      worker: Index of the worker that hosts it.
      split: Which of the `num_splits` groups it belongs to.
    """

    index: int
    start: int
    stop: int
    worker: int
    split: int


def make_blocks(num_envs: int, num_workers: int, num_splits: int) -> tuple[Block, ...]:
    """Cuts rows into blocks of nearly equal size, the blocks of one split together.

    There are never more blocks than envs: surplus splits and workers get none.
    """
    num_splits = min(num_splits, num_envs)
    num_workers = min(num_workers, num_envs // num_splits)
    count = num_splits * num_workers
    edges = [index * num_envs // count for index in range(count + 1)]
    return tuple(
        Block(
            index=index,
            start=edges[index],
            stop=edges[index + 1],
            worker=index % num_workers,
            split=index // num_workers,
        )
        for index in range(count)
    )


@dataclass(frozen=True)
class Reset:
    """Reset of some rows of a block.

    Attributes:
      block: Index of the block.
      env_indices: Rows of the lane to reset; None for all of the block.
      seeds: A seed per row to reset; None leaves the choice to the env's own
        generator, or, right after construction, to its `env_seed`.
    """

    block: int
    env_indices: tuple[int, ...] | None = None
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Call:
    """Attribute access on one env.

    Attributes:
      env_index: Row of the lane.
      kind: "call" calls a method, or reads an attribute that is not callable; "get"
        reads; "set" assigns `arguments[0]`.
      name: Name of the attribute.
      arguments: Plain values, see `envserve.codec`.
    """

    env_index: int
    kind: Literal["call", "get", "set"]
    name: str
    arguments: tuple[Any, ...] = ()


class Fault(NamedTuple):
    """Why a row's last transition is not valid.

    Attributes:
      env_index: Row of the lane.
      status: Kind of fault.
      text: What happened: the worker's traceback, or exit signal.
      is_violation: Whether the env broke its own spaces (wrong shape or dtype, or
        values that are not finite), which is a bug to mend rather than a mishap.
    """

    env_index: int
    status: Status
    text: str
    is_violation: bool = False


class Outcome(NamedTuple):
    """A block's operation has ended, and its rows are as it left them.

    Attributes:
      block: Index of the block.
      infos: Info dict by row, as far as asked for.
      faults: Faults of this operation.
      result: Encoded result of a `Call`, else empty.
      error: Set when the operation failed as a whole.
    """

    block: int
    infos: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
    faults: Sequence[Fault] = ()
    result: bytes = b""
    error: EnvserveError | None = None


class Lane(Protocol):
    """How a batch reaches envs: a pool in this process, or a server.

    Actions are written to `rows.action` before `submit_step`; what comes back is in
    `rows` from `collect` until the block's next submission. Submitting a block that
    is in flight raises LocalProtocolError.

    A block is lost once a fault has ended its envs. A step of a lost block resets it;
    its outcome is the lost row: truncated, with a status and a fault. A block in flight
    is absent while its envs are not there; its rows of `final_observation` are then the
    last observation that was seen.

    Attributes:
      is_waiting: Whether a call that was interrupted did nothing but wait, or send what
        it had submitted, so that it has cost nothing; else `lose` cleans up after it.
    """

    is_waiting: bool

    @property
    def name(self) -> str:
        """Where the envs are, for messages: "local" or an address."""

    @property
    def spec(self) -> EnvSpec:
        """Spaces of every env of the lane."""

    @property
    def num_envs(self) -> int:
        """Number of rows."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, which partition the rows."""

    @property
    def rows(self) -> Rows:
        """Where actions are read from and results are written to."""

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight, or has ended and was not collected."""

    @property
    def absent(self) -> Collection[int]:
        """Blocks in flight whose envs are not there now."""

    @property
    def given_up(self) -> EnvserveError | None:
        """Why absent blocks are not worth waiting for, if nothing else is alive."""

    def finish_start(self, deadline: float) -> None:
        """Waits until all envs are built, at most until an instant of `monotonic`.

        Raises:
          EnvStartError: An env could not be built, or not in time; the lane is closed.
          ServerError: A server refuses, or is lost; the lane is closed.
        """

    def submit_step(self, blocks: Sequence[int]) -> None:
        """Starts a step of these blocks, with the actions now in `rows.action`."""

    def submit_reset(self, resets: Sequence[Reset]) -> None:
        """Starts resets, each of another block."""

    def submit_call(self, call: Call) -> None:
        """Starts attribute access on one env, as an operation of its block."""

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        """Waits until so many operations have ended, and returns them.

        Fewer come back after the timeout, when no more are in flight, or when a block
        in flight has become absent since the last call.
        """

    def lose(self, text: str) -> None:
        """Takes all envs for lost, and forgets what is in flight.

        This is how an interrupted call is cleaned up after: by an episode of each row.
        """

    def stats(self) -> Mapping[str, int]:
        """Counts since the lane was made, by name; what is counted is the lane's."""

    def fileno(self) -> int:
        """A descriptor that is readable when `collect(0)` may have something."""

    def begin_close(self) -> None:
        """Asks all envs to end, without waiting."""

    def close(self) -> None:
        """Ends all envs, within 2 seconds even if one hangs; may be called twice."""
