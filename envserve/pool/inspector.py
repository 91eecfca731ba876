"""What others see of a pool while it runs: numbers, pictures, and flight records.

Reads what is counted, and shared memory, so that any thread may call it.
"""

from __future__ import annotations

import time
from itertools import zip_longest
from typing import Any, Final

from msgspec.structs import replace

from envserve.errors import RemoteProtocolError
from envserve.pool.block_operations import BlockOperations
from envserve.pool.worker_set import WorkerSet
from envserve.pool.worker_states import WorkerState
from envserve.wire.bodies import FrameRequest, FrameResult
from envserve.wire.constants import MAX_FRAMES_BYTES
from envserve.wire.status import LeaseStatus

__all__ = ["PoolInspector"]

#: How long workers make pictures after somebody has asked for them.
_WATCH_NS: Final = 3_000_000_000
#: Of rows whose envs are away, so many are told.
_MAX_ABSENT: Final = 1024


class PoolInspector:
    """Answers STATUS and FRAME for one pool."""

    def __init__(self, workers: WorkerSet, operations: BlockOperations) -> None:
        self._workers, self._operations = workers, operations

    @property
    def num_in_flight(self) -> int:
        """How many rows are being stepped, reset or called."""
        return len(self._operations.rows_where(lambda _, kind: kind))

    def status(self, most_episodes: int, **known: Any) -> LeaseStatus:
        """Returns what it has been through, and what it is doing; see `PoolMetrics`."""
        config, serves = self._workers.config, WorkerState.SERVING
        away = self._operations.rows_where(lambda it, _: it.state is not serves)
        return self._operations.metrics.status(
            most_episodes,
            env_name=config.env_name,
            num_envs=config.num_envs,
            in_flight=self.num_in_flight,
            absent=tuple(away[:_MAX_ABSENT]),
            **known,
        )

    def read_frames(self, request: FrameRequest) -> tuple[FrameResult, bytes]:
        """Has workers go on to make pictures; returns those there are, or the record.

        Raises RemoteProtocolError if there is no such record.
        """
        board, rows = self._workers.board, request.rows
        if board is None:
            return FrameResult(), b""
        if request.record:
            if not (record := self._operations.record(rows[0]) if rows else b""):
                raise RemoteProtocolError(
                    "expected a row of an env that was ever reset"
                )
            return FrameResult(), record
        board.watch(rows, request.width, time.monotonic_ns() + _WATCH_NS)
        pictures, room = [], MAX_FRAMES_BYTES
        known = request.after[: len(rows)]
        for row, serial in zip_longest(rows, known, fillvalue=0):
            picture = board.latest(row, serial)
            if picture is not None and len(picture.jpeg) <= room:
                total = self._operations.metrics.running_return(row)
                pictures.append(replace(picture, episode_return=total))
                room -= len(picture.jpeg)
        return FrameResult(pictures=tuple(pictures)), b""
