"""Simulate sessions over a network, hosts and workers that fail, in virtual time.

    python scripts/simulate_sessions.py                       1 million events
    python scripts/simulate_sessions.py --events 100000000    100 million
    python scripts/simulate_sessions.py --seed 7              one again, with its end

Every failure is a seed: add it to tests/envserve/test_session_simulator.py.
"""

import typer

from envserve.chaos.sessions.many import main

if __name__ == "__main__":
    typer.run(main)
