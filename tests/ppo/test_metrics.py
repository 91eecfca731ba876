"""Rows of metrics: their values, and their names, which docs/metrics.md documents."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppo.algorithms.ppo.update import Updater
from ppo.config import Config
from ppo.errors import DivergedError
from ppo.run_folder.metrics import ReportWindow
from tests.ppo.fakes import CountingBatchEnv
from tests.ppo.runs import SMALL, Maker, rows_of, run

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
CONFIG = SMALL.replace(total_steps=80, curve_episodes=2)


def trained(folder: Path, config: Config) -> list[dict[str, Any]]:
    """Train on envs, one of which loses a step; return the rows of metrics."""
    lost = frozenset({(3, 0)})
    maker = Maker(lambda num_envs: CountingBatchEnv([3] * num_envs, lost=lost))
    run(folder, config, maker)
    return rows_of(folder)


def documented() -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", DOCS.read_text(), re.MULTILINE))


def test_the_docs_list_exactly_the_metrics_of_a_row(tmp_path: Path) -> None:
    config = CONFIG.replace(total_steps=16, evaluate_every=16, objective="penalty")
    config = config.replace(nonfinite="mask")
    (row,) = trained(tmp_path, config)
    assert set(row) - {"steps"} == documented()


def test_rows_omit_metrics_of_disabled_features(tmp_path: Path) -> None:
    config = CONFIG.replace(normalize_observations=False, scale_rewards=False)
    names = {name for row in trained(tmp_path, config) for name in row}
    missing = documented() - names
    kinds = {name.partition("_")[0] for name in missing}
    assert kinds == {"observation", "reward", "evaluation", "kl", "nonfinite"}


def test_a_row_aggregates_all_iterations_since_the_previous_row(tmp_path: Path) -> None:
    config = CONFIG.replace(objective="clip_and_penalty", kl_target=1.0)
    single = trained(tmp_path / "single", config)
    joined = trained(tmp_path / "joined", config.replace(report_every=32))
    # Iterations have 16 steps, one of which is lost in the first iteration.
    assert [row["steps"] for row in single] == [15, 31, 47, 63, 79]
    assert [row["steps"] for row in joined] == [47, 79]
    assert [row["iteration"] for row in joined] == [3, 5]
    assert [row["invalid_steps"] for row in joined] == [1, 0]
    for name in ("policy_loss", "entropy", "valid_fraction"):
        parts = [row[name] for row in single]
        assert joined[0][name] == pytest.approx(np.mean(parts[:3]))
        assert joined[1][name] == pytest.approx(np.mean(parts[3:]))
    assert joined[0]["kl"] == max(row["kl"] for row in single[:3])
    for name in ("learning_rate", "kl_penalty", "mean_length", "observation_mean_max"):
        assert joined[1][name] == single[4][name]
    assert single[3]["kl_penalty"] != single[4]["kl_penalty"]


def test_an_evaluation_is_reported_in_its_iteration(tmp_path: Path) -> None:
    config = CONFIG.replace(report_every=64, evaluate_every=30)
    rows = trained(tmp_path, config)
    assert [row["steps"] for row in rows] == [31, 63, 79]
    assert [row["iteration"] for row in rows] == [2, 4, 5]


def test_iterations_before_a_divergence_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, calls = Updater.update, itertools.count(1)

    def diverges(self: Updater, *arguments: Any, **named: Any) -> Any:
        if next(calls) == 3:
            raise DivergedError("expected a finite log-probability")
        return update(self, *arguments, **named)

    monkeypatch.setattr(Updater, "update", diverges)
    with pytest.raises(DivergedError):
        trained(tmp_path, CONFIG.replace(report_every=1000))
    (row,) = rows_of(tmp_path)
    assert row["iteration"] == 2


def test_a_row_contains_the_normalisation_statistics(tmp_path: Path) -> None:
    (row,) = trained(tmp_path, CONFIG.replace(total_steps=16))
    # Env 0 observes (0, count) and env 1 (1, count). Env 0 loses its fourth step, whose
    # observation is the first one of an episode.
    counts = [0, 1, 2] + [0, 1, 2, 0] + [0, 1, 2, 0, 1, 2, 0, 1]
    columns = np.array([[0.0] * 7 + [1.0] * 8, counts])
    assert row["observation_mean_max"] == pytest.approx(columns.mean(axis=1).max())
    assert row["observation_mean_min"] == pytest.approx(columns.mean(axis=1).min())
    assert row["observation_std_max"] == pytest.approx(columns.std(axis=1).max())
    assert row["observation_std_min"] == pytest.approx(columns.std(axis=1).min())
    assert 0 < row["reward_scale"] < 10
    assert row["learning_rate"] == pytest.approx(3e-4)


def test_throughput_is_over_all_iterations_of_a_row() -> None:
    window = ReportWindow()
    assert not window
    window.add(10, {"rollout_seconds": 1.0, "update_seconds": 4.0, "entropy": 1.0})
    window.add(30, {"rollout_seconds": 3.0, "update_seconds": 0.0})
    window.add(0, {"rollout_seconds": 1.0, "update_seconds": 0.0, "entropy": math.nan})
    assert window
    row = window.take()
    assert row == {
        "rollout_seconds": 5.0,
        "update_seconds": 4.0,
        "entropy": 1.0,
        "steps_per_second": 40 / 9,
        "rollout_steps_per_second": 8.0,
        "update_steps_per_second": 10.0,
    }
    assert not window
