"""Submits to several lanes, and waits for all of them or for the first.

Every submission has a ticket, by which its results are told from older ones. A call
that was cut short leaves the group unsettled; the next one first waits until nothing
is under way, drops what belongs to nobody, and keeps what was sent to be received.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from envserve.client.row_set import BatchBlock, RowSet
from envserve.errors import EnvserveError, LocalProtocolError
from envserve.lane import Call, Fault, Lane, Outcome, Reset

__all__ = ["Gathered", "LaneGroup"]

Array = np.ndarray[Any, Any]

_LOGGER: Final = logging.getLogger(__name__)
#: Lanes end every operation by deadlines of their own; this is how often we look.
_COLLECT_SECONDS: Final = 60.0
#: The same where more than one lane, or what has become of one, is to be seen.
_SLICE_SECONDS: Final = 0.1
#: Between steps of a batch of which nothing is alive.
_PACE_SECONDS: Final = 0.05


@dataclass(slots=True)
class Gathered:
    """What came besides rows, by env index of the whole batch."""

    infos: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    faults: dict[int, Fault] = field(default_factory=dict)

    def add(self, finished: Outcome, offset: int) -> None:
        """Adds a block's; a fault is reported in the row's info."""
        for row, info in finished.infos.items():
            self.infos[row + offset] = info
        for fault in finished.faults:
            self.faults[fault.env_index + offset] = fault
            report = {"status": fault.status.name, "text": fault.text}
            self.infos[fault.env_index + offset] = {"fault": report}


class LaneGroup:
    """Lanes whose rows follow each other.

    A block is *out* from `send` until `release`. Only blocks that are not can be
    reset and called, and only if none is, all can be stepped.

    Attributes:
      blocks: The blocks of all lanes, in row order.
      num_envs: Rows of all lanes.
      everything: All rows.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        """Gives each lane its rows."""
        blocks: list[BatchBlock] = []
        offset = 0
        for lane in lanes:
            for block in lane.blocks:
                start, stop = block.start + offset, block.stop + offset
                position = len(blocks)
                blocks.append(
                    BatchBlock(
                        position, lane, block.index, start, stop, offset, block.split
                    )
                )
            offset += lane.num_envs
        self.blocks = tuple(blocks)
        self.num_envs = offset
        self.everything = RowSet(self.blocks)
        self._lanes = tuple(lanes)
        self._has_one_lane = len(lanes) == 1
        self._first_block = {lane: _first_block(lane, blocks) for lane in lanes}
        self._selector: selectors.BaseSelector | None = None
        self._ticket = 0
        self._is_settled = True
        self._tickets: dict[int, int] = {}  # of blocks that are out, by position
        self._inbox: dict[int, Outcome] = {}  # of those, the ones that have ended
        self._lost: set[int] = set()  # of those, the ones whose end was lost
        self._pending: set[int] = set()  # blocks that came back as padding last

    @property
    def out(self) -> Set[int]:
        """Positions of the blocks that are out."""
        return self._tickets.keys()

    def num_rows(self, positions: Collection[int]) -> int:
        """Returns how many rows some blocks have."""
        blocks = self.blocks
        return sum([blocks[at].stop - blocks[at].start for at in positions])

    def block_of(self, env_index: int) -> BatchBlock:
        """Returns the block that a row belongs to."""
        return next(block for block in self.blocks if env_index < block.stop)

    # All at once.

    def step(self, actions: Sequence[Array]) -> Gathered:
        """Steps all envs with one array of actions `[num_envs, ...]` per leaf."""
        ticket = self._begin()
        self._pace()
        self.everything.write_actions(actions)
        pieces = self.everything.pieces
        for piece in pieces:
            piece.lane.submit_step(piece.blocks, ticket, self._has_one_lane)
        gathered = Gathered()
        errors: list[EnvserveError] = []
        for piece in pieces:
            self._collect_all(piece.lane, ticket, piece.blocks, gathered, errors)
        self._end(errors)
        return gathered

    def reset(self, env_indices: Array, seeds: Sequence[int] | None) -> None:
        """Resets some rows, each with its seed if there are seeds."""
        position_of = {int(index): at for at, index in enumerate(env_indices)}
        chosen_of = {
            block: [row for row in range(block.start, block.stop) if row in position_of]
            for block in self.blocks
        }
        self._check_not_out(
            [block.position for block in self.blocks if chosen_of[block]]
        )
        resets: dict[Lane, list[Reset]] = {lane: [] for lane in self._lanes}
        for block, chosen in chosen_of.items():
            if not chosen:
                continue
            rows = tuple(row - block.offset for row in chosen)
            is_whole = len(chosen) == block.stop - block.start
            reset = Reset(block.lane_block, None if is_whole else rows)
            if seeds is not None:
                values = tuple(seeds[position_of[row]] for row in chosen)
                reset = Reset(block.lane_block, rows, values)
            resets[block.lane].append(reset)
        ticket = self._begin()
        for lane, of_lane in resets.items():
            if of_lane:
                lane.submit_reset(of_lane, ticket)
        errors: list[EnvserveError] = []
        gathered = Gathered()
        for lane, of_lane in resets.items():
            blocks = [reset.block for reset in of_lane]
            self._collect_all(lane, ticket, blocks, gathered, errors)
        self._end(errors)

    def call(self, call: Call) -> bytes:
        """Carries out attribute access; returns the encoded result."""
        block = self.block_of(call.env_index)
        self._check_not_out([block.position])
        ticket = self._begin()
        row = call.env_index - block.offset
        block.lane.submit_call(replace(call, env_index=row), ticket)
        errors: list[EnvserveError] = []
        (finished,) = self._collect_all(
            block.lane, ticket, [block.lane_block], Gathered(), errors
        )
        self._end(errors)
        return finished.result

    # One after the other.

    def send(self, row_set: RowSet, actions: Sequence[Array], together: bool) -> None:
        """Starts a step of these rows, with an array `[len(row_set), ...]` per leaf.

        Unless `together`, blocks are submitted one by one: what is submitted at once, a
        server answers at once.
        """
        self._check_not_out(row_set.positions)
        ticket = self._begin()
        self._pace()
        row_set.write_actions(actions)
        for position in row_set.positions:
            self._tickets[position] = ticket
        for piece in row_set.pieces:
            if together:
                piece.lane.submit_step(piece.blocks, ticket, self._has_one_lane)
                continue
            for block in piece.blocks:
                piece.lane.submit_step([block], ticket, self._has_one_lane)
        self._is_settled = True

    def wait(
        self, positions: Collection[int], num_rows: int, deadline: float
    ) -> list[int]:
        """Waits until so many rows of blocks that are out have finished.

        Args:
          positions: The blocks to look at.
          num_rows: Rows to wait for.
          deadline: Instant of `time.monotonic` to give up at.

        Returns:
          Positions of those blocks that have finished, in order; they stay out until
          `release`.

        Raises:
          LocalProtocolError: Results were lost by an interrupted call.
        """
        if not self._is_settled:
            self._settle()
        self._is_settled = False
        is_late = False
        while not self._lost:
            ready = [position for position in positions if position in self._inbox]
            count = self.num_rows(ready)
            if count >= num_rows or is_late:
                self._is_settled = True
                return sorted(ready)
            remaining = deadline - time.monotonic()
            is_late = remaining <= 0
            wants_all = num_rows == self.num_rows(positions)
            missing = len(positions) - len(ready) if wants_all else 1
            self._collect_some(max(0.0, remaining), missing)
        error = self._give_up_lost()
        self._is_settled = True
        raise error

    def finished(self, positions: Sequence[int]) -> list[Outcome]:
        """Returns what came with blocks that `wait` has returned."""
        return [self._inbox[position] for position in positions]

    def release(self, positions: Sequence[int]) -> None:
        """Takes blocks that have finished for received: they are out no more."""
        for position in positions:
            del self._inbox[position]
            del self._tickets[position]

    def take_back(self, positions: Sequence[int], finished: Sequence[Outcome]) -> None:
        """Undoes a `release`, even one that was cut short."""
        for position, item in zip(positions, finished, strict=True):
            self._tickets[position] = item.ticket
            self._inbox[position] = item

    def close(self) -> None:
        """Lets go of what the group has besides the lanes."""
        if self._selector is not None:
            self._selector.close()
            self._selector = None

    # Tickets.

    def _begin(self) -> int:
        """Returns a new ticket; the group is unsettled until the call has ended."""
        if not self._is_settled:
            self._settle()
        self._is_settled = False
        self._ticket += 1
        return self._ticket

    def _end(self, errors: Sequence[EnvserveError]) -> None:
        """Notes that all has ended, or raises the first of the errors."""
        self._is_settled = True
        if errors:
            raise errors[0]

    def _settle(self) -> None:
        """Waits until nothing is under way that an interrupted call has left."""
        for lane in self._lanes:
            # By and by: a lane may find out that nothing more will come.
            while lane.is_busy:
                for item in lane.collect(_SLICE_SECONDS):
                    if not self._keep(lane, item) and item.error is not None:
                        _LOGGER.warning("of an interrupted call: %s", item.error)
        self._lost = {at for at in self._tickets if at not in self._inbox}
        self._is_settled = True

    def _keep(self, lane: Lane, item: Outcome) -> bool:
        """Puts the end of what was sent into the inbox; False for anything else."""
        position = self._first_block[lane].position + item.block
        if self._tickets.get(position) != item.ticket:
            return False
        self._inbox[position] = item
        self._note_padding(position, item)
        return True

    def _note_padding(self, position: int, item: Outcome) -> None:
        if item.is_padding:
            self._pending.add(position)
        elif self._pending:
            self._pending.discard(position)

    def _pace(self) -> None:
        """Waits a moment if nothing at all is alive, lest padding come without end.

        With one lane there is no need to: it is told that it is alone, and waits. Of
        several, none may: another may be the first that is back.
        """
        if len(self._pending) == len(self.blocks) and not self._has_one_lane:
            self._all_lanes().select(_PACE_SECONDS)

    def _check_not_out(self, positions: Sequence[int]) -> None:
        wrong = [at for at in positions if at in self._tickets]
        if wrong:
            raise LocalProtocolError(
                f"the rows {self._rows_of(wrong)} are out; recv() them first"
            )

    def _rows_of(self, positions: Collection[int]) -> list[int]:
        chosen = [self.blocks[at] for at in sorted(positions)]
        return [row for block in chosen for row in range(block.start, block.stop)]

    def _give_up_lost(self) -> LocalProtocolError:
        """Gives up blocks of which nothing more will come, and says so."""
        rows = self._rows_of(self._lost)
        for position in self._lost:
            self._tickets.pop(position, None)
        self._lost = set()
        return LocalProtocolError(
            f"an interrupted call has cost the results of the rows {rows}, which are "
            "out no more; send to them anew, or reset them"
        )

    # Waiting.

    def _collect_all(
        self,
        lane: Lane,
        ticket: int,
        blocks: Sequence[int],
        gathered: Gathered,
        errors: list[EnvserveError],
    ) -> list[Outcome]:
        """Waits for blocks of a lane; what has another ticket is dropped."""
        collected: list[Outcome] = []
        first = self._first_block[lane]
        offset = first.offset
        waiting = set(blocks)
        while waiting:
            items = lane.collect(_COLLECT_SECONDS, len(waiting))
            if not items and not lane.is_busy:
                raise LocalProtocolError(
                    f"{lane.name}: expected results of blocks {sorted(waiting)}; they "
                    "are in flight no more; reset the batch"
                )
            for item in items:
                if item.ticket != ticket:
                    self._keep(lane, item)
                    continue
                waiting.discard(item.block)
                collected.append(item)
                if item.infos or item.faults:
                    gathered.add(item, offset)
                if item.is_padding or self._pending:
                    self._note_padding(first.position + item.block, item)
                if item.error is not None:
                    errors.append(item.error)
        return collected

    def _collect_some(self, timeout_seconds: float, min_finished: int) -> None:
        """Waits for blocks, at least for some of them, and keeps what has come."""
        # With several lanes none may wait for itself alone.
        timeout = min(timeout_seconds, _COLLECT_SECONDS)
        is_alone = len(self._lanes) == 1
        is_any = False
        for lane in self._lanes:
            items = (
                lane.collect(timeout, min_finished) if is_alone else lane.collect(0.0)
            )
            for item in items:
                self._keep(lane, item)
                is_any = True
        if is_any:
            return
        if not any(lane.is_busy for lane in self._lanes):
            self._settle()  # finds out what will never come
        elif not is_alone:
            self._all_lanes().select(min(timeout, _SLICE_SECONDS))

    def _all_lanes(self) -> selectors.BaseSelector:
        """Returns what is readable when one of the lanes may have something."""
        if self._selector is None:
            selector = selectors.DefaultSelector()
            for lane in self._lanes:
                selector.register(lane, selectors.EVENT_READ)
            self._selector = selector
        return self._selector


def _first_block(lane: Lane, blocks: Sequence[BatchBlock]) -> BatchBlock:
    return next(block for block in blocks if block.lane is lane)
