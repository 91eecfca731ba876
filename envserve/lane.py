"""The words in which pools, sessions and lanes speak of blocks.

A block is a range of rows that one worker steps in lockstep: the unit that is
submitted, answered, numbered and lost. At most one operation on it runs at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from envserve.errors import EnvserveError, LocalProtocolError
from envserve.slab import Rows, Status
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.infos import PackedInfo
from envserve.text import printable

__all__ = [
    "MAX_JPEG_BYTES",
    "MAX_TEXT",
    "Block",
    "Call",
    "CallKind",
    "Fault",
    "Lane",
    "Outcome",
    "RenderedFrame",
    "Reset",
    "make_blocks",
]


MAX_JPEG_BYTES: Final = 48 << 10
MAX_TEXT: Final = 1 << 10  # characters

_U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class RenderedFrame(Struct, frozen=True, kw_only=True):
    """What an env looked like after one of its steps.

    Attributes:
      row: Row of the lease.
      serial: Another one for each picture; later ones are higher.
      jpeg: The picture; empty if there is none.
      text: What is shown in its place: why there is none, or what the env renders.
      seed: Of the last reset that had one, if all since is known.
      episode_steps: Steps of the running episode.
      episode_return: Its rewards, if they were added up.
    """

    row: Annotated[int, Meta(ge=0, lt=1 << 16)]
    serial: _U63
    jpeg: Annotated[bytes, Meta(max_length=MAX_JPEG_BYTES)] = b""
    text: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    seed: _U63 | None = None
    episode_steps: _U63 = 0
    episode_return: float | None = None

    def __post_init__(self) -> None:
        """Makes the text fit to be shown, whoever wrote it."""
        force_setattr(self, "text", printable(self.text[:MAX_TEXT])[:MAX_TEXT])


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

    @property
    def rows(self) -> range:
        """The rows, as indices."""
        return range(self.start, self.stop)

    @property
    def part(self) -> slice:
        """The rows, as a slice of the lane's arrays."""
        return slice(self.start, self.stop)


def make_blocks(
    num_envs: int, num_workers: int, num_splits: int, blocks_per_split: int = 0
) -> tuple[Block, ...]:
    """Cuts rows into blocks of nearly equal size, the blocks of one split together.

    There are never more blocks than envs: surplus splits and workers get none. A split
    has a block per worker, unless it is said how many; then workers take turns.
    """
    num_splits = min(num_splits, num_envs)
    each = min(blocks_per_split or num_workers, num_envs // num_splits)
    count = num_splits * each
    edges = [index * num_envs // count for index in range(count + 1)]
    return tuple(
        Block(
            index=index,
            start=edges[index],
            stop=edges[index + 1],
            worker=index % each % num_workers,
            split=index // each,
        )
        for index in range(count)
    )


@dataclass(frozen=True)
class Reset:
    """Reset of some rows of a block.

    Attributes:
      block: Index of the block.
      env_indices: Rows of the lane to reset; None for all of the block.
      seeds: A seed per row to reset, or None for what the env then gets. Without them
        an env gets none either, but, right after construction, its `env_seed`.
      options: A dict that each of these envs gets, as `codec` encodes it; else empty.
    """

    block: int
    env_indices: tuple[int, ...] | None = None
    seeds: tuple[int | None, ...] | None = None
    options: bytes = b""

    def check(self, block: Block) -> Sequence[int]:
        """Returns the rows; raises LocalProtocolError for those, or seeds, unfit."""
        rows, seeds = block.rows, self.seeds
        chosen = rows if self.env_indices is None else self.env_indices
        are_rows = len({*chosen}) == len(chosen) and {*chosen} <= {*rows}
        given = [0] * len(chosen) if seeds is None else [seed or 0 for seed in seeds]
        fit = len(given) == len(chosen) and all(0 <= seed < 2**63 for seed in given)
        if not (are_rows and fit):
            raise LocalProtocolError(
                f"block {block.index}: expected distinct rows in {rows}, and for each "
                f"a seed in [0, 2**63), or None; got {chosen!s:.200}; {seeds!s:.200}"
            )
        return chosen


#: What is done to an attribute.
CallKind = Literal["call", "get", "set"]


@dataclass(frozen=True)
class Call:
    """Attribute access on some envs of a block.

    Attributes:
      block: Index of the block.
      env_indices: Rows of the lane.
      kind: "call" calls a method, or reads an attribute that is not callable; "get"
        reads; "set" assigns a value of its own to each.
      name: Name of the attribute.
      arguments: A list and a dict, as `codec` encodes them: those of the method; to
        set, a value for each row.
    """

    block: int
    env_indices: tuple[int, ...]
    kind: CallKind
    name: str
    arguments: bytes = codec.encode([[], {}])


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

    @property
    def cause(self) -> str:
        """What has failed: the last line of a traceback; else the first."""
        lines = self.text.strip().split("\n")
        return lines[-1 if self.status == Status.ENV_ERROR else 0]

    @property
    def detail(self) -> str:
        """The traceback, or what stands below the cause; "" if that says all."""
        below = self.text.strip().partition("\n")[2]
        return self.text if below and self.status == Status.ENV_ERROR else below


class Outcome(NamedTuple):
    """A block's operation has ended, and its rows are as it left them.

    Attributes:
      block: Index of the block.
      infos: Info dict by row, as far as asked for.
      faults: Faults of this operation; of a `Call`, why rows have no value.
      result: Of a `Call`, the values of its rows, encoded as a list: of the first, as
        many as there was room for; the others were not called.
      error: Set when the operation failed as a whole.
      notes: What is to be said once about the envs; whoever hosts them has.
      packed_infos: The infos once more, as their worker has encoded them; of a server,
        and of what it has read, empty.
    """

    block: int
    infos: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
    faults: Sequence[Fault] = ()
    result: bytes = b""
    error: EnvserveError | None = None
    notes: Sequence[str] = ()
    packed_infos: Mapping[int, PackedInfo] = MappingProxyType({})


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

    def submit_call(self, calls: Sequence[Call]) -> None:
        """Starts attribute access, each on envs of another block."""

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
