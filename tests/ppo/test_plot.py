"""Plots of runs: seeds become a mean and a band, configs become curves."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppo.config import Config
from ppo.errors import BadInputError, RunFolderError
from ppo.evaluation.plot import draw_curves, read_curves
from ppo.run_folder.folder import RunFolder
from tests.ppo.runs import ppo

CONFIG = Config(env_name="CartPole-v1")


def run(path: Path, points: list[tuple[int, float | None]], **changes: Any) -> Path:
    folder = RunFolder.create(path, CONFIG.replace(**changes))
    rows = [{"steps": steps, "mean_return": value} for steps, value in points]
    (folder.path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return path


def test_runs_that_differ_in_their_seed_are_one_curve(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / "a", [(10, None), (20, 2.0), (30, 4.0)], seed=1),
        run(tmp_path / "b", [(10, 2.0), (20, 4.0), (30, 8.0), (40, 9.0)], seed=2),
    ]
    (curve,) = read_curves(runs)
    assert (curve.label, curve.num_runs) == ("CartPole-v1", 2)
    # Only where both have numbers.
    np.testing.assert_array_equal(curve.steps, [20, 30])
    np.testing.assert_array_equal(curve.mean, [3.0, 6.0])
    np.testing.assert_array_equal(curve.deviation, [1.0, 2.0])


def test_between_its_numbers_a_run_is_followed_along_a_line(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / "a", [(10, 0.0), (30, 4.0)], seed=1),
        run(tmp_path / "b", [(10, 0.0), (15, 7.0), (30, 4.0)], seed=2),
    ]
    (curve,) = read_curves(runs)
    np.testing.assert_array_equal(curve.steps, [10, 15, 30])
    np.testing.assert_array_equal(curve.mean, [0.0, 4.0, 4.0])


def test_configs_are_curves_of_their_own_named_by_what_differs(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / "a", [(10, 1.0)], learning_rate=1e-3),
        run(tmp_path / "b", [(10, 2.0)], env_kwargs={"x": 1}, seed=4),
        run(tmp_path / "c", [(10, 3.0)], learning_rate=1e-3, seed=5),
    ]
    first, second = read_curves(runs)
    assert first.label == "env_kwargs={}, learning_rate=0.001"
    assert second.label == "env_kwargs={'x': 1}, learning_rate=0.0003"
    assert (first.num_runs, second.num_runs) == (2, 1)
    np.testing.assert_array_equal(first.mean, [2.0])


def test_configs_that_differ_in_much_are_named_by_their_folder(tmp_path: Path) -> None:
    many = {"learning_rate": 1e-3, "discount": 0.9, "epochs": 1, "horizon": 64}
    runs = [run(tmp_path / "a", [(10, 1.0)]), run(tmp_path / "b", [(10, 1.0)], **many)]
    assert [curve.label for curve in read_curves(runs)] == ["a", "b"]


def test_numbers_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    a = run(tmp_path / "a", [(10, None)])
    b = run(tmp_path / "b", [(10, 1.0), (20, 1.0)])
    c = run(tmp_path / "c", [(30, 1.0)])
    with pytest.raises(BadInputError, match="numbers of mean_return, but it has none"):
        read_curves([a])
    with pytest.raises(BadInputError, match=r"Did you mean mean_return\? Metrics: me"):
        read_curves([b], "return")
    with pytest.raises(BadInputError, match="one ends at 20 and another begins at 30"):
        read_curves([b, c])
    with pytest.raises(RunFolderError, match="expected a run folder"):
        read_curves([tmp_path / "d"])


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BadInputError, match=r"pip install 'envserve\[plot\]'"):
        draw_curves([], "mean_return", tmp_path / "curves.png")


def test_the_command_draws_a_png_or_says_why_not(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / str(seed), [(10, 1.0), (20, 1.0 + seed)], seed=seed)
        for seed in range(3)
    ]
    out = tmp_path / "curves.png"
    assert ppo("plot", *runs, "--out", out) == (0, f"Plot: {out}\n", "")
    assert out.read_bytes().startswith(b"\x89PNG")
    default = tmp_path / "mean_return.png"
    assert ppo("plot", *runs) == (0, f"Plot: {default}\n", "")
    default = runs[0] / "mean_return.png"
    assert ppo("plot", runs[0]) == (0, f"Plot: {default}\n", "")
    assert default.exists()
    for name in ("curves.gif7", "missing/curves.png"):
        code, _, error = ppo("plot", *runs, "--out", tmp_path / name)
        assert code == 2
        assert "expected a writable image file" in error
        assert error.count("\n") == 1
