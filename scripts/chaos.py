"""Make things fail under the oracle's eyes: `scripts/chaos.py kill --scale 0.01`."""

from envserve.chaos.cli import main

if __name__ == "__main__":
    main()
