"""The workers of a pool and the slab that they share.

A `WorkerSet` starts, watches, replaces and closes all workers together, and passes on
their events.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from envserve.crashes.action_ring import ring_nbytes
from envserve.errors import (
    EnvserveError,
    EnvStartError,
    WorkerError,
    raise_if_from_handler,
)
from envserve.lane import Block
from envserve.pool.launcher import Launcher
from envserve.pool.supervisor import SupervisedWorker, watch_seconds
from envserve.pool.worker_states import Event
from envserve.settings import PoolSettings
from envserve.slab import Slab, rows_mib
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.worker.channel import MAX_MESSAGE_BYTES
from envserve.worker.frame_board import FrameBoard, board_nbytes
from envserve.wrappers.specs import wrappers_to_plain

_LOGGER: Final = logging.getLogger(__name__)
#: Upper bounds for the size of a BUILD message without the arguments and the code of
#: envs: a constant, and bytes per row.
_BUILD_BYTES: Final = 1 << 14
_BUILD_ROW_BYTES: Final = 16
#: Time for a worker to end after it was killed because it did not exit when asked to.
_KILL_SECONDS: Final = 0.8


class WorkerSet:
    """The workers of a pool, and a selector to wait for them.

    Attributes:
      config: Settings of the pool.
      all: The workers, by index.
      incarnations: Number of times that the env of each row was rebuilt.
      watch_seconds: Maximum seconds from submitting an operation until its worker's
        heartbeat is checked.
      watch_at: Time of the next `watch`, unless an event occurs first.
      spec: Spaces of all envs; None until all workers are ready.
      slab: The shared memory; None until all workers are ready.
      frame_board: Rendered frames, in the slab's memory.
      error: Error that prevents the pool from starting; None if there is none.
      selector: Reports the workers whose channels are readable or writable.
    """

    def __init__(
        self,
        config: PoolSettings,
        blocks: Sequence[Block],
        launcher: Launcher | None,
        clock: Callable[[], float],
    ) -> None:
        """Create the workers; `watch` starts them.

        If no launcher is given, the set owns a new one.

        Raises:
          EnvStartError: The `env_kwargs` or `wrappers` are not plain values, or are too
            large.
        """
        arguments = [config.env_kwargs, wrappers_to_plain(config.wrappers)]
        try:
            size = len(codec.encode(arguments, keep_types=True))
        except codec.CodecError as error:
            raise EnvStartError(f"env_kwargs or wrappers: {error}") from None
        size += len(config.pickled_code) + _BUILD_BYTES
        size += _BUILD_ROW_BYTES * config.num_envs
        if size > MAX_MESSAGE_BYTES:
            raise EnvStartError(
                f"env_kwargs and wrappers: expected at most {MAX_MESSAGE_BYTES >> 20} "
                f"MiB of data; got {size >> 20} MiB; load the data in the env's "
                f"constructor, for example from a file"
            )
        self.incarnations = [config.first_incarnation] * config.num_envs
        self.watch_seconds = watch_seconds(config)
        self.watch_at = clock()
        self.config = config
        self._blocks = blocks
        self._clock = clock
        self.selector = selectors.DefaultSelector()
        self._num_workers = 1 + max(block.worker for block in blocks)
        self.spec: EnvSpec | None = None
        self.error: EnvserveError | None = None
        self.slab: Slab | None = None
        self.frame_board: FrameBoard | None = None
        # Maps workers to their specs, until all workers are ready.
        self._specs: dict[int, EnvSpec] = {}
        # Start the process of the launcher last: an interrupt before the end of the
        # constructor would leave it running for a while.
        self._owns_launcher = launcher is None
        self._launcher = launcher or Launcher(
            config.import_modules, (config.env_name,) if config.preload else None
        )
        self.all = [self._new_worker(index) for index in range(self._num_workers)]

    def _new_worker(self, index: int) -> SupervisedWorker:
        return SupervisedWorker(
            index,
            tuple(block for block in self._blocks if block.worker == index),
            self._num_workers,
            self.config,
            self._launcher,
            self.selector,
        )

    def accept_ready(self, worker: SupervisedWorker, spec: EnvSpec, now: float) -> bool:
        """Accept a worker whose envs are built; return whether it can serve.

        Once all workers are ready for the first time, create the slab.
        """
        if self.spec is not None:
            different = self.spec.differences(spec, self.config.observation_mode)
            if different:
                text = f"restarted with different spaces: {'; '.join(different)}"
                worker.kill(text, now)
            return not different
        self._specs[worker.index] = spec
        if len(self._specs) < len(self.all):
            return False
        first = self._specs[0]
        for index, other in self._specs.items():
            different = first.differences(other, self.config.observation_mode)
            if different:
                label = self.all[index].label
                text = f"the spaces of {label} differ from those of the first worker: "
                self.error = EnvStartError(text + "; ".join(different))
                return False
        num_envs, limit = self.config.num_envs, self.config.max_row_mib
        ring, size = ring_nbytes(first, num_envs), rows_mib(first, num_envs)
        num_bytes = ring + board_nbytes(num_envs, len(self.all))
        if limit is not None and size > limit:
            self.error = EnvStartError(
                f"the rows of {num_envs} envs need {size} MiB, but only {limit} MiB "
                f"are left for this user; use fewer envs, or ask the operator to raise "
                f"--max-row-mib"
            )
            return False
        try:
            with self._launcher.reserve:
                self.slab = Slab.create(first, num_envs, len(self.all), num_bytes)
        except OSError as error:
            raise_if_from_handler(error)
            self.error = WorkerError(
                f"cannot allocate shared memory for the rows: {error}"
            )
            return False
        self.frame_board = FrameBoard(num_envs, len(self.all), self.slab.extra[ring:])
        for member in self.all:
            member.attach(self.slab)
        self.spec = first
        return True

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Process ids; None for workers without a process."""
        self._launcher.poll()
        return tuple(
            worker.process.pid if worker.process else None for worker in self.all
        )

    def watch(self, now: float) -> Iterator[tuple[SupervisedWorker, Event]]:
        """Watch all workers and start those that are due; yield (worker, event)."""
        self.watch_at = math.inf
        for worker in self.all:
            for event in worker.watch(now):
                yield worker, event
            for event in worker.start(self.incarnations, now):
                yield worker, event
            self.watch_at = min(self.watch_at, worker.next_watch(now))

    def replace_all(self, reason: str, now: float) -> list[SupervisedWorker]:
        """Kill all processes and replace their workers with new ones.

        This is allowed in any state, because an interrupted call may leave a worker in
        any state.

        Returns:
          The old workers. Those that have failed are ended, but not replaced.
        """
        if self.spec is None:
            self._specs, self.slab = {}, None
        old = [*self.all]
        for worker in old:
            worker.kill_and_wait(reason, now)
            if worker.error is None:
                self.all[worker.index] = successor = self._new_worker(worker.index)
                if self.slab is not None:
                    successor.attach(self.slab)
        for key in list(self.selector.get_map().values()):
            # An interrupted call was starting the process of this channel. Closing the
            # channel makes the process exit.
            self.selector.unregister(key.fileobj)
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self.watch_at = now
        return old

    def begin_close(self, grace_seconds: float) -> None:
        """Ask all workers to exit; kill those still running after the grace period."""
        self.watch_at = now = self._clock()
        for worker in self.all:
            worker.begin_close(grace_seconds, now)

    def close(self) -> None:
        """Wait until all workers have ended or cannot be killed; free resources.

        Do not wait for processes that are not forked yet, which have no id: the
        template may be importing modules for a long time. It kills them after their
        fork.
        """
        while any(self.pids) and (now := self._clock()) < _KILL_SECONDS + max(
            worker.kill_at for worker in self.all if worker.process is not None
        ):
            for key, _ in self.selector.select(
                min(0.05, max(0.0, self.watch_at - now))
            ):
                key.data.read(now)
            for _ in self.watch(now):
                pass
        if slow := [worker.label for worker in self.all if worker.was_slow_to_close]:
            more = f" and {len(slow) - 1} more" if slow[1:] else ""
            _LOGGER.warning(
                "%s%s: killed before close() of the envs had returned; data that the "
                "envs save in close() may be incomplete",
                slow[0],
                more,
            )
        for worker in self.all:
            if worker.process is not None:
                if worker.process.pid is None:
                    worker.process.kill("was closed", self._clock())
                else:
                    _LOGGER.error("%r cannot be killed", worker)
                worker.abandon()
        if self._owns_launcher:
            self._launcher.close()
        if self.slab is not None:
            self.slab.close()
            self.slab = self.frame_board = None
        self.selector.close()
