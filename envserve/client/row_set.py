"""Rows of a batch in whole blocks: which lanes they are of, and how to get at them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence, Set
from functools import lru_cache, partial
from itertools import groupby, pairwise, starmap
from operator import attrgetter
from typing import Any, Final, NamedTuple, Self

import numpy as np

from envserve.errors import LocalProtocolError
from envserve.lane import Lane
from envserve.slab import Rows

Array = np.ndarray[Any, Any]

_MAX_REMEMBERED: Final = 64


class BatchBlock(NamedTuple):
    """A block of a lane as part of the whole batch.

    Attributes:
      position: Its place among all blocks of the batch.
      lane: The lane.
      lane_block: The lane's own number for it.
      start: First row of the batch.
      stop: Row of the batch after the last.
      offset: Row of the batch that is the lane's first.
      split: Which group it belongs to.
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
        """Its rows of the lane."""
        return slice(self.start - self.offset, self.stop - self.offset)

    @property
    def ended(self) -> Array:
        """Which of its rows show the end of an episode, bool `[rows]`."""
        rows = self.lane.rows.at(self.lane_rows)
        return rows.terminated | rows.truncated


class BatchBlocks(tuple[BatchBlock, ...]):
    """All blocks of a batch, each at its position."""

    __slots__ = ()

    @classmethod
    def of(cls, lanes: Iterable[Lane]) -> Self:
        """Returns the blocks of all lanes, whose rows follow each other."""
        blocks: list[BatchBlock] = []
        offset = 0
        for lane in lanes:
            for b in lane.blocks:
                rows = (b.start + offset, b.stop + offset)
                blocks.append(
                    BatchBlock(len(blocks), lane, b.index, *rows, offset, b.split)
                )
            offset += lane.num_envs
        return cls(blocks)

    def num_rows(self, positions: Iterable[int]) -> int:
        """Returns how many rows some of them have."""
        return sum([self[at].stop - self[at].start for at in positions])

    def block_of(self, env_index: int) -> BatchBlock:
        """Returns the one that a row belongs to."""
        return self[bisect_right(self, env_index, key=attrgetter("start")) - 1]

    def in_flight_error(self, positions: Iterable[int]) -> LocalProtocolError:
        """Return the error to raise for blocks that must not be in flight."""
        chosen = [self[at] for at in sorted(positions)]
        rows = [row for block in chosen for row in range(block.start, block.stop)]
        return LocalProtocolError(f"the rows {rows} are in flight; recv() them first")


class Piece:
    """The rows of a set that are one lane's.

    Attributes:
      lane: The lane.
      blocks: The lane's blocks.
      single_blocks: The same, each for itself.
      set_rows: Which of the set's rows.
      lane_rows: Which of the lane's rows: a slice where they follow each other.
      actions: The lane's action leaves.
      view: The rows, where they follow each other.
    """

    def __init__(self, blocks: Sequence[BatchBlock], start: int) -> None:
        """Takes blocks of one lane; their rows begin at row `start` of the set."""
        self.lane = blocks[0].lane
        self.blocks = tuple(block.lane_block for block in blocks)
        self.single_blocks = tuple((block,) for block in self.blocks)
        rows = np.concatenate([np.arange(b.start, b.stop) for b in blocks])
        self.set_rows = slice(start, start + len(rows))
        rows -= blocks[0].offset
        self.lane_rows: slice | Array = rows
        self.actions = self.lane.rows.action
        self.view: Rows | None = None
        if rows[-1] - rows[0] + 1 == len(rows):
            self.lane_rows = slice(int(rows[0]), int(rows[-1]) + 1)
            self.view = self.lane.rows.at(self.lane_rows)

    def read(self) -> Rows:
        """Returns the rows: views where they follow each other, else copies."""
        return self.view or self.lane.rows.at(self.lane_rows)


class RowSet:
    """The rows of some blocks, in the order of the batch.

    Attributes:
      blocks: The blocks, in order.
      positions: Places of the blocks among all of the batch.
      env_indices: int64 `[len(self)]`, ascending.
      parts: Each block with its rows of the set.
      pieces: The rows by lane, in order.
    """

    def __init__(self, blocks: Sequence[BatchBlock]) -> None:
        """Prepares to copy; `blocks` are in order."""
        self.blocks = tuple(blocks)
        self.positions = frozenset(block.position for block in blocks)
        self.env_indices: Array = np.concatenate(
            [np.arange(block.start, block.stop) for block in blocks] or [np.arange(0)]
        )
        self.env_indices.flags.writeable = False  # it is given away
        stops = np.cumsum([block.stop - block.start for block in blocks]).tolist()
        parts = starmap(slice, pairwise([0, *stops]))
        self.parts = tuple(zip(self.blocks, parts, strict=True))
        pieces: list[Piece] = []
        for _, of_lane in groupby(self.parts, lambda part: part[0].offset):
            blocks_of_lane, rows = zip(*of_lane, strict=True)
            pieces.append(Piece(blocks_of_lane, rows[0].start))
        self.pieces = tuple(pieces)

    def __len__(self) -> int:
        return len(self.env_indices)


class RowSets:
    """The sets of a batch's rows, by row or by block; the last ones are remembered.

    Attributes:
      everything: All rows.
    """

    def __init__(self, blocks: Sequence[BatchBlock]) -> None:
        self.everything = RowSet(blocks)
        self._blocks = tuple(blocks)
        sizes = [block.stop - block.start for block in blocks]
        position_of_row = np.repeat(np.arange(len(blocks)), sizes)
        # Neither refers to `self`: a batch that is dropped goes at once.
        remember = lru_cache(_MAX_REMEMBERED)
        self._find = remember(partial(_find, self._blocks, position_of_row))
        self._join = remember(partial(_join, self._blocks))

    def of_rows(
        self, env_indices: Sequence[int] | Array | None
    ) -> tuple[RowSet, Array | None]:
        """Returns the set of some rows, None for all.

        Returns:
          The set, and, unless the indices ascend, how to sort arrays that are in
          their order: `array[order]`.

        Raises:
          IndexError: The rows are not there, or are not whole blocks.
        """
        if env_indices is None:
            return self.everything, None
        return self._find(_as_rows(env_indices).tobytes())

    def of_blocks(self, positions: Iterable[int]) -> RowSet:
        """Returns the set of some blocks."""
        return self._join(tuple(sorted(positions)))

    def rows_by(self, key: Callable[[BatchBlock], int]) -> tuple[Array, ...]:
        """Returns the rows, int64 `[n]`, of blocks that have the same key."""
        keys = [key(block) for block in self._blocks]
        return tuple(
            self.of_blocks(
                [at for at, other in enumerate(keys) if other == one]
            ).env_indices
            for one in sorted({*keys})
        )

    def choose(
        self,
        in_flight: Set[int],
        min_envs: int | None,
        env_indices: Sequence[int] | Array | None,
    ) -> tuple[Set[int], int]:
        """Return the blocks that a `recv` waits for, and the number of rows.

        Raises:
          LocalProtocolError: The rows are not in flight, or fewer are.
        """
        positions: Set[int] = frozenset(in_flight)
        if env_indices is not None:
            row_set, _ = self.of_rows(env_indices)
            missing = row_set.positions - in_flight
            if missing:
                rows = self.of_blocks(missing).env_indices.tolist()
                raise LocalProtocolError(
                    f"expected rows in flight; the rows {rows} are not; send() them "
                    f"first"
                )
            positions = row_set.positions
        num_in_flight = len(self.of_blocks(positions))
        if not num_in_flight:
            raise LocalProtocolError("no rows are in flight; send() some first")
        if min_envs is None:
            min_envs = 1 if env_indices is None else num_in_flight
        if not 1 <= min_envs <= num_in_flight:
            raise LocalProtocolError(
                f"min_envs: expected 1 to {num_in_flight}, the rows in flight; "
                f"got {min_envs}"
            )
        return positions, min_envs


def _join(blocks: Sequence[BatchBlock], positions: tuple[int, ...]) -> RowSet:
    return RowSet([blocks[position] for position in positions])


def _find(
    blocks: Sequence[BatchBlock], position_of_row: Array, rows: bytes
) -> tuple[RowSet, Array | None]:
    indices = check_rows(np.frombuffer(rows, np.int64), len(position_of_row))
    if not indices.size:
        raise IndexError("expected at least one row; got none")
    row_set = _join(blocks, np.unique(position_of_row[indices]).tolist())
    order = np.argsort(indices)
    if len(row_set) != len(indices):
        missing = np.setdiff1d(row_set.env_indices, indices)[0]
        block = blocks[position_of_row[missing]]
        raise IndexError(
            f"expected whole blocks; got row(s) of the block of rows {block.start} "
            f"to {block.stop - 1} without row {missing}; one worker steps them "
            "together, see BatchEnv.blocks"
        )
    is_sorted = bool((order[1:] > order[:-1]).all())
    return row_set, None if is_sorted else order


def check_rows(env_indices: Sequence[int] | Array | None, num_envs: int) -> Array:
    """Returns rows as int64 `[n]`; raises IndexError for one too many or twice."""
    if env_indices is None:
        return np.arange(num_envs)
    indices = _as_rows(env_indices).reshape(-1)
    wrong = indices[(indices < 0) | (indices >= num_envs)]
    if wrong.size:
        raise IndexError(
            f"expected env indices in [0, {num_envs}); got {wrong.tolist()}"
        )
    if np.unique(indices).size != indices.size:
        raise IndexError(f"expected each env once; got {indices.tolist()}")
    return indices


def _as_rows(env_indices: Sequence[int] | Array) -> Array:
    indices = np.asarray(env_indices)
    if indices.dtype.kind not in "iu" and indices.size:
        hint = "; use np.flatnonzero(mask)" if indices.dtype.kind == "b" else ""
        raise IndexError(f"expected numbers of rows; got {indices.dtype}{hint}")
    return indices.astype(np.int64, copy=False)
