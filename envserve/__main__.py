"""The `envserve` program.

Containers run `envserve health` every few seconds. This module runs simple health
checks itself, because importing the other commands and their option parser would take
longer than the check.
"""

from __future__ import annotations

import contextlib
import getopt
import os
import sys
from typing import Any


def main() -> None:
    """Run the command in `sys.argv`."""
    try:
        if sys.argv[1:2] == ["health"]:
            _run_health_probe(sys.argv[2:])
        if sys.argv[1:2] == ["bench"]:
            # Run Python with -P, so that multiprocessing's child processes do not
            # import modules from the working directory.
            from envserve.python_process import restart_with_safe_path

            restart_with_safe_path("envserve.__main__")
        from envserve.cli.app import main as run

        run()
    except KeyboardInterrupt:  # Ctrl-C during the imports
        sys.exit(130)


def _run_health_probe(arguments: list[str]) -> None:
    """Run a simple health check and exit; return if it needs the option parser."""
    from envserve.monitoring.health_probe import probe

    options = probe.__kwdefaults__ or {}
    flags = [name if value is False else f"{name}=" for name, value in options.items()]
    try:
        parsed, (address,) = getopt.gnu_getopt(arguments, "", flags)
        values: dict[str, Any] = {
            flag[2:]: options[flag[2:]] is False or float(text) for flag, text in parsed
        }
    except (getopt.GetoptError, ValueError):
        return  # `envserve.cli.app` prints the error, or the help
    if values.get("timeout", 1.0) > 0:
        code, text = probe(address, **values)
        if code:
            from envserve.cli.terminal import show_error

            show_error(text)
        else:
            with contextlib.suppress(OSError):  # stdout may be closed; exit anyway
                os.write(1, f"{text}\n".encode())
        sys.exit(code)


if __name__ == "__main__":
    main()
