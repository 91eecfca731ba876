"""A row with two envs: while one is stepped, the other is made ready for its turn.

Every reset passes the row on to the other env, which a thread has reset before, and
has the env that is relieved reset in turn. Which env plays which episode, and on which
random numbers, follows from what the caller does and never from how long things take.
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
from envserve.spaces.infos import snapshot
from envserve.worker import step_timings
from envserve.worker.env_row import EnvRow

__all__ = ["ResetThreads", "SpareRow"]

#: More would only get in the way of the stepping thread when resets need the processor.
_MAX_THREADS: Final = 16
#: How soon a reset that computes gives way to the stepping thread.
_SWITCH_SECONDS: Final = 0.5e-3


class ResetThreads(ThreadPoolExecutor):
    """Threads that reset the spare envs of a process while it steps the others."""

    def __init__(self, num_envs: int) -> None:
        sys.setswitchinterval(_SWITCH_SECONDS)
        super().__init__(min(num_envs, _MAX_THREADS), "reset")
        self._resets: set[Future[Mapping[str, Any]]] = set()

    def start_reset(self, env: EnvRow, seed: int | None) -> Future[Mapping[str, Any]]:
        """Reset an env in one of the threads; the result is the info of the reset."""
        reset = self.submit(env.reset, seed)
        self._resets.add(reset)
        reset.add_done_callback(self._resets.discard)
        return reset

    def close(self, timeout_seconds: float) -> None:
        """Cancel the resets that have not begun, and wait for the others."""
        self.shutdown(wait=False, cancel_futures=True)
        wait([*self._resets], timeout_seconds)


class SpareRow:
    """Two envs that take turns in one row. It is used like an `EnvRow`.

    The active env is touched by the caller's thread only. The spare is handed to a
    thread for its reset, which writes to rows of its own, and taken back by waiting for
    that: what the reset has raised is raised then, from the env that is active by then.

    Attributes:
      row: Row of the pool.
      env_index: Row of the whole batch, from which the seeds follow.
      incarnation: How often one of the envs, or both with their process, was rebuilt.
      record: What the row has been through, once attached.
    """

    def __init__(self, active: EnvRow, spare: EnvRow, threads: ResetThreads) -> None:
        """Take two equal rows; `build` and `build_spare` make their envs."""
        self._active, self._spare = active, spare
        self._spare.attributes = self._active.attributes
        # The envs do not reset themselves; their row does it.
        self._autoreset = active.autoreset
        active.autoreset = spare.autoreset = "disabled"
        self._threads = threads
        self.row = active.row
        self.env_index = active.env_index
        self.incarnation = active.incarnation
        #: The reset of the spare, from its start until the spare becomes active.
        self._warming: Future[Mapping[str, Any]] | None = None
        self._spare_seed = spare_seed(active.seed) if active.request.seeded else None
        self._is_over = False
        self._missed_attributes: dict[str, Any] = {}  # while the spare was away

    @property
    def is_fresh(self) -> bool:
        """Whether the active env is new, and has not been reset yet."""
        return self._active.is_fresh

    def forget_seed(self) -> None:
        """Has first resets get no seed, unless one is given."""
        self._spare_seed = None
        self._active.forget_seed()
        self._spare.forget_seed()

    def build(self) -> EnvSpec:
        """Makes the first env."""
        self._spec = self._active.build()
        return self._spec

    def build_spare(self) -> EnvSpec:
        """Makes the second env."""
        return self._spare.build()

    def rebuild(self) -> None:
        """Replaces the active env, which has failed; the spare stays as it is."""
        self._active.incarnation = self.incarnation
        self._active.rebuild()
        self.incarnation = self._active.incarnation

    def attach(self, rows: Rows, heartbeat: memoryview, record: RowRecord) -> None:
        """Sets where to write; see `EnvRow.attach`."""
        self._rows = rows
        self._heartbeat = heartbeat
        self.record = record
        self._warm_record = RowRecord.private()
        self._warm_rows = Rows.allocate(self._spec, 1)
        self._warm_heartbeat = private_heartbeat()
        self._active.attach(rows, heartbeat, record)

    def step(self, action: Any) -> tuple[float, bool, bool, Mapping[str, Any]]:
        """Steps the active env; see `EnvRow.step`."""
        if self._is_over and self._autoreset == "next_step":
            return 0.0, False, False, self.reset(None)
        reward, terminated, truncated, info = self._active.step(action)
        if not (terminated or truncated):
            return reward, terminated, truncated, info
        self._is_over = True
        if self._autoreset == "same_step":
            info = snapshot(info)
            reset_info = self.reset(None)
            if reset_info or "reset_info" in info:
                info = {**info, "reset_info": reset_info}
        return reward, terminated, truncated, info

    def reset(self, seed: int | None, options: bytes = b"") -> Mapping[str, Any]:
        """Begins an episode, writes its first observation, and returns the info.

        Args:
          seed: Seeds both envs anew; what has been made ready is dropped. By default
            the spare's turn comes, unless the active env is fresh.
          options: See `lane.Reset`; what has been made ready without them is dropped.
        """
        self._is_over = False
        if seed is None and not options and not self.is_fresh:
            info = self._take_turns()
        else:
            is_turn = seed is not None or not self.is_fresh
            if is_turn and self._warming is not None:
                self._take_spare(self._warming)
            if seed is not None:
                self._spare_seed = spare_seed(seed)
            info = self._active.reset(seed, options)
        if self._warming is None:
            self._warm_spare()
        return info

    def call(
        self,
        kind: str,
        name: str,
        arguments: list[Any],
        named: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Calls, gets or sets an attribute of the active env; sets it on both.

        What the spare has been made ready with is then out of date: it will be reset
        once more when its turn comes.
        """
        if kind != "set":
            return self._active.call(kind, name, arguments, named)
        value = copy.deepcopy(arguments[0])
        self._active.call("set", name, arguments)
        if self._warming is None:
            self._set_attributes(self._spare, {name: value})
        else:
            self._missed_attributes[name] = value

    def render(self) -> Any:
        """Return what the active env renders."""
        return self._active.render()

    def close(self) -> None:
        """Closes both envs, except one that a thread has not given back."""
        self._active.close()
        if self._warming is None or self._warming.done():
            self._spare.close()

    def check_finite(self, reward: float = 0.0) -> None:
        """Raises SpaceViolation for NaN or infinity; see `EnvRow.check_finite`."""
        self._active.check_finite(reward)

    def _take_turns(self) -> Mapping[str, Any]:
        """Begins the episode that the spare has been made ready for."""
        assert self._warming is not None, "it begins with the first reset of the row"
        is_stale = bool(self._missed_attributes)
        info = self._take_spare(self._warming)
        if is_stale:
            return self._active.reset(None)
        for target, warm in zip(
            self._rows.observation, self._warm_rows.observation, strict=True
        ):
            target[self.row] = warm[0]
        return info

    def _take_spare(self, warming: Future[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Makes the spare the active env, once its reset is done; returns the info.

        Raises:
          Exception: Whatever that reset has raised. The env is active nevertheless, and
            is to be rebuilt.
        """
        self._warming = None
        self._active, self._spare = self._spare, self._active
        missed, self._missed_attributes = self._missed_attributes, {}
        self._heartbeat[0] = next_beat(self._heartbeat[0], self.row)
        if not warming.done():
            self._heartbeat[1] = 1
        try:
            info = warming.result()
        finally:
            step_timings.move(self._warm_heartbeat, self._heartbeat)
            self._active.row = self.row
            self._active.attach(self._rows, self._heartbeat, self.record)
            self.record.adopt(self._warm_record, self.incarnation)
        self._heartbeat[1] = 0
        self._set_attributes(self._active, missed)
        return info

    def _warm_spare(self) -> None:
        """Hands the spare to a thread, which resets it."""
        self._spare.row = 0
        self._spare.attach(self._warm_rows, self._warm_heartbeat, self._warm_record)
        seed, self._spare_seed = self._spare_seed, None
        self._warming = self._threads.start_reset(self._spare, seed)

    def _set_attributes(self, env: EnvRow, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            env.call("set", name, [copy.deepcopy(value)])
