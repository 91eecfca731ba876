"""The `envserve` program: its commands, grouped by heading of the help."""

from __future__ import annotations

from envserve.cli.program import Program

PROGRAM = Program(
    "envserve",
    "Serve Gymnasium environments to reinforcement learning trainers.",
    "envserve.cli",
    {
        "Try it": ("demo",),
        "Serve envs": ("start", "drain"),
        "Inspect servers": (
            *("status", "top", "page", "health", "doctor", "envs", "check"),
        ),
        "Develop envs": ("describe", "bench", "replay"),
        "Manage keys": ("invite", "join", "clients", "keys make", "keys new"),
    },
)


def main() -> None:
    """Run the command in `sys.argv`."""
    PROGRAM.main()
