"""A program that steps envs of a server, each row checked, until its input ends.

Its arguments: the server's address, and the folder of the envs' journal. It prints a
line when it has begun, and at the end what the ledger has counted.
"""

from __future__ import annotations

import json
import select
import sys
import time

import numpy as np

from envserve.client import BatchEnv
from tests.envserve.ledger_player import SEED, Player
from tests.envserve.server_process import LEDGER

NUM_ENVS = 4
#: Pauses that are worth telling.
PAUSE_SECONDS = 0.2


def main(address: str, journal: str) -> None:
    pauses = []
    with BatchEnv.connect(
        LEDGER, [address], NUM_ENVS, seed=SEED, env_kwargs={"journal": journal}
    ) as batch:
        # No root seed: a new lease skips more incarnations than a ledger looks for.
        player = Player(batch, np.random.default_rng(SEED), root_seed=None)
        print("playing", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            began = time.monotonic()
            player.step(1)
            ended = time.monotonic()
            if ended - began > PAUSE_SECONDS:
                pauses.append((began, ended))
    ledger = player.ledger
    ledger.finish(journal)
    counts = {
        "rows": ledger.num_rows,
        "valid": ledger.num_valid,
        "padding": ledger.num_padding,
        "unseen": ledger.num_unseen,
        "losses": {status.name: count for status, count in ledger.losses.items()},
        "pauses": pauses,  # instants of the monotonic clock, which hosts here share
    }
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
