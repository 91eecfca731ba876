"""Padding and late rows: the content of rows while their env is absent.

Each lane eventually finishes or loses each of its blocks, but has no information about
other lanes. Therefore this module alone decides how long a caller waits for an absent
block: `padding_after` seconds. After that, the rows of the block are padding, and its
step is late: it is still running, although its caller has already received padding. The
next step of the block does not submit its actions. Instead, it waits for the late step
and returns that step's result: rows whose env did not fail have status LATE; the
episodes of the other rows have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from numbers import Real

import numpy as np

from envserve.client.row_set import BatchBlock, RowSet
from envserve.client.step_result import StepResult
from envserve.lane import Outcome
from envserve.slab import LATE, OK, PENDING, Rows, write_pending
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import Array, flatten


class Absence:
    """The late steps of a batch, and the rows that are padding.

    A step becomes late when its caller gets padding instead of its result, or when an
    interrupt ends the call. A late step still runs, and nothing else is submitted to
    its block until it has finished.

    Attributes:
      late_steps: Positions of blocks with a late step that no caller waits for.
      awaited_late_steps: Positions of blocks whose late step a caller waits for.
      padded: Positions of blocks that a caller waits for and whose rows are padding.
      absent_since: Times from which `padding_after` counts, by block position. It
        contains the blocks that were absent at the last call to `pad`, except those
        whose steps have been released or marked late since.
      next_pad: Time at which rows will next become padding; infinity if never.
    """

    def __init__(
        self, blocks: Iterable[BatchBlock], padding_after_seconds: float
    ) -> None:
        is_number = isinstance(padding_after_seconds, Real)
        if not (is_number and padding_after_seconds >= 0):
            raise ValueError(
                "padding_after: expected at least 0 seconds; "
                f"got {padding_after_seconds!r:.200}"
            )
        self.late_steps: set[int] = set()
        self.awaited_late_steps: set[int] = set()
        self.padded: set[int] = set()
        self.absent_since: dict[int, float] = {}
        self.next_pad = np.inf
        self._blocks = tuple(blocks)
        self._padding_after = padding_after_seconds
        self._is_any_present = True  # at the last call to `pad`

    def mark_late(self, positions: Set[int]) -> None:
        """Record that no caller waits for the steps of the given blocks any more."""
        self.late_steps |= positions
        self.release(positions)

    def await_late_steps(self, positions: Set[int]) -> Set[int]:
        """Record that a caller waits for the late steps of the given blocks.

        Return the positions of the blocks without a late step.
        """
        late = self.late_steps & positions
        self.late_steps -= late
        self.awaited_late_steps |= late
        return positions - late

    def current_rows(self, num_rows: int, finished: Collection[int]) -> Array:
        """Return a mask of the rows whose last observation is in `observation`.

        In all other rows, the last observation is in `final_observation`, because their
        late step is still running or has ended the episode. `finished` contains the
        positions of the blocks whose step has finished.
        """
        is_current = np.ones(num_rows, np.bool_)
        for position in self.late_steps:
            block = self._blocks[position]
            has_finished = position in finished
            is_current[block.start : block.stop] = has_finished & ~block.ended
        return is_current

    def clear(self) -> None:
        """Forget all late steps, because their lanes were invalidated."""
        self.late_steps.clear()
        self.awaited_late_steps.clear()
        self.padded.clear()
        self.absent_since.clear()

    def pad(self, absent: Set[int], waiting: Set[int], now: float) -> None:
        """Update `padded`, `absent_since` and `next_pad`.

        Awaited blocks that have been absent for long enough become padding.

        Args:
          absent: Positions of blocks in flight whose envs are absent.
          waiting: Positions of unfinished blocks that a caller waits for.
          now: Monotonic seconds.
        """
        # Time counts towards `padding_after` only while at least one block is present.
        previous = self.absent_since if self._is_any_present else {}
        self.absent_since = {
            position: previous.get(position, now) for position in absent
        }
        self._is_any_present = len(absent) < len(self._blocks)
        self.padded.clear()
        self.next_pad = np.inf
        if self._is_any_present:  # a step that returns only padding would be useless
            times = {position: self._pad_at(position) for position in absent & waiting}
            self.padded.update(
                position for position, time in times.items() if now >= time
            )
            self.next_pad = min((t for t in times.values() if t > now), default=np.inf)

    def _pad_at(self, position: int) -> float:
        """Return the time at which the rows of an absent block become padding.

        If a caller waits for a late step, there is no delay, because an earlier call
        has already waited for the same step. If `padding_after` is infinite, rows never
        become padding.
        """
        is_late = position in self.awaited_late_steps and self._padding_after < np.inf
        return self.absent_since[position] + (0.0 if is_late else self._padding_after)

    def mark_rows(self, spec: EnvSpec, row_set: RowSet, result: StepResult) -> None:
        """Write padding into rows of `padded` blocks; mark other late rows as LATE."""
        for block, part in row_set.block_parts:
            if block.position in self.padded:
                _write_padding(spec, block, part, result)
            elif block.position in self.awaited_late_steps:
                status = result.status[part]
                status[status == OK] = LATE
                result.valid[part] = False

    def release(self, positions: Set[int]) -> None:
        """Record that blocks were returned to the caller.

        The steps of padded blocks become late.
        """
        self.awaited_late_steps -= positions
        self.late_steps |= self.padded & positions
        self.padded -= positions
        # At their next absence, `padding_after` counts from zero.
        for position in positions & self.absent_since.keys():
            del self.absent_since[position]


class DeferredOutcome:
    """The outcome of a late step, saved during a call or partial reset of its block.

    The caller has not received this outcome yet, and the call or reset overwrites the
    block's latest outcome.
    """

    def __init__(
        self, outcome: Outcome, block: BatchBlock, reset_rows: Collection[int]
    ) -> None:
        """Save the outcome and, before a partial reset, a copy of the other rows.

        Before a call, `reset_rows` is empty.
        """
        self._outcome = outcome
        self._block = block.lane_rows
        rows = range(self._block.start, self._block.stop)
        self._other_rows = [row for row in rows if row not in reset_rows]
        self._rows: Rows = block.lane.rows
        self._saved_rows = self._rows.at(self._other_rows) if reset_rows else None

    def restore(self) -> Outcome:
        """Write the saved rows back to the lane, and return the outcome.

        After a partial reset, the rows that were reset become padding.
        """
        if self._saved_rows is None:
            return self._outcome
        write_pending(self._rows, self._block)
        rows = self._other_rows
        for target, saved in zip(
            _results(self._rows), _results(self._saved_rows), strict=True
        ):
            target[rows] = saved
        return self._outcome._replace(
            infos={row: i for row, i in self._outcome.infos.items() if row in rows},
            faults=[f for f in self._outcome.faults if f.env_index in rows],
        )


def _results(rows: Rows) -> tuple[Array, ...]:
    arrays = (rows.reward, rows.terminated, rows.truncated, rows.status)
    return (*rows.observation, *rows.final_observation, *arrays)


def _write_padding(
    spec: EnvSpec, block: BatchBlock, part: slice, result: StepResult
) -> None:
    """Write padding into the rows `part` of a result.

    Their observations are the last ones, which the lane stores as final observations.
    """
    observation = flatten(spec.observation_space, result.observation)
    final = flatten(spec.observation_space, result.final_observation)
    last = block.lane.rows.final_observation
    for leaf, final_leaf, last_leaf in zip(observation, final, last, strict=True):
        leaf[part] = last_leaf[block.lane_rows]
        final_leaf[part] = 0
    result.reward[part] = 0.0
    result.terminated[part] = result.truncated[part] = result.valid[part] = False
    result.status[part] = PENDING
