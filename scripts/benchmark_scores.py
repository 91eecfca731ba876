"""Train the named configs on several seeds, beside published scores.

    python scripts/benchmark_scores.py                       all that is missing: hours
    python scripts/benchmark_scores.py cheetah-1M --seeds 1  one run
    python scripts/benchmark_scores.py --document docs/scores.md

Runs that have ended are kept in runs/scores/ and are not run again.
"""

import typer

from ppo.scores.many import main

if __name__ == "__main__":
    typer.run(main)
