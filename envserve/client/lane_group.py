"""Submits to several lanes, and waits for all of them.

Every call has a ticket of its own, and waits until what an interrupted one has left
under way has ended: no result ever answers another call.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from envserve.blocks import Call, Fault, Finished, Lane, Reset
from envserve.errors import EnvserveError, LocalProtocolError

__all__ = ["Gathered", "LaneGroup", "Part"]

Array = np.ndarray[Any, Any]

_LOGGER: Final = logging.getLogger(__name__)
#: Lanes end every operation by deadlines of their own; this is how often we look.
_COLLECT_SECONDS: Final = 60.0


class Part(NamedTuple):
    """A lane, and the rows of the batch that are its."""

    lane: Lane
    rows: slice


@dataclass(frozen=True)
class Gathered:
    """What came besides rows, by env index of the whole batch."""

    infos: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    faults: dict[int, Fault] = field(default_factory=dict)

    def add(self, finished: Finished, offset: int) -> None:
        """Adds a block's; a fault is reported in the row's info."""
        for row, info in finished.infos.items():
            self.infos[row + offset] = info
        for fault in finished.faults:
            self.faults[fault.env_index + offset] = fault
            report = {"status": fault.status.name, "text": fault.text}
            self.infos[fault.env_index + offset] = {"fault": report}


class LaneGroup:
    """Lanes whose rows follow each other.

    Attributes:
      parts: The lanes with their rows.
      num_envs: Rows of all lanes.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        """Gives each lane its rows."""
        edges = np.cumsum([0, *(lane.num_envs for lane in lanes)]).tolist()
        self.parts = tuple(
            Part(lane, slice(start, stop))
            for lane, start, stop in zip(lanes, edges, edges[1:], strict=False)
        )
        self.num_envs = edges[-1]
        self._ticket = 0

    def part_of(self, env_index: int) -> Part:
        """Returns the part that a row belongs to."""
        return next(part for part in self.parts if env_index < part.rows.stop)

    def step(self, actions: Sequence[Array]) -> Gathered:
        """Steps all envs with one array of actions `[num_envs, ...]` per leaf."""
        ticket = self._begin()
        waiting = []
        for lane, rows in self.parts:
            for target, array in zip(lane.rows.action, actions, strict=True):
                target[...] = array[rows]
            blocks = range(len(lane.blocks))
            lane.submit_step(blocks, ticket)
            waiting.append(set(blocks))
        return self._collect(ticket, waiting)

    def reset(self, env_indices: Array, seeds: Sequence[int] | None) -> None:
        """Resets some rows, each with its seed if there are seeds."""
        ticket = self._begin()
        waiting = []
        position_of = {int(index): at for at, index in enumerate(env_indices)}
        for lane, rows in self.parts:
            resets = []
            for block in lane.blocks:
                chosen = tuple(
                    row
                    for row in range(block.start, block.stop)
                    if row + rows.start in position_of
                )
                if not chosen:
                    continue
                is_whole = len(chosen) == block.stop - block.start
                reset = Reset(block.index, None if is_whole else chosen)
                if seeds is not None:
                    values = tuple(seeds[position_of[r + rows.start]] for r in chosen)
                    reset = Reset(block.index, chosen, values)
                resets.append(reset)
            if resets:
                lane.submit_reset(resets, ticket)
            waiting.append({reset.block for reset in resets})
        self._collect(ticket, waiting)

    def call(self, call: Call) -> bytes:
        """Carries out attribute access; returns the encoded result."""
        ticket = self._begin()
        part = self.part_of(call.env_index)
        row = call.env_index - part.rows.start
        part.lane.submit_call(replace(call, env_index=row), ticket)
        block = next(b.index for b in part.lane.blocks if row < b.stop)
        (finished,) = _collect_from(part.lane, ticket, {block})
        if finished.error is not None:
            raise finished.error
        return finished.result

    def _begin(self) -> int:
        """Returns a new ticket, once nothing is under way any more.

        What an interrupted call has left is waited for, and dropped.
        """
        for lane, _ in self.parts:
            while lane.is_busy:
                for finished in lane.collect(_COLLECT_SECONDS):
                    if finished.error is not None:
                        _LOGGER.warning("of an interrupted call: %s", finished.error)
        self._ticket += 1
        return self._ticket

    def _collect(self, ticket: int, waiting: Sequence[set[int]]) -> Gathered:
        """Waits for blocks of each lane; raises the first error after the last."""
        gathered = Gathered()
        errors: list[EnvserveError] = []
        for (lane, rows), blocks in zip(self.parts, waiting, strict=True):
            for finished in _collect_from(lane, ticket, blocks):
                gathered.add(finished, rows.start)
                if finished.error is not None:
                    errors.append(finished.error)
        if errors:
            raise errors[0]
        return gathered


def _collect_from(lane: Lane, ticket: int, blocks: set[int]) -> list[Finished]:
    """Waits for blocks of a lane; an answer to any other ticket is dropped."""
    collected: list[Finished] = []
    waiting = set(blocks)
    while waiting:
        finished = lane.collect(_COLLECT_SECONDS, len(waiting))
        if not finished and not lane.is_busy:
            raise LocalProtocolError(
                f"{lane.name}: expected results of blocks {sorted(waiting)}; they are "
                "in flight no more; reset the batch"
            )
        for item in finished:
            if item.ticket == ticket:
                waiting.discard(item.block)
                collected.append(item)
    return collected
