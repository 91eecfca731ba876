"""A linear model of the CPU time that a trainer spends on a batch step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from benchmarks.scaling.measure import Point

Clock = Literal["thread", "process"]
#: Cores of a host, and envs per core, in the planning table.
CORES: Final = 16
ENVS_PER_CORE: Final = 4


class Model(NamedTuple):
    """Coefficients of the model: the CPU time of a batch step in microseconds.

    Attributes:
      split: Time per split.
      server: Time per server and split.
      env: Time per env.
      kilobyte: Time per 1,000 bytes of observations.
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
      steps: Env steps per second on these hosts.
      gbit: Data rate of the observations in Gbit per second.
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
    is_used = np.full(4, True)
    while True:
        solution = np.zeros(4)
        target = np.ones(len(points))
        solution[is_used] = np.linalg.lstsq(terms[:, is_used], target, rcond=None)[0]
        if (solution[is_used] > 0).all():
            break
        is_used &= solution > 0
    return Model(*solution.tolist())


def errors(model: Model, points: Sequence[Point], clock: Clock) -> list[float]:
    """Return the relative error of the model's prediction for each point."""
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

    While the hosts step one split, the trainer handles the other. The result is the
    largest number of hosts with which the trainer is not slower than the hosts.

    Args:
      model: Model of the stepping thread.
      env_us: Microseconds of an env step on one core.
      size: Size of an observation in bytes.
      slowdown: Factor by which the model's times are multiplied.
      round_trip_us: Round-trip time of the network in microseconds.
    """
    envs = CORES * ENVS_PER_CORE
    # A batch step steps both splits in turn: a worker steps all of its envs once, and
    # each split requires one round trip.
    stepping_us = env_us * ENVS_PER_CORE + 2 * round_trip_us

    def handling_us(hosts: int) -> float:
        return slowdown * model.predict(Point(hosts, envs, size, splits=2))

    per_host = handling_us(2) - handling_us(1)
    hosts = max(1, math.floor((stepping_us - handling_us(0)) / per_host))
    steps = hosts * envs / max(stepping_us, handling_us(hosts)) * 1e6
    return Plan(hosts, steps, steps * size * 8 / 1e9)


def _terms(point: Point) -> np.ndarray:
    """Return the factors by which `Model.predict` multiplies the coefficients."""
    return np.array(
        [
            point.splits,
            point.splits * point.servers,
            point.num_envs,
            point.num_envs * point.size / 1000,
        ],
        float,
    )
