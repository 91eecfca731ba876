"""Read-only views of a running pool: status, frames and flight records.

Any thread may use this module, because it changes neither counters nor operations.
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

#: Nanoseconds for which workers render frames after a request.
_WATCH_NS: Final = 3_000_000_000
#: Maximum number of absent rows that a status lists.
_MAX_ABSENT: Final = 1024


class PoolInspector:
    """Replies to STATUS and FRAME requests about one pool."""

    def __init__(self, workers: WorkerSet, operations: BlockOperations) -> None:
        self._workers, self._operations = workers, operations

    @property
    def num_in_flight(self) -> int:
        """Number of rows with an operation (step, reset or call) in flight."""
        return len(self._operations.rows_where(lambda _, kind: kind))

    def status(self, max_episodes: int, **fields: Any) -> LeaseStatus:
        """Return the status of the pool's lease; see `PoolMetrics.status`."""
        config, serving = self._workers.config, WorkerState.SERVING
        absent = self._operations.rows_where(lambda w, _: w.state is not serving)
        return self._operations.metrics.status(
            max_episodes,
            env_name=config.env_name,
            num_envs=config.num_envs,
            in_flight=self.num_in_flight,
            absent=tuple(absent[:_MAX_ABSENT]),
            **fields,
        )

    def read_frames(self, request: FrameRequest) -> tuple[FrameResult, bytes]:
        """Request frames and return the newest ones, or return a row's flight record.

        Raises:
          RemoteProtocolError: The row has no flight record.
        """
        board, rows = self._workers.frame_board, request.rows
        if board is None:
            return FrameResult(), b""
        if request.record:
            log = self._operations.fault_log
            if not (record := log.flight_record(rows[0]) if rows else b""):
                raise RemoteProtocolError(
                    "expected the row of an env that has been reset"
                )
            return FrameResult(), record
        board.watch(rows, request.width, time.monotonic_ns() + _WATCH_NS)
        frames, bytes_left = [], MAX_FRAMES_BYTES
        known = request.after[: len(rows)]
        for row, serial in zip_longest(rows, known, fillvalue=0):
            frame = board.latest(row, serial)
            if frame is not None and len(frame.jpeg) <= bytes_left:
                total = self._operations.metrics.running_return(row)
                frames.append(replace(frame, episode_return=total))
                bytes_left -= len(frame.jpeg)
        return FrameResult(pictures=tuple(frames)), b""
