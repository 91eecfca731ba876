"""A trainer that tests kill: `python -m tests.chaos.trainer ADDRESS NUM_ENVS SEED`.

It steps ledger envs in local workers and on a server, verifies every row, and prints
"stepping" once it is running. If a row is wrong, it exits with code 1.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

from envserve.client import BatchEnv
from tests.chaos.batches import LEDGER
from tests.chaos.driver import Driver
from tests.chaos.trial import RowCorruption, Trial
from tests.oracle.ledger import Ledger
from tests.oracle.probe_envs import MODULE
from tests.oracle.result import LedgerError

_NUM_WORKERS = 2


def main(address: str, num_envs: int, seed: int, corrupts: bool = False) -> None:
    """Step forever; raise LedgerError if a row is wrong."""
    corruption = RowCorruption(after_faults=0) if corrupts else None
    trial = Trial(
        "trainer",
        seed=seed,
        scale=1,
        seconds=math.inf,
        folder=Path(),
        corruption=corruption,
    )
    with (
        BatchEnv.local(
            LEDGER, num_envs, _NUM_WORKERS, seed=seed, import_modules=[MODULE]
        ) as local,
        BatchEnv.connect(LEDGER, [address], num_envs, seed=seed) as remote,
    ):
        drivers = [Driver(trial, b, Ledger(num_envs, seed)) for b in (local, remote)]
        for num_steps in itertools.count(1):
            for driver in drivers:
                driver.step()
            if num_steps == 10:
                print("stepping", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "corruption" in sys.argv)
    except LedgerError as error:
        print(f"wrong: {error}", flush=True)
        sys.exit(1)
