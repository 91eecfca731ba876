"""Simulate sessions in virtual time, with failures of the network, hosts and workers.

    python scripts/simulate_sessions.py                       1 million events
    python scripts/simulate_sessions.py --events 100000000    100 million
    python scripts/simulate_sessions.py --seed 7              repeat seed 7 only

If a simulation fails, the script prints its seed; add the seed to
tests/simulation/test_simulation.py.
"""

import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.simulation.cli import main

if __name__ == "__main__":
    typer.run(main)
