"""What a batch step costs its trainer, as a sum, and what follows from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from benchmarks.scaling.measure import Point

Clock = Literal["thread", "process"]
#: A host of the planning table.
CORES: Final = 16
ENVS_PER_CORE: Final = 4


class Model(NamedTuple):
    """Microseconds per batch step; a split is a step of its part of the batch.

    Attributes:
      split: Of each split.
      server: Of each server and split.
      env: Of each env.
      kilobyte: Of each 1000 bytes of observations.
    """

    split: float
    server: float
    env: float
    kilobyte: float

    def predict(self, point: Point) -> float:
        """Returns the microseconds of a batch step."""
        return float(_terms(point) @ np.array(self))


class Plan(NamedTuple):
    """How far one trainer goes.

    Attributes:
      hosts: Of `CORES` cores each, of whose envs it can keep up with.
      steps: Env steps per second with so many.
      gbit: Of observations per second, in Gbit.
    """

    hosts: int
    steps: float
    gbit: float


def fit(points: Sequence[Point], clock: Clock) -> Model:
    """Returns the model whose relative errors have the least sum of squares.

    What would come out below zero, by noise, is zero.
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
    """Returns by which part of what was measured each prediction is off."""
    return [model.predict(p) / getattr(p, clock) - 1.0 for p in points]


def slowdown(points: Sequence[Point], model: Model) -> float:
    """Returns how many times as long real servers take the thread, the median."""
    return statistics.median(point.thread / model.predict(point) for point in points)


def plan(
    model: Model,
    env_us: float,
    size: int,
    *,
    slowdown: float = 1.0,
    round_trip_us: float = 200.0,
) -> Plan:
    """Returns how many hosts keep one trainer busy, which steps two splits in turns.

    While one split is stepped by the hosts, the trainer handles the other. It is idle
    as long as the hosts take longer, and with one host more they never do.

    Args:
      model: Of the thread that steps.
      env_us: What a step of one env takes on one core.
      size: Bytes of an observation.
      slowdown: How many times as long as the model says it takes.
      round_trip_us: Of the network.
    """
    envs = CORES * ENVS_PER_CORE
    # Each worker steps its part of a split; both splits are one batch step.
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
