"""What has come of blocks in flight, from all lanes, until somebody takes it."""

from __future__ import annotations

import selectors
from collections.abc import Sequence, Set
from typing import Final

from envserve.client.row_set import BatchBlock
from envserve.errors import EnvserveError, LocalProtocolError
from envserve.lane import Lane, Outcome
from envserve.slab import copy_final_to_observation

__all__ = ["Inbox"]

#: How often to look where more than one lane has to be looked at.
_SLICE_SECONDS: Final = 0.1


class Inbox:
    """Collects from lanes.

    Attributes:
      outcomes: What has come, by position of the block in the batch.
      is_midway: Whether bookkeeping has begun and not ended. An interrupt leaves it so,
        unless it came while a lane did nothing but wait.
    """

    def __init__(self, lanes: Sequence[Lane], blocks: Sequence[BatchBlock]) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.is_midway = False
        self._blocks = tuple(blocks)
        self._positions = {
            lane: frozenset(at.position for at in blocks if at.lane is lane)
            for lane in lanes
        }
        self._first_position = {lane: min(at) for lane, at in self._positions.items()}
        self._only_lane = lanes[0] if len(lanes) == 1 else None
        self._selector: selectors.BaseSelector | None = None

    def collect(
        self, timeout_seconds: float, waiting: Set[int], min_finished: int
    ) -> None:
        """Waits until something has ended or become absent, and keeps what has come.

        Args:
          timeout_seconds: Longest to wait.
          waiting: Blocks that are waited for.
          min_finished: How many of them.

        Raises:
          LocalProtocolError: Nothing is in flight.
        """
        self.is_midway = True
        lane = self._only_lane
        if lane is None:
            is_busy = self._collect_from_all(timeout_seconds, waiting, min_finished)
        else:  # as `_collect`, in line: it is done at every step
            try:
                outcomes = lane.collect(timeout_seconds, min_finished)
            except BaseException:
                self.is_midway = not lane.is_waiting
                raise
            for outcome in outcomes:
                self.outcomes[outcome.block] = outcome
            is_busy = bool(outcomes) or lane.is_busy
        self.is_midway = False
        if not is_busy:
            raise LocalProtocolError(
                f"expected results of the blocks {sorted(waiting)}; they are in flight "
                "no more; reset the batch"
            )

    def _collect(self, lane: Lane, timeout_seconds: float, min_finished: int) -> bool:
        first = self._first_position[lane]
        try:
            outcomes = lane.collect(timeout_seconds, min_finished)
        except BaseException:
            self.is_midway = not lane.is_waiting
            raise
        for outcome in outcomes:
            self.outcomes[first + outcome.block] = outcome
        return bool(outcomes)

    def _collect_from_all(
        self, timeout_seconds: float, waiting: Set[int], min_finished: int
    ) -> bool:
        """Does the same for several lanes; tells whether anything was in flight.

        Who waits for all waits for one lane after the other. Else, and while envs are
        absent, none may wait for itself alone.
        """
        has_any = is_any_busy = False
        for lane, positions in self._positions.items():
            expected = len(waiting & positions)
            if not (expected or lane.is_busy):
                continue
            is_for_all = min_finished == len(waiting) and expected and not lane.absent
            seconds = timeout_seconds if is_for_all else 0.0
            has_any |= self._collect(lane, seconds, expected or 1)  # it is to go on
            is_any_busy |= has_any or lane.is_busy
        if is_any_busy and not has_any:
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
                for lane in self._first_position:
                    self._selector.register(lane, selectors.EVENT_READ)
            self.is_midway = False
            self._selector.select(min(timeout_seconds, _SLICE_SECONDS))
        return is_any_busy

    def absent(self) -> Set[int]:
        """Returns the blocks in flight whose envs are not there."""
        return {
            first + lane_block
            for lane, first in self._first_position.items()
            for lane_block in lane.absent
            if first + lane_block not in self.outcomes
        }

    def given_up(self) -> EnvserveError | None:
        """Returns why no lane is worth waiting for, if that is so."""
        errors = [lane.given_up for lane in self._first_position]
        return errors[0] if all(errors) else None

    def lose(self, text: str) -> None:
        """Takes all envs for lost, and forgets what has come.

        Of an episode that was lost, the last observation is what was seen last, too:
        the next one's first was not shown.
        """
        for lane in self._first_position:
            lane.lose(text)
        for position, outcome in self.outcomes.items():
            rows = [fault.env_index for fault in outcome.faults]
            copy_final_to_observation(self._blocks[position].lane.rows, rows)
        self.outcomes.clear()

    def close(self) -> None:
        """Lets go of what it has besides the lanes."""
        if self._selector is not None:
            self._selector.close()
            self._selector = None
