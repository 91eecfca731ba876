"""Entry point of the `ppo` command."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from ppo.cli.app import main as run

        run()
    except KeyboardInterrupt:  # Ctrl-C during the imports; later, `run` handles it
        sys.exit(130)


if __name__ == "__main__":
    main()
