"""The oracle: checks every row that a batch of `LedgerEnv` gives.

Each result must be that of the action sent for it, applied once, in the same
incarnation; or must say that it is not. What was applied is compared with the journal.
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
from tests.oracle.reference_model import ReferenceModel
from tests.oracle.result import LedgerError, ResultRows, check_shape
from tests.oracle.transitions import EPISODE, HASH, SEED, STEP, Transition

#: What says that an episode was lost.
LOSSES: Final = (
    Status.ENV_ERROR,
    Status.WORKER_DIED,
    Status.TIMEOUT,
    Status.SERVER_LOST,
)


class Ledger:
    """A second set of books beside those of the envs, with which all must agree.

    Call `reset` and `step` with what came, for all rows or some; at last `finish`. What
    disagrees raises LedgerError, which names the row. Spare envs, which take turns in a
    row, it does not know.

    What it holds a row to:

    * OK: the action, and no other, was applied once to what was observed last.
    * PENDING: nothing happens. An action that was sent with the first of such rows, and
      with no other, may come to be applied.
    * LATE: only after PENDING; what the first of these rows' actions has led to.
    * A loss (any other status): one row, truncated and not terminated. Its observation
      is of an incarnation that is higher than all before, or in which no action was
      applied so far; and before any action. Its final observation is the last one that
      was seen, or of the action that was lost with it: an env in this host writes
      before it answers.

    Attributes:
      num_rows: Rows checked.
      num_valid: Of these, those that are OK.
      num_padding: Those that are PENDING.
      num_late: Those that are LATE.
      losses: Those that were lost, by status.
      num_unseen: Actions that were applied, but whose result never came; known after
        `finish`.
      longest_seconds: The longest call so far; see `within`.
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
        self._steps = np.zeros(num_envs, np.int64)  # for messages
        self._books = ReferenceModel(
            num_envs, root_seed, length=length, autoreset=autoreset, **options
        )

    # What the batch has given.

    def reset(
        self,
        observation: Array,
        env_indices: Sequence[int] | Array | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> None:
        """Checks the first observations of a reset, in the order of `env_indices`."""
        rows = self._rows(env_indices)
        check_shape("observation", observation, (len(rows), 4))
        for index, row in enumerate(rows.tolist()):
            seen = tuple(observation[index].tolist())
            seed = None if seeds is None else seeds[index]
            if seed is None:
                self._reset(row, seen)
                continue
            expected = (seed, 0, 0, 0)
            if seen != expected:
                self._fail(row, "first observation", [expected], seen)
            self._books.begin_life(row, seen, -1, self._books.states(row))
            self._books.note_reset(row)

    def _reset(self, row: int, seen: tuple[int, ...]) -> None:
        """Checks the first observation of an episode whose seed was not given."""
        books = self._books
        states = books.states(row) if books.observed[row, SEED] >= 0 else []
        expected: list[Any] = []
        for state in states:
            seed, episode, _, value = state.observed
            if seen == (seed, episode + 1, 0, value):
                books.settle(row, state._replace(observed=seen, has_ended=False))
                books.note_reset(row)
                return
            expected.append((seed, episode + 1, 0, value))
        is_fresh = _is_fresh(seen) and (bool(states) or seen[EPISODE] == 0)
        # Its block was lost, and what was owed for it was a reset as well.
        if is_fresh and books.take_reset_again(row, seen):
            return books.note_reset(row)
        incarnation = books.incarnation_of(row, seen[SEED]) if is_fresh else None
        if incarnation is None:
            self._fail(row, "first observation", expected or ["a first reset"], seen)
        books.begin_life(row, seen, incarnation, states)
        books.note_reset(row)

    def step(
        self,
        actions: Any,
        result: StepResult,
        env_indices: Sequence[int] | Array | None = None,
    ) -> None:
        """Checks a step, or what was received for `actions`, int64 `[n]`.

        The rows are in the order of the result; None for all.
        """
        rows = self._rows(env_indices)
        unknown = rows[self._books.observed[rows, SEED] < 0]
        if unknown.size:
            raise ValueError(f"expected reset() of env {unknown[0]} before its step")
        part = ResultRows.of(rows, np.asarray(actions, np.int64), result)
        self.num_rows += len(rows)
        self._steps[rows] += 1
        self._expect(part, "valid", part.valid, part.status == Status.OK)
        self._resolve(part)
        if not part.status.any():  # the usual case
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

    def unanswered(
        self, actions: Any, env_indices: Sequence[int] | Array | None = None
    ) -> None:
        """Notes actions whose result the caller will not see, and that may be applied.

        Say this of a call that was interrupted, or has raised, and at the end of rows
        that were sent and not received. The next results may go on from either.
        """
        rows = self._rows(env_indices)
        given = check_shape("actions", np.asarray(actions, np.int64), rows.shape)
        for row, action in zip(rows.tolist(), given.tolist(), strict=True):
            self._books.doubt(row, action)

    def finish(self, journal: str | os.PathLike[str] | None = None) -> None:
        """Closes the books.

        A journal, a folder with those of these envs, must hold every action whose
        result was seen, and at most one more for each row that was lost, is pending,
        or went unanswered.
        """
        if journal is None:
            return
        self.num_unseen, wrong = audit(self.lives(), read_journal(journal))
        if wrong:
            text = "\n".join(wrong[:20])
            raise LedgerError(f"{journal} disagrees in {len(wrong)} places:\n{text}")

    def lives(self) -> list[Incarnation]:
        return self._books.lives()

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Checks that what is done inside, even in vain, takes no longer than this."""
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            self.longest_seconds = max(self.longest_seconds, took)
            if took > seconds:
                text = f"expected the call to end within {seconds:g} s; it took"
                raise LedgerError(f"{text} {took:.3f} s")

    # Each kind of row.

    def _on_ok(self, part: ResultRows) -> None:
        rows, books = part.rows, self._books
        if self._autoreset == "disabled" and books.has_ended[rows].any():
            row = int(rows[books.has_ended[rows]][0])
            raise LedgerError(f"env {row}: its episode has ended; reset it first", row)
        after = books.advance(rows, part.actions)
        self._expect(part, "reward", part.reward, after.reward)
        self._check_transition(part, after)
        books.commit(rows, after)
        self.num_valid += len(rows)

    def _on_late(self, part: ResultRows) -> None:
        rows, books = part.rows, self._books
        always = np.ones(len(rows), np.bool_)
        self._expect(part, "pending before", books.is_pending[rows], always)
        after = books.advance(rows, books.owed[rows])
        self._expect(part, "reward", part.reward, after.reward, np.zeros(len(rows)))
        self._check_transition(part, after)
        books.commit(rows, after)
        self.num_late += len(rows)

    def _on_pending(self, part: ResultRows) -> None:
        rows, books = part.rows, self._books
        never = np.zeros(len(rows), np.bool_)
        self._expect(part, "reward", part.reward, np.zeros(len(rows)))
        self._expect(part, "terminated", part.terminated, never)
        self._expect(part, "truncated", part.truncated, never)
        books.pend(rows, part.actions)
        owed = books.advance(rows, books.owed[rows]).observation
        self._expect(part, "observation", part.observation, books.observed[rows], owed)
        self.num_padding += len(rows)

    def _on_lost(self, part: ResultRows) -> None:
        rows, books = part.rows, self._books
        never = np.zeros(len(rows), np.bool_)
        self._expect(part, "reward", part.reward, np.zeros(len(rows)))
        self._expect(part, "terminated", part.terminated, never)
        self._expect(part, "truncated", part.truncated, ~never)
        books.note_actions(rows, part.actions)
        lost_action = np.where(books.is_pending[rows], books.owed[rows], part.actions)
        unseen = books.advance(rows, lost_action)
        self._expect(
            part,
            "final observation",
            part.final_observation,
            books.observed[rows],
            unseen.observation,
            unseen.final_observation,
            books.advance(rows, part.actions).observation,  # see `note_reset`
        )
        for index, row in enumerate(rows.tolist()):
            self._begin_anew(
                row, tuple(part.observation[index].tolist()), int(lost_action[index])
            )
            self.losses[Status(int(part.status[index]))] += 1
        books.has_ended[rows] = self._autoreset == "disabled"

    def _begin_anew(self, row: int, seen: tuple[int, ...], lost_action: int) -> None:
        """Checks the first observation after a loss."""
        books, what = self._books, "observation after a loss"
        states = books.states(row)
        if not _is_fresh(seen):
            self._fail(row, what, ["one before any action"], seen)
        if books.take_reset_again(row, seen):
            return
        incarnation = books.incarnation_of(row, seen[SEED])
        if incarnation is None:
            above = int(books.highest[row])
            like = books.seed_of(row, above + 1)
            expected = f"the seed of an incarnation above {above}, like {like}"
            self._fail(row, what, [expected], seen)
        if not books.is_pending[row]:
            states += [books.after(state, lost_action) for state in states]
        books.begin_life(row, seen, incarnation, states)

    def _resolve(self, part: ResultRows) -> None:
        """Lets rows tell what has become of actions that went unanswered."""
        books = self._books
        for index, row in books.doubtful(part.rows):
            status = part.status[index]
            action = int(part.actions[index])
            shown = part.final_observation if status in LOSSES else part.observation
            seen = tuple(shown[index].tolist())
            if status == Status.LATE:
                books.owe(row, seen)
                continue
            states = books.states(row)
            if not books.is_in_doubt(row):
                continue
            fits = [s for s in states if books.after(s, action).observed == seen]
            if status == Status.OK and fits:
                books.settle(row, fits[0])
                continue
            fits = [s for s in states if s.observed == seen] + fits
            if status != Status.OK and fits:
                books.rebase(row, fits[0])
                continue
            # A loss may have been told in a result that nobody saw.
            incarnation = books.incarnation_of(row, seen[SEED])
            if incarnation is not None:
                fresh = (seen[SEED], 0, 0, 0)
                books.begin_life(row, fresh, incarnation, states)

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
                    f"env {row}: expected infos of rows that were stepped; got {info}",
                    row,
                )
            status = Status(int(part.status[index_of[row]]))
            if status in LOSSES:
                told = info.get("fault", {}).get("status")
                if told != status.name:
                    self._fail(row, "info of the fault", [status.name], told)
            elif "step" in info:
                ended = self._books.observed[row, STEP] == 0
                step = self._length if ended else int(self._books.observed[row, STEP])
                if info["step"] != step:
                    self._fail(row, "step in the info", [step], info["step"])

    def _rows(self, env_indices: Sequence[int] | Array | None) -> Array:
        if env_indices is None:
            return np.arange(self.num_envs)
        return np.asarray(env_indices, np.int64)

    def _expect(self, part: ResultRows, what: str, got: Array, *allowed: Array) -> None:
        """Holds rows to one of some possibilities, each `[n, ...]`."""
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
        whose = self._books.whose(row, got[SEED]) if is_observation else ""
        raise LedgerError(
            f"env {row}, its step {self._steps[row]}{where}: expected {what} "
            f"{allowed}; got {got}{whose}",
            row,
        )


def _is_fresh(observed: tuple[int, ...]) -> bool:
    """Tells whether no action was applied since the seed."""
    return observed[STEP] == 0 and observed[HASH] == 0
