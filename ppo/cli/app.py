"""The `ppo` command.

Exit codes: 0 when done or stopped by SIGINT or SIGTERM, 130 when a second one cut it
short, 1 when a run failed, 2 when what was asked for cannot be done; docs/exit-codes.md
has those of --restartable.
"""

import os
import sys
from collections.abc import Sequence

from envserve.cli.terminal import make_app
from ppo.cli.configs import configs
from ppo.cli.runs import evaluate, export, plot, visualize
from ppo.cli.train import train

__all__ = ["main"]

app = make_app("ppo", "Train and evaluate agents with proximal policy optimisation.")
for _command in (train, evaluate, configs, export, plot, visualize):
    app.command()(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` default to those of the process."""
    # --import finds modules of the working directory too, as `python -m` would; last,
    # so that a file there hides nothing.
    sys.path.append(os.getcwd())
    app(arguments if arguments is None else list(arguments), prog_name="ppo")
