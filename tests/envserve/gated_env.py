"""A ledger that is built, and later reset, only while its gate is open."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium

from tests.oracle.ledger_env import LedgerEnv

GATED = "tests/Gated-v0"


class GatedEnv(LedgerEnv):
    """Waits while a file exists, as a simulator does that takes long to boot."""

    def __init__(self, gate: str, **options: Any) -> None:
        while os.path.exists(gate):
            time.sleep(0.005)
        super().__init__(**options)

    def pid(self) -> int:
        """Returns the worker's process id."""
        return os.getpid()


gymnasium.register(GATED, f"{__name__}:GatedEnv")
