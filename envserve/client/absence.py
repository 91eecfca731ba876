"""What a row shows while its env is not there: decided here, and nowhere else.

Below this floor a block is finished or lost, sooner or later; only here is known
whether anything else is alive. A caller waits a moment for a block whose envs are
absent. From then on its rows are padding, while its step is owed. What comes of that
step is shown in place of a later one: rows that are LATE, or of a lost episode.
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

__all__ = ["Absence", "PutAside"]

Array = np.ndarray[Any, Any]

_OK: Final = int(Status.OK)
_LATE: Final = int(Status.LATE)
_PENDING: Final = int(Status.PENDING)


class Absence:
    """The steps of a batch that are owed, and what is shown meanwhile.

    A step is owed once its caller has had padding, or was interrupted: it goes on, and
    nothing else is submitted to its block before it has ended.

    Attributes:
      owed: Positions of blocks whose step is owed, and that nobody waits for now.
      awaited: Of those that are out, the ones that a step which is owed will answer.
      padded: Of those that are out, the ones whose rows are padding now.
    """

    def __init__(
        self, blocks: Iterable[BatchBlock], padding_after_seconds: float
    ) -> None:
        if not padding_after_seconds >= 0:
            raise ValueError(
                "padding_after: expected at least 0 seconds; "
                f"got {padding_after_seconds}"
            )
        self.owed: set[int] = set()
        self.awaited: set[int] = set()
        self.padded: set[int] = set()
        self._blocks = tuple(blocks)
        self._padding_after = padding_after_seconds
        self._since: dict[int, float] = {}  # from when on they were seen to be absent

    def owe(self, positions: Iterable[int]) -> None:
        """Notes that the callers of these steps go on without them."""
        self.owed.update(positions)
        self.awaited -= self.owed
        self.padded -= self.owed

    def await_owed(self, positions: Set[int]) -> Set[int]:
        """Has a caller wait for what is owed; returns the other blocks."""
        found = self.owed & positions
        self.owed -= found
        self.awaited |= found
        return positions - found

    def shown_rows(self, num_rows: int, ended: Collection[int]) -> Array:
        """Tells of which rows the observation is the last, bool `[num_rows]`.

        Of the others, whose step is owed, it is the final one. `ended` are positions of
        blocks whose step has ended.
        """
        is_shown = np.ones(num_rows, np.bool_)
        for position in self.owed:
            block = self._blocks[position]
            has_come = position in ended
            is_shown[block.start : block.stop] = has_come & ~block.ended
        return is_shown

    def forget(self) -> None:
        """Forgets what is owed, since it will never come."""
        for blocks in (self.owed, self.awaited, self.padded, self._since):
            blocks.clear()

    def pad(self, absent: Set[int], out: Set[int], now: float) -> None:
        """Decides which of the blocks that are out are padding now.

        Args:
          absent: Blocks in flight whose envs are not there.
          out: Blocks that a caller waits for, and that have not ended.
          now: Monotonic seconds.
        """
        # Who had nobody to go on with was not kept waiting by the others.
        before = self._since if self._is_any_alive() else {}
        self._since = {at: before.get(at, now) for at in absent}
        self.padded.clear()
        if self._is_any_alive():  # else who would go on?
            self.padded.update(at for at in absent & out if now >= self._pad_at(at))

    def next_pad(self) -> float:
        """When `pad` may have more to do, if nothing else happens."""
        waiting = self._since.keys() - self.padded if self._is_any_alive() else ()
        return min(map(self._pad_at, waiting), default=np.inf)

    def _is_any_alive(self) -> bool:
        """Tells whether a block was there when that was last looked at."""
        return len(self._since) < len(self._blocks)

    def _pad_at(self, position: int) -> float:
        """Who has had padding knows, and does not wait again."""
        is_known = position in self.awaited
        return self._since[position] + (0.0 if is_known else self._padding_after)

    def show(self, spec: EnvSpec, row_set: RowSet, result: StepResult) -> None:
        """Writes padding, and which rows are late, over what the lanes' rows gave."""
        for block, part in row_set.parts:
            if block.position in self.padded:
                _write_padding(spec, block, part, result)
            elif block.position in self.awaited:
                status = result.status[part]
                status[status == _OK] = _LATE
                result.valid[part] = False

    def release(self, positions: Set[int]) -> None:
        """Notes that callers have what was shown; padding leaves a step owed."""
        self.awaited -= positions
        self.owed |= self.padded & positions
        self.padded -= positions


class PutAside:
    """What has come of a step that is owed, while its block is called or reset."""

    def __init__(
        self, outcome: Outcome, block: BatchBlock, reset_rows: Collection[int] = ()
    ) -> None:
        """Keeps the rows that are not reset; `reset_rows` are the lane's."""
        self._outcome = outcome
        self._block = block.lane_rows
        rows = range(self._block.start, self._block.stop)
        self._left = [row for row in rows if row not in reset_rows]
        self._rows: Rows = block.lane.rows
        self._kept = self._rows.at(self._left) if reset_rows else None

    def take_back(self) -> Outcome:
        """Returns it, to be shown yet; rows that were reset are padding in it."""
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
    """Has nothing happen in a block; its lane keeps the last observation."""
    observation = flatten(spec.observation_space, result.observation)
    final = flatten(spec.observation_space, result.final_observation)
    last = block.lane.rows.final_observation
    for leaf, final_leaf, last_leaf in zip(observation, final, last, strict=True):
        leaf[part] = last_leaf[block.lane_rows]
        final_leaf[part] = 0
    result.reward[part] = 0.0
    result.terminated[part] = result.truncated[part] = result.valid[part] = False
    result.status[part] = _PENDING
