"""The oracle: what was asked of which episode, what envs did, and which ones were lost.

An episode has a number of its own; an observation is that number, the step, and a hash
of all actions applied so far; a reward repeats the action; an action is used only once.
So a result shows by itself what it belongs to.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from gymnasium import spaces

from envserve.spec import EnvSpec

__all__ = [
    "SPEC",
    "Episode",
    "Ledger",
    "Observation",
    "Violation",
    "apply",
    "endings",
    "first_observation",
]

_MASK: Final = (1 << 62) - 1
_FACTOR: Final = 6364136223846793005
#: Actions are rewards too, which are exact below this.
_NUM_ACTIONS: Final = 1 << 53
#: Of so many steps, one terminates an episode, and one truncates it.
_STEPS_PER_ENDING: Final = 13

SPEC: Final = EnvSpec(
    "Simulated-v0",
    spaces.Box(0, 1 << 62, (3,), np.int64),
    spaces.Discrete(_NUM_ACTIONS),
)

#: Number of the episode, step, hash of all actions.
Observation = list[int]


class Violation(Exception):
    """Something has happened that never may, whatever fails."""


class Episode(NamedTuple):
    """Where an episode takes place.

    Attributes:
      pool: Number of the pool; every lease has another.
      seed: Root seed of the lease, by which its client is known.
      row: Row of the lease.
    """

    pool: int
    seed: int
    row: int


def first_observation(episode: int) -> Observation:
    """Returns what a reset gives."""
    return [episode, 0, episode * _FACTOR & _MASK]


def apply(observation: Observation, action: int) -> Observation:
    """Returns the observation after an action."""
    episode, step, value = observation
    return [episode, step + 1, ((value ^ action) * _FACTOR + action) & _MASK]


def endings(observation: Observation) -> tuple[bool, bool]:
    """Returns whether an episode terminates, and whether it is truncated, here."""
    rest = (observation[2] >> 16) % _STEPS_PER_ENDING
    return rest == 0, rest == 1


class Ledger:
    """Everything that was asked and done in one simulation.

    Attributes:
      num_executed: How many steps of rows were executed.
      num_lost: How many episodes were lost.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.num_executed = 0
        self.num_lost = 0
        self._last_action = 0
        self._asked: dict[int, Observation] = {}
        self._episodes: list[Episode] = []
        self._lost: set[int] = set()
        self._ended_pools: set[int] = set()
        self._incarnations: set[tuple[int, int, int]] = set()
        self._calls: set[int] = set()

    # What callers ask.

    def new_action(self, observation: Observation) -> int:
        """Returns an action that was never used, for the state that a caller sees."""
        self._last_action += 1
        self._asked[self._last_action] = observation
        return self._last_action

    def new_call(self) -> int:
        """Returns an argument that no other call has."""
        self._last_action += 1
        self._calls.add(self._last_action)
        return self._last_action

    # What envs do.

    def note_step(self, observation: Observation, action: int) -> None:
        """Notes that an env executes an action in this state."""
        asked = self._asked.pop(action, None)
        if asked is None:
            raise Violation(f"action {action} was executed twice, or never asked for")
        if asked != observation:
            raise Violation(
                f"action {action} was executed in {self.place(observation)}, and was "
                f"meant for {self.place(asked)}"
            )
        self.num_executed += 1

    def note_call(self, argument: int) -> None:
        """Notes that an env executes a call."""
        if argument not in self._calls:
            raise Violation(f"call {argument} was executed twice, or never asked for")
        self._calls.remove(argument)

    def new_episode(self, pool: int, seed: int, row: int) -> int:
        """Returns the number of an episode that begins."""
        self._episodes.append(Episode(pool, seed, row))
        return len(self._episodes)

    def note_incarnation(self, seed: int, row: int, incarnation: int) -> None:
        """Notes that an env is used that was seeded for this incarnation."""
        key = (seed, row, incarnation)
        if key in self._incarnations:
            raise Violation(f"row {row} was built twice with the seed of {incarnation}")
        self._incarnations.add(key)

    def lose(self, episode: int) -> None:
        """Notes that an episode was lost."""
        if episode not in self._lost:
            self.num_lost += 1
            self._lost.add(episode)

    def end_pool(self, pool: int) -> None:
        """Notes that the envs of a pool are gone."""
        self._ended_pools.add(pool)

    # What results are compared with.

    def episode(self, number: int) -> Episode:
        """Returns where an episode takes place."""
        if not 1 <= number <= len(self._episodes):
            raise Violation(f"there is no episode {number}")
        return self._episodes[number - 1]

    def is_lost(self, episode: int) -> bool:
        """Tells whether an episode was lost."""
        return episode in self._lost

    def is_over(self, episode: int) -> bool:
        """Tells whether the envs are gone that an episode took place in."""
        return self.episode(episode).pool in self._ended_pools

    def place(self, observation: Observation) -> str:
        """Says where an observation is from."""
        number, step, _ = observation
        pool, _, row = self.episode(number)
        return f"step {step} of episode {number} (pool {pool}, row {row})"
