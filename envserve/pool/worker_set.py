"""All workers of a pool: started, waited for, watched, replaced, ended; their slab.

What happens to them comes back as events, each with its worker.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from envserve.crashes.action_ring import ring_nbytes
from envserve.errors import EnvserveError, EnvStartError, WorkerError
from envserve.lane import Block
from envserve.pool.launcher import Launcher
from envserve.pool.supervisor import SupervisedWorker
from envserve.pool.worker_states import Event
from envserve.settings import PoolSettings
from envserve.slab import Slab, rows_mib
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.worker.frame_board import FrameBoard, board_nbytes
from envserve.wrappers.specs import plain_wrappers

__all__ = ["WorkerSet"]

_LOGGER: Final = logging.getLogger(__name__)


class WorkerSet:
    """The workers of a pool, and a descriptor to wait for them.

    Attributes:
      config: What they build.
      all: The workers.
      incarnations: How often the env of each row has been built before.
      watch_at: When to `watch` them, if nothing happens before.
      spec: Spaces of all envs, once all workers are ready for the first time.
      slab: The rows, from then on.
      board: Pictures of the envs, as long as the rows.
      error: Why there will be none, or why a worker was given up before.
      selector: Wakes for those that `read` has something from.
    """

    def __init__(
        self,
        config: PoolSettings,
        blocks: Sequence[Block],
        launcher: Launcher | None,
        clock: Callable[[], float],
    ) -> None:
        """Starts none yet; `watch` does. Without a launcher they have one of their own.

        Raises:
          EnvStartError: The `env_kwargs` or `wrappers` are not plain values.
        """
        try:
            codec.encode(dict(config.env_kwargs))
            codec.encode(plain_wrappers(config.wrappers))
        except codec.CodecError as error:
            raise EnvStartError(f"env_kwargs or wrappers: {error}") from None
        self.incarnations = [config.first_incarnation] * config.num_envs
        self.watch_at = clock()
        self.config = config
        self._blocks = blocks
        self._clock = clock
        self._owns_launcher = launcher is None
        self._launcher = launcher or Launcher(config.import_modules, (config.env_name,))
        self.selector = selectors.DefaultSelector()
        self._num_workers = 1 + max(block.worker for block in blocks)
        self.spec: EnvSpec | None = None
        self.error: EnvserveError | None = None
        self.slab: Slab | None = None
        self.board: FrameBoard | None = None
        self._specs: dict[int, EnvSpec] = {}  # of the workers that are ready first
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

    def admit(self, worker: SupervisedWorker, spec: EnvSpec, now: float) -> bool:
        """Takes in a worker whose envs are built; tells whether it can be asked.

        Once all are ready for the first time, they get the slab.
        """
        if self.spec is not None:
            different = self.spec.differences(spec)
            if different:
                text = f"came back with other spaces: {'; '.join(different)}"
                worker.fail(text, now)
            return not different
        self._specs[worker.index] = spec
        if len(self._specs) < len(self.all):
            return False
        first = self._specs[0]
        for index, other in self._specs.items():
            different = first.differences(other)
            if different:
                label = self.all[index].label
                text = f"{label} has other spaces than the first worker: "
                self.error = EnvStartError(text + "; ".join(different))
                return False
        num_envs, most = self.config.num_envs, self.config.max_row_mib
        ring, needed = ring_nbytes(first, num_envs), rows_mib(first, num_envs)
        num_bytes = ring + board_nbytes(num_envs, len(self.all))
        if most is not None and needed > most:
            self.error = EnvStartError(
                f"rows of {num_envs} envs need {needed} MiB, and {most} are left for "
                f"this user; ask for fewer, or the operator for more (--max-row-mib)"
            )
            return False
        try:
            with self._launcher.reserve:
                self.slab = Slab.create(first, num_envs, len(self.all), num_bytes)
        except OSError as error:
            self.error = WorkerError(f"no shared memory for the rows: {error}")
            return False
        self.board = FrameBoard(num_envs, len(self.all), self.slab.extra[ring:])
        for each in self.all:
            each.attach(self.slab)
        self.spec = first
        return True

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Process ids; None for a worker that does not run."""
        self._launcher.poll()
        return tuple(each.process.pid if each.process else None for each in self.all)

    def watch(self, now: float) -> Iterator[tuple[SupervisedWorker, Event]]:
        """Looks after all, starts whose turn it is, and plans when to do so next."""
        self.watch_at = math.inf
        for worker in self.all:
            for event in worker.watch(now):
                yield worker, event
            for event in worker.start(self.incarnations, now):
                yield worker, event
            self.watch_at = min(self.watch_at, worker.next_watch(now))

    def replace(self, reason: str, now: float) -> list[SupervisedWorker]:
        """Ends all processes, whatever state an interrupt has left their workers in.

        Returns:
          The workers that were replaced, or were not, since they could not be killed.
        """
        if self.spec is None:
            self._specs, self.slab = {}, None
        old = [worker for worker in self.all if worker.error is None]
        for worker in old:
            worker.end(reason, now)
            if worker.error is None:
                self.all[worker.index] = successor = self._new_worker(worker.index)
                if self.slab is not None:
                    successor.attach(self.slab)
        for key in list(self.selector.get_map().values()):
            # Of one that was being started. A process ends with its socket.
            self.selector.unregister(key.fileobj)
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self.watch_at = now
        return old

    @property
    def have_ended(self) -> bool:
        """Whether no process is left."""
        return all(worker.process is None for worker in self.all)

    def begin_close(self, grace_seconds: float) -> None:
        """Asks all to end, and kills who has not after so long."""
        self.watch_at = now = self._clock()
        for worker in self.all:
            worker.begin_close(kill_at=now + grace_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Waits until all have ended, at most so long, and lets go of them."""
        give_up_at = self._clock() + timeout_seconds
        while not self.have_ended and (now := self._clock()) < give_up_at:
            for key, _ in self.selector.select(
                min(0.05, max(0.0, self.watch_at - now))
            ):
                key.data.read(now)
            for _ in self.watch(now):
                pass
        for worker in self.all:
            if worker.process is not None:
                _LOGGER.error("%r cannot be killed", worker)
                worker.drop()
        if self._owns_launcher:
            self._launcher.close()
        if self.slab is not None:
            self.slab.close()
            self.slab = self.board = None
        self.selector.close()
