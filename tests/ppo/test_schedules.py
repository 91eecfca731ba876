"""Schedules: coefficients that decay over the run or adapt to the KL divergence."""

from pathlib import Path

import numpy as np
import pytest

from ppo.algorithms.ppo.schedules import Schedules
from ppo.config import Config
from ppo.errors import ConfigError

CONFIG = Config(
    env_name="fake",
    learning_rate=1e-3,
    learning_rate_schedule="kl_adaptive",
    objective="penalty",
    kl_target=0.01,
)


def after(kl: float, config: Config = CONFIG, times: int = 1) -> tuple[float, float]:
    """Return the penalty and learning rate after iterations with this KL divergence."""
    schedules = Schedules(config)
    for _ in range(times):
        schedules.update(kl)
    coefficients = schedules.at(0.5)
    return coefficients.kl_penalty, coefficients.learning_rate


@pytest.mark.parametrize(
    ("kl", "penalty", "rate"),
    [
        (0.0049, 1 / 1.5, 1e-3),  # the initial rate is the maximum
        (0.0069, 1 / 1.5, 1e-3),
        (0.0071, 1.0, 1e-3),
        (0.0129, 1.0, 1e-3),
        (0.0131, 1.5, 1e-3),
        (0.0199, 1.5, 1e-3),
        (0.0201, 1.5, 1e-3 / 1.5),
    ],
)
def test_a_kl_outside_the_band_changes_a_coefficient_by_a_factor(
    kl: float, penalty: float, rate: float
) -> None:
    assert after(kl) == pytest.approx((penalty, rate))


def test_adaptive_coefficients_stay_within_their_bounds_and_can_leave_them_again() -> (
    None
):
    assert after(0.001, times=100) == (1e-3, 1e-3)
    assert after(1.0, times=100) == (1e6, 1e-6)
    schedules = Schedules(CONFIG)
    for _ in range(300):  # without bounds, 1.5**-300 would be 0 in float32
        schedules.update(1.0)
    schedules.update(0.001)
    assert schedules.at(0.0).kl_penalty == pytest.approx(1e6 / 1.5)
    assert schedules.at(0.0).learning_rate == pytest.approx(1.5e-6)


def test_a_resumed_run_does_not_exceed_its_new_learning_rate() -> None:
    schedules = Schedules(CONFIG.replace(learning_rate=1e-5))
    for restored, expected in ((1e-3, 1e-5), (2e-6, 2e-6)):
        schedules.trackables["kl_learning_rate"].assign(restored)
        assert schedules.at(0.5).learning_rate == expected


def test_the_learning_rate_does_not_adapt_when_the_policy_hardly_moves() -> None:
    schedules = Schedules(CONFIG)
    schedules.update(1.0)
    for kl in (0.0, 0.99e-4):
        schedules.update(kl)
        assert schedules.at(0.0).learning_rate == pytest.approx(1e-3 / 1.5)
    schedules.update(1.01e-4)
    assert schedules.at(0.0).learning_rate == pytest.approx(1e-3)


def test_unused_coefficients_do_not_adapt() -> None:
    schedules = Schedules(CONFIG.replace(objective="clip"))
    schedules.update(1.0)
    assert schedules.trackables["kl_penalty"].numpy() == 1.0
    schedules = Schedules(CONFIG.replace(learning_rate_schedule="linear"))
    schedules.update(1.0)
    assert schedules.trackables["kl_learning_rate"].numpy() == 1e-3


def test_a_nan_kl_changes_nothing() -> None:
    assert after(np.nan) == (1.0, 1e-3)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", (1e-3, 1e-3, 1e-3)), ("linear", (1e-3, 0.5e-3, 0.0))],
)
def test_constant_and_linear_learning_rates_depend_only_on_progress(
    schedule: str, expected: tuple[float, ...]
) -> None:
    schedules = Schedules(CONFIG.replace(learning_rate_schedule=schedule))
    schedules.update(1.0)
    rates = [schedules.at(progress).learning_rate for progress in (0.0, 0.5, 1.0)]
    assert rates == pytest.approx(expected)


def test_a_custom_schedule_returns_a_factor(tmp_path: Path) -> None:
    file = tmp_path / "rates.py"
    file.write_text(
        "def warmup(progress):\n    return min(4 * progress, 1.0)\n"
        "def negative(progress):\n    return 0.95 - progress\n"
        "def odd(progress, more):\n    return 1.0\n"
    )
    config = CONFIG.replace(learning_rate_schedule=f"{file}:warmup")
    schedules = Schedules(config)
    schedules.update(1.0)
    rates = [schedules.at(progress).learning_rate for progress in (0.0, 0.1, 0.9)]
    assert rates == pytest.approx([0.0, 0.4e-3, 1e-3])
    for name, text in (
        ("negative", "rates.py:3: .* >= 0, got -0.* at progress 0.96"),
        ("odd", "'more'"),
    ):
        config = CONFIG.replace(learning_rate_schedule=f"{file}:{name}")
        with pytest.raises(ConfigError, match=text):
            Schedules(config)


def test_clip_range_and_entropy_coefficient_decay_if_configured() -> None:
    config = CONFIG.replace(clip_range=0.2, entropy_coefficient=0.1)
    steady = Schedules(config).at(0.75)
    assert (steady.clip_range, steady.entropy) == (0.2, 0.1)
    decaying = config.replace(decay_clip_range=True, decay_entropy_coefficient=True)
    coefficients = Schedules(decaying).at(0.75)
    assert coefficients.clip_range == pytest.approx(0.05)
    assert coefficients.entropy == pytest.approx(0.025)
