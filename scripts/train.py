"""Train an agent: `python scripts/train.py cartpole` is `ppo train cartpole`."""

import sys

from ppo.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
