"""Several lanes as one: submit to some of them, wait for all of them or for the first.

A block is in flight from `send` to `release`. A step that nobody waits for any more is
cancelled: it still runs, and the next operation on its block waits for it and discards
its result, except the end of an episode.

Interrupts. A signal handler may raise an exception (KeyboardInterrupt, for example) at
any point of a call. While a lane only waits, `queue.is_updating` is False: everything
that was submitted is accounted for, and the next call continues. At any other point of
a method that changes something it is True, and the next call begins with `recover`,
which invalidates all lanes. That costs each row an episode, and no row can be wrong.
The flag is set before each update, not by an exception handler, so a second interrupt
changes nothing. docs/decisions.md: "An interrupt inside an operation
invalidates the lane".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, TypeVar

import numpy as np

from envserve.client.absence import Absence, DeferredOutcome
from envserve.client.outcome_queue import OutcomeQueue
from envserve.client.row_set import BatchBlock, BatchBlocks, RowSet
from envserve.errors import EnvserveError, EnvTimeout, LocalProtocolError
from envserve.lane import Call, Lane, Outcome, Reset, pop_harmless_mark

Array = np.ndarray[Any, Any]
Operation = TypeVar("Operation", Reset, Call)

#: Longest wait for a lane. Lanes end every operation by deadlines of their own.
_COLLECT_SECONDS: Final = 60.0


class LaneGroup:
    """Lanes whose rows follow each other.

    Attributes:
      blocks: The blocks of all lanes, in row order.
      in_flight: Positions of the blocks that were sent and not released.
      queue: Outcomes of blocks, until they are released.
      absence: The blocks whose envs are absent.
    """

    def __init__(self, lanes: Sequence[Lane], padding_after_seconds: float) -> None:
        self.blocks = BatchBlocks.of(lanes)
        self.in_flight: set[int] = set()
        self.queue = OutcomeQueue(lanes, self.blocks)
        self.absence = Absence(self.blocks, padding_after_seconds)
        self._cancelled: set[int] = set()  # blocks of a step that nobody waits for
        self._called: set[int] = set()  # blocks with a reset or call in flight
        self._deferred: dict[
            int, DeferredOutcome
        ] = {}  # of those, late steps' outcomes

    # Steps.

    def send(
        self,
        row_set: RowSet,
        actions: Sequence[Array],
        *,
        together: bool,
        is_cancelled: bool = False,
    ) -> None:
        """Start a step of some rows.

        Args:
          row_set: The rows.
          actions: An array `[len(row_set), ...]` for each leaf of the action space.
          together: Whether to submit all blocks of a lane at once. A server answers at
            once what was submitted at once.
          is_cancelled: Whether the step counts as cancelled until it is released. So an
            interrupt of its caller needs no handler.

        Raises:
          LocalProtocolError: Some of the rows are in flight.
        """
        if self._called or self._cancelled:
            self._clean_up(row_set.positions)
        if not self.in_flight.isdisjoint(row_set.positions):
            raise self.blocks.in_flight_error(row_set.positions & self.in_flight)
        queue, interrupt = self.queue, None
        queue.is_updating = True
        late_steps = self.absence.late_steps
        if late_steps and not late_steps.isdisjoint(row_set.positions):
            self._send_rest(row_set, actions)
        else:
            for piece in row_set.pieces:
                lane = piece.lane
                for target, array in zip(piece.actions, actions, strict=True):
                    target[piece.lane_rows] = array[piece.set_rows]
                for blocks in (piece.blocks,) if together else piece.single_blocks:
                    try:
                        lane.submit_step(blocks)
                    except BaseException as error:
                        if not pop_harmless_mark(error):
                            raise
                        interrupt = error  # raised once all blocks are submitted
        started = self._cancelled if is_cancelled else self.in_flight
        started.update(row_set.positions)
        queue.is_updating = False
        if interrupt is not None:
            raise interrupt

    def _send_rest(self, row_set: RowSet, actions: Sequence[Array]) -> None:
        """Step the blocks that have no late step; ignore the actions of the others."""
        chosen = self.absence.await_late_steps(row_set.positions)
        for block, part in row_set.parts:
            if block.position in chosen:
                for target, array in zip(block.lane.rows.action, actions, strict=True):
                    target[block.lane_rows] = array[part]
                block.lane.submit_step((block.lane_block,))

    def wait(
        self, positions: Set[int], num_rows: int | None, deadline: float
    ) -> Set[int]:
        """Wait until blocks in flight have ended or are padding.

        Args:
          positions: The blocks to wait for.
          num_rows: Rows to wait for; None for all.
          deadline: Instant of `time.monotonic` at which to give up.

        Returns:
          The blocks that have ended or are padding, maybe fewer than asked for. They
          stay in flight until `release`.

        Raises:
          ServerLost: All envs of the batch are absent, and waiting is pointless.
        """
        outcomes, absence, blocks = self.queue.outcomes, self.absence, self.blocks
        if num_rows is not None and num_rows == blocks.num_rows(positions):
            num_rows = None
        may_be_absent = bool(absence.awaited_late_steps)
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
            self.queue.collect(max(0.0, timeout), waiting, missing)
            may_be_absent = True

    def _pad(self, waiting: Set[int]) -> Set[int]:
        """Return the blocks, of those that are waited for, that are padding now."""
        absent = self.queue.absent()
        self.absence.pad(absent, waiting, time.monotonic())
        if len(absent) == len(self.blocks) and (error := self.queue.give_up_error()):
            raise error
        return self.absence.padded

    def release(self, positions: Set[int]) -> None:
        """Mark blocks that `wait` has returned as received: they can be sent again."""
        queue, absence = self.queue, self.absence
        queue.is_updating = True
        self.in_flight -= positions
        self._cancelled -= positions
        if absence.awaited_late_steps or absence.padded:
            absence.release(positions)
        left = {}
        if not queue.outcomes.keys() <= positions:
            left = {at: o for at, o in queue.outcomes.items() if at not in positions}
        queue.outcomes, queue.is_updating = left, False

    def cancel_step(self) -> None:
        """Discard the steps that were sent and not released, as they end."""
        cancelled = self._cancelled | self.in_flight
        self._cancelled, self.in_flight = cancelled, set()

    # Resets and calls.

    def start_reset(
        self,
        env_indices: Array,
        seeds: Sequence[int | None] | None,
        options: bytes = b"",
    ) -> Set[int]:
        """Start a reset of some rows, each with its seed if there are seeds.

        Returns:
          Positions of the blocks, for `finish_reset`.
        """
        resets = _resets_of(self.blocks, env_indices, seeds, options)
        self._clean_up(
            range(len(self.blocks))
        )  # the caller may read the other rows too
        self._start(resets, lambda lane, some: lane.submit_reset(some))
        return resets.keys()

    def finish_reset(
        self, positions: Set[int], deadline: float
    ) -> dict[int, Mapping[str, Any]]:
        """Wait for a reset that `start_reset` has started.

        Args:
          positions: The blocks that it has returned.
          deadline: Instant of `time.monotonic` at which to give up.

        Returns:
          Infos by row, for the rows that have any.

        Raises:
          EnvTimeout: The reset takes longer; this can be called again.
        """
        if not positions <= self._called:
            raise LocalProtocolError("the reset was interrupted; reset() once more")
        outcomes = self._finish(positions, deadline)
        return {
            row + self.blocks[position].offset: info
            for position, outcome in zip(sorted(positions), outcomes, strict=True)
            for row, info in outcome.infos.items()
        }

    def call(self, calls: Mapping[int, Call]) -> Sequence[Outcome]:
        """Carry out attribute access on blocks, given and returned by position."""
        self._start(calls, lambda lane, some: lane.submit_call(some))
        return self._finish(calls.keys())

    def _start(
        self,
        operations: Mapping[int, Operation],
        submit: Callable[[Lane, list[Operation]], None],
    ) -> None:
        """Start operations other than steps, once their blocks are idle."""
        positions = operations.keys()
        if not self.in_flight.isdisjoint(positions):
            raise self.blocks.in_flight_error(positions & self.in_flight)
        self._clean_up(positions)
        self._wait_for(positions & self.absence.late_steps)
        self.queue.is_updating = True
        by_lane: dict[Lane, list[Operation]] = {}
        for position, operation in operations.items():
            block, is_reset = self.blocks[position], isinstance(operation, Reset)
            by_lane.setdefault(block.lane, []).append(operation)
            late = self.queue.outcomes.pop(position, None)
            rows = (operation.env_indices or ()) if is_reset else ()
            is_part = 0 < len(rows) < block.stop - block.start
            if late is not None and (is_part or not is_reset):  # not shown yet
                self._deferred[position] = DeferredOutcome(late, block, rows)
            elif is_reset:
                self.absence.late_steps.discard(position)
        self._called |= positions
        for lane, some in by_lane.items():
            try:
                submit(lane, some)
            except EnvserveError:
                if lane is next(iter(by_lane)):  # so none was submitted
                    self._take_called(positions)
                raise
        self.queue.is_updating = False

    def _finish(
        self, positions: Set[int], deadline: float = math.inf
    ) -> Sequence[Outcome]:
        """Wait until operations have ended; then raise the first error, if any."""
        self._wait_for(positions, deadline)
        outcomes = self._take_called(positions)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return outcomes

    def _take_called(self, positions: Set[int]) -> Sequence[Outcome]:
        """Remove resets and calls with their outcomes; restore deferred outcomes."""
        outcomes = self.queue.outcomes
        self.queue.is_updating = True
        found = [outcomes.pop(at) for at in sorted(positions) if at in outcomes]
        self._called -= positions
        for position in positions & self._deferred.keys():
            outcomes[position] = self._deferred.pop(position).restore()
        self.queue.is_updating = False
        return found

    def _wait_for(self, positions: Set[int], deadline: float = math.inf) -> None:
        """Wait until operations have ended, however long their envs are absent.

        Raises:
          EnvTimeout: They have not ended by the deadline, an instant of
            `time.monotonic`.
        """
        while waiting := positions - self.queue.outcomes.keys():
            for position in waiting & self.queue.absent():
                error = self.blocks[position].lane.give_up_error
                if error is not None:
                    raise error
            left = deadline - time.monotonic()
            seconds = max(0.0, min(left, _COLLECT_SECONDS))
            self.queue.collect(seconds, waiting, len(waiting))
            if left <= 0 and positions - self.queue.outcomes.keys():
                raise EnvTimeout("not all have finished in time; one can wait again")

    # After interrupts.

    def recover(self) -> None:
        """Invalidate all lanes if an interrupt has cut an update short.

        Blocks stay in flight: their step gives the row that says that the episode was
        lost.
        """
        if not self.queue.is_updating:
            return
        for position, deferred in self._deferred.items():
            self.queue.outcomes[position] = deferred.restore()
        self.queue.invalidate("a call was interrupted")
        self.absence.clear()
        for blocks in (self._called, self._cancelled, self._deferred):
            blocks.clear()
        for position in self.in_flight:
            block = self.blocks[position]
            block.lane.submit_step((block.lane_block,))
        self.queue.is_updating = False

    def _clean_up(self, positions: Iterable[int]) -> None:
        """Wait for operations that nobody waits for any more, and discard them."""
        if left := self._called.intersection(positions):
            self._wait_for(left)
            self._take_called(left)
        if left := self._cancelled.intersection(positions):
            self._drop_cancelled(left)

    def _drop_cancelled(self, positions: Set[int]) -> None:
        """Wait for cancelled steps, unless their envs are absent; discard the results.

        The end of an episode is kept as a late step: a valid row must not follow an end
        that the caller has not seen.
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
    """Return the reset of each block concerned, by the position of the block."""
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
