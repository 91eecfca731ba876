"""Combine several lanes: submit blocks to them and wait for all or some of the results.

All methods run in the caller's thread. A block is in flight from `send` to `release`.
If the caller no longer waits for a step, the step is cancelled: it still runs, and the
next operation on its block waits for it and discards its result, except for the end of
an episode.

Interrupts: a signal handler may raise an exception (KeyboardInterrupt, for example) at
any point. While a method only waits, `queue.is_updating` is False: the bookkeeping is
consistent with the submitted operations, and the next call continues. While a method
updates the bookkeeping, the flag is True. If an interrupt leaves it True, the next call
begins with `recover`, which invalidates all lanes. This ends the episodes of all rows,
but never returns a wrong row. The flag is set before each update instead of in
an exception handler, because a second interrupt could end the handler before it sets
the flag. See the decision "An interrupt inside an operation invalidates the lane".
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final

from envserve.client.absence import Absence, DeferredOutcome
from envserve.client.outcome_queue import OutcomeQueue
from envserve.client.row_set import BatchBlock, BatchBlocks, LanePart, RowSet
from envserve.errors import (
    CallError,
    EnvserveError,
    EnvTimeout,
    LocalProtocolError,
    ServerLost,
)
from envserve.lane import Call, Lane, Outcome, Reset, pop_harmless_mark
from envserve.slab import Array

#: Maximum duration of one wait for a lane, in seconds. A lane's `give_up_error` is
#: raised with at most this delay.
_COLLECT_SECONDS: Final = 1.0


class LaneGroup:
    """The lanes of a batch, with their rows concatenated.

    Attributes:
      blocks: The blocks of all lanes, in row order.
      in_flight: Positions of the blocks that were sent and not released.
      queue: Outcomes of blocks that have finished and were not released.
      absence: Late steps and padding.
    """

    def __init__(self, lanes: Sequence[Lane], padding_after_seconds: float) -> None:
        self.blocks = BatchBlocks.of(lanes)
        self.in_flight: set[int] = set()
        self.queue = OutcomeQueue(lanes, self.blocks)
        self.absence = Absence(self.blocks, padding_after_seconds)
        #: Blocks whose step was cancelled, or will be if its caller is interrupted.
        self._cancelled: set[int] = set()
        #: Blocks with a reset or call in flight, which may have been interrupted.
        self._reset_or_called: set[int] = set()
        #: Maps block positions to the outcomes of late steps, which are kept while a
        #: reset or call of the block is in flight.
        self._deferred: dict[int, DeferredOutcome] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether operations of blocks were started and not released."""
        return bool(self.in_flight or self._cancelled or self._reset_or_called)

    # Steps.

    def send(
        self,
        row_set: RowSet,
        actions: Sequence[Array],
        *,
        together: bool,
        cancels_on_interrupt: bool = False,
    ) -> None:
        """Start a step of the given rows.

        Args:
          row_set: The rows.
          actions: An array `[len(row_set), ...]` for each leaf of the action space.
          together: Whether to submit all blocks of a lane in one request, to which a
            server sends one reply.
          cancels_on_interrupt: Whether the step is cancelled if its caller is
            interrupted before `release`. Otherwise, the caller must call `cancel_step`.

        Raises:
          LocalProtocolError: Some of the rows are in flight.
        """
        if self._reset_or_called or self._cancelled:
            self._clean_up(row_set.positions)
        if not self.in_flight.isdisjoint(row_set.positions):
            raise self.blocks.in_flight_error(row_set.positions & self.in_flight)
        queue, interrupt = self.queue, None
        queue.is_updating = True
        parts, late_steps = row_set.lane_parts, self.absence.late_steps
        if late_steps and not late_steps.isdisjoint(row_set.positions):
            # Ignore the actions of blocks whose late step is still to be returned.
            without_late_step = self.absence.await_late_steps(row_set.positions)
            parts = tuple(
                (LanePart((block,)), rows)
                for block, rows in row_set.block_parts
                if block.position in without_late_step
            )
        for part, rows in parts:
            lane = part.lane
            for target, array in zip(part.actions, actions, strict=True):
                target[part.lane_rows] = array[rows]
            for blocks in (part.blocks,) if together else part.single_blocks:
                try:
                    lane.submit_step(blocks)
                except BaseException as error:
                    if not pop_harmless_mark(error):
                        if interrupt is not None:
                            raise interrupt from error
                        raise
                    interrupt = error  # raised once all blocks are submitted
        sent = self._cancelled if cancels_on_interrupt else self.in_flight
        sent.update(row_set.positions)
        queue.is_updating = False
        if interrupt is not None:
            raise interrupt

    def wait(
        self, positions: Set[int], num_rows: int | None, deadline: float
    ) -> Set[int]:
        """Wait until blocks in flight have finished or are padding.

        Args:
          positions: The blocks to wait for.
          num_rows: Number of rows to wait for; None for all.
          deadline: Time at which to stop waiting, as a value of `time.monotonic()`.

        Returns:
          The blocks that have finished or are padding, possibly fewer than requested if
          the deadline has passed. They stay in flight until `release`.

        Raises:
          ServerLost: All envs of the batch are absent, and every lane has given up.
        """
        outcomes, absence, blocks = self.queue.outcomes, self.absence, self.blocks
        if num_rows is not None and num_rows == blocks.num_rows(positions):
            num_rows = None
        # A lane reports each absence only once, perhaps during an earlier call.
        may_be_absent = bool(absence.awaited_late_steps or absence.absent_since)
        has_collected = False
        while True:
            ready = positions & outcomes.keys()
            if absence.padded:
                absence.padded -= ready  # these blocks have finished in the meantime
            if len(ready) == len(positions):
                return ready
            waiting, timeout = positions - ready, _COLLECT_SECONDS
            if may_be_absent:
                ready |= self._pad(waiting)
                timeout = min(timeout, absence.next_pad - time.monotonic())
            is_enough = len(ready) == len(positions)
            if deadline != math.inf or num_rows is not None:
                remaining = deadline - time.monotonic()
                if remaining <= 0 and has_collected:
                    return ready
                is_enough |= num_rows is not None and blocks.num_rows(ready) >= num_rows
                timeout = min(timeout, remaining)
            if not is_enough:
                waiting -= ready
            elif has_collected or absence.padded.isdisjoint(ready):
                return ready
            else:  # poll once: lanes read results and restart workers in `collect`
                timeout = 0.0
            min_finished = len(waiting) if num_rows is None else 1
            self.queue.collect(max(0.0, timeout), waiting, min_finished)
            may_be_absent = has_collected = True

    def _pad(self, waiting: Set[int]) -> Set[int]:
        """Return the positions in `waiting` whose blocks are padding now."""
        absent = self.queue.absent()
        self.absence.pad(absent, waiting, time.monotonic())
        if waiting <= absent and not self.queue.outcomes:
            self._raise_if_all_have_given_up()
        return self.absence.padded

    def release(self, positions: Set[int]) -> None:
        """Release blocks that `wait` has returned, so that they can be sent again."""
        queue, absence = self.queue, self.absence
        queue.is_updating = True
        self.in_flight -= positions
        self._cancelled -= positions
        if absence.awaited_late_steps or absence.absent_since:
            absence.release(positions)
        kept = {}
        if not queue.outcomes.keys() <= positions:
            kept = {
                position: outcome
                for position, outcome in queue.outcomes.items()
                if position not in positions
            }
        queue.outcomes, queue.is_updating = kept, False

    def cancel_step(self) -> None:
        """Cancel the steps that were sent and not released."""
        cancelled = self._cancelled | self.in_flight
        self._cancelled, self.in_flight = cancelled, set()

    # Resets and calls.

    def start_reset(
        self,
        env_indices: Array,
        seeds: Sequence[int | None] | None,
        options: bytes = b"",
    ) -> Set[int]:
        """Start a reset of the given rows; return the positions of their blocks.

        Raises:
          ServerLost: Every lane has given up; nothing was started.
        """
        resets = _resets_of(self.blocks, env_indices, seeds, options)
        # Clean up all blocks, because the caller may also read rows that are not reset.
        self._clean_up(range(len(self.blocks)))
        for position in resets.keys() & self.absence.late_steps:
            with contextlib.suppress(ServerLost):
                self._wait_for({position})
            # The late step may never finish, and reports the end of the episodes.
            if self.blocks[position].lane.give_up_error is not None:
                del resets[position]
        self._raise_if_all_have_given_up()
        self.start(resets)
        return resets.keys()

    def finish_reset(
        self, positions: Set[int], deadline: float
    ) -> dict[int, Mapping[str, Any]]:
        """Wait for a reset of the blocks that `start_reset` has returned.

        Returns:
          A dict from rows to info dicts, for the rows that have one.

        Raises:
          EnvTimeout: The reset has not finished in time; call this again to wait
            longer.
          ServerLost: Every lane has given up.
        """
        outcomes = self.finish(positions, deadline)
        self._raise_if_all_have_given_up()
        return {
            row + self.blocks[position].offset: info
            for position, outcome in zip(sorted(positions), outcomes, strict=True)
            for row, info in outcome.infos.items()
        }

    def _raise_if_all_have_given_up(self) -> None:
        if (error := self.queue.give_up_error()) is not None:
            raise error

    def start(self, operations: Mapping[int, Reset] | Mapping[int, Call]) -> None:
        """Start resets or attribute accesses, once their blocks are idle.

        Args:
          operations: Maps block positions to operations of the same kind.

        Raises:
          ServerLost: A lane has given up while a late step of these blocks was running;
            nothing was started.
        """
        positions: Set[int] = operations.keys()
        if not self.in_flight.isdisjoint(positions):
            raise self.blocks.in_flight_error(positions & self.in_flight)
        self._clean_up(positions)
        self._wait_for(positions & self.absence.late_steps)
        self.queue.is_updating = True
        by_lane: dict[Lane, dict[int, Any]] = {}
        for position, operation in operations.items():
            block, is_reset = self.blocks[position], isinstance(operation, Reset)
            by_lane.setdefault(block.lane, {})[position] = operation
            late = self.queue.outcomes.pop(position, None)
            rows = (operation.env_indices or ()) if is_reset else ()
            is_partial = 0 < len(rows) < block.stop - block.start
            # A late step's outcome has not been returned yet. Only a reset of the
            # whole block makes it obsolete.
            if late is not None and (is_partial or not is_reset):
                self._deferred[position] = DeferredOutcome(late, block, rows)
            elif is_reset:
                self.absence.late_steps.discard(position)
        self._reset_or_called |= positions
        not_started = set(operations)
        for lane, group in by_lane.items():
            submit: Callable[[Any], None]
            submit = lane.submit_reset if is_reset else lane.submit_call
            try:
                submit(list(group.values()))
            except EnvserveError as error:
                # The next operation waits for calls that were started. If resets were
                # started, all lanes are invalidated, because episodes have ended.
                if len(not_started) == len(operations) or isinstance(error, CallError):
                    self._take_outcomes(not_started)
                raise self.blocks[min(group)].located(error) from None
            except BaseException as error:
                # Not harmless for the batch: other lanes have not started yet.
                pop_harmless_mark(error)
                raise
            not_started.difference_update(group)
        self.queue.is_updating = False

    def finish(self, positions: Set[int], deadline: float) -> Sequence[Outcome]:
        """Wait until resets or calls have finished.

        Returns:
          One outcome per block, in ascending order of the positions.

        Raises:
          EnvserveError: The first error of a block.
          EnvTimeout: See `finish_reset`.
        """
        if not positions <= self._reset_or_called:
            raise LocalProtocolError(
                "the reset or call was interrupted; start it again"
            )
        self._wait_for(positions, deadline)
        outcomes = self._take_outcomes(positions)
        for position, outcome in zip(sorted(positions), outcomes, strict=True):
            if outcome.error is not None:
                raise self.blocks[position].located(outcome.error)
        return outcomes

    def _take_outcomes(self, positions: Set[int]) -> Sequence[Outcome]:
        """Remove and return the outcomes of finished resets and calls.

        Restore the outcomes of late steps, which were deferred during these operations.
        """
        outcomes = self.queue.outcomes
        self.queue.is_updating = True
        finished = [
            outcomes.pop(each) for each in sorted(positions) if each in outcomes
        ]
        self._reset_or_called -= positions
        for position in positions & self._deferred.keys():
            outcomes[position] = self._deferred.pop(position).restore()
        self.queue.is_updating = False
        return finished

    def _wait_for(self, positions: Set[int], deadline: float = math.inf) -> None:
        """Wait until operations have finished, even while their envs are absent.

        Raises:
          EnvTimeout: The operations have not finished before the deadline.
          ServerLost: A lane has given up, and one of the operations is a late step. A
            lane that has given up ends its resets and calls by itself.
        """
        while waiting := positions - self.queue.outcomes.keys():
            for position in (waiting & self.queue.absent()) - self._reset_or_called:
                error = self.blocks[position].lane.give_up_error
                if error is not None:
                    raise error
            remaining = deadline - time.monotonic()
            seconds = max(0.0, min(remaining, _COLLECT_SECONDS))
            self.queue.collect(seconds, waiting, len(waiting))
            if remaining <= 0 and positions - self.queue.outcomes.keys():
                raise EnvTimeout("not all envs have finished in time; wait again")

    # After interrupts.

    def recover(self) -> None:
        """Invalidate all lanes if an interrupt has left an update incomplete.

        Blocks in flight are submitted again, so that they return the rows that end the
        lost episodes.
        """
        if not self.queue.is_updating:
            return
        for position, deferred in self._deferred.items():
            self.queue.outcomes[position] = deferred.restore()
        self.queue.invalidate("a call was interrupted")
        self.absence.clear()
        for blocks in (self._reset_or_called, self._cancelled, self._deferred):
            blocks.clear()
        for position in self.in_flight:
            block = self.blocks[position]
            try:
                block.lane.submit_step((block.lane_block,))
            except BaseException as error:
                # Not harmless for the batch: other blocks are not submitted yet.
                pop_harmless_mark(error)
                raise
        self.queue.is_updating = False

    def _clean_up(self, positions: Iterable[int]) -> None:
        """Wait for interrupted or cancelled operations, and discard their results."""
        if interrupted := self._reset_or_called.intersection(positions):
            self._wait_for(interrupted)
            self._take_outcomes(interrupted)
        if cancelled := self._cancelled.intersection(positions):
            self._drop_cancelled(cancelled)

    def _drop_cancelled(self, positions: Set[int]) -> None:
        """Wait for cancelled steps, unless their envs are absent; discard the results.

        A step that ended an episode is kept as a late step, because the caller must get
        the end of the episode before any row of the next one.
        """
        outcomes = self.queue.outcomes
        self.absence.mark_late(positions)
        while waiting := positions - outcomes.keys() - self.queue.absent():
            self.queue.collect(_COLLECT_SECONDS, waiting, len(waiting))
        self.queue.is_updating = True
        for position in positions & outcomes.keys():
            if not (self.blocks[position].ended.any() or outcomes[position].faults):
                del outcomes[position]
                self.absence.late_steps.discard(position)
        self._cancelled -= positions
        self.queue.is_updating = False


def _resets_of(
    blocks: Sequence[BatchBlock],
    env_indices: Array,
    seeds: Sequence[int | None] | None,
    options: bytes,
) -> dict[int, Reset]:
    """Divide a reset of rows; return a dict from block positions to resets."""
    index_of = {int(row): index for index, row in enumerate(env_indices)}
    resets = {}
    for block in blocks:
        rows = [row for row in range(block.start, block.stop) if row in index_of]
        if not rows:
            continue
        is_whole = len(rows) == block.stop - block.start
        lane_rows = None
        if not is_whole or seeds is not None:
            lane_rows = tuple(row - block.offset for row in rows)
        block_seeds = None
        if seeds is not None:
            values = [seeds[index_of[row]] for row in rows]
            block_seeds = tuple(None if seed is None else int(seed) for seed in values)
        resets[block.position] = Reset(
            block.lane_block, lane_rows, block_seeds, options
        )
    return resets
