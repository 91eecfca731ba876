"""Train the named configs on several seeds, and compare them with published scores.

    python scripts/benchmark_scores.py                       all missing runs (hours)
    python scripts/benchmark_scores.py cheetah-1M --seeds 1  one run
    python scripts/benchmark_scores.py --document docs/scores.md
    python scripts/benchmark_scores.py --no-train --document docs/scores.md

Finished runs are kept in runs/scores/ and are not repeated. To repeat a run with the
current settings, remove its folder there.
"""

import sys
from pathlib import Path

import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.scores.command import main

    typer.run(main)
