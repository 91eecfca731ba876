"""Envs that probe (a ledger, an echo, one that fails on demand), and their oracle.

Import this module where the envs are built (`import_modules=["envserve.testing"]`,
or `envserve start --import envserve.testing`): as with every module that offers
envs to Gymnasium, importing it registers them.
"""

from __future__ import annotations

import gymnasium

from envserve.testing.breakdowns import BREAKDOWNS
from envserve.testing.journal import Journal, read_journal
from envserve.testing.ledger import Ledger
from envserve.testing.ledger_env import LedgerEnv, ledger_hash
from envserve.testing.ledger_result import LedgerError
from envserve.testing.probe_envs import SPACES, EchoEnv, FaultyEnv

__all__ = [
    "BREAKDOWNS",
    "SPACES",
    "EchoEnv",
    "FaultyEnv",
    "Journal",
    "Ledger",
    "LedgerEnv",
    "LedgerError",
    "ledger_hash",
    "read_journal",
]

for _name, _class in (
    ("Ledger", LedgerEnv),
    ("Echo", EchoEnv),
    ("Faulty", FaultyEnv),
):
    gymnasium.register(
        f"envserve/{_name}-v0", f"{_class.__module__}:{_class.__qualname__}"
    )
