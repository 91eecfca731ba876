"""Inject faults and verify every row: `scripts/chaos.py kill --scale 0.01`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chaos.cli import main

if __name__ == "__main__":
    main()
