"""Submits to several lanes, and waits for all of them or for the first.

A block is out while a caller waits for it, and owed while its step goes on without
one: see `absence`. An interrupt while waiting costs nothing. One that cuts this
bookkeeping short costs an episode of each row: the next call takes all lanes for lost.
docs/decisions.md: "An interrupt inside an operation invalidates the lane".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, TypeVar

import numpy as np

from envserve.client.absence import Absence, PutAside
from envserve.client.outcome_queue import Inbox
from envserve.client.row_set import BatchBlock, BatchBlocks, RowSet
from envserve.errors import EnvserveError, EnvTimeout, LocalProtocolError
from envserve.lane import Call, Lane, Outcome, Reset

__all__ = ["LaneGroup"]

Array = np.ndarray[Any, Any]
What = TypeVar("What", Reset, Call)

#: Lanes end every operation by deadlines of their own; this is how often we look.
_COLLECT_SECONDS: Final = 60.0


class LaneGroup:
    """Lanes whose rows follow each other.

    Attributes:
      blocks: The blocks of all lanes, in row order.
      out: Positions of the blocks that were sent, and not released.
      inbox: What has come of blocks in flight, until it is released.
      absence: The blocks whose envs are not there.
    """

    def __init__(self, lanes: Sequence[Lane], padding_after_seconds: float) -> None:
        self.blocks = BatchBlocks.of(lanes)
        self.out: set[int] = set()
        self.inbox = Inbox(lanes, self.blocks)
        self.absence = Absence(self.blocks, padding_after_seconds)
        self._called: set[int] = set()  # blocks with a reset or call in flight
        self._interrupted: set[int] = set()  # blocks of a step that nobody waits for
        self._put_aside: dict[int, PutAside] = {}  # of those, what was owed before

    # Steps.

    def send(
        self, row_set: RowSet, actions: Sequence[Array], *, together: bool
    ) -> None:
        """Starts a step of these rows, with an array `[len(row_set), ...]` per leaf.

        Unless `together`, blocks are submitted one by one: what is submitted at once, a
        server answers at once.

        Raises:
          LocalProtocolError: Some of the rows are out.
        """
        if self.inbox.is_midway or self._called or self._interrupted:
            self._clean_up(row_set.positions)
        if not self.out.isdisjoint(row_set.positions):
            raise self.blocks.out_error(row_set.positions & self.out)
        self.inbox.is_midway = True
        owed = self.absence.owed
        if owed and not owed.isdisjoint(row_set.positions):
            self._send_what_is_not_owed(row_set, actions)
        else:
            for piece in row_set.pieces:
                piece.lane.is_waiting = False  # or was it, long ago?
                for target, array in zip(piece.actions, actions, strict=True):
                    target[piece.lane_rows] = array[piece.set_rows]
            last = row_set.blocks[-1]
            try:
                for piece in row_set.pieces:
                    for blocks in (piece.blocks,) if together else piece.single_blocks:
                        piece.lane.submit_step(blocks)
            except BaseException:
                if last.lane.is_waiting and blocks[-1] == last.lane_block:
                    self.out.update(row_set.positions)  # all is in flight
                    self.inbox.is_midway = False
                raise
        self.out.update(row_set.positions)
        self.inbox.is_midway = False

    def _send_what_is_not_owed(self, row_set: RowSet, actions: Sequence[Array]) -> None:
        """Steps the other blocks; the actions for those that are owed are not used."""
        wanted = self.absence.await_owed(row_set.positions)
        for block, part in row_set.parts:
            if block.position in wanted:
                for target, array in zip(block.lane.rows.action, actions, strict=True):
                    target[block.lane_rows] = array[part]
                block.lane.submit_step((block.lane_block,))

    def wait(
        self, positions: Set[int], num_rows: int | None, deadline: float
    ) -> Set[int]:
        """Waits until blocks that are out have ended, or are padding.

        Args:
          positions: The blocks to look at.
          num_rows: Rows to wait for; None for all.
          deadline: Instant of `time.monotonic` to give up at.

        Returns:
          Those that have, maybe fewer than asked for; they stay out until `release`.

        Raises:
          ServerLost: None of the batch's envs is there, and none is worth waiting for.
        """
        if self.inbox.is_midway:
            self._clean_up(positions)
        outcomes, absence, blocks = self.inbox.outcomes, self.absence, self.blocks
        if num_rows is not None and num_rows == blocks.num_rows(positions):
            num_rows = None
        may_be_absent = bool(absence.awaited)
        while True:
            ready = positions & outcomes.keys()
            if absence.padded:
                absence.padded -= ready  # they have ended meanwhile
            if len(ready) == len(positions):
                return ready
            timeout = _COLLECT_SECONDS
            if may_be_absent:
                ready |= self._pad(positions - ready)
                if len(ready) == len(positions):
                    return ready
                timeout = min(timeout, absence.next_pad() - time.monotonic())
            if deadline != math.inf or num_rows is not None:
                remaining = deadline - time.monotonic()
                is_enough = num_rows is not None and blocks.num_rows(ready) >= num_rows
                if is_enough or (remaining <= 0 and may_be_absent):
                    return ready
                timeout = min(timeout, remaining)
            waiting = positions - ready
            missing = len(waiting) if num_rows is None else 1
            self.inbox.collect(max(0.0, timeout), waiting, missing)
            may_be_absent = True

    def _pad(self, waiting: Set[int]) -> Set[int]:
        """Returns the blocks, of those that are waited for, that are padding now."""
        absent = self.inbox.absent()
        self.absence.pad(absent, waiting, time.monotonic())
        if len(absent) == len(self.blocks) and (error := self.inbox.given_up()):
            raise error
        return self.absence.padded

    def release(self, positions: Set[int]) -> None:
        """Takes blocks that `wait` has returned for received: they are out no more."""
        inbox, absence = self.inbox, self.absence
        inbox.is_midway = True
        self.out -= positions
        if absence.awaited or absence.padded:
            absence.release(positions)
        left = {}
        if not inbox.outcomes.keys() <= positions:
            left = {at: o for at, o in inbox.outcomes.items() if at not in positions}
        # No call in between: an interrupt finds all of it, for `lose`, or is too late.
        inbox.outcomes, inbox.is_midway = left, False

    def give_up_step(self, *, is_untold: bool) -> None:
        """Has nobody wait for a step of everything that was interrupted.

        Args:
          is_untold: Whether it has ended, and nobody has seen how.
        """
        self.inbox.is_midway |= is_untold
        self._interrupted |= self.out
        self.absence.owe(self.out)
        self.out.clear()

    # Resets and calls.

    def start_reset(
        self,
        env_indices: Array,
        seeds: Sequence[int | None] | None,
        options: bytes = b"",
    ) -> Set[int]:
        """Starts a reset of some rows, each with its seed if there are seeds.

        Returns:
          Positions of the blocks, for `finish_reset`.
        """
        resets = _resets_of(self.blocks, env_indices, seeds, options)
        self._clean_up(range(len(self.blocks)))  # what the other rows show counts too
        self._start(resets, lambda lane, some: lane.submit_reset(some))
        return resets.keys()

    def finish_reset(
        self, positions: Set[int], deadline: float
    ) -> dict[int, Mapping[str, Any]]:
        """Waits for what `start_reset` has started, until an instant of `monotonic`.

        Returns:
          Infos by row, as far as there are any.

        Raises:
          EnvTimeout: It takes longer; one can wait again.
        """
        if self.inbox.is_midway or not positions <= self._called:
            self._clean_up(positions)
            raise LocalProtocolError("the reset was interrupted; reset() once more")
        outcomes = self._finish(positions, deadline)
        return {
            row + self.blocks[position].offset: info
            for position, outcome in zip(sorted(positions), outcomes, strict=True)
            for row, info in outcome.infos.items()
        }

    def call(self, calls: Mapping[int, Call]) -> Sequence[Outcome]:
        """Carries out attribute access on blocks, given by position, in that order."""
        self._start(calls, lambda lane, some: lane.submit_call(some))
        return self._finish(calls.keys())

    def _start(
        self, asked: Mapping[int, What], submit: Callable[[Lane, list[What]], None]
    ) -> None:
        """Starts operations that are no steps, once their blocks have nothing to do."""
        positions = asked.keys()
        if not self.out.isdisjoint(positions):
            raise self.blocks.out_error(positions & self.out)
        self._clean_up(positions)
        self._wait_for(positions & self.absence.owed)
        self.inbox.is_midway = True
        by_lane: dict[Lane, list[What]] = {}
        for position, what in asked.items():
            block, is_reset = self.blocks[position], isinstance(what, Reset)
            by_lane.setdefault(block.lane, []).append(what)
            owed = self.inbox.outcomes.pop(position, None)
            rows = (what.env_indices or ()) if is_reset else ()
            is_part = 0 < len(rows) < block.stop - block.start
            if owed is not None and (is_part or not is_reset):  # it is shown yet
                self._put_aside[position] = PutAside(owed, block, rows)
            elif is_reset:
                self.absence.owed.discard(position)
        self._called |= asked.keys()
        for lane, some in by_lane.items():
            try:
                submit(lane, some)
            except EnvserveError:
                if lane is next(iter(by_lane)):  # it has refused them as a whole
                    self._take_called(asked.keys())
                    self.inbox.is_midway = False
                raise
        self.inbox.is_midway = False

    def _finish(
        self, positions: Set[int], deadline: float = math.inf
    ) -> Sequence[Outcome]:
        """Waits for them; raises the first error, once all have ended."""
        self._wait_for(positions, deadline)
        self.inbox.is_midway = True
        outcomes = self._take_called(positions)
        self.inbox.is_midway = False
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return outcomes

    def _take_called(self, positions: Set[int]) -> Sequence[Outcome]:
        """Takes what has come of resets and calls; what was put aside is back."""
        found = [
            self.inbox.outcomes.pop(at)
            for at in sorted(positions)
            if at in self.inbox.outcomes
        ]
        self._called -= positions
        for position in positions & self._put_aside.keys():
            self.inbox.outcomes[position] = self._put_aside[position].take_back()
            del self._put_aside[position]
        return found

    def _wait_for(self, positions: Set[int], deadline: float = math.inf) -> None:
        """Waits until operations have ended, however long their envs are absent.

        Raises:
          EnvTimeout: That takes longer than until an instant of `monotonic`.
        """
        while waiting := positions - self.inbox.outcomes.keys():
            for position in waiting & self.inbox.absent():
                error = self.blocks[position].lane.given_up
                if error is not None:
                    raise error
            left = deadline - time.monotonic()
            seconds = max(0.0, min(left, _COLLECT_SECONDS))
            self.inbox.collect(seconds, waiting, len(waiting))
            if left <= 0 and positions - self.inbox.outcomes.keys():
                raise EnvTimeout("not all have finished in time; one can wait again")

    # Interrupts.

    def _clean_up(self, positions: Iterable[int]) -> None:
        """Mends what an interrupted call has left: all at once, or a call at a time."""
        if self.inbox.is_midway:
            for position, put_aside in self._put_aside.items():
                self.inbox.outcomes[position] = put_aside.take_back()
            self.inbox.lose("a call was interrupted")
            self.absence.forget()
            for blocks in (self._called, self._interrupted, self._put_aside):
                blocks.clear()
            for position in self.out:  # a step of a lost block gives the lost row
                block = self.blocks[position]
                block.lane.submit_step((block.lane_block,))
            self.inbox.is_midway = False
        if left := self._called.intersection(positions):
            self._wait_for(left)
            self._take_called(left)
        if left := self._interrupted.intersection(positions):
            self._drop_interrupted(left)

    def _drop_interrupted(self, positions: Set[int]) -> None:
        """Waits for steps that were interrupted; drops what has come of them.

        But for the ends of episodes, which are told, and for envs that are absent.
        """
        outcomes = self.inbox.outcomes
        while waiting := positions - outcomes.keys() - self.inbox.absent():
            self.inbox.collect(_COLLECT_SECONDS, waiting, len(waiting))
        self.inbox.is_midway = True
        for position in positions & outcomes.keys():
            if not (self.blocks[position].ended.any() or outcomes[position].faults):
                del outcomes[position]
                self.absence.owed.discard(position)
        self._interrupted -= positions
        self.inbox.is_midway = False


def _resets_of(
    blocks: Sequence[BatchBlock],
    env_indices: Array,
    seeds: Sequence[int | None] | None,
    options: bytes,
) -> dict[int, Reset]:
    """Returns what to reset of which blocks, by position."""
    position_of = {int(index): at for at, index in enumerate(env_indices)}
    resets = {}
    for block in blocks:
        chosen = [row for row in range(block.start, block.stop) if row in position_of]
        if not chosen:
            continue
        is_whole = len(chosen) == block.stop - block.start
        rows = tuple(row - block.offset for row in chosen)
        some = None if is_whole and seeds is None else rows
        values = None
        if seeds is not None:
            given = [seeds[position_of[row]] for row in chosen]
            values = tuple(None if seed is None else int(seed) for seed in given)
        resets[block.position] = Reset(block.lane_block, some, values, options)
    return resets
