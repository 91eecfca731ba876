"""The oracle: verifies every row that a batch of `LedgerEnv` returns.

A valid row must be the result of the action that was sent, applied exactly once to the
env that returned the row's previous result. At the end, the applied actions are
compared with the envs' journals.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np

from envserve.client import StepResult
from envserve.slab import Status
from tests.oracle.incarnations import Incarnation, audit
from tests.oracle.journal import Array, read_journal
from tests.oracle.reference_model import ReferenceModel, State
from tests.oracle.result import LedgerError, ResultRows, check_shape
from tests.oracle.transitions import EPISODE, HASH, SEED, STEP, Transition

#: Statuses of rows whose episode was lost.
LOSSES: Final = (
    Status.ENV_ERROR,
    Status.WORKER_DIED,
    Status.TIMEOUT,
    Status.SERVER_LOST,
)


class Ledger:
    """Verifies results against a reference model of the envs.

    Pass every result to `reset` or `step`, for all rows or some of them, and call
    `finish` at the end. A wrong row raises a LedgerError that names the row. Batches
    with spare envs are not supported, because two envs take turns in each row.

    The rules for each status are:

    * OK: the action that was sent, and no other, was applied exactly once.
    * PENDING: the result is not available yet; reward 0, neither terminated nor
      truncated. If several consecutive results of a row are PENDING, only the action
      that was sent for the first of them may be applied later.
    * LATE: follows PENDING results, and is the result of the action that was sent for
      the first of them.
    * A loss (any other status): reported once, with reward 0, truncated and not
      terminated. Its observation precedes the first action of an episode. This episode
      belongs to an incarnation with a higher number than all previous ones, or is a
      later one of an incarnation in which no action has been applied. Its final
      observation is the last one received, or the one after the lost action, because
      local envs write a result before they report it. With autoreset mode "next_step",
      its observation equals its final observation, and the row's next OK or LATE result
      is the reset: reward 0, neither terminated nor truncated, and the observation
      described above.

    Attributes:
      num_rows: Number of verified rows.
      num_valid: Number of OK rows.
      num_padding: Number of PENDING rows.
      num_late: Number of LATE rows.
      losses: Number of lost rows by status.
      num_unseen: Number of actions that were applied but whose result was never
      received; set by `finish`.
      longest_seconds: Duration of the longest call so far; see `within`.
    """

    def __init__(
        self,
        num_envs: int,
        root_seed: int | None,
        *,
        length: int = 10,
        autoreset: str = "same_step",
        clock: Callable[[], float] = time.monotonic,
        **options: int,
    ) -> None:
        """Create a ledger without rows.

        `clock` is used by `within`; the other arguments are those of `ReferenceModel`.
        """
        self.num_envs = num_envs
        self.num_rows = self.num_valid = self.num_padding = self.num_late = 0
        self.losses: Counter[Status] = Counter()
        self.num_unseen = 0
        self.longest_seconds = 0.0
        self._length = length
        self._autoreset = autoreset
        self._clock = clock
        self._steps = np.zeros(num_envs, np.int64)  # by row, for error messages
        self._lost_actions: dict[int, int] = {}  # by row, until its next step resets it
        self._model = ReferenceModel(
            num_envs, root_seed, length=length, autoreset=autoreset, **options
        )

    # Results of the batch.

    def reset(
        self,
        observation: Array,
        env_indices: Sequence[int] | Array | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> None:
        """Verify the observations after a reset, in the order of `env_indices`."""
        rows = self._rows(env_indices)
        check_shape("observation", observation, (len(rows), 4))
        for index, row in enumerate(rows.tolist()):
            seen = tuple(observation[index].tolist())
            seed = None if seeds is None else seeds[index]
            states = self._states_before_reset(row)
            if seed is None:
                self._reset(row, seen, states)
                continue
            expected = (seed, 0, 0, 0)
            if seen != expected:
                self._fail(row, "first observation", [expected], seen)
            self._model.begin_incarnation(row, seen, -1, states)
            self._model.record_reset(row)

    def skip_reset(
        self, observation: Array, env_indices: Sequence[int] | Array
    ) -> None:
        """Verify the observations of rows that a reset has skipped.

        They are the last ones, or zeros before the first reset of an env. If the reset
        has replaced a late result, they may be those of the late result.
        """
        rows, model = self._rows(env_indices), self._model
        check_shape("observation", observation, (len(rows), 4))
        for row, seen in zip(rows.tolist(), observation, strict=True):
            if model.observed[row, SEED] < 0:
                model.observed[row] = 0
            states = model.possible_states(row)
            if tuple(seen.tolist()) not in [state.observed for state in states]:
                self._reset(row, tuple(seen.tolist()), states)

    def _states_before_reset(self, row: int) -> list[State]:
        """Return the possible states of an env, including those after a lost action."""
        model, lost_action = self._model, self._lost_actions.pop(row, None)
        if model.observed[row, SEED] < 0:
            return []
        states = model.possible_states(row)
        if lost_action is not None and not model.is_pending[row]:
            states += [model.state_after(state, lost_action) for state in states]
        return states

    def _reset(self, row: int, seen: tuple[int, ...], states: Sequence[State]) -> None:
        """Verify the first observation of an episode whose seed was not specified."""
        model = self._model
        expected: list[Any] = []
        for state in states:
            seed, episode, _, value = state.observed
            if seen == (seed, episode + 1, 0, value):
                model.set_state(row, state._replace(observed=seen, has_ended=False))
                model.record_reset(row)
                return
            expected.append((seed, episode + 1, 0, value))
        is_fresh = _is_fresh(seen) and (bool(states) or seen[EPISODE] == 0)
        # If a block is lost while a reset is in flight, its envs are reset again.
        if is_fresh and model.accept_repeated_reset(row, seen):
            return model.record_reset(row)
        incarnation = model.find_incarnation(row, seen[SEED]) if is_fresh else None
        if incarnation is None:
            self._fail(row, "first observation", expected or ["a first reset"], seen)
        model.begin_incarnation(row, seen, incarnation, states)
        model.record_reset(row)

    def step(
        self,
        actions: Any,
        result: StepResult,
        env_indices: Sequence[int] | Array | None = None,
    ) -> None:
        """Verify the result of a step or of `recv`.

        Args:
          actions: int64 `[n]`; the actions that were sent, in the order of the rows.
          env_indices: The rows of the result; None for all.
        """
        rows = self._rows(env_indices)
        unknown = rows[self._model.observed[rows, SEED] < 0]
        if unknown.size:
            raise ValueError(f"expected reset() of env {unknown[0]} before its step")
        part = ResultRows.of(rows, np.asarray(actions, np.int64), result)
        self.num_rows += len(rows)
        self._steps[rows] += 1
        self._expect(part, "valid", part.valid, part.status == Status.OK)
        self._resolve(part)
        self._find_renewed(part)
        if self._lost_actions:
            part = self._take_resets(part)
        if not part.status.any():  # nearly always
            self._on_ok(part)
        else:
            self._by_status(part)
        if result.infos:
            self._check_infos(part, result.infos)

    def _by_status(self, part: ResultRows) -> None:
        is_known = np.zeros(len(part.rows), np.bool_)
        for statuses, handle in (
            ((Status.OK,), self._on_ok),
            ((Status.PENDING,), self._on_pending),
            ((Status.LATE,), self._on_late),
            (LOSSES, self._on_lost),
        ):
            chosen = np.isin(part.status, statuses)
            is_known |= chosen
            if chosen.any():
                handle(part.at(chosen))
        self._expect(part, "known status", is_known, np.ones_like(is_known))

    def _find_renewed(self, part: ResultRows) -> None:
        """Find rows in which this step resets a new env without a reported loss.

        The previous env was replaced after its episode had ended.
        """
        if self._autoreset != "next_step":
            return
        is_done = np.isin(part.status, (Status.OK, Status.LATE))
        is_other = part.observation[:, SEED] != self._model.observed[part.rows, SEED]
        is_renewed = is_done & is_other & self._model.has_ended[part.rows]
        for row, action in zip(
            part.rows[is_renewed].tolist(), part.actions[is_renewed], strict=True
        ):
            self._lost_actions.setdefault(row, int(action))

    def _take_resets(self, part: ResultRows) -> ResultRows:
        """Verify the rows that were reset after a loss; return the other rows."""
        is_done = np.isin(part.status, (Status.OK, Status.LATE))
        is_reset = is_done & np.isin(part.rows, [*self._lost_actions])
        resets = part.at(is_reset)
        self._expect(resets, "reward", resets.reward, np.zeros(len(resets.rows)))
        never = np.zeros(len(resets.rows), np.bool_)
        self._expect(resets, "terminated", resets.terminated, never)
        self._expect(resets, "truncated", resets.truncated, never)
        for row, seen in zip(resets.rows.tolist(), resets.observation, strict=True):
            action = self._lost_actions.pop(row)
            self._check_new_incarnation(row, tuple(seen.tolist()), action)
        self.num_valid += int((resets.status == Status.OK).sum())
        self.num_late += int((resets.status == Status.LATE).sum())
        return part.at(~is_reset)

    def mark_unanswered(
        self, actions: Any, env_indices: Sequence[int] | Array | None = None
    ) -> None:
        """Record actions that may be applied, but whose results will not be received.

        Call this method after a call that was interrupted or raised, and at the end for
        rows that were sent but not received. The next result may or may not include
        these actions.
        """
        rows = self._rows(env_indices)
        given = check_shape("actions", np.asarray(actions, np.int64), rows.shape)
        for row, action in zip(rows.tolist(), given.tolist(), strict=True):
            self._model.record_unanswered(row, action)

    def finish(self, journal: str | os.PathLike[str] | None = None) -> None:
        """Compare the results with the envs' journals, if a folder is given.

        The journals must contain every action whose result was received, and at most
        one more for each row that was lost, is PENDING, or was marked as unanswered.
        """
        if journal is None:
            return
        self.num_unseen, wrong = audit(self.incarnations(), read_journal(journal))
        if wrong:
            text = "\n".join(wrong[:20])
            raise LedgerError(f"{journal}: {len(wrong)} contradictions:\n{text}")

    def incarnations(self) -> list[Incarnation]:
        return self._model.incarnations()

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Verify that the body returns or raises within a number of seconds."""
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            self.longest_seconds = max(self.longest_seconds, took)
            if took > seconds:
                text = f"expected the call to take at most {seconds:g} s; it took"
                raise LedgerError(f"{text} {took:.3f} s")

    # Rows of each status.

    def _on_ok(self, part: ResultRows) -> None:
        rows, model = part.rows, self._model
        if self._autoreset == "disabled" and model.has_ended[rows].any():
            row = int(rows[model.has_ended[rows]][0])
            raise LedgerError(f"env {row}: its episode has ended; reset it first", row)
        after = model.advance(rows, part.actions)
        self._expect(part, "reward", part.reward, after.reward)
        self._check_transition(part, after)
        model.commit(rows, after)
        self.num_valid += len(rows)

    def _on_late(self, part: ResultRows) -> None:
        rows, model = part.rows, self._model
        always = np.ones(len(rows), np.bool_)
        self._expect(part, "pending before", model.is_pending[rows], always)
        after = model.advance(rows, model.awaited_action[rows])
        self._expect(part, "reward", part.reward, after.reward, np.zeros(len(rows)))
        self._check_transition(part, after)
        model.commit(rows, after)
        self.num_late += len(rows)

    def _on_pending(self, part: ResultRows) -> None:
        rows, model = part.rows, self._model
        never = np.zeros(len(rows), np.bool_)
        self._expect(part, "reward", part.reward, np.zeros(len(rows)))
        self._expect(part, "terminated", part.terminated, never)
        self._expect(part, "truncated", part.truncated, never)
        model.mark_pending(rows, part.actions)
        late_observation = model.advance(rows, model.awaited_action[rows]).observation
        self._expect(
            part,
            "observation",
            part.observation,
            model.observed[rows],
            late_observation,
        )
        self.num_padding += len(rows)

    def _on_lost(self, part: ResultRows) -> None:
        rows, model = part.rows, self._model
        never = np.zeros(len(rows), np.bool_)
        self._expect(part, "reward", part.reward, np.zeros(len(rows)))
        self._expect(part, "terminated", part.terminated, never)
        self._expect(part, "truncated", part.truncated, ~never)
        model.record_actions(rows, part.actions)
        lost_action = np.where(
            model.is_pending[rows], model.awaited_action[rows], part.actions
        )
        unseen = model.advance(rows, lost_action)
        self._expect(
            part,
            "final observation",
            part.final_observation,
            model.observed[rows],
            unseen.observation,
            unseen.final_observation,
            model.advance(rows, part.actions).observation,  # see `record_reset`
        )
        if self._autoreset == "next_step":
            what = "observation after a loss"
            self._expect(part, what, part.observation, part.final_observation)
        for index, row in enumerate(rows.tolist()):
            self.losses[Status(int(part.status[index]))] += 1
            action = int(lost_action[index])
            if self._autoreset == "next_step":
                self._lost_actions.setdefault(row, action)
                continue
            self._check_new_incarnation(
                row, tuple(part.observation[index].tolist()), action
            )
        model.has_ended[rows] = self._autoreset == "disabled"

    def _check_new_incarnation(
        self, row: int, seen: tuple[int, ...], lost_action: int
    ) -> None:
        """Verify the first observation after a loss."""
        model, what = self._model, "observation after a loss"
        states = model.possible_states(row)
        if not _is_fresh(seen):
            self._fail(row, what, ["one before any action"], seen)
        if model.accept_repeated_reset(row, seen):
            return
        incarnation = model.find_incarnation(row, seen[SEED])
        if incarnation is None:
            above = int(model.highest_incarnation[row])
            like = model.seed_of(row, above + 1)
            expected = f"the seed of an incarnation above {above}, like {like}"
            self._fail(row, what, [expected], seen)
        if not model.is_pending[row]:
            states += [model.state_after(state, lost_action) for state in states]
        model.begin_incarnation(row, seen, incarnation, states)

    def _resolve(self, part: ResultRows) -> None:
        """Use the results to decide which of the unanswered actions were applied."""
        model = self._model
        for index, row in model.uncertain_rows(part.rows):
            status = part.status[index]
            action = int(part.actions[index])
            shown = part.final_observation if status in LOSSES else part.observation
            seen = tuple(shown[index].tolist())
            if status == Status.LATE:
                model.resolve_late(row, seen)
                continue
            states = model.possible_states(row)
            if not model.is_uncertain(row):
                continue
            fits = [s for s in states if model.state_after(s, action).observed == seen]
            if status == Status.OK and fits:
                model.set_state(row, fits[0])
                continue
            fits = [s for s in states if s.observed == seen] + fits
            if status != Status.OK and fits:
                model.set_last_seen(row, fits[0])
                continue
            # An earlier result, which the caller discarded, may have reported a loss.
            incarnation = model.find_incarnation(row, seen[SEED])
            if incarnation is not None:
                fresh = (seen[SEED], 0, 0, 0)
                model.begin_incarnation(row, fresh, incarnation, states)

    def _check_transition(self, part: ResultRows, after: Transition) -> None:
        self._expect(part, "observation", part.observation, after.observation)
        self._expect(part, "terminated", part.terminated, after.terminated)
        self._expect(part, "truncated", part.truncated, after.truncated)
        ended = after.terminated | after.truncated
        if ended.any():
            self._expect(
                part.at(ended),
                "final observation",
                part.final_observation[ended],
                after.final_observation[ended],
            )

    def _check_infos(
        self, part: ResultRows, infos: Mapping[int, Mapping[str, Any]]
    ) -> None:
        index_of = {row: index for index, row in enumerate(part.rows.tolist())}
        for row, info in infos.items():
            if row not in index_of:
                raise LedgerError(
                    f"env {row}: expected infos only for stepped rows; got {info}", row
                )
            status = Status(int(part.status[index_of[row]]))
            if status in LOSSES:
                reported = info.get("fault", {}).get("status")
                if reported != status.name:
                    self._fail(row, "info of the fault", [status.name], reported)
            elif "step" in info:
                ended = self._model.observed[row, STEP] == 0
                step = self._length if ended else int(self._model.observed[row, STEP])
                if info["step"] != step:
                    self._fail(row, "step in the info", [step], info["step"])

    def _rows(self, env_indices: Sequence[int] | Array | None) -> Array:
        if env_indices is None:
            return np.arange(self.num_envs)
        return np.asarray(env_indices, np.int64)

    def _expect(self, part: ResultRows, what: str, got: Array, *allowed: Array) -> None:
        """Verify that each row equals one of the allowed values, each `[n, ...]`."""
        if np.array_equal(got, allowed[0]):
            return
        is_right = np.zeros(len(part.rows), np.bool_)
        for expected in allowed:
            equal = got == expected
            is_right |= equal if equal.ndim == 1 else equal.all(axis=1)
        wrong = np.flatnonzero(~is_right)
        if wrong.size:
            index = int(wrong[0])
            expected_values = [
                np.broadcast_to(expected, got.shape)[index].tolist()
                for expected in allowed
            ]
            self._fail(
                int(part.rows[index]),
                what,
                expected_values,
                got[index].tolist(),
                f", in a row with action {part.actions[index]} and status "
                f"{part.status[index]}",
            )

    def _fail(
        self, row: int, what: str, expected: Sequence[Any], got: Any, where: str = ""
    ) -> NoReturn:
        allowed = " or ".join(dict.fromkeys(str(each) for each in expected))
        is_observation = isinstance(got, (list, tuple))
        owner = (
            self._model.describe_seed_owner(row, got[SEED]) if is_observation else ""
        )
        raise LedgerError(
            f"env {row}, its step {self._steps[row]}{where}: expected {what} "
            f"{allowed}; got {got}{owner}",
            row,
        )


def _is_fresh(observed: tuple[int, ...]) -> bool:
    """Return whether no action was applied since the seed was set."""
    return observed[STEP] == 0 and observed[HASH] == 0
