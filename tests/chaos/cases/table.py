"""The table of all cases."""

from __future__ import annotations

from typing import Final

from tests.chaos.cases import cancel, elastic, network, servers, soak, trainers, workers
from tests.chaos.trial import ChaosCase

#: All cases, in the order of the table.
CASES: Final[tuple[ChaosCase, ...]] = (
    *(workers.kill, workers.raise_, workers.hang, workers.slow, workers.crash_loop),
    workers.spoiled,
    *(servers.server_kill, servers.server_gone, servers.pause, elastic.elastic),
    *network.NETWORK,
    *(trainers.trainer_kill, trainers.two_trainers),
    *(cancel.cancel, servers.drain, soak.soak),
)
