"""Run a benchmark of envserve and other projects: `python scripts/bench.py step`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Import here, because the processes of the cases also load this file, but need
    # none of these modules.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.cli import main
    from envserve.python_process import restart_with_safe_path

    restart_with_safe_path("benchmarks.cli")
    main()
