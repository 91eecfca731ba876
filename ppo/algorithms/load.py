"""Load the algorithm that a config names: a built-in one, or a user's class."""

from typing import Any

import gymnasium

from ppo.agent.agent import Agent
from ppo.algorithms.algorithm import Algorithm
from ppo.config.config import Config
from ppo.errors import ConfigError
from ppo.user_code import load_user_code, source_location


def load_algorithm(config: Config) -> type[Algorithm]:
    """Return the class of the algorithm that a config names.

    Raises:
      ConfigError: The class does not exist, or is not an `Algorithm`.
    """
    if config.algorithm == "ppo":
        from ppo.algorithms.ppo.ppo import PPO

        return PPO
    if config.algorithm == "sac":
        from ppo.algorithms.sac.sac import SAC

        return SAC
    found: Any = load_user_code("algorithm", config.algorithm)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(
            f"algorithm {config.algorithm}: {source_location(found)}expected a "
            f"subclass of ppo.algorithms.algorithm.Algorithm, got {found!r}."
        )
    if missing := found.__abstractmethods__:
        raise ConfigError(
            f"algorithm {config.algorithm}: {source_location(found)}expected a class "
            f"with the method {', '.join(missing)}, found none."
        )
    return found


def make_agent(
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    config: Config,
) -> Agent:
    """Return a new agent of the config's algorithm for the spaces of one env.

    Raises:
      ConfigError: The algorithm or a custom network cannot be loaded.
      UnsupportedSpaceError: The algorithm does not support a space.
    """
    return load_algorithm(config).make_agent(observation_space, action_space, config)
