"""The cases, by what is struck."""

from __future__ import annotations

from typing import Final

from tests.chaos.cases.cancel import CANCEL
from tests.chaos.cases.drain import DRAIN
from tests.chaos.cases.network import NETWORK
from tests.chaos.cases.servers import PAUSE, SERVER_GONE, SERVER_KILL
from tests.chaos.cases.soak import SOAK
from tests.chaos.cases.starts import CRASH_LOOP, SLOW
from tests.chaos.cases.trainers import TRAINER_KILL, TWO_TRAINERS
from tests.chaos.cases.workers import HANG, KILL, RAISE
from tests.chaos.trial import ChaosCase

#: All cases, in the order of the table.
CASES: Final[tuple[ChaosCase, ...]] = (
    *(KILL, RAISE, HANG, SLOW, CRASH_LOOP),
    *(SERVER_KILL, SERVER_GONE, PAUSE),
    *NETWORK,
    *(TRAINER_KILL, TWO_TRAINERS, CANCEL, DRAIN, SOAK),
)
