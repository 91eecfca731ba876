"""A linear model of what a batch step costs the trainer, and predictions from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from benchmarks.scaling.measure import Point

Clock = Literal["thread", "process"]
#: Cores and envs of a host in the planning table.
CORES: Final = 16
ENVS_PER_CORE: Final = 4


class Model(NamedTuple):
    """Costs of a batch step in microseconds.

    Attributes:
      split: Cost of each split.
      server: Cost of each server, per split.
      env: Cost of each env.
      kilobyte: Cost of 1,000 bytes of observations.
    """

    split: float
    server: float
    env: float
    kilobyte: float

    def predict(self, point: Point) -> float:
        """Return the predicted microseconds of a batch step."""
        return float(_terms(point) @ np.array(self))


class Plan(NamedTuple):
    """The capacity of one trainer.

    Attributes:
      hosts: Number of hosts, with `CORES` cores each, that keep the trainer busy.
      steps: Env steps per second with these hosts.
      gbit: Observations in Gbit per second.
    """

    hosts: int
    steps: float
    gbit: float


def fit(points: Sequence[Point], clock: Clock) -> Model:
    """Return the model with the smallest sum of squared relative errors.

    Coefficients that would be negative, because of noise, are 0.
    """
    measured = np.array([getattr(point, clock) for point in points])
    terms = np.array([_terms(point) for point in points]) / measured[:, None]
    used = np.full(4, True)
    while True:
        solution = np.zeros(4)
        found = np.linalg.lstsq(terms[:, used], np.ones(len(points)), rcond=None)
        solution[used] = found[0]
        if (solution[used] > 0).all():
            break
        used &= solution > 0
    return Model(*solution.tolist())


def errors(model: Model, points: Sequence[Point], clock: Clock) -> list[float]:
    """Return the relative error of each prediction."""
    return [model.predict(p) / getattr(p, clock) - 1.0 for p in points]


def slowdown(points: Sequence[Point], model: Model) -> float:
    """Return the median ratio of measured to predicted time of the stepping thread."""
    return statistics.median(point.thread / model.predict(point) for point in points)


def plan(
    model: Model,
    env_us: float,
    size: int,
    *,
    slowdown: float = 1.0,
    round_trip_us: float = 200.0,
) -> Plan:
    """Compute how many hosts keep a trainer with two splits busy.

    While the hosts step one split, the trainer handles the other. With the returned
    number of hosts, the hosts take longer than the trainer; with one more, they do not.

    Args:
      model: Model of the stepping thread.
      env_us: Microseconds of an env step on one core.
      size: Size of an observation in bytes.
      slowdown: Factor by which the model's times are multiplied.
      round_trip_us: Round-trip time of the network in microseconds.
    """
    envs = CORES * ENVS_PER_CORE
    # Each worker steps its part of a split. A batch step consists of both splits.
    waiting = env_us * ENVS_PER_CORE + 2 * round_trip_us

    def handling(hosts: int) -> float:
        return slowdown * model.predict(Point(hosts, envs, size, splits=2))

    each = handling(2) - handling(1)
    hosts = max(1, math.floor((waiting - handling(0)) / each))
    steps = hosts * envs / max(waiting, handling(hosts)) * 1e6
    return Plan(hosts, steps, steps * size * 8 / 1e9)


def _terms(point: Point) -> np.ndarray:
    return np.array(
        [
            point.splits,
            point.splits * point.servers,
            point.num_envs,
            point.num_envs * point.size / 1000,
        ],
        float,
    )
