"""The `ppo` program; each command is in the module of the same name.

Exit codes: 0 after success, or if a signal stopped training; 130 after an interrupt at
any other time, or a second one; 1 if a run failed; 2 for invalid input. With `ppo train
--restartable`, the exit code is 3 if a signal stopped the run or its env servers were
lost. "Exit codes" in the docs lists all cases.
"""

from collections.abc import Sequence

from envserve.cli.program import Program

PROGRAM = Program(
    "ppo",
    "Train and evaluate agents with PPO, SAC or an algorithm of your own.",
    "ppo.cli",
    {"Commands": ("train", "evaluate", "configs", "export", "plot", "visualize")},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line; by default, the arguments of the process."""
    PROGRAM.main(arguments)
