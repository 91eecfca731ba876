"""Padding and late rows: what a row shows while its env is absent.

A lane finishes or loses each of its blocks sooner or later, but it does not know
whether any other lane is alive. So the decision how long to wait is made here, and
nowhere else. A caller waits for an absent block for a moment. Then the block's rows are
padding, and its step is late. The result of a late step is shown in place of a later
step's result: its rows are LATE, or show that the episode was lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from typing import Any, Final

import numpy as np

from envserve.client.row_set import BatchBlock, RowSet
from envserve.client.step_result import StepResult
from envserve.lane import Outcome
from envserve.slab import Rows, Status, write_pending
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import flatten

Array = np.ndarray[Any, Any]

_OK: Final = int(Status.OK)
_LATE: Final = int(Status.LATE)
_PENDING: Final = int(Status.PENDING)


class Absence:
    """The late steps of a batch, and the rows that are padding.

    A step is late once its caller got padding for it, or was interrupted. It still
    runs, and nothing else is submitted to its block before it has ended.

    Attributes:
      late_steps: Positions of blocks whose step is late and not waited for.
      awaited_late_steps: Positions of blocks whose late step a caller waits for.
      padded: Positions of blocks that a caller waits for and that are padding now.
    """

    def __init__(
        self, blocks: Iterable[BatchBlock], padding_after_seconds: float
    ) -> None:
        if not padding_after_seconds >= 0:
            raise ValueError(
                "padding_after: expected at least 0 seconds; "
                f"got {padding_after_seconds}"
            )
        self.late_steps: set[int] = set()
        self.awaited_late_steps: set[int] = set()
        self.padded: set[int] = set()
        self._blocks = tuple(blocks)
        self._padding_after = padding_after_seconds
        self._since: dict[int, float] = {}  # when each absent block was first seen so

    def mark_late(self, positions: Set[int]) -> None:
        """Record that the callers of these steps no longer wait for them."""
        self.late_steps |= positions
        self.awaited_late_steps -= positions
        self.padded -= positions

    def await_late_steps(self, positions: Set[int]) -> Set[int]:
        """Record that a caller waits for late steps; return the other blocks."""
        found = self.late_steps & positions
        self.late_steps -= found
        self.awaited_late_steps |= found
        return positions - found

    def shown_rows(self, num_rows: int, ended: Collection[int]) -> Array:
        """Return which rows' last observation is `observation`, bool `[num_rows]`.

        Of the other rows, whose step is late, it is `final_observation`. `ended` are
        the positions of blocks whose step has ended.
        """
        is_shown = np.ones(num_rows, np.bool_)
        for position in self.late_steps:
            block = self._blocks[position]
            has_ended = position in ended
            is_shown[block.start : block.stop] = has_ended & ~block.ended
        return is_shown

    def clear(self) -> None:
        """Forget all late steps, because they will never end."""
        self.late_steps.clear()
        self.awaited_late_steps.clear()
        self.padded.clear()
        self._since.clear()

    def pad(self, absent: Set[int], waiting: Set[int], now: float) -> None:
        """Decide which blocks are padding now.

        Args:
          absent: Blocks in flight whose envs are absent.
          waiting: Blocks that a caller waits for and that have not ended.
          now: Monotonic seconds.
        """
        # While all blocks were absent, no block has waited for padding yet.
        before = self._since if self._is_any_alive() else {}
        self._since = {at: before.get(at, now) for at in absent}
        self.padded.clear()
        if self._is_any_alive():  # otherwise there is no row to continue with
            self.padded.update(at for at in absent & waiting if now >= self._pad_at(at))

    def next_pad(self) -> float:
        """Return when `pad` has to be called again, if nothing else happens."""
        waiting = self._since.keys() - self.padded if self._is_any_alive() else ()
        return min(map(self._pad_at, waiting), default=np.inf)

    def _is_any_alive(self) -> bool:
        """Return whether any block was present at the last call of `pad`."""
        return len(self._since) < len(self._blocks)

    def _pad_at(self, position: int) -> float:
        """Return when a block becomes padding; at once if its step is late."""
        is_late = position in self.awaited_late_steps and self._padding_after < np.inf
        return self._since[position] + (0.0 if is_late else self._padding_after)

    def show(self, spec: EnvSpec, row_set: RowSet, result: StepResult) -> None:
        """Write padding, and the status of late rows, into a gathered result."""
        for block, part in row_set.parts:
            if block.position in self.padded:
                _write_padding(spec, block, part, result)
            elif block.position in self.awaited_late_steps:
                status = result.status[part]
                status[status == _OK] = _LATE
                result.valid[part] = False

    def release(self, positions: Set[int]) -> None:
        """Record that callers got these rows; steps of padding are late from now on."""
        self.awaited_late_steps -= positions
        self.late_steps |= self.padded & positions
        self.padded -= positions


class DeferredOutcome:
    """The outcome of a late step, kept while its block is called or partly reset."""

    def __init__(
        self, outcome: Outcome, block: BatchBlock, reset_rows: Collection[int] = ()
    ) -> None:
        """Keep the rows that are not reset; `reset_rows` are rows of the lane."""
        self._outcome = outcome
        self._block = block.lane_rows
        rows = range(self._block.start, self._block.stop)
        self._left = [row for row in rows if row not in reset_rows]
        self._rows: Rows = block.lane.rows
        self._kept = self._rows.at(self._left) if reset_rows else None

    def restore(self) -> Outcome:
        """Return the outcome, to be shown; rows that were reset are padding in it."""
        if self._kept is None:
            return self._outcome
        write_pending(self._rows, self._block)
        left = self._left
        for target, kept in zip(
            _results(self._rows), _results(self._kept), strict=True
        ):
            target[left] = kept
        return self._outcome._replace(
            infos={row: i for row, i in self._outcome.infos.items() if row in left},
            faults=[f for f in self._outcome.faults if f.env_index in left],
        )


def _results(rows: Rows) -> tuple[Array, ...]:
    arrays = (rows.reward, rows.terminated, rows.truncated, rows.status)
    return (*rows.observation, *rows.final_observation, *arrays)


def _write_padding(
    spec: EnvSpec, block: BatchBlock, part: slice, result: StepResult
) -> None:
    """Show the last observation of a block, which its lane keeps, and no transition."""
    observation = flatten(spec.observation_space, result.observation)
    final = flatten(spec.observation_space, result.final_observation)
    last = block.lane.rows.final_observation
    for leaf, final_leaf, last_leaf in zip(observation, final, last, strict=True):
        leaf[part] = last_leaf[block.lane_rows]
        final_leaf[part] = 0
    result.reward[part] = 0.0
    result.terminated[part] = result.truncated[part] = result.valid[part] = False
    result.status[part] = _PENDING
