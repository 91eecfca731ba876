"""A row with two envs that alternate: one is stepped while the other is reset.

At the end of an episode, the row switches to the spare env, which a thread has already
reset, and a thread resets the env that was active before. Therefore, a step does not
wait for a slow reset. The env of each episode and its seeds depend only on the sequence
of operations, never on timing.

Only one thread at a time uses an env. The active env belongs to the main thread. The
spare belongs to a reset thread from `start_reset` until its future is done; meanwhile,
it writes to private rows, a private heartbeat and a private record. The main thread
takes it back by waiting for the future, which raises the exception of a failed reset.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import Any, Final

from envserve.crashes.action_ring import RowRecord
from envserve.envs.seeding import spare_seed
from envserve.slab import Rows, next_beat, private_heartbeat
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.infos import copy_info
from envserve.worker import step_timings
from envserve.worker.env_row import NO_OPTIONS, EnvRow, add_reset_info

#: Maximum number of reset threads. If resets are CPU-bound, more threads would delay
#: the stepping thread.
_MAX_THREADS: Final = 16
#: Python's switch interval: the time after which a CPU-bound reset yields to the
#: stepping thread.
_SWITCH_SECONDS: Final = 0.5e-3


class ResetThreads(ThreadPoolExecutor):
    """Threads that reset spare envs while the main thread steps the active ones."""

    def __init__(self, num_envs: int) -> None:
        sys.setswitchinterval(_SWITCH_SECONDS)
        super().__init__(min(num_envs, _MAX_THREADS), "reset")
        self._resets: set[Future[Mapping[str, Any]]] = set()

    def start_reset(self, env: EnvRow, seed: int | None) -> Future[Mapping[str, Any]]:
        """Start to reset an env in one of the threads; the future returns the info."""
        reset = self.submit(env.reset, seed)
        self._resets.add(reset)
        reset.add_done_callback(self._resets.discard)
        return reset

    def close(self, timeout_seconds: float) -> None:
        """Cancel resets that have not started; wait for the others or the timeout."""
        self.shutdown(wait=False, cancel_futures=True)
        wait([*self._resets], timeout_seconds)


class SpareRow:
    """Two envs that alternate in one row; has the interface of `EnvRow`.

    Attributes:
      row: Row of the pool.
      env_index: Row in the whole batch, which determines the seeds.
      incarnation: Number of times that an env of this row was rebuilt.
      record: The row's record in the action ring, after `attach`.
    """

    def __init__(self, active: EnvRow, spare: EnvRow, threads: ResetThreads) -> None:
        """Store two rows with equal settings; their envs are not built yet."""
        self._active, self._spare = active, spare
        self._spare.attributes = self._active.attributes
        # This class resets the envs, so they must not reset themselves.
        self._autoreset = active.autoreset
        active.autoreset = spare.autoreset = "disabled"
        self._threads = threads
        self.row = active.row
        self.env_index = active.env_index
        self.incarnation = active.incarnation
        #: The spare's reset, from its start until the spare becomes active.
        self._spare_reset: Future[Mapping[str, Any]] | None = None
        self._next_spare_seed = (
            spare_seed(active.default_seed) if active.request.seeded else None
        )
        self._episode_has_ended = False
        #: Attributes that were set after the spare's reset had started.
        self._pending_attributes: dict[str, Any] = {}

    @property
    def is_fresh(self) -> bool:
        """Whether the active env has never been reset."""
        return self._active.is_fresh

    def drop_initial_seed(self) -> None:
        """Discard the default seeds that the first reset of each env would use."""
        self._next_spare_seed = None
        self._active.drop_initial_seed()
        self._spare.drop_initial_seed()

    def build(self) -> EnvSpec:
        """Build the active env; return its spec."""
        return self._active.build()

    def build_spare(self) -> EnvSpec:
        """Build the spare env; return its spec."""
        return self._spare.build()

    def rebuild(self) -> None:
        """Rebuild the active env; keep the spare."""
        self._active.incarnation = self.incarnation
        self._active.rebuild()
        self.incarnation = self._active.incarnation

    def attach(self, rows: Rows, heartbeat: memoryview, record: RowRecord) -> None:
        """Set the arrays, the heartbeat and the record; see `EnvRow.attach`."""
        self._rows = rows
        self._heartbeat = heartbeat
        self.record = record
        self._spare_record = RowRecord.private()
        self._spare_rows = Rows.allocate(self._active.spec, 1)
        self._spare_heartbeat = private_heartbeat()
        self._active.attach(rows, heartbeat, record)

    def step(self, action: Any) -> tuple[float, bool, bool, Mapping[str, Any]]:
        """Step the active env; see `EnvRow.step`."""
        if self._episode_has_ended and self._autoreset == "next_step":
            return 0.0, False, False, self.reset(None)
        reward, terminated, truncated, info = self._active.step(action)
        if not (terminated or truncated):
            return reward, terminated, truncated, info
        self._episode_has_ended = True
        if self._autoreset == "same_step":
            info = add_reset_info(copy_info(info), self.reset(None))
        return reward, terminated, truncated, info

    def reset(self, seed: int | None, options: bytes = b"") -> Mapping[str, Any]:
        """Begin an episode, write its first observation, and return the info.

        The row switches to the spare. Without seed and options, the episode that the
        spare has prepared begins; otherwise, the spare is reset again. If the active
        env has never been reset and no seed is given, it is reset and stays active.

        Args:
          seed: Seed of this reset, from which the spare's next seed is derived.
          options: See `lane.Reset`.
        """
        self._episode_has_ended = False
        if seed is None and options in NO_OPTIONS and not self.is_fresh:
            info = self._begin_prepared_episode()
        else:
            switches = seed is not None or not self.is_fresh
            if switches and self._spare_reset is not None:
                self._activate_spare(self._spare_reset)
            if seed is not None:
                self._next_spare_seed = spare_seed(seed)
            info = self._active.reset(seed, options)
        if self._spare_reset is None:
            self._start_spare_reset()
        return info

    def call(
        self,
        kind: str,
        name: str,
        arguments: list[Any],
        keywords: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Call or get an attribute of the active env, or set it on both envs.

        If an attribute is set after the spare's reset has started, the prepared episode
        is stale, so the spare is reset again when it becomes active.
        """
        if kind != "set":
            return self._active.call(kind, name, arguments, keywords)
        self._active.call("set", name, arguments)
        value = self._active.attributes[name]  # a copy that the env does not change
        if self._spare_reset is None:
            self._set_attributes(self._spare, {name: value})
        else:
            self._pending_attributes[name] = value

    def defer_reset(self) -> None:
        """Defer the reset to the next step, as autoreset mode "next_step" requires."""
        self._episode_has_ended = True

    def render(self) -> Any:
        """Return the rendered frame of the active env."""
        return self._active.render()

    def close(self) -> None:
        """Close both envs, except a spare that is still being reset."""
        self._active.close()
        if self._spare_reset is None or self._spare_reset.done():
            self._spare.close()

    def check_finite(self, reward: float = 0.0) -> None:
        """Raise SpaceViolation for NaN or infinity; see `EnvRow.check_finite`."""
        self._active.check_finite(reward)

    def _begin_prepared_episode(self) -> Mapping[str, Any]:
        """Switch to the spare, write its first observation, and return the info."""
        assert self._spare_reset is not None, "started by the first reset of the row"
        is_stale = bool(self._pending_attributes)
        info = self._activate_spare(self._spare_reset)
        if is_stale:
            return self._active.reset(None)
        for target, prepared in zip(
            self._rows.observation, self._spare_rows.observation, strict=True
        ):
            target[self.row] = prepared[0]
        return info

    def _activate_spare(
        self, spare_reset: Future[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Wait for the reset of the spare env, activate it, and return the info.

        Raises:
          Exception: The reset failed. The spare is active nevertheless, so that the
            caller can rebuild it.
        """
        self._spare_reset = None
        self._active, self._spare = self._spare, self._active
        pending, self._pending_attributes = self._pending_attributes, {}
        self._heartbeat[0] = next_beat(self._heartbeat[0], self.row)
        if not spare_reset.done():
            self._heartbeat[1] = 1
        try:
            info = spare_reset.result()
        finally:
            step_timings.move_resets(self._spare_heartbeat, self._heartbeat)
            self._active.row = self.row
            self._active.attach(self._rows, self._heartbeat, self.record)
            self.record.adopt(self._spare_record, self.incarnation)
        self._heartbeat[1] = 0
        self._set_attributes(self._active, pending)
        return info

    def _start_spare_reset(self) -> None:
        """Start the spare's reset in a thread."""
        self._spare.row = 0
        self._spare.attach(self._spare_rows, self._spare_heartbeat, self._spare_record)
        seed, self._next_spare_seed = self._next_spare_seed, None
        self._spare_reset = self._threads.start_reset(self._spare, seed)

    def _set_attributes(self, env: EnvRow, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            env.call("set", name, [copy.deepcopy(value)])
