"""How a server is started from here."""

from __future__ import annotations

import sys

__all__ = ["start_command"]


def start_command(*options: str) -> list[str]:
    """Returns the command line of `envserve start` with this interpreter."""
    return [sys.executable, "-m", "envserve.cli", "start", *options]
