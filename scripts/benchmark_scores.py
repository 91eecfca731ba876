"""Train the named configs on several seeds, beside published scores.

    python scripts/benchmark_scores.py                       all that is missing: hours
    python scripts/benchmark_scores.py cheetah-1M --seeds 1  one run
    python scripts/benchmark_scores.py --document docs/scores.md
    python scripts/benchmark_scores.py --no-train --document docs/scores.md

Runs that have ended are kept in runs/scores/ and are not run again: remove a folder
there to have it run with the settings of today.
"""

import sys
from pathlib import Path

import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.scores.many import main

    typer.run(main)
