"""Statistics of returns over seeds and tasks, as proposed by Agarwal et al. (2021)."""

from collections.abc import Callable, Sequence

import numpy as np

_NUM_DRAWS = 10_000


def interquartile_mean(scores: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the mean of the middle half of the scores, over the last axis.

    As in rliable, a quarter of the scores, rounded down, is omitted at each end. For up
    to three scores, the result is therefore their mean.
    """
    ordered = np.sort(scores, axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)


def bootstrap_interval(
    *tasks: Sequence[float] | np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray] = lambda draws: draws.mean(axis=-1),
) -> tuple[float, float]:
    """Return the 95 % confidence interval of a statistic over all scores.

    Uses the stratified percentile bootstrap: the seeds of each task are resampled
    separately. For a single task with three to five seeds, the interval is too narrow.
    The result is deterministic.

    Args:
      tasks: The scores of each task, one per seed.
      statistic: Computes the statistic over the last axis; by default, the mean.
    """
    random = np.random.default_rng(0)
    draws = [random.choice(scores, (_NUM_DRAWS, len(scores))) for scores in tasks]
    values = statistic(np.concatenate(draws, axis=1))
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
