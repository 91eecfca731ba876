"""The cases, by what is struck."""

from __future__ import annotations

from typing import Final

from envserve.chaos.cases.cancel import CANCEL
from envserve.chaos.cases.drain import DRAIN
from envserve.chaos.cases.network import NETWORK
from envserve.chaos.cases.servers import PAUSE, SERVER_GONE, SERVER_KILL
from envserve.chaos.cases.soak import SOAK
from envserve.chaos.cases.starts import CRASH_LOOP, SLOW
from envserve.chaos.cases.trainers import TRAINER_KILL, TWO_TRAINERS
from envserve.chaos.cases.workers import HANG, KILL, RAISE
from envserve.chaos.trial import ChaosCase

__all__ = ["CASES"]

#: All cases, in the order of the table.
CASES: Final[tuple[ChaosCase, ...]] = (
    *(KILL, RAISE, HANG, SLOW, CRASH_LOOP),
    *(SERVER_KILL, SERVER_GONE, PAUSE),
    *NETWORK,
    *(TRAINER_KILL, TWO_TRAINERS, CANCEL, DRAIN, SOAK),
)
