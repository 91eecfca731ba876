"""A trainer to be killed: `python -m envserve.chaos.trainer ADDRESS NUM_ENVS SEED`.

It steps ledgers in workers of its own and at a server, has every row checked, says
"stepping" once it does, and goes on until it is killed. A wrong row ends it with 1.
"""

from __future__ import annotations

import sys

import numpy as np

from envserve.chaos.envs import LEDGER, MODULE
from envserve.chaos.plant import Plant
from envserve.client import BatchEnv
from envserve.testing import Ledger, LedgerError

__all__ = ["main"]

_NUM_WORKERS = 2


def main(address: str, num_envs: int, seed: int, is_planted: bool = False) -> None:
    """Steps for ever.

    Raises:
      LedgerError: A row was wrong.
    """
    random = np.random.default_rng(seed)
    plant = Plant(after_faults=0) if is_planted else None
    with (
        BatchEnv.local(
            LEDGER, num_envs, _NUM_WORKERS, seed=seed, import_modules=[MODULE]
        ) as local,
        BatchEnv.connect(LEDGER, [address], num_envs, seed=seed) as remote,
    ):
        pairs = [(batch, Ledger(num_envs, seed)) for batch in (local, remote)]
        for batch, ledger in pairs:
            ledger.reset(batch.reset())
        num_steps = 0
        while True:
            for batch, ledger in pairs:
                actions = random.integers(0, 900, num_envs)
                result = batch.step(actions)
                ledger.step(
                    actions, result if plant is None else plant.spoil(result, 0)
                )
            num_steps += 1
            if num_steps == 10:
                print("stepping", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "plant" in sys.argv)
    except LedgerError as error:
        print(f"wrong: {error}", flush=True)
        sys.exit(1)
