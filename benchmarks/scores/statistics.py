"""Summaries of a few scores, one per seed (Agarwal et al. 2021, arXiv 2108.13264)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Summary", "interquartile_mean", "summarize"]

_NUM_RESAMPLES = 10_000


class Summary(NamedTuple):
    """Scores of one task over seeds.

    Attributes:
      num_seeds: How many there are.
      mean: Over seeds.
      std: Over seeds, with n - 1; NaN of one seed.
      iqm: Interquartile mean.
      low: Lower end of the 95 % interval of the mean, by bootstrap over seeds.
      high: Its upper end.
    """

    num_seeds: int
    mean: float
    std: float
    iqm: float
    low: float
    high: float


def summarize(scores: Sequence[float]) -> Summary:
    """Summarise the scores of one task, one per seed.

    The interval is the percentile bootstrap of the mean: with three to five seeds it is
    narrower than it should be. The same scores give the same interval.
    """
    values = np.asarray(scores, np.float64)
    generator = np.random.default_rng(0)
    draws = generator.integers(len(values), size=(_NUM_RESAMPLES, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
    return Summary(
        num_seeds=len(values),
        mean=float(values.mean()),
        std=float(values.std(ddof=1)) if len(values) > 1 else float("nan"),
        iqm=interquartile_mean(values),
        low=float(low),
        high=float(high),
    )


def interquartile_mean(scores: Sequence[float] | np.ndarray) -> float:
    """Return the mean of the middle half; scores at its ends count in part.

    Of 5 scores the lowest and the highest count nothing, and their neighbours three
    quarters: 25 % of the weight is cut off at each end.
    """
    values = np.sort(np.asarray(scores, np.float64))
    edges = np.linspace(0.0, 1.0, len(values) + 1)
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0, 1)
    return float((values * weights).sum() / weights.sum())
