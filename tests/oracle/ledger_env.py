"""An env whose observations reveal every wrong transition."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.oracle.env_failures import FailurePlan
from tests.oracle.journal import Array, Journal, Writer

HASH_FACTOR: Final = 6364136223846793005
HASH_TERM: Final = 1442695040888963407


def ledger_hash(previous: int, action: int) -> int:
    """Return the running hash of actions after one more action, as an int64.

    The arithmetic is modulo 2**64, like that of NumPy's int64.
    """
    value = previous * HASH_FACTOR + action + HASH_TERM
    return ((value + 2**63) & (2**64 - 1)) - 2**63


class LedgerEnv(gymnasium.Env[Array, np.int64]):
    """An env whose observations describe the history of its actions.

    The observation is int64 `[4]`: the env's seed, the number of the episode (from 0)
    since the seed was set, the step in the episode, and a running hash of all actions
    since the seed was set. The reward equals the action. Episodes last `length` steps
    and end alternately by termination and truncation.

    The env is given only its seed. `Ledger` derives the row and the incarnation from
    the seed with `env_seed`.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self,
        length: int = 10,
        reset_seconds: float = 0.0,
        render_mode: str | None = None,
        *,
        journal: str | Writer | None = None,
        failures: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Create an env that has not been reset.

        Args:
          length: Number of steps in an episode.
          journal: A folder in which a journal of applied actions is written, or an
          object with the methods of `Journal`.
          failures: Failures, by their name in `FAILURES`, for example `{"kill":
          {"probability": 0.001, "when": "after"}, "hang": {"actions": [999],
          "seconds": 2.0}, "raise": {"steps": [3, 7]}}`. "after" means that the action
          has been applied and written to the journal. Random failures are
          deterministic for a given seed.
        """
        low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        self.observation_space = spaces.Box(low, high, (4,), np.int64)
        self.action_space = spaces.Discrete(1000)
        self.render_mode = render_mode
        self.difficulty = 1
        self._length = length
        self._reset_seconds = reset_seconds
        self._journal = Journal(journal) if isinstance(journal, str) else journal
        self._failures = FailurePlan(failures) if failures else None
        self._seed = -1
        self._episode = 0
        self._step = 0
        self._hash = 0
        self._count = 0  # steps since the seed was set

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Start the next episode or, if there is a seed, a new incarnation."""
        super().reset(seed=seed)
        if self._reset_seconds:
            time.sleep(self._reset_seconds)
        if self._failures is not None:
            self._failures.trigger("reset", self.np_random)
        if seed is not None:
            self._seed, self._episode, self._hash, self._count = seed, 0, 0, 0
        else:
            self._episode += 1
        self._step = 0
        info: dict[str, Any] = {"reset_of_episode": self._episode}
        return self._observation(), info if options is None else info | options

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        value = int(action)
        self._count += 1
        if self._failures is not None:
            self._failures.trigger("before", self.np_random, value, self._count)
        self._step += 1
        self._hash = ledger_hash(self._hash, value)
        if self._journal is not None:
            self._journal.write(self._seed, self._episode, self._step, value)
        if self._failures is not None:
            self._failures.trigger("after", self.np_random, value, self._count)
        is_over = self._step >= self._length
        is_termination = self._episode % 2 == 0
        return (
            self._observation(),
            float(value),
            is_over and is_termination,
            is_over and not is_termination,
            {"step": self._step, "weights": np.full(2, self._step, np.float32)},
        )

    def render(self) -> Any:
        """Return an image uint8 `[2, 3, 3]` whose values are the step."""
        return np.full((2, 3, 3), self._step, np.uint8)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def echo(self, *arguments: Any) -> list[Any]:
        return list(arguments)

    def complain(self, text: str) -> None:
        raise ValueError(text)

    def loaded_modules(self) -> list[str]:
        return sorted(sys.modules)

    def _observation(self) -> Array:
        return np.array([self._seed, self._episode, self._step, self._hash], np.int64)
