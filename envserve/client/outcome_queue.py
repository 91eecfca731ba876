"""The outcomes of blocks in flight, collected from all lanes of a batch."""

from __future__ import annotations

import selectors
import time
from collections.abc import Sequence, Set
from typing import Final

from envserve.client.row_set import BatchBlock
from envserve.errors import EnvserveError, LocalProtocolError, raise_if_from_handler
from envserve.lane import Lane, Outcome, pop_harmless_mark
from envserve.slab import copy_final_to_observation

#: Interval in seconds at which all lanes are polled, even if their descriptors are not
#: readable, because each lane checks its timeouts only in `collect`.
POLL_SECONDS: Final = 0.1


class OutcomeQueue:
    """Collects outcomes from the lanes of a batch.

    Attributes:
      outcomes: Maps positions of blocks in the batch to outcomes that were collected
        but not consumed yet.
      is_updating: Whether the bookkeeping of the batch is being updated. If an
        interrupt leaves the flag True, all lanes must be invalidated. An interrupt
        while a lane only waits leaves the flag False.
    """

    def __init__(self, lanes: Sequence[Lane], blocks: Sequence[BatchBlock]) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.is_updating = False
        self._blocks = tuple(blocks)
        self._positions = {
            lane: frozenset(b.position for b in blocks if b.lane is lane)
            for lane in lanes
        }
        self._first_position = {
            lane: min(positions) for lane, positions in self._positions.items()
        }
        self._only_lane = lanes[0] if len(lanes) == 1 else None
        self._selector: selectors.BaseSelector | None = None
        #: Time at which to poll all lanes, as a value of `time.monotonic()`.
        self._poll_at = 0.0

    def collect(
        self, timeout_seconds: float, waiting: Set[int], min_finished: int
    ) -> None:
        """Wait until `min_finished` of the `waiting` blocks have finished.

        Return earlier if the timeout expires, or if a block has become absent.

        Raises:
          LocalProtocolError: Nothing is in flight.
        """
        self.is_updating = True
        lane = self._only_lane
        try:
            if lane is None:
                has_outcomes = self._collect_from_all(
                    timeout_seconds, waiting, min_finished
                )
            else:
                outcomes = lane.collect(timeout_seconds, min_finished)
                for outcome in outcomes:
                    self.outcomes[outcome.block] = outcome
                has_outcomes = bool(outcomes)
            is_busy = has_outcomes or any(each.is_busy for each in self._positions)
        except BaseException as error:
            self.is_updating = not pop_harmless_mark(error)
            raise
        self.is_updating = False
        if not is_busy:
            raise LocalProtocolError(
                f"expected results of the blocks {sorted(waiting)}, but they are no "
                "longer in flight; reset the batch"
            )
        if lane is None and not has_outcomes:
            self._wait(timeout_seconds)

    def _collect_from_all(
        self, timeout_seconds: float, waiting: Set[int], min_finished: int
    ) -> bool:
        """Collect from several lanes; return whether there were any outcomes.

        If the caller waits for all blocks, wait for one lane after the other, but not
        for lanes with absent envs. Stop waiting after the timeout, or when a lane's
        envs become absent. If the caller waits for fewer blocks, do not block, and skip
        lanes whose descriptors are not readable, unless envs are absent or it is time
        to poll all.
        """
        has_outcomes, needs_all = False, min_finished == len(waiting)
        now = time.monotonic()
        if needs_all or now >= self._poll_at:
            lanes = list(self._positions)
            self._poll_at = now + POLL_SECONDS
        else:
            readable = {key.fileobj for key, _ in self._armed_selector().select(0)}
            lanes = [
                lane for lane in self._positions if lane in readable or lane.absent
            ]
        for lane in lanes:
            expected = len(waiting & self._positions[lane])
            if not (expected or lane.is_busy):
                continue
            may_block = needs_all and expected and not lane.absent
            seconds = timeout_seconds if may_block else 0.0
            outcomes = lane.collect(seconds, expected or 1)
            if may_block and len(outcomes) < expected:
                needs_all = False  # do not block any more
            if outcomes:
                has_outcomes, first = True, self._first_position[lane]
                for outcome in outcomes:
                    self.outcomes[first + outcome.block] = outcome
        return has_outcomes

    def _wait(self, timeout_seconds: float) -> None:
        """Wait until any lane may have outcomes."""
        self.is_updating = True
        selector = self._armed_selector()  # may receive messages
        self.is_updating = False
        try:
            selector.select(min(timeout_seconds, self._poll_at - time.monotonic()))
        except OSError as error:
            raise_if_from_handler(error)
            if self._selector is selector:
                raise
            # A signal handler has closed the batch.
            raise LocalProtocolError("the batch is already closed") from None

    def _armed_selector(self) -> selectors.BaseSelector:
        """Return a selector of all lanes, after updating their descriptors."""
        if self._selector is None:
            selector = selectors.DefaultSelector()
            for lane in self._positions:
                selector.register(lane, selectors.EVENT_READ)
            self._selector = selector
        for lane in self._positions:
            # Without this call, the descriptor might not become readable after a
            # `collect` with a timeout.
            lane.fileno()
        return self._selector

    def absent(self) -> Set[int]:
        """Return the positions of blocks in flight whose envs are absent."""
        return {
            first + lane_block
            for lane, first in self._first_position.items()
            for lane_block in lane.absent
            if first + lane_block not in self.outcomes
        }

    def give_up_error(self) -> EnvserveError | None:
        """Return the error to raise instead of waiting, once every lane has one."""
        errors = [lane.give_up_error for lane in self._first_position]
        return errors[0] if all(errors) else None

    def invalidate(self, reason: str) -> None:
        """Invalidate all lanes and discard their outcomes.

        If a discarded outcome has a fault, the caller has not received the first
        observation of the new episode. Therefore, the last observation of the lost
        episode is restored in its row.
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
