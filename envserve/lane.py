"""The interface between a batch and its sources of rows.

A lane provides the rows of some envs: a `Pool` in this process, or a `RemoteLane` to a
server. Its rows are divided into blocks. A block is a contiguous range of rows that one
worker steps together. Operations, replies, sequence numbers and losses apply to whole
blocks. At most one operation (step, reset or call) runs on a block at a time.
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
from envserve.text import exception_line, printable

MAX_JPEG_BYTES: Final = 48 << 10
#: Maximum number of characters of a frame's text.
MAX_TEXT: Final = 1 << 10

_U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class RenderedFrame(Struct, frozen=True, kw_only=True):
    """A rendered image of an env after one of its steps.

    Attributes:
      row: Row of the lease.
      serial: Number that increases with every frame of the row.
      jpeg: The image; empty if there is none.
      text: Text to show instead of an image: the text that the env renders, or the
        reason why there is no image.
      seed: Seed of the last seeded reset; None if the env's state cannot be reproduced
        from this seed.
      episode_steps: Number of steps in the current episode.
      episode_return: Sum of the episode's rewards; None if some were not recorded.
    """

    row: Annotated[int, Meta(ge=0, lt=1 << 16)]
    serial: _U63
    jpeg: Annotated[bytes, Meta(max_length=MAX_JPEG_BYTES)] = b""
    text: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    seed: _U63 | None = None
    episode_steps: _U63 = 0
    episode_return: float | None = None

    def __post_init__(self) -> None:
        """Escape the text, because it may come from another host."""
        force_setattr(self, "text", printable(self.text[:MAX_TEXT])[:MAX_TEXT])


@dataclass(frozen=True)
class Block:
    """Rows `start` to `stop` (exclusive) of a lane, stepped together by one worker.

    Attributes:
      index: Position in the lane's `blocks`.
      start: First row.
      stop: Row after the last.
      worker: Index of the worker that hosts the block.
      split: Index of the split, one of `num_splits` groups of blocks.
    """

    index: int
    start: int
    stop: int
    worker: int
    split: int

    @property
    def rows(self) -> range:
        """The indices of the block's rows in the lane."""
        return range(self.start, self.stop)

    @property
    def row_slice(self) -> slice:
        """The slice of the rows in the lane's arrays."""
        return slice(self.start, self.stop)


def block_counts(
    num_envs: int, num_workers: int, num_splits: int, blocks_per_split: int = 0
) -> tuple[int, int]:
    """Return the number of splits, and of blocks in each split; see `make_blocks`."""
    num_splits = min(num_splits, num_envs)
    return num_splits, min(blocks_per_split or num_workers, num_envs // num_splits)


def make_blocks(
    num_envs: int, num_workers: int, num_splits: int, blocks_per_split: int = 0
) -> tuple[Block, ...]:
    """Divide rows into blocks of nearly equal size; blocks of a split are adjacent.

    A split has one block per worker by default, or `blocks_per_split` blocks that are
    assigned to the workers round-robin. No block is empty: if there are fewer envs than
    splits or workers, the surplus splits and workers get no block.
    """
    num_splits, per_split = block_counts(
        num_envs, num_workers, num_splits, blocks_per_split
    )
    count = num_splits * per_split
    edges = [index * num_envs // count for index in range(count + 1)]
    return tuple(
        Block(
            index=index,
            start=edges[index],
            stop=edges[index + 1],
            worker=index % per_split % num_workers,
            split=index // per_split,
        )
        for index in range(count)
    )


@dataclass(frozen=True)
class Reset:
    """A reset of some rows of a block.

    Attributes:
      block: Index of the block.
      env_indices: Rows of the lane to reset; None for all rows of the block.
      seeds: One seed per row to reset; a row with None is reset without a seed. If
        `seeds` is None, envs are reset without a seed, except that the first reset
        after construction uses the env's `env_seed`.
      options: Options for each of these envs, a dict encoded by `codec`; may be empty.
    """

    block: int
    env_indices: tuple[int, ...] | None = None
    seeds: tuple[int | None, ...] | None = None
    options: bytes = b""

    def check(self, block: Block) -> Sequence[int]:
        """Return the rows to reset.

        Raises:
          LocalProtocolError: There are no rows, they are not distinct rows of the
            block, or there is not one valid seed per row.
        """
        seeds = self.seeds
        rows = block.rows if self.env_indices is None else self.env_indices
        are_distinct = 0 < len({*rows}) == len(rows)
        values = [0] * len(rows) if seeds is None else [seed or 0 for seed in seeds]
        has_seeds = len(values) == len(rows) and all(
            0 <= seed < 2**63 for seed in values
        )
        if not (are_distinct and {*rows} <= {*block.rows} and has_seeds):
            raise LocalProtocolError(
                f"block {block.index}: expected one or more distinct rows in "
                f"{block.rows}, each with a seed in [0, 2**63) or None; got rows "
                f"{rows!s:.200} and seeds {seeds!s:.200}"
            )
        return rows


#: Kinds of attribute access.
CallKind = Literal["call", "get", "set"]


@dataclass(frozen=True)
class Call:
    """Attribute access on some envs of a block.

    Attributes:
      block: Index of the block.
      env_indices: Rows of the lane.
      kind: "call" calls a method, or reads an attribute that is not callable; "get"
        reads an attribute; "set" assigns one value per row.
      name: Name of the attribute.
      arguments: A list and a dict, encoded by `codec`: positional and keyword arguments
        of the method. For "set", the list contains one value per row.
    """

    block: int
    env_indices: tuple[int, ...]
    kind: CallKind
    name: str
    arguments: bytes = codec.encode([[], {}])


class Fault(NamedTuple):
    """The reason why a row's last transition is not valid.

    Attributes:
      env_index: Row of the lane.
      status: Kind of fault.
      text: The traceback of the env's exception, or a description of how its worker
        ended.
      is_violation: Whether the env returned a value outside its spaces (wrong shape or
        dtype, NaN or infinity), which is a bug in the env rather than a crash.
    """

    env_index: int
    status: Status
    text: str
    is_violation: bool = False

    @property
    def cause(self) -> str:
        """The line that names the env's exception; the first line of another text."""
        if self.status in (Status.OK, Status.ENV_ERROR):
            return exception_line(self.text)
        return self.text.strip().partition("\n")[0]

    @property
    def detail(self) -> str:
        """The whole traceback, or the lines after the cause; may be empty."""
        rest = self.text.strip().partition("\n")[2]
        return self.text if rest and self.status == Status.ENV_ERROR else rest


class Outcome(NamedTuple):
    """The result of an operation on a block, without the data in the lane's rows.

    Attributes:
      block: Index of the block.
      infos: Maps rows to info dicts; the batch's option `infos` determines which rows
        have one.
      faults: Faults of this operation; for a `Call`, one per row without a value.
      result: For a `Call`, the encoded list of the values of the first rows, as many as
        fit into one reply. The other rows were not called.
      error: Error if the whole operation failed; otherwise None.
      warnings: Warnings about the envs, each reported once and logged by their host.
      packed_infos: The infos in the worker's encoding, so that a server can forward
        them. Empty for outcomes that come from a server.
      retried: Faults of resets that succeeded after the env was rebuilt. Their status
        is OK; the host of the envs logs them.
    """

    block: int
    infos: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
    faults: Sequence[Fault] = ()
    result: bytes = b""
    error: EnvserveError | None = None
    warnings: Sequence[str] = ()
    packed_infos: Mapping[int, PackedInfo] = MappingProxyType({})
    retried: Sequence[Fault] = ()


#: Key in the `__dict__` of an exception that `mark_harmless` has marked.
_HARMLESS: Final = "_envserve_harmless"


def mark_harmless(error: BaseException) -> None:
    """Mark an exception that interrupted a lane's method but lost no step or result."""
    error.__dict__[_HARMLESS] = True


def pop_harmless_mark(error: BaseException) -> bool:
    """Remove the mark of `mark_harmless`; return whether the exception had it.

    The mark is removed because a signal handler may raise the same object again.
    """
    return bool(error.__dict__.pop(_HARMLESS, False))


class Lane(Protocol):
    """A source of rows: a pool of this process, or a lane to a server.

    The caller writes actions to `rows.action` before `submit_step`. Results are in
    `rows` from `collect` until the block is submitted again. Submitting a block that is
    in flight raises LocalProtocolError.

    A block is lost if a fault ends its envs (a worker died, for example). The next step
    of a lost block resets it instead, and its outcome is a lost transition: truncated,
    with a status and a fault. A block in flight is absent while its envs are not
    available. While a block is absent, its rows of `final_observation` contain the last
    known observations.

    A signal handler may raise an exception (KeyboardInterrupt, for example) at any
    point of a call. If `collect` was only waiting, or `submit_step` was sending an
    accepted step, nothing is lost, and the lane marks the exception with
    `mark_harmless`. After any other such exception, the lane is in an unknown state,
    and only `invalidate` and `close` may be called.
    """

    @property
    def name(self) -> str:
        """Location of the envs, for messages: "local" or an address."""

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
        """Arrays of actions, which the lane reads, and results, which it writes."""

    @property
    def is_busy(self) -> bool:
        """Whether any operation is in flight, or has ended but not been collected."""

    @property
    def absent(self) -> Collection[int]:
        """Indices of blocks in flight whose envs are not available at the moment."""

    @property
    def give_up_error(self) -> EnvserveError | None:
        """Error to raise instead of waiting for absent envs; None to keep waiting.

        While there is one, resets end without an effect, and calls fail with it.
        """

    def finish_start(self, deadline: float) -> None:
        """Wait until all envs are built.

        Args:
          deadline: Time at which to stop waiting, as a value of `time.monotonic()`.

        Raises:
          EnvStartError: An env could not be built before the deadline; the lane is
            closed.
          ServerError: The server rejected the request or was lost; the lane is closed.
        """

    def submit_step(self, blocks: Sequence[int]) -> None:
        """Start a step of these blocks, with the actions in `rows.action`."""

    def submit_reset(self, resets: Sequence[Reset]) -> None:
        """Start resets, at most one per block."""

    def submit_call(self, calls: Sequence[Call]) -> None:
        """Start attribute accesses (call, get or set), at most one per block."""

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        """Wait until `min_finished` operations have finished, and return the outcomes.

        Return fewer outcomes if the timeout expires, if no more operations are in
        flight, or if a block in flight has become absent since the last call.
        """

    def invalidate(self, reason: str) -> None:
        """Replace all envs, discard operations in flight, and end all episodes.

        The next result of each row reports the end of its episode as a fault.

        Allowed in any state, including after an interrupted call.
        """

    def stats(self) -> Mapping[str, int]:
        """Return a dict from names to counts since the lane was created.

        The names depend on the type of the lane.
        """

    def fileno(self) -> int:
        """Return a descriptor that is readable when `collect(0)` may return results.

        The descriptor is always the same. After a call to `collect` with a timeout, it
        may not become readable until `fileno` is called again.
        """

    def begin_close(self) -> None:
        """Ask all envs to close, without waiting."""

    def close(self) -> None:
        """Close all envs; idempotent.

        Local envs have 10 s for `close`, after which their workers are killed; workers
        that are still executing another operation are killed after 1 s, and so are all
        workers on servers. This method waits at most 2 s for servers.
        """
