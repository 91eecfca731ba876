"""Run a benchmark: `python scripts/bench.py step` is `envserve bench step`."""

from envserve.bench.cli import main
from ppo.bench.overlap import overlap
from ppo.bench.profile import profile
from ppo.bench.simulate import simulate
from ppo.bench.train import train

if __name__ == "__main__":
    # Named here as well as by entry points, so that it works without an installation.
    more = {
        command.__name__: command for command in (overlap, profile, simulate, train)
    }
    main(more=more)
