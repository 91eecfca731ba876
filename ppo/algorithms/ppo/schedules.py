"""Schedules for the coefficients of the update.

Some coefficients decay linearly to 0 over the run. Others adapt to the KL divergence of
each iteration, KL(old || new): when the divergence leaves a band around its target, the
coefficient is multiplied or divided by 1.5.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import tensorflow as tf

from ppo.config.config import Config
from ppo.errors import CallbackError, ConfigError, PpoError
from ppo.user_code import load_user_code, user_code_errors


class Coefficients(NamedTuple):
    """Coefficients of an iteration: Python floats, or float32 scalars in a graph."""

    learning_rate: Any
    clip_range: Any
    entropy: Any
    kl_penalty: Any


@dataclasses.dataclass(kw_only=True, eq=False)
class AdaptiveCoefficient:
    """A positive coefficient that adapts to the KL divergence of each iteration.

    Args:
      initial: Initial value; clipped to the bounds.
      low_kl: KL divergence, in nats, below which the coefficient is divided by
        `factor`.
      high_kl: KL divergence, in nats, above which the coefficient is multiplied by
        `factor`.
      factor: Above 1 if a larger coefficient slows policy changes (a penalty), below
        1 if it accelerates them (a learning rate).
      bounds: Minimum and maximum. The minimum must be positive, because
        multiplication cannot leave 0.
      idle_kl: KL divergence, in nats, below which the coefficient is not divided,
        but left unchanged.

    Attributes:
      variable: float64 variable that holds the coefficient; checkpoints store it.
    """

    initial: float
    low_kl: float
    high_kl: float
    factor: float
    bounds: tuple[float, float]
    idle_kl: float = 0.0

    def __post_init__(self) -> None:
        self.variable = tf.Variable(
            self._clip(self.initial), dtype=tf.float64, trainable=False
        )

    @property
    def value(self) -> float:
        """The coefficient for the next iteration.

        A resumed run may have other bounds than the run that saved the variable.
        """
        return self._clip(float(self.variable))

    def update(self, kl: float) -> None:
        """Adapt the coefficient to the mean KL divergence of an iteration, in nats."""
        if kl > self.high_kl:
            self.variable.assign(self._clip(self.value * self.factor))
        elif self.idle_kl <= kl < self.low_kl:
            self.variable.assign(self._clip(self.value / self.factor))

    def _clip(self, value: float) -> float:
        low, high = self.bounds
        return min(max(value, low), high)


class Schedules:
    """Computes the coefficients of each iteration according to the config.

    Attributes:
      trackables: Maps names to the objects that a checkpoint must store. The names do
        not depend on the config, because a run may be resumed with other settings.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        name = config.learning_rate_schedule
        self._label = f"learning_rate_schedule {name}"
        self._function = None
        if ":" in name:
            self._function = load_user_code("learning_rate_schedule", name)
            # Before training starts, report errors that would occur late in the run.
            for percent in range(100):
                self._custom_factor(percent / 100)
        # The rule is that of batch-ppo. With these bounds, the penalty can return from
        # its minimum to 1 within 18 iterations.
        self._kl_penalty = AdaptiveCoefficient(
            initial=config.initial_kl_penalty,
            low_kl=0.7 * config.kl_target,
            high_kl=1.3 * config.kl_target,
            factor=1.5,
            bounds=(1e-3, 1e6),
        )
        # The rule is that of rl_games, with two changes: the rate does not change if
        # the policy hardly changed, and the rate never exceeds its initial value. Once
        # a task is solved, the KL divergence is small, and increasing the rate would
        # destroy the policy.
        self._kl_learning_rate = AdaptiveCoefficient(
            initial=config.learning_rate,
            low_kl=0.5 * config.kl_target,
            high_kl=2.0 * config.kl_target,
            factor=1.0 / 1.5,
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
          progress: Fraction of the run that is complete, in [0, 1].

        Raises:
          CallbackError: The user's function raised, or returned no valid factor.
        """
        config = self._config
        remaining = 1.0 - progress
        if self._function is not None:
            factor = self._custom_factor(progress, CallbackError)
            rate = config.learning_rate * factor
        else:
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

    def _custom_factor(
        self, progress: float, kind: type[PpoError] = ConfigError
    ) -> float:
        with user_code_errors(self._label, self._function, kind):
            assert self._function is not None
            factor = float(self._function(progress))
            if not 0.0 <= factor < math.inf:
                raise ValueError(
                    f"expected a finite factor >= 0, got {factor} at progress "
                    f"{progress:g}"
                )
        return factor

    def update(self, kl: float) -> None:
        """Adapt the coefficients in use to the mean KL of an iteration, in nats."""
        if self._config.penalizes_kl:
            self._kl_penalty.update(kl)
        if self._config.learning_rate_schedule == "kl_adaptive":
            self._kl_learning_rate.update(kl)
