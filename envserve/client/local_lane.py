"""Envs in worker processes of this host: a pool, waited for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from envserve.errors import EnvStartError
from envserve.lane import Block, Call, Outcome, PoolConfig, Reset
from envserve.pool.pool import Pool
from envserve.slab import Rows
from envserve.spec import EnvSpec

__all__ = ["LocalLane"]


class LocalLane:
    """A pool in this process. Satisfies `lane.Lane`."""

    name = "local"

    def __init__(self, config: PoolConfig) -> None:
        """Starts the workers; `finish_start` waits for them."""
        self._pool = Pool(config)

    def finish_start(self, deadline: float) -> None:
        """Waits until all envs are built.

        Args:
          deadline: Instant of `time.monotonic`.

        Raises:
          EnvStartError: An env could not be built, or not before the deadline.
        """
        while not self._pool.is_ready and self._pool.error is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                config = self._pool.config
                self.close()
                raise EnvStartError(
                    f"expected {config.num_envs} {config.env_name} in time; they are "
                    "still being built; raise start_timeout if that may take so long"
                )
            self._pool.collect(remaining)
        if self._pool.error is not None:
            self.close()
            raise self._pool.error

    @property
    def spec(self) -> EnvSpec:
        """Spaces of every env of the lane."""
        return self._pool.spec

    @property
    def num_envs(self) -> int:
        """Number of rows."""
        return self._pool.num_envs

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, which partition the rows."""
        return self._pool.blocks

    @property
    def rows(self) -> Rows:
        """The pool's shared memory itself."""
        return self._pool.rows

    @property
    def worker_pids(self) -> tuple[int | None, ...]:
        """Process ids of the workers."""
        return self._pool.worker_pids

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight, or has ended and was not collected."""
        return self._pool.is_busy

    def submit_step(
        self, blocks: Sequence[int], ticket: int = 0, is_alone: bool = False
    ) -> None:
        """Starts a step of these blocks, with the actions now in `rows.action`."""
        self._pool.submit_step(blocks, ticket, is_alone)

    def submit_reset(self, resets: Sequence[Reset], ticket: int = 0) -> None:
        """Starts resets, each of another block."""
        self._pool.submit_reset(resets, ticket)

    def submit_call(self, call: Call, ticket: int = 0) -> None:
        """Starts attribute access on one env, as an operation of its block."""
        self._pool.submit_call(call, ticket)

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        """Waits until so many operations have ended; see `lane.Lane`."""
        return self._pool.collect(timeout_seconds, min_finished)

    def stats(self) -> Mapping[str, int]:
        """Returns how often workers were replaced, and blocks padded."""
        return self._pool.stats()

    def fileno(self) -> int:
        """A descriptor that is readable when `collect(0)` may have something."""
        return self._pool.fileno()

    def begin_close(self) -> None:
        """Asks all envs to end, without waiting."""
        self._pool.begin_close()

    def close(self) -> None:
        """Ends all envs, within 2 seconds even if one hangs; may be called twice."""
        self._pool.close()

    def __repr__(self) -> str:
        """Returns the pool."""
        return f"<LocalLane {self._pool!r}>"
