"""Feed every decoder with bytes that nobody should send.

    python scripts/fuzz_decoders.py                       1 million bodies
    python scripts/fuzz_decoders.py --bodies 10000000     10 million
    python scripts/fuzz_decoders.py --seed 7              other ones

Ends with an error at the first body that is neither read nor refused.
"""

import logging
import resource
import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.envserve.fuzzing import fuzz, make_targets


def main(
    bodies: Annotated[int, typer.Option(help="How many, over all decoders.")] = 10**6,
    seed: Annotated[int, typer.Option(help="Of the changes to valid bodies.")] = 0,
) -> None:
    logging.disable(logging.CRITICAL)
    targets = make_targets()
    fuzz(targets, 10_000, seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fuzz(targets, bodies, seed + 1)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    for name, target in targets.items():
        seconds, data = target.slowest
        print(
            f"{name:20} {target.num_refused:9,} refused; slowest "
            f"{1e3 * seconds:6.3f} ms, {len(data)} bytes"
        )
    print(f"{bodies:,} bodies; memory at most {grown / 1024:.1f} MiB more")


if __name__ == "__main__":
    typer.run(main)
