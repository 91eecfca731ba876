"""Ledgers that are slow to reset, or cannot be built while a file says so.

Import this module where the envs are built; importing it registers them.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

import gymnasium

from tests.oracle.ledger_env import LedgerEnv

MODULE: Final = __name__
LEDGER: Final = "envserve/ChaosLedger-v0"


class ChaosLedgerEnv(LedgerEnv):
    """A ledger with two more ways to make life hard."""

    def __init__(
        self,
        *,
        most_reset_seconds: float = 0.0,
        broken_by: str | None = None,
        **options: Any,
    ) -> None:
        """Opens the books.

        Args:
          most_reset_seconds: A reset takes a time between 0 and this, which is drawn.
          broken_by: A file; while it is there, the env cannot be built, and when that
            was tried is appended to it.
          options: As for `LedgerEnv`.

        Raises:
          RuntimeError: The file is there.
        """
        super().__init__(**options)
        self._most_reset_seconds = most_reset_seconds
        if broken_by is not None and os.path.exists(broken_by):
            with open(broken_by, "a") as file:
                file.write(f"{time.monotonic()}\n")
            raise RuntimeError("the simulator's licence has expired")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        result = super().reset(seed=seed, options=options)
        if self._most_reset_seconds:
            time.sleep(self.np_random.uniform(0.0, self._most_reset_seconds))
        return result


gymnasium.register(LEDGER, f"{MODULE}:{ChaosLedgerEnv.__qualname__}")
