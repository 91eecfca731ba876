"""The reference model of ledger envs: the state and past incarnations of every row.

If the caller has discarded a result, a row has several possible states until the next
result shows which one is correct.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from envserve.envs.seeding import env_seed
from tests.oracle.incarnations import ActionDigest, Incarnation
from tests.oracle.journal import Array
from tests.oracle.transitions import EPISODE, HASH, SEED, Transition, advance

#: Maximum number of possible states of a row. It is reached only if results are
#: discarded continually.
_MAX_STATES: Final = 1 << 12
#: Number of incarnations, and of leases, to try first after a loss, because an env
#: seldom skips more.
_FEW: Final = 16


class State(NamedTuple):
    """A possible state of one row.

    Attributes:
      observed: The last observation.
      num_applied: Number of actions applied since the seed was set.
      has_ended: Whether the episode has ended, so that the next step resets the env.
    """

    observed: tuple[int, ...]
    num_applied: int
    has_ended: bool


class ReferenceModel:
    """The expected state of every row.

    Attributes:
      observed: int64 `[num_envs, 4]`; the last observation of each env, -1 before its
      first reset.
      has_ended: bool `[num_envs]`; whether an env must be reset before its next step.
      is_pending: bool `[num_envs]`; whether the last status was PENDING.
      awaited_action: int64 `[num_envs]`; the action sent when the row became PENDING.
      highest_incarnation: int64 `[num_envs]`; number of the highest incarnation, or -1.
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
        """Create the model of envs that have not been reset.

        Args:
          root_seed: The seed of the batch. If None, the envs get their seeds from
          elsewhere, and the seed after a loss only has to be new to its row.
          length: Number of steps in an episode.
          autoreset: The autoreset mode: same_step, next_step or disabled.
          first_env_index: Index of row 0 among all rows that are seeded from
          `root_seed`.
          max_skipped_incarnations: Maximum number of times that an env may have been
          rebuilt before the caller receives a result of it.
          incarnations_per_lease: Difference between the first incarnations of two
          consecutive leases of a client.
        """
        self.observed = np.full((num_envs, 4), -1, np.int64)
        self.has_ended = np.zeros(num_envs, np.bool_)
        self.is_pending = np.zeros(num_envs, np.bool_)
        self.awaited_action = np.zeros(num_envs, np.int64)
        self.highest_incarnation = np.full(num_envs, -1, np.int64)
        self._num_applied = np.zeros(num_envs, np.int64)
        self._has_derived_seed = np.zeros(num_envs, np.bool_)
        self._root_seed = root_seed
        self._length = length
        self._is_same_step = autoreset == "same_step"
        self._first_env_index = first_env_index
        self._max_skipped = max_skipped_incarnations
        self._incarnations_per_lease = incarnations_per_lease
        self._seeds: list[set[int]] = [set() for _ in range(num_envs)]
        self._possible_states: dict[int, list[State]] = {}
        self._unanswered_actions: dict[int, list[int]] = {}
        #: Rows that were reset and have not been stepped since, each with the actions
        #: that were sent while it was PENDING.
        self._resets: dict[int, list[int]] = {}
        #: Pickled tuples of fields, which take a tenth of the memory: the case `soak`
        #: measures whether the process with the model grows.
        self._past_incarnations = bytearray()

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
        for row in [row for row in self._possible_states if row in rows]:
            del self._possible_states[row], self._unanswered_actions[row]
        for row in [row for row in self._resets if row in rows]:
            del self._resets[row]

    def mark_pending(self, rows: Array, actions: Array) -> None:
        """Mark rows as PENDING; only the first of consecutive actions is awaited."""
        is_first = ~self.is_pending[rows]
        self.awaited_action[rows[is_first]] = actions[is_first]
        for row in [row for row in self._possible_states if row in rows[is_first]]:
            self.record_unanswered(row, int(self.awaited_action[row]))
        self.is_pending[rows] = True
        self.record_actions(rows, actions)

    def record_actions(self, rows: Array, actions: Array) -> None:
        """Record actions sent to rows that were reset; see `record_reset`."""
        for row in [row for row in self._resets if row in rows]:
            action = int(actions[rows == row][0])
            if action not in self._resets[row]:
                self._resets[row].append(action)

    def record_reset(self, row: int) -> None:
        """Record that a row was reset.

        If other rows of its block were lost or late at that time, they may cause
        PENDING results of this row, too. The env then receives a later action than the
        one sent for the first PENDING result.
        """
        self._resets[row] = []

    # Incarnations.

    def seed_of(self, row: int, incarnation: int) -> int | None:
        if self._root_seed is None:
            return None
        return env_seed(self._root_seed, row + self._first_env_index, incarnation)

    def find_incarnation(self, row: int, seed: int) -> int | None:
        """Return a later incarnation that has this seed, or None."""
        above = int(self.highest_incarnation[row]) + 1
        if self._root_seed is None:
            return None if seed in self._seeds[row] else above
        for incarnation in self._later_incarnations(above):
            if self.seed_of(row, incarnation) == seed:
                return incarnation
        return None

    def _later_incarnations(self, above: int) -> Iterator[int]:
        """Yield candidates for the next incarnation, the most likely ones first."""
        stride = self._incarnations_per_lease
        yield above
        yield (above // stride + 1) * stride
        yield from range(above + 1, above + _FEW)
        for lease in range(above // stride + 1, above // stride + 1 + _FEW):
            yield from range(lease * stride, lease * stride + _FEW)
        yield from range(above + _FEW, above + self._max_skipped)

    def begin_incarnation(
        self,
        row: int,
        observed: tuple[int, ...],
        incarnation: int,
        states: Sequence[State],
    ) -> None:
        """Start an incarnation; the previous one ended in one of `states`."""
        if self.observed[row, SEED] >= 0:
            fields = dataclasses.astuple(self._incarnation(row, states))
            self._past_incarnations += pickle.dumps(fields)
        self.set_state(row, State(observed, 0, False))
        self._seeds[row].add(observed[SEED])
        self._has_derived_seed[row] = incarnation >= 0
        self.highest_incarnation[row] = max(self.highest_incarnation[row], incarnation)

    def accept_repeated_reset(self, row: int, observed: tuple[int, ...]) -> bool:
        """Accept an observation if the env has only been reset since it got its seed.

        Returns:
          Whether the observation belongs to a later episode of the row's incarnation,
          in which no action has been applied.
        """
        seed, episode, _, _ = self.observed[row].tolist()
        is_later = observed[SEED] == seed and observed[EPISODE] > episode
        if not is_later or self._num_applied[row]:
            return False
        self.set_state(row, State(observed, 0, False))
        return True

    def incarnations(self) -> list[Incarnation]:
        rows = np.flatnonzero(self.observed[:, SEED] >= 0).tolist()
        found, past = [], io.BytesIO(self._past_incarnations)
        while past.tell() < len(self._past_incarnations):
            found.append(Incarnation(*pickle.load(past)))
        current = (self._incarnation(row, self.possible_states(row)) for row in rows)
        return [*found, *current]

    def _incarnation(self, row: int, states: Sequence[State]) -> Incarnation:
        seed, _, _, value = self.observed[row].tolist()
        digest = (int(self._num_applied[row]), value)
        digests: set[ActionDigest] = {(s.num_applied, s.observed[HASH]) for s in states}
        incarnation = (
            int(self.highest_incarnation[row]) if self._has_derived_seed[row] else -1
        )
        return Incarnation(
            row, incarnation, seed, digest, frozenset(digests - {digest})
        )

    def describe_seed_owner(self, row: int, seed: int) -> str:
        """Return a note about the row or incarnation to which a seed belongs."""
        (others,) = np.nonzero(self.observed[:, SEED] == seed)
        if others.size and row not in others:
            return f"; this is the seed of env {others[0]}"
        if seed in self._seeds[row] and seed != self.observed[row, SEED]:
            return "; this env had this seed before"
        return ""

    # Uncertain states.

    def possible_states(self, row: int) -> list[State]:
        """Return the possible states of a row, starting with the last known one."""
        if row in self._possible_states:
            return list(self._possible_states[row])
        observed = tuple(self.observed[row].tolist())
        state = State(observed, int(self._num_applied[row]), bool(self.has_ended[row]))
        if not self.is_pending[row]:
            return [state]
        actions = dict.fromkeys(
            [int(self.awaited_action[row]), *self._resets.get(row, [])]
        )
        return [state, *(self.state_after(state, action) for action in actions)]

    def state_after(self, state: State, action: int) -> State:
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

    def record_unanswered(self, row: int, action: int) -> None:
        """Record an action that may or may not have been applied."""
        states = self.possible_states(row)
        actions = self._unanswered_actions.setdefault(row, [])
        if self.is_pending[row]:
            actions.append(int(self.awaited_action[row]))
            actions += self._resets.get(row, [])
            self.is_pending[row] = False  # the late result may have arrived
        actions.append(action)
        states += [self.state_after(state, action) for state in states]
        self._possible_states[row] = list(dict.fromkeys(states))
        if len(self._possible_states[row]) > _MAX_STATES:
            raise ValueError(
                f"env {row}: expected some results; too many consecutive actions "
                "remained unanswered"
            )

    def resolve_late(self, row: int, observed: tuple[int, ...]) -> None:
        """Find the unanswered action that leads to this observation."""
        states = self._possible_states.get(row, self.possible_states(row)[:1])
        actions = self._unanswered_actions.get(row, [])
        if self.is_pending[row]:
            actions = [
                int(self.awaited_action[row]),
                *actions,
                *self._resets.get(row, []),
            ]
        for action in actions:
            for state in states:
                if self.state_after(state, action).observed == observed:
                    self.set_state(row, state)
                    self.awaited_action[row], self.is_pending[row] = action, True
                    return

    def uncertain_rows(self, rows: Array) -> Iterator[tuple[int, int]]:
        """Yield the uncertain rows, each with its position in `rows`."""
        if self._possible_states or self._resets:
            for index, row in enumerate(rows.tolist()):
                if row in self._possible_states or row in self._resets:
                    yield index, row

    def is_uncertain(self, row: int) -> bool:
        return row in self._possible_states

    def set_last_seen(self, row: int, state: State) -> None:
        """Set the last known state of a row; the row stays uncertain."""
        self.observed[row] = state.observed
        self._num_applied[row] = state.num_applied
        self.has_ended[row] = state.has_ended

    def set_state(self, row: int, state: State) -> None:
        """Set the state of a row; the row is certain from now on."""
        self.set_last_seen(row, state)
        self.is_pending[row] = False
        self._possible_states.pop(row, None)
        self._unanswered_actions.pop(row, None)
        self._resets.pop(row, None)
