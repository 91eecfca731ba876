"""The settings of a training run."""

from ppo.config.config import Config

__all__ = ["Config"]
