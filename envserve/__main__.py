"""The `envserve` program.

A container's health is asked every 2 s: `envserve health` loads neither other commands
nor what reads their options, which would cost more than the question.
"""

from __future__ import annotations

import getopt
import sys
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Runs the command that the arguments name."""
    try:
        if sys.argv[1:2] == ["health"]:
            _ask_health(sys.argv[2:])
        from envserve.cli.app import main as run

        run()
    except KeyboardInterrupt:  # while it was still loading
        sys.exit(130)


def _ask_health(words: list[str]) -> None:
    """Ends the process with an answer, if that is what the words plainly ask for."""
    from envserve.monitoring.health_probe import probe

    options = probe.__kwdefaults__ or {}
    flags = [name if value is False else f"{name}=" for name, value in options.items()]
    try:
        found, (address,) = getopt.gnu_getopt(words, "", flags)
        given: dict[str, Any] = {
            name[2:]: float(value) if value else True for name, value in found
        }
    except (getopt.GetoptError, ValueError):
        return  # `envserve.cli.app` says what is wrong, or shows the help
    if given.get("timeout", 1.0) > 0:
        code, text = probe(address, **given)
        if code:
            from envserve.cli.terminal import show_error

            show_error(text)
        else:
            print(text)
        sys.exit(code)


if __name__ == "__main__":
    main()
