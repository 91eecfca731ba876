"""Sets of whole blocks, prepared for copying their rows to and from the lanes.

The index of a row in the batch is its index in the lane plus the lane's `offset`. The
rows of a `RowSet` are in batch order, and are grouped by block and by lane.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from copy import copy
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple, Self

import numpy as np

from envserve.errors import EnvError, EnvserveError, LocalProtocolError
from envserve.lane import Lane
from envserve.slab import Array, Rows

_CACHE_SIZE: Final = 64


class BatchBlock(NamedTuple):
    """A block of a lane as part of the whole batch.

    Attributes:
      position: Index among all blocks of the batch.
      lane: The lane.
      lane_block: Index among the blocks of the lane.
      start: Index in the batch of the block's first row.
      stop: Index in the batch of the row after the block's last row.
      offset: Index in the batch of the lane's first row.
      split: Index of the split.
    """

    position: int
    lane: Lane
    lane_block: int
    start: int
    stop: int
    offset: int
    split: int

    @property
    def lane_rows(self) -> slice:
        """The rows of the block within its lane."""
        return slice(self.start - self.offset, self.stop - self.offset)

    @property
    def ended(self) -> Array:
        """Mask of the block's rows whose last step ended an episode, bool `[n]`."""
        rows = self.lane.rows.at(self.lane_rows)
        return rows.terminated | rows.truncated

    def located(self, error: EnvserveError) -> EnvserveError:
        """Return an error of the lane, with its row in the batch as `env_index`."""
        if isinstance(error, EnvError) and error.env_index is not None:
            row = self.offset + error.env_index
            error = copy(error)  # several blocks may share it
            error.env_index = row
        return error


class BatchBlocks(tuple[BatchBlock, ...]):
    """All blocks of a batch, ordered by position."""

    __slots__ = ()

    @classmethod
    def of(cls, lanes: Iterable[Lane]) -> Self:
        """Concatenate the blocks of all lanes."""
        blocks: list[BatchBlock] = []
        offset = 0
        for lane in lanes:
            for b in lane.blocks:
                start, stop = b.start + offset, b.stop + offset
                blocks.append(
                    BatchBlock(len(blocks), lane, b.index, start, stop, offset, b.split)
                )
            offset += lane.num_envs
        return cls(blocks)

    def num_rows(self, positions: Iterable[int]) -> int:
        """Return the total number of rows of the given blocks."""
        return sum([self[index].stop - self[index].start for index in positions])

    def block_of(self, env_index: int) -> BatchBlock:
        """Return the block that contains a row."""
        return self[bisect_right(self, env_index, key=attrgetter("start")) - 1]

    def host_of(self, env_index: int) -> str:
        """Return the address of the server of a row, or "local"."""
        return self.block_of(env_index).lane.name

    def in_flight_error(self, positions: Iterable[int]) -> LocalProtocolError:
        """Return the error to raise if blocks that must be idle are in flight."""
        blocks = [self[index] for index in sorted(positions)]
        rows = [row for block in blocks for row in range(block.start, block.stop)]
        return LocalProtocolError(f"the rows {rows} are in flight; recv() them first")


class LanePart:
    """Blocks of one lane.

    Attributes:
      lane: The lane.
      blocks: Indices of the blocks within the lane.
      single_blocks: `blocks`, each as a tuple of length 1.
      env_indices: Rows of the batch, int64 `[n]`.
      lane_rows: The rows within the lane: a slice if they are contiguous, otherwise an
        index array.
      actions: The lane's arrays of actions, one per leaf.
      view: The lane's rows as views if they are contiguous, otherwise None.
    """

    def __init__(self, blocks: Sequence[BatchBlock]) -> None:
        """Combine blocks of one lane."""
        self.lane = blocks[0].lane
        self.blocks = tuple(block.lane_block for block in blocks)
        self.single_blocks = tuple((block,) for block in self.blocks)
        self.env_indices: Array = np.concatenate(
            [np.arange(block.start, block.stop) for block in blocks]
        )
        rows = self.env_indices - blocks[0].offset
        self.lane_rows: slice | Array = rows
        self.actions = self.lane.rows.action
        self.view: Rows | None = None
        if rows[-1] - rows[0] + 1 == len(rows):
            self.lane_rows = slice(int(rows[0]), int(rows[-1]) + 1)
            self.view = self.lane.rows.at(self.lane_rows)

    def read(self) -> Rows:
        """Return the rows: views if they are contiguous, otherwise copies."""
        return self.view or self.lane.rows.at(self.lane_rows)


class RowSet:
    """The rows of one or more blocks, in the order of the batch.

    Attributes:
      blocks: The blocks, by ascending position.
      positions: Positions of the blocks in the batch.
      env_indices: Rows of the batch, int64 `[len(self)]`, ascending.
      all_valid: `StepResult.valid` of a step without faults.
      no_flags: One zero byte per row: the bytes of an array of flags or statuses in
        which all are False or OK.
      lane_parts: The blocks of each lane, in the order of the batch, each with the
        slice of its rows within the set.
    """

    def __init__(
        self,
        blocks: Sequence[BatchBlock],
        lane_part: Callable[[tuple[BatchBlock, ...]], LanePart] = LanePart,
    ) -> None:
        """Make the set of all rows of `blocks`, which are sorted by position.

        The function `lane_part` combines blocks of one lane.
        """
        self.blocks = tuple(blocks)
        self.positions = frozenset([block.position for block in blocks])
        lane_parts, start = [], 0
        for _, group in groupby(self.blocks, attrgetter("offset")):
            part = lane_part(tuple(group))
            stop = start + len(part.env_indices)
            lane_parts.append((part, slice(start, stop)))
            start = stop
        self.lane_parts = tuple(lane_parts)
        self.env_indices: Array = np.concatenate(
            [part.env_indices for part, _ in lane_parts] or [np.arange(0)]
        )
        # Read-only, because the array is cached, and `recv` returns it to the user.
        self.env_indices.flags.writeable = False
        self.all_valid: Array = np.ones(start, np.bool_)
        self.no_flags = bytes(start)
        views = [part.view for part, _ in lane_parts if part.view is not None]
        #: The arrays that `sources` returns, if all of them are views.
        self._views = _by_field(views) if len(views) == len(lane_parts) else None

    @property
    def block_parts(self) -> Iterator[tuple[BatchBlock, slice]]:
        """Each block with the slice of its rows within the set."""
        start = 0
        for block in self.blocks:
            stop = start + block.stop - block.start
            yield block, slice(start, stop)
            start = stop

    def sources(self) -> Sequence[Sequence[Array]]:
        """Return the arrays of each field of a result, one array per lane.

        The fields are the observation leaves, reward, terminated, truncated and status.
        """
        if self._views is not None:
            return self._views
        return _by_field([part.read() for part, _ in self.lane_parts])

    def __len__(self) -> int:
        return len(self.env_indices)


def _by_field(parts: Sequence[Rows]) -> Sequence[Sequence[Array]]:
    fields = [
        (*rows.observation, rows.reward, rows.terminated, rows.truncated, rows.status)
        for rows in parts
    ]
    return [*zip(*fields, strict=True)]


class RowSetCache:
    """A cache of the most recently used row sets, with rows or blocks as keys.

    Attributes:
      all_rows: The set of all rows of the batch.
    """

    def __init__(self, blocks: Sequence[BatchBlock]) -> None:
        self.all_rows = self._latest = RowSet(blocks)
        self._blocks = BatchBlocks(blocks)
        sizes = [block.stop - block.start for block in blocks]
        position_of_row = np.repeat(np.arange(len(blocks)), sizes)
        # The caches do not refer to `self`: a reference cycle would delay the
        # destruction of a batch that is no longer used.
        remember = lru_cache(_CACHE_SIZE)
        lane_part = lru_cache(max(_CACHE_SIZE, len(blocks)))(LanePart)
        self._join = remember(partial(_join, self._blocks, lane_part))
        self._find = remember(partial(_find, self._blocks, position_of_row, self._join))

    def for_rows(
        self, env_indices: Sequence[int] | Array | None
    ) -> tuple[RowSet, Array | None]:
        """Return the set of the given rows; for None, the set of all rows.

        Returns:
          The set; and None if `env_indices` is ascending, otherwise an index array
          `order`, such that `array[order]` brings an array into the order of the set.

        Raises:
          IndexError: A row does not exist, or the rows are not whole blocks.
        """
        if env_indices is None:
            return self.all_rows, None
        if env_indices is self._latest.env_indices:  # the rows that `recv` returned
            return self._latest, None
        return self._find(_as_rows(env_indices).tobytes())

    def for_blocks(self, positions: Iterable[int]) -> RowSet:
        """Return the set of all rows of the given blocks."""
        self._latest = self._join(tuple(sorted(positions)))
        return self._latest

    def rows_by(self, key: Callable[[BatchBlock], int]) -> tuple[Array, ...]:
        """Group the rows by a key of their block.

        Returns:
          The rows of each key, int64 `[n]`, in ascending order of the keys.
        """
        positions: dict[int, list[int]] = {}
        for block in self._blocks:
            positions.setdefault(key(block), []).append(block.position)
        groups = [positions[value] for value in sorted(positions)]
        return tuple([self.for_blocks(group).env_indices for group in groups])

    def select_in_flight(
        self,
        in_flight: Set[int],
        min_envs: int | None,
        env_indices: Sequence[int] | Array | None,
    ) -> tuple[Set[int], int]:
        """Return the blocks that `recv` may return, and the number of rows to wait for.

        Raises:
          LocalProtocolError: The rows are not in flight, or fewer than `min_envs` are.
        """
        positions: Set[int] = frozenset(in_flight)
        if env_indices is not None:
            row_set, _ = self.for_rows(env_indices)
            missing = row_set.positions - in_flight
            if missing:
                rows = self.for_blocks(missing).env_indices.tolist()
                raise LocalProtocolError(
                    f"the rows {rows} are not in flight; send() them first"
                )
            positions = row_set.positions
        num_in_flight = self._blocks.num_rows(positions)
        if not num_in_flight:
            raise LocalProtocolError("no rows are in flight; send() some first")
        if min_envs is None:
            min_envs = 1 if env_indices is None else num_in_flight
        if not 1 <= min_envs <= num_in_flight:
            raise LocalProtocolError(
                f"min_envs: expected 1 to {num_in_flight}, the number of rows in "
                f"flight; got {min_envs}"
            )
        return positions, min_envs


def _join(
    blocks: Sequence[BatchBlock],
    lane_part: Callable[[tuple[BatchBlock, ...]], LanePart],
    positions: tuple[int, ...],
) -> RowSet:
    return RowSet([blocks[position] for position in positions], lane_part)


def _find(
    blocks: Sequence[BatchBlock],
    position_of_row: Array,
    join: Callable[[tuple[int, ...]], RowSet],
    rows: bytes,
) -> tuple[RowSet, Array | None]:
    indices = check_rows(np.frombuffer(rows, np.int64), len(position_of_row))
    if not indices.size:
        raise IndexError("expected at least one row; got none")
    row_set = join(tuple(np.unique(position_of_row[indices]).tolist()))
    order = np.argsort(indices)
    if len(row_set) != len(indices):
        missing = np.setdiff1d(row_set.env_indices, indices)[0]
        block = blocks[position_of_row[missing]]
        raise IndexError(
            f"expected whole blocks; row {missing} of the block of rows {block.start} "
            f"to {block.stop - 1} is missing; pass all rows of a block, because one "
            f"worker steps them together (see BatchEnv.blocks)"
        )
    is_sorted = bool((order[1:] > order[:-1]).all())
    return row_set, None if is_sorted else order


def check_rows(env_indices: Sequence[int] | Array | None, num_envs: int) -> Array:
    """Return rows as int64 `[n]`.

    Raises:
      IndexError: A row does not exist or occurs twice.
    """
    if env_indices is None:
        return np.arange(num_envs)
    indices = _as_rows(env_indices).reshape(-1)
    invalid = indices[(indices < 0) | (indices >= num_envs)]
    if invalid.size:
        raise IndexError(
            f"expected env indices in [0, {num_envs}); got {invalid.tolist()}"
        )
    if np.unique(indices).size != indices.size:
        raise IndexError(f"expected distinct env indices; got {indices.tolist()}")
    return indices


def _as_rows(env_indices: Sequence[int] | Array) -> Array:
    indices = np.asarray(env_indices)
    if indices.dtype.kind not in "iu" and indices.size:
        hint = "; use np.flatnonzero(mask)" if indices.dtype.kind == "b" else ""
        raise IndexError(f"expected integer env indices; got {indices.dtype}{hint}")
    return indices.astype(np.int64, copy=False)
