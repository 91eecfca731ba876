"""Run a benchmark beside other projects: `python scripts/bench.py step`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Within, since the processes of the cases load this file as well.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.cli import main

    main()
