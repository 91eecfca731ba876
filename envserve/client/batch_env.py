"""Many envs as one: actions in, arrays `[num_envs, ...]` out.

Rows come from any mix of lanes (worker processes here, servers elsewhere) and are
the same wherever they run. A call that is cut short never leaks its result into the
next one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.spaces import Space

from envserve.client.attributes import Attributes
from envserve.client.factory import Builders, OnFault
from envserve.client.lane_group import LaneGroup
from envserve.client.resets import Resets
from envserve.client.row_set import RowSet, RowSets
from envserve.client.stats import BatchStats, StepRecorder
from envserve.client.step_result import (
    StepResult,
    add_infos,
    decode_result,
    gather_result,
)
from envserve.errors import (
    EnvError,
    EnvserveError,
    EnvTimeout,
    LocalProtocolError,
    SpaceError,
)
from envserve.lane import Lane
from envserve.settings import Autoreset
from envserve.spaces.action_checks import check_actions
from envserve.spaces.env_spec import EnvSpec

__all__ = ["BatchEnv", "BatchStats", "EnvsClosed", "ResetFirst", "StepResult"]

Array = np.ndarray[Any, Any]

_all: Final = np.logical_and.reduce


class EnvsClosed(LocalProtocolError, ClosedEnvironmentError):
    """The envs were used after `close`."""


class ResetFirst(LocalProtocolError, ResetNeeded):
    """The envs were stepped before all of them were reset."""


class BatchEnv(Attributes, Resets, Builders):
    """A batch of equal envs.

    Build it with `BatchEnv.local` or `BatchEnv.connect`; or from lanes of your own.
    Use it from one thread at a time, and close it, best by `with`.

    Attributes:
      spec: Name and spaces of the envs.
      observation_space: Space of one env's observation.
      action_space: Space of one env's action.
      num_envs: Number of rows.
      lanes: Where the rows come from, in row order.
      blocks: For each block its rows, int64 `[n]`. A block's envs are stepped
        together, by one worker; it is the least that can be sent and received.
      splits: For each group of blocks its rows, int64 `[n]`; there are `num_splits`,
        or fewer where there are too few rows.
      reset_infos: Info dict by row of the last `reset`, with `infos="all"`.
      autoreset: When an ended episode's env is reset.
      reset_call: How a row is reset by who uses this, for messages.
    """

    reset_call = "reset(env_indices=...)"

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        autoreset: Autoreset = "same_step",
        on_fault: OnFault = "truncate",
        padding_after: float = 0.1,
    ) -> None:
        """Puts lanes together.

        Args:
          lanes: Lanes that are ready. The batch owns them from now on.
          autoreset: The mode that the lanes were built with.
          on_fault: "truncate" ends a failed env's episode with an invalid row;
            "raise" raises EnvError besides. A value that breaks the env's own spaces
            always raises.
          padding_after: As for `local`.

        Raises:
          SpaceError: A lane's spaces differ from the first one's.
        """
        self.lanes = tuple(lanes)
        self.spec = _common_spec(self.lanes)
        self.observation_space: Space[Any] = self.spec.observation_space
        self.action_space: Space[Any] = self.spec.action_space
        self._group = LaneGroup(self.lanes, padding_after)
        self._row_sets = RowSets(self._group.blocks)
        self.num_envs = len(self._row_sets.everything)
        self.blocks = self._row_sets.rows_by(lambda block: block.position)
        self.splits = self._row_sets.rows_by(lambda block: block.split)
        self.autoreset = autoreset
        self._raises_faults = on_fault == "raise"
        self._has_reset = False
        self._resetting = None
        self._is_stepping = False  # in a call of `step`, or interrupted there
        self._is_untold = False  # as it was about to return
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._recorder = StepRecorder()
        self._is_closed = False
        self.reset_infos: Mapping[int, Mapping[str, Any]] = {}
        self._is_encoded = self.spec.has_encoded_observations

    def step(self, actions: Any, out: StepResult | None = None) -> StepResult:
        """Steps all envs.

        What has come of a step that was interrupted is dropped, but for the ends of
        episodes, which the next one tells.

        Args:
          actions: Arrays `[num_envs, ...]`, nested as the action space.
          out: Arrays to write to instead of new ones; its infos are ignored.

        Raises:
          ActionError: The actions do not fit the action space; nothing was stepped.
          EnvError: An env broke its own spaces, or failed while `on_fault="raise"`. All
            envs have to be reset before the next step.
          ServerError: A server was lost.
        """
        group = self._group
        if self._is_stepping or self._is_closed or not self._has_reset:
            self._begin(needs_reset=True)
        if group.out:
            raise group.blocks.out_error(group.out)
        if out is not None:
            self._check_out()
        began_at = time.perf_counter()
        everything = self._row_sets.everything
        arrays = check_actions(self.spec, actions, None, self.num_envs)
        if self.autoreset == "disabled":
            self._check_not_ended(everything)
        self._is_stepping = True
        group.send(everything, arrays, together=True)
        ready = group.wait(everything.positions, None, math.inf)
        result, error = self._result(everything, out)
        self._recorder.latencies.append(time.perf_counter() - began_at)
        self._is_untold = True
        group.release(ready)
        self._is_stepping = self._is_untold = False
        if error is not None:
            # What has become of the other rows is not told.
            self._has_reset = type(error[1]) is not EnvError
            raise error[1]
        return result

    def send(
        self,
        actions: Any,
        env_indices: Sequence[int] | Array | None = None,
        *,
        together: bool = False,
    ) -> None:
        """Starts a step of some envs, and does not wait for it.

        Args:
          actions: Arrays `[n, ...]`, nested as the action space.
          env_indices: The rows that the actions are for, in any order; whole blocks
            (see `blocks`, `splits`). None for all.
          together: Have each server answer once all of its rows are done: fewer
            messages, if all are waited for. By default each block is answered when it
            is done, so that a slow env holds up its own block only.

        Raises:
          ActionError: The actions do not fit the action space; nothing was sent.
          IndexError: The rows are not whole blocks.
          LocalProtocolError: Some of the rows are out already.
          ServerError: A server was lost.
        """
        self._begin(needs_reset=True)
        row_set, order = self._row_sets.of_rows(env_indices)
        arrays = check_actions(self.spec, actions, env_indices, len(row_set))
        self._check_not_ended(row_set)
        if order is not None:
            arrays = [array[order] for array in arrays]
        self._group.send(row_set, arrays, together=together)

    def recv(
        self,
        min_envs: int | None = None,
        timeout: float | None = None,
        *,
        env_indices: Sequence[int] | Array | None = None,
        out: StepResult | None = None,
    ) -> tuple[Array, StepResult]:
        """Waits for envs that were sent, and returns those that have finished.

        Args:
          min_envs: Rows to wait for at least; all that have finished by then are
            returned. By default whatever block is first, or all of `env_indices`.
          timeout: Seconds to wait; by default as long as it takes.
          env_indices: Wait for these rows only, whole blocks that are out.
          out: Arrays of exactly as many rows to write to instead of new ones; only
            with `env_indices` and without `min_envs`.

        Returns:
          Rows (int64 `[n]`, ascending, in whatever order they were sent), and their
          step, whose infos are by row of the batch. They can be sent again.

        Raises:
          EnvTimeout: Fewer have finished; the next call gets them.
          EnvError: As for `step`; the rows of that env's block are received, all
            others are not.
          LocalProtocolError: Fewer rows are out.
          ServerError: A server was lost, and with it the rows that it had.
          ValueError: `out` has other shapes; the rows stay out.
        """
        self._begin()
        if out is not None and (env_indices is None or min_envs is not None):
            raise ValueError(
                "out: expected env_indices and no min_envs with it; else the number "
                "of rows is not known before"
            )
        if out is not None:
            self._check_out()
        group = self._group
        positions, num_rows = self._row_sets.choose(group.out, min_envs, env_indices)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        ready = group.wait(positions, num_rows, deadline)
        row_set = self._row_sets.of_blocks(ready)
        if len(row_set) < num_rows:
            raise EnvTimeout(
                f"expected {num_rows} rows within {timeout} s; {len(row_set)} have "
                "finished; nothing is lost, the next recv() gets them"
            )
        result, error = self._result(row_set, out)
        if error is not None:
            group.release({error[0]})
            raise error[1]
        group.release(ready)
        return row_set.env_indices, result

    def stats(self) -> BatchStats:
        """Returns what the batch has been through: faults by kind, latencies."""
        return self._recorder.stats(self.lanes)

    def close(self) -> None:
        """Ends all envs, within 2 seconds even if one hangs; may be called twice."""
        if self._is_closed:
            return
        with contextlib.ExitStack() as stack:
            for lane in self.lanes:
                stack.callback(lane.close)
            for lane in self.lanes:
                lane.begin_close()
            self._group.inbox.close()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        parts = ", ".join(f"{lane.num_envs} {lane.name}" for lane in self.lanes)
        state = "closed" if self._is_closed else "open"
        return (
            f"<BatchEnv {self.spec.env_name}, {self.num_envs} envs: {parts}; {state}>"
        )

    @property
    def num_out(self) -> int:
        """How many rows have been sent and not received."""
        return 0 if self._is_stepping else self._group.blocks.num_rows(self._group.out)

    @property
    def pending(self) -> str:
        """What is to be waited for: "reset", "step", or nothing."""
        return "reset" if self._resetting else "step" if self.num_out else ""

    def drain(self) -> None:
        """Receives what is out, and drops it: all envs have to be reset then."""
        self._has_reset = False
        while self.num_out:
            with contextlib.suppress(EnvError):
                self.recv(self.num_out)

    def give_up_step(self) -> None:
        """Drops the step of all envs that is out, as `step` does with its own."""
        self._is_stepping = True

    def _begin(self, *, needs_reset: bool = False) -> None:
        """Checks that the batch can be used; nobody waits for an interrupted step."""
        if self._is_closed:
            raise EnvsClosed(f"{self.spec.env_name}: closed, and can no longer be used")
        if self._is_stepping:
            self._group.give_up_step(is_untold=self._is_untold)
            self._is_stepping = self._is_untold = False
        if self._resetting is not None:
            raise LocalProtocolError("the envs are being reset; recv_reset() first")
        if needs_reset and not self._has_reset:
            raise ResetFirst("expected reset() of all envs before the first step")

    def _check_out(self) -> None:
        if self._is_encoded:
            raise ValueError(
                "out: expected None where observations hold texts, sequences, graphs "
                "or choices; there is no array to write them to"
            )

    def _check_not_ended(self, row_set: RowSet) -> None:
        ended = row_set.env_indices[self._ended[row_set.env_indices]]
        if ended.size:
            raise LocalProtocolError(
                f"the episodes of envs {ended.tolist()} have ended; "
                f"{self.reset_call} them before the next step"
            )

    def _result(
        self, row_set: RowSet, out: StepResult | None
    ) -> tuple[StepResult, tuple[int, EnvserveError] | None]:
        """Copies what is in the lanes' rows, and shows what is absent or late.

        Returns:
          The result, and the first error to raise with the position of its block.
        """
        infos: dict[int, Mapping[str, Any]] = {}
        first_error = None
        outcomes = self._group.inbox.outcomes
        for block in row_set.blocks:
            outcome = outcomes.get(block.position)  # there is none of padding
            if outcome is not None and (
                outcome.infos or outcome.faults or outcome.error
            ):
                error = add_infos(infos, outcome, block, self._raises_faults)
                if error is not None and first_error is None:
                    first_error = (block.position, error)
        result = gather_result(self.spec, row_set, infos, out)
        absence = self._group.absence
        if absence.padded or absence.awaited:
            absence.show(self.spec, row_set, result)
        if self._is_encoded:
            result = decode_result(self.spec, result, row_set.env_indices)
        if self.autoreset == "disabled":
            self._ended[row_set.env_indices] = result.terminated | result.truncated
        if first_error is None:
            recorder = self._recorder
            recorder.steps += 1
            recorder.rows += len(result.valid)
            if not _all(result.valid):
                recorder.count_invalid(result.valid, result.status)
        return result, first_error


def _common_spec(lanes: Sequence[Lane]) -> EnvSpec:
    """Returns what all lanes have; raises SpaceError if they differ."""
    first = lanes[0]
    for lane in lanes[1:]:
        different = first.spec.differences(lane.spec)
        if different:
            raise SpaceError(
                f"{lane.name} has other spaces than {first.name}: "
                f"{'; '.join(different)}; give all of them the same env version"
            )
    return first.spec
