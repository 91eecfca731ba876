"""The base class of all algorithms.

An algorithm creates an agent from spaces and settings, and trains it on rollouts. The
training loop, checkpoints, metrics, evaluations, videos and exports work with any
algorithm.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, get_origin, get_type_hints

import gymnasium
import msgspec

from ppo.agent.agent import Agent
from ppo.config.config import Config, suggest_setting
from ppo.config.named_configs import parse_value
from ppo.errors import ConfigError
from ppo.learners import SINGLE_LEARNER, Learners
from ppo.rollout import Rollout

__all__ = ["Algorithm"]


class Algorithm(abc.ABC):
    """Base class of algorithms; subclasses implement `learn`.

    Args:
      agent: The agent to train, from `make_agent`.
      config: The settings of the run. With several learners, `num_envs` and
        `minibatch_size` are this learner's share.
      learners: The group of learners.

    Attributes:
      agent: The agent to train.
      config: The settings of the run.
      learners: The group of learners.
      settings: The algorithm-specific settings, an instance of `settings_type`.
      trackables: Maps names to the objects that a checkpoint must store in addition
        to the agent: optimizers, Keras models, variables or `tf.train.Checkpoint`s.
    """

    settings_type: ClassVar[type[Any] | None] = None
    """Dataclass of the algorithm-specific settings. All fields must have defaults, and
    must be annotated with `int`, `float`, `bool`, `str` or tuples of these, or with one
    of these or None, so that JSON values can be converted to them."""

    supports_several_learners: ClassVar[bool] = False
    """Whether `learn` averages its gradients over `learners`."""

    def __init__(
        self, agent: Agent, config: Config, learners: Learners = SINGLE_LEARNER
    ) -> None:
        self.agent, self.config, self.learners = agent, config, learners
        self.settings: Any = self.read_settings(config)
        self.trackables: dict[str, Any] = {}

    @classmethod
    def check(cls, config: Config) -> None:
        """Check a config before the envs start.

        Raises:
          ConfigError: A setting is unknown or invalid.
        """
        cls.read_settings(config)

    @classmethod
    def make_agent(
        cls,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        config: Config,
    ) -> Agent:
        """Return a new agent for the spaces of one env.

        Evaluations, videos and exports also call this method, and then load the agent's
        `trackables` from a checkpoint.

        Raises:
          UnsupportedSpaceError: The algorithm does not support a space.
        """
        return Agent(observation_space, action_space, config)

    @abc.abstractmethod
    def learn(
        self, rollout: Rollout, *, progress: float, seed: tuple[int, int]
    ) -> Mapping[str, float]:
        """Train the agent on a rollout.

        Args:
          rollout: A rollout. At least one row of all learners' rollouts is valid.
            Rows that are not `valid` must not be used. The next rollouts overwrite
            the arrays, so copy rows that must be kept. Rewards may be changed in
            place, but observations must not, because the next rollout begins with
            the last ones.
          progress: Fraction of the run that is complete, in [0, 1).
          seed: Seed for random numbers; it differs in every iteration.

        Returns:
          A dict from metric names to numbers.

        Raises:
          DivergedError: A loss or a gradient is not finite. The run then ends without
            another checkpoint.
        """

    def statistics(self) -> dict[str, float]:
        """Return metrics of the current state; called after each iteration.

        If a row of metrics covers several iterations, it contains the latest values of
        these metrics, not their means.
        """
        return self.agent.preprocess.statistics()

    def save_data(self, folder: Path) -> None:  # noqa: B027
        """Save data that is too large for every checkpoint, such as a replay buffer.

        Called before each checkpoint is written. A run can be killed before this
        checkpoint is complete, so the data of the preceding checkpoint must not be
        overwritten. With several learners, only learner 0 saves and loads data. By
        default, save nothing.

        Args:
          folder: Folder in the run folder for these data; it may not exist yet.

        Raises:
          OSError: The data cannot be written.
        """

    def load_data(self, folder: Path, steps: int) -> None:  # noqa: B027
        """Load data that `save_data` saved, after a checkpoint has been restored.

        Called whenever a run is resumed. By default, load nothing.

        Args:
          folder: Folder that `save_data` used; it may not exist.
          steps: Env steps of the run until the checkpoint. The folder may contain
            data of later steps, which the resumed run repeats.

        Raises:
          CheckpointError: The data cannot be read.
        """

    @classmethod
    def read_settings(cls, config: Config) -> Any:
        """Return the algorithm-specific settings; None without a `settings_type`.

        Raises:
          ConfigError: A setting is unknown or invalid.
        """
        table, kind = dict(config.algorithm_settings), cls.settings_type
        if kind and not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise ConfigError(
                f"algorithm {config.algorithm}: expected a dataclass as settings_type, "
                f"got {kind!r}."
            )
        known = [field.name for field in dataclasses.fields(kind)] if kind else []
        if shared := [name for name in known if name in vars(config)]:
            raise ConfigError(
                f"algorithm {config.algorithm}: expected a settings_type without the "
                f"names of other settings, got {', '.join(shared)}; rename them, or "
                "use those of config."
            )
        for name in table:
            if name in vars(config):
                raise ConfigError(
                    f"{name} is a setting of all algorithms or of ppo; write it "
                    "outside of algorithm_settings."
                )
            if name not in known:
                nearest = suggest_setting(name, [*known, *vars(config)])
                raise ConfigError(
                    f"unknown key {name!r}.{nearest} The settings of "
                    f"{config.algorithm} are: {', '.join(known) or 'none'}."
                )
        hints = get_type_hints(kind) if kind else {}
        for name, value in table.items():
            if isinstance(value, str):
                table[name] = _parse_text(name, value, hints[name])
            elif get_origin(hints[name]) in (tuple, list) and not isinstance(
                value, list
            ):
                table[name] = [value]
        try:
            return kind and msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"Invalid setting of {config.algorithm}: {error}; got {table}."
            ) from error


def _parse_text(name: str, text: str, hint: Any) -> Any:
    """Parse the text of a setting, for example from `--set`, by its annotated type."""
    guess = parse_value(name, text, None)
    candidates = [guess, parse_value(name, text, list), text]
    if not text.startswith("["):  # a list of texts that may look like numbers
        words = map(str.strip, text.strip("()").split(","))
        candidates.append([word for word in words if word])
    if text == "null":
        candidates.insert(0, None)
    for value in candidates:
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert(value, hint)
            return value
    return guess
