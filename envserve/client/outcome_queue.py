"""The outcomes of blocks in flight, collected from all lanes of a batch."""

from __future__ import annotations

import selectors
from collections.abc import Sequence, Set
from typing import Final

from envserve.client.row_set import BatchBlock
from envserve.errors import EnvserveError, LocalProtocolError
from envserve.lane import Lane, Outcome, pop_harmless_mark
from envserve.slab import copy_final_to_observation

#: Interval in seconds at which several lanes are polled, because each lane checks its
#: timeouts only in `collect`.
_POLL_SECONDS: Final = 0.1


class OutcomeQueue:
    """Collects outcomes from the lanes of a batch.

    Attributes:
      outcomes: Outcomes that were collected but not consumed yet, by the position of
        their block in the batch.
      is_updating: Whether the bookkeeping of the batch is being updated. If an
        interrupt leaves this True, all lanes must be invalidated. An interrupt while a
        lane only waits leaves it False.
    """

    def __init__(self, lanes: Sequence[Lane], blocks: Sequence[BatchBlock]) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.is_updating = False
        self._blocks = tuple(blocks)
        self._positions = {
            lane: frozenset(b.position for b in blocks if b.lane is lane)
            for lane in lanes
        }
        self._first_position = {lane: min(b) for lane, b in self._positions.items()}
        self._only_lane = lanes[0] if len(lanes) == 1 else None
        self._selector: selectors.BaseSelector | None = None

    def collect(
        self, timeout_seconds: float, waiting: Set[int], min_finished: int
    ) -> None:
        """Wait until operations have finished or a block has become absent.

        Args:
          timeout_seconds: Maximum time to wait.
          waiting: Positions of the blocks that the caller waits for.
          min_finished: Number of these blocks to wait for.

        Raises:
          LocalProtocolError: Nothing is in flight.
        """
        self.is_updating = True
        lane = self._only_lane
        if lane is None:
            is_busy = self._collect_from_all(timeout_seconds, waiting, min_finished)
        else:  # the code of `_collect`, inlined because it runs at every step
            try:
                outcomes = lane.collect(timeout_seconds, min_finished)
            except BaseException as error:
                self.is_updating = not pop_harmless_mark(error)
                raise
            for outcome in outcomes:
                self.outcomes[outcome.block] = outcome
            is_busy = bool(outcomes) or lane.is_busy
        self.is_updating = False
        if not is_busy:
            raise LocalProtocolError(
                f"expected results of the blocks {sorted(waiting)}, but they are no "
                "longer in flight; reset the batch"
            )

    def _collect(self, lane: Lane, timeout_seconds: float, min_finished: int) -> bool:
        first = self._first_position[lane]
        try:
            outcomes = lane.collect(timeout_seconds, min_finished)
        except BaseException as error:
            self.is_updating = not pop_harmless_mark(error)
            raise
        for outcome in outcomes:
            self.outcomes[first + outcome.block] = outcome
        return bool(outcomes)

    def _collect_from_all(
        self, timeout_seconds: float, waiting: Set[int], min_finished: int
    ) -> bool:
        """Collect from several lanes; return whether anything was in flight.

        If the caller waits for all blocks, wait for one lane after the other.
        Otherwise, or while envs are absent, poll all lanes without blocking and wait
        for all their descriptors together.
        """
        is_waiting = is_any_busy = False
        for lane, positions in self._positions.items():
            expected = len(waiting & positions)
            if not (expected or lane.is_busy):
                continue
            needs_all = min_finished == len(waiting) and expected and not lane.absent
            seconds = timeout_seconds if needs_all else 0.0
            is_waiting |= self._collect(lane, seconds, expected or 1)
            is_any_busy |= is_waiting or lane.is_busy
        if is_any_busy and not is_waiting:
            if self._selector is None:
                selector = selectors.DefaultSelector()
                for lane in self._first_position:
                    selector.register(lane, selectors.EVENT_READ)
                self._selector = selector
            self.is_updating = False  # from now on, the lane only waits
            self._selector.select(min(timeout_seconds, _POLL_SECONDS))
        return is_any_busy

    def absent(self) -> Set[int]:
        """Return the positions of blocks in flight whose envs are absent."""
        return {
            first + lane_block
            for lane, first in self._first_position.items()
            for lane_block in lane.absent
            if first + lane_block not in self.outcomes
        }

    def give_up_error(self) -> EnvserveError | None:
        """Return an error to raise instead of waiting, if all lanes have given up."""
        errors = [lane.give_up_error for lane in self._first_position]
        return errors[0] if all(errors) else None

    def invalidate(self, reason: str) -> None:
        """Invalidate all lanes and discard their outcomes.

        If an unconsumed outcome replaced a lost env, the caller has not received the
        first observation of the new episode, so the last observation of the lost
        episode is restored.
        """
        for lane in self._first_position:
            lane.invalidate(reason)
        for position, outcome in self.outcomes.items():
            rows = [fault.env_index for fault in outcome.faults]
            copy_final_to_observation(self._blocks[position].lane.rows, rows)
        self.outcomes.clear()

    def close(self) -> None:
        """Close the selector; the lanes are closed by the batch."""
        if self._selector is not None:
            self._selector.close()
            self._selector = None
