"""The `ppo` program: its commands, each in the module of its name.

Exit codes: 0 when done or stopped by SIGINT or SIGTERM, 130 when a second signal cut it
short, 1 when a run failed, 2 when the request cannot be carried out; docs/exit-codes.md
has those of --restartable.
"""

import os
import sys
from collections.abc import Sequence

from envserve.cli.program import Program

PROGRAM = Program(
    "ppo",
    "Train and evaluate agents with proximal policy optimisation (PPO).",
    "ppo.cli",
    {"Commands": ("train", "evaluate", "configs", "export", "plot", "visualize")},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of the process."""
    # --import finds modules of the working directory too, as `python -m` would; last,
    # so that no file in it hides another module.
    sys.path.append(os.getcwd())
    PROGRAM.main(arguments)
