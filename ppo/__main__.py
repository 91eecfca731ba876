"""The `ppo` program."""

import sys


def main() -> None:
    """Run the command that the arguments name."""
    try:
        from ppo.cli.app import main as run

        run()
    except KeyboardInterrupt:  # while it was still loading
        sys.exit(130)


if __name__ == "__main__":
    main()
