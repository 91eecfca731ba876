"""What each row of ledgers is like by now, and which lives it has had.

Where the caller has thrown a result away, a row may be in several states; the next
result tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from envserve.envs.seeding import env_seed
from tests.oracle.incarnations import Ending, Incarnation
from tests.oracle.journal import Array
from tests.oracle.transitions import EPISODE, HASH, SEED, Transition, advance

#: There are few, unless results are thrown away all the time.
_MAX_STATES: Final = 1 << 12
#: How many incarnations, and leases, an env mostly skips at most.
_FEW: Final = 16


class State(NamedTuple):
    """What one row may be like.

    Attributes:
      num_applied: Actions since its seed.
      has_ended: Whether the next step is its reset.
    """

    observed: tuple[int, ...]
    num_applied: int
    has_ended: bool


class ReferenceModel:
    """The state of every row.

    Attributes:
      observed: int64 `[num_envs, 4]`; what the envs observed last, -1 before a reset.
      has_ended: bool; whether an env must be reset before it can be stepped.
      is_pending: bool; whether the row was PENDING last.
      owed: int64; the action that was sent when the padding began.
      highest: int64; highest incarnation so far.
    """

    def __init__(
        self,
        num_envs: int,
        root_seed: int | None,
        *,
        length: int,
        autoreset: str,
        first_env_index: int = 0,
        max_skipped_incarnations: int = 1000,
        incarnations_per_lease: int = 1 << 18,
    ) -> None:
        """Opens empty books.

        Args:
          root_seed: The batch's. None if its envs are seeded otherwise: then a seed
            after a loss need only be new to its row.
          autoreset: The batch's mode: same_step, next_step or disabled.
          first_env_index: Row, of those that `root_seed` is for, that is the first.
          max_skipped_incarnations: An env may be rebuilt several times before it is
            seen again; this is how many times are looked for.
          incarnations_per_lease: By how much each further lease of a client raises the
            first incarnation of its envs.
        """
        self.observed = np.full((num_envs, 4), -1, np.int64)
        self.has_ended = np.zeros(num_envs, np.bool_)
        self.is_pending = np.zeros(num_envs, np.bool_)
        self.owed = np.zeros(num_envs, np.int64)
        self.highest = np.full(num_envs, -1, np.int64)
        self._num_applied = np.zeros(num_envs, np.int64)  # since the seed
        self._is_of_stream = np.zeros(num_envs, np.bool_)  # as opposed to given
        self._root_seed = root_seed
        self._length = length
        self._is_same_step = autoreset == "same_step"
        self._first_env_index = first_env_index
        self._max_skipped = max_skipped_incarnations
        self._incarnations_per_lease = incarnations_per_lease
        self._seeds: list[set[int]] = [set() for _ in range(num_envs)]
        self._doubts: dict[int, list[State]] = {}
        self._doubtful_actions: dict[int, list[int]] = {}
        #: Rows that were reset since they last went on, and their padding's actions.
        self._resets: dict[int, list[int]] = {}
        self._lives: list[Incarnation] = []

    # Steps.

    def advance(self, rows: Array, actions: Array) -> Transition:
        return advance(
            self.observed[rows],
            actions,
            self.has_ended[rows],
            self._length,
            same_step=self._is_same_step,
        )

    def commit(self, rows: Array, after: Transition) -> None:
        self.observed[rows] = after.observation
        self._num_applied[rows] += after.is_applied
        self.has_ended[rows] = after.has_ended
        self.is_pending[rows] = False
        for row in [row for row in self._doubts if row in rows]:
            del self._doubts[row], self._doubtful_actions[row]
        for row in [row for row in self._resets if row in rows]:
            del self._resets[row]

    def pend(self, rows: Array, actions: Array) -> None:
        """Takes rows to be pending; the first action of a run stays owed."""
        is_first = ~self.is_pending[rows]
        self.owed[rows[is_first]] = actions[is_first]
        for row in [row for row in self._doubts if row in rows[is_first]]:
            self.doubt(row, int(self.owed[row]))
        self.is_pending[rows] = True
        self.note_actions(rows, actions)

    def note_actions(self, rows: Array, actions: Array) -> None:
        """Notes what may have been sent for rows that were reset."""
        for row in [row for row in self._resets if row in rows]:
            action = int(actions[rows == row][0])
            if action not in self._resets[row]:
                self._resets[row].append(action)

    def note_reset(self, row: int) -> None:
        """Notes that a row was reset.

        Others of its block may have been lost or late meanwhile. Then its first padding
        is for their sake, and it is a later action that is sent.
        """
        self._resets[row] = []

    # Lives.

    def seed_of(self, row: int, incarnation: int) -> int | None:
        if self._root_seed is None:
            return None
        return env_seed(self._root_seed, row + self._first_env_index, incarnation)

    def incarnation_of(self, row: int, seed: int) -> int | None:
        """Returns which incarnation, above all before, has this seed; None for none."""
        above = int(self.highest[row]) + 1
        if self._root_seed is None:
            return None if seed in self._seeds[row] else above
        for incarnation in self._later_incarnations(above):
            if self.seed_of(row, incarnation) == seed:
                return incarnation
        return None

    def _later_incarnations(self, above: int) -> Iterator[int]:
        """Yields those that may be next, the likelier ones first."""
        stride = self._incarnations_per_lease
        yield above
        yield (above // stride + 1) * stride
        yield from range(above + 1, above + _FEW)
        for lease in range(above // stride + 1, above // stride + 1 + _FEW):
            yield from range(lease * stride, lease * stride + _FEW)
        yield from range(above + _FEW, above + self._max_skipped)

    def begin_life(
        self,
        row: int,
        observed: tuple[int, ...],
        incarnation: int,
        states: Sequence[State],
    ) -> None:
        """Begins with a seed; what was before has ended in one of these states."""
        if self.observed[row, SEED] >= 0:
            self._lives.append(self._life(row, states))
        self.settle(row, State(observed, 0, False))
        self._seeds[row].add(observed[SEED])
        self._is_of_stream[row] = incarnation >= 0
        self.highest[row] = max(self.highest[row], incarnation)

    def take_reset_again(self, row: int, observed: tuple[int, ...]) -> bool:
        """Takes a row to be like this if it is a later reset of a life of no action."""
        seed, episode, _, _ = self.observed[row].tolist()
        is_later = observed[SEED] == seed and observed[EPISODE] > episode
        if not is_later or self._num_applied[row]:
            return False
        self.settle(row, State(observed, 0, False))
        return True

    def lives(self) -> list[Incarnation]:
        rows = np.flatnonzero(self.observed[:, SEED] >= 0).tolist()
        return self._lives + [self._life(row, self.states(row)) for row in rows]

    def _life(self, row: int, states: Sequence[State]) -> Incarnation:
        seed, _, _, value = self.observed[row].tolist()
        seen = (int(self._num_applied[row]), value)
        endings: set[Ending] = {(s.num_applied, s.observed[HASH]) for s in states}
        incarnation = int(self.highest[row]) if self._is_of_stream[row] else -1
        return Incarnation(row, incarnation, seed, seen, frozenset(endings - {seen}))

    def whose(self, row: int, seed: int) -> str:
        """Says whose seed that is, if it is not the row's own."""
        (others,) = np.nonzero(self.observed[:, SEED] == seed)
        if others.size and row not in others:
            return f", which is env {others[0]}'s"
        if seed in self._seeds[row] and seed != self.observed[row, SEED]:
            return ", whose seed is one that this env had before"
        return ""

    # Doubts.

    def states(self, row: int) -> list[State]:
        """Returns what a row may be like; first what it is as far as was seen."""
        if row in self._doubts:
            return list(self._doubts[row])
        observed = tuple(self.observed[row].tolist())
        state = State(observed, int(self._num_applied[row]), bool(self.has_ended[row]))
        if not self.is_pending[row]:
            return [state]
        actions = dict.fromkeys([int(self.owed[row]), *self._resets.get(row, [])])
        return [state, *(self.after(state, action) for action in actions)]

    def after(self, state: State, action: int) -> State:
        after = advance(
            np.array([state.observed]),
            np.array([action]),
            np.array([state.has_ended]),
            self._length,
            same_step=self._is_same_step,
        )
        return State(
            tuple(after.observation[0].tolist()),
            state.num_applied + int(after.is_applied[0]),
            bool(after.has_ended[0]),
        )

    def doubt(self, row: int, action: int) -> None:
        """Notes that an action may have been applied, or not."""
        states = self.states(row)
        actions = self._doubtful_actions.setdefault(row, [])
        if self.is_pending[row]:
            actions.append(int(self.owed[row]))
            actions += self._resets.get(row, [])
            self.is_pending[row] = False  # what was owed may have come by now
        actions.append(action)
        states += [self.after(state, action) for state in states]
        self._doubts[row] = list(dict.fromkeys(states))
        if len(self._doubts[row]) > _MAX_STATES:
            raise ValueError(
                f"env {row}: expected a result now and then; too many actions in a row "
                "went unanswered"
            )

    def owe(self, row: int, observed: tuple[int, ...]) -> None:
        """Takes that action to be owed which leads to this, if one does."""
        states = self._doubts.get(row, self.states(row)[:1])
        actions = self._doubtful_actions.get(row, [])
        if self.is_pending[row]:
            actions = [int(self.owed[row]), *actions, *self._resets.get(row, [])]
        for action in actions:
            for state in states:
                if self.after(state, action).observed == observed:
                    self.settle(row, state)
                    self.owed[row], self.is_pending[row] = action, True
                    return

    def doubtful(self, rows: Array) -> Iterator[tuple[int, int]]:
        """Yields rows of which not all is known, each with its place in `rows`."""
        if self._doubts or self._resets:
            for index, row in enumerate(rows.tolist()):
                if row in self._doubts or row in self._resets:
                    yield index, row

    def is_in_doubt(self, row: int) -> bool:
        return row in self._doubts

    def rebase(self, row: int, state: State) -> None:
        """Takes a row to be like this as far as was seen; it stays in doubt."""
        self.observed[row] = state.observed
        self._num_applied[row] = state.num_applied
        self.has_ended[row] = state.has_ended

    def settle(self, row: int, state: State) -> None:
        self.rebase(row, state)
        self.is_pending[row] = False
        self._doubts.pop(row, None)
        self._doubtful_actions.pop(row, None)
        self._resets.pop(row, None)
