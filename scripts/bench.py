"""Run a benchmark: `python scripts/bench.py step` is `envserve bench step`."""

from envserve.bench.cli import main

if __name__ == "__main__":
    main()
