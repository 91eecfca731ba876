"""The coefficients of an update, and how they change from one iteration to the next.

Some fall linearly to 0 over the run. Others follow how far the policy moves: each is
multiplied or divided by 1.5 when the divergence of an iteration, KL(old || new), is not
in a band around its target.
"""

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from ppo.config.config import Config


class Coefficients(NamedTuple):
    """What holds for one iteration: Python floats, or float32 scalars in a graph."""

    learning_rate: Any
    clip_range: Any
    entropy: Any
    kl_penalty: Any


@dataclasses.dataclass(kw_only=True, eq=False)
class AdaptiveCoefficient:
    """A positive number that follows the divergence, in a checkpointed variable.

    Args:
        initial: where it starts; moved into the bounds.
        low_kl: below this divergence, in nats, it is divided by `step`.
        high_kl: above this divergence it is multiplied by `step`.
        step: above 1 for what holds the policy back, below 1 for what drives it.
        bounds: least and greatest value. The least is above 0: from 0, no
            multiplication leads back.
        idle_kl: below this divergence it stays as it is.

    Attributes:
        variable: what a checkpoint must hold, float64.
    """

    initial: float
    low_kl: float
    high_kl: float
    step: float
    bounds: tuple[float, float]
    idle_kl: float = 0.0

    def __post_init__(self) -> None:
        self.variable = tf.Variable(
            self._bounded(self.initial), dtype=tf.float64, trainable=False
        )

    @property
    def value(self) -> float:
        """The coefficient for the next iteration."""
        return float(self.variable)

    def update(self, kl: float) -> None:
        """Take in the divergence of an iteration, in nats per valid row."""
        if kl > self.high_kl:
            self.variable.assign(self._bounded(self.value * self.step))
        elif self.idle_kl <= kl < self.low_kl:
            self.variable.assign(self._bounded(self.value / self.step))

    def _bounded(self, value: float) -> float:
        low, high = self.bounds
        return min(max(value, low), high)


class Schedules:
    """Gives the coefficients of each iteration, as the config wants them.

    Attributes:
        trackables: Objects that a checkpoint must store, by name. They do not depend on
            the config, because a run may be resumed with other settings.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        # The rule of batch-ppo. From its least value the penalty is back at 1 within
        # 18 iterations.
        self._kl_penalty = AdaptiveCoefficient(
            initial=config.initial_kl_penalty,
            low_kl=0.7 * config.kl_target,
            high_kl=1.3 * config.kl_target,
            step=1.5,
            bounds=(1e-3, 1e6),
        )
        # The rule of rl_games, but: where nothing moved there is nothing to adapt to,
        # and what a rate leaps to while a task is solved would undo that.
        self._kl_learning_rate = AdaptiveCoefficient(
            initial=config.learning_rate,
            low_kl=0.5 * config.kl_target,
            high_kl=2.0 * config.kl_target,
            step=1.0 / 1.5,
            bounds=(min(1e-6, config.learning_rate), config.learning_rate),
            idle_kl=1e-4,
        )
        self.trackables = {
            "kl_penalty": self._kl_penalty.variable,
            "kl_learning_rate": self._kl_learning_rate.variable,
        }

    def at(self, progress: float) -> Coefficients:
        """Return the coefficients of the next iteration.

        Args:
            progress: share of the training that is over, in [0, 1].
        """
        config = self._config
        remaining = 1.0 - progress
        rate = {
            "constant": config.learning_rate,
            "linear": config.learning_rate * remaining,
            "kl_adaptive": self._kl_learning_rate.value,
        }[config.learning_rate_schedule]
        clip_share = remaining if config.decay_clip_range else 1.0
        entropy_share = remaining if config.decay_entropy_coefficient else 1.0
        return Coefficients(
            learning_rate=rate,
            clip_range=config.clip_range * clip_share,
            entropy=config.entropy_coefficient * entropy_share,
            kl_penalty=self._kl_penalty.value,
        )

    def update(self, kl: float) -> None:
        """Adapt what is in use to the divergence of an iteration, in nats per row."""
        if self._config.penalizes_kl:
            self._kl_penalty.update(kl)
        if self._config.learning_rate_schedule == "kl_adaptive":
            self._kl_learning_rate.update(kl)
