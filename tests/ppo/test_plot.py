"""Plots of runs: one curve per config, with mean and deviation over seeds."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from envserve.text import install_command
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


def test_runs_that_differ_only_in_the_seed_are_merged_into_one_curve(
    tmp_path: Path,
) -> None:
    runs = [
        run(tmp_path / "a", [(10, None), (20, 2.0), (30, 4.0)], seed=1),
        run(tmp_path / "b", [(10, 2.0), (20, 4.0), (30, 8.0), (40, 9.0)], seed=2),
    ]
    (curve,) = read_curves(runs)
    assert (curve.label, curve.num_runs) == ("a", 2)
    # Only steps for which both runs have values.
    np.testing.assert_array_equal(curve.steps, [20, 30])
    np.testing.assert_array_equal(curve.mean, [3.0, 6.0])
    np.testing.assert_array_equal(curve.deviation, [1.0, 2.0])


def test_the_folder_of_several_seeds_is_plotted_like_its_runs(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "three", CONFIG).path
    runs = [
        run(folder / f"seed-{seed}", [(10, float(seed))], seed=seed)
        for seed in range(2)
    ]
    for given in ([folder], runs, [folder, *runs]):
        (curve,) = read_curves(given)
        assert (curve.num_runs, curve.mean.tolist()) == (2, [0.5])
    # Seeds that have not reported the metric yet are left out.
    run(folder / "seed-2", [(10, None)], seed=2)
    RunFolder.create(folder / "seed-3", CONFIG.replace(seed=3))
    (curve,) = read_curves([folder])
    assert (curve.num_runs, curve.mean.tolist()) == (2, [0.5])
    with pytest.raises(RunFolderError, match=r"seed-3.*cannot read the metrics"):
        read_curves([folder / "seed-3"])
    with pytest.raises(BadInputError, match="seed-0: the run has no metric 'return'"):
        read_curves([folder], "return")


def test_a_single_value_is_visible(tmp_path: Path) -> None:
    curves = read_curves([run(tmp_path / "a", [(10, 2.0)])])
    draw_curves(curves, "mean_return", tmp_path / "plot.png")
    pixels = matplotlib.image.imread(tmp_path / "plot.png")[..., :3]
    height, width = pixels.shape[:2]
    middle = pixels[height // 3 : -height // 3, width // 3 : -width // 3]
    blue = matplotlib.colors.to_rgb("C0")
    assert np.isclose(middle, blue, atol=0.01).all(axis=-1).any()


def test_merged_runs_are_interpolated_linearly(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / "a", [(10, 0.0), (30, 4.0)], seed=1),
        run(tmp_path / "b", [(10, 0.0), (15, 7.0), (30, 4.0)], seed=2),
    ]
    (curve,) = read_curves(runs)
    np.testing.assert_array_equal(curve.steps, [10, 15, 30])
    np.testing.assert_array_equal(curve.mean, [0.0, 4.0, 4.0])


def test_curves_are_labelled_with_run_names_and_different_settings(
    tmp_path: Path,
) -> None:
    runs = [
        run(tmp_path / "a", [(10, 1.0)], learning_rate=1e-3),
        run(tmp_path / "b", [(10, 2.0)], env_kwargs={"x": 1}, seed=4),
        run(tmp_path / "c", [(10, 3.0)], learning_rate=1e-3, seed=5),
    ]
    first, second = read_curves(runs)
    assert first.label == "a: env_kwargs={}, learning_rate=0.001"
    assert second.label == "b: env_kwargs={'x': 1}, learning_rate=0.0003"
    assert (first.num_runs, second.num_runs) == (2, 1)
    np.testing.assert_array_equal(first.mean, [2.0])


@pytest.mark.parametrize(
    ("algorithm", "first", "second"),
    [
        ("sac", 128, 256),
        ("/my.py:Mine", 128, "default"),
        ("/my.py:Mine", None, "default"),
    ],
)
def test_labels_contain_settings_of_the_algorithm_that_differ(
    algorithm: str, first: object, second: object, tmp_path: Path
) -> None:
    settings = {"algorithm": algorithm, "random_steps": 50}
    changes = {} if second == "default" else {"batch_size": second}
    runs = [
        run(tmp_path / "a", [(10, 1.0)], **settings, batch_size=first),
        run(tmp_path / "b", [(10, 2.0)], **settings, **changes),
    ]
    expected = [f"a: batch_size={first}", f"b: batch_size={second}"]
    assert [curve.label for curve in read_curves(runs)] == expected


def test_labels_contain_no_absolute_path_and_are_unique(tmp_path: Path) -> None:
    file = {"env_name": str(tmp_path / "my_env.py:Walk")}
    runs = [
        run(tmp_path / "x" / "a", [(10, 1.0)], **file),
        run(tmp_path / "y" / "a", [(10, 2.0)]),
        run(tmp_path / "study" / "seed-0", [(10, 3.0)], epochs=3),
        run(tmp_path / "study" / "seed-1", [(10, 3.0)], epochs=3, seed=1),
    ]
    assert [curve.label for curve in read_curves(runs[:1])] == ["a"]
    assert [curve.label for curve in read_curves(runs)] == [
        "x/a: env_name=my_env:Walk, epochs=10",
        "y/a: env_name=CartPole-v1, epochs=10",
        f"{tmp_path.name}/study: env_name=CartPole-v1, epochs=3",
    ]


def test_curves_with_many_different_settings_are_labelled_with_their_folder(
    tmp_path: Path,
) -> None:
    many = {"learning_rate": 1e-3, "discount": 0.9, "epochs": 1, "horizon": 64}
    runs = [run(tmp_path / "a", [(10, 1.0)]), run(tmp_path / "b", [(10, 1.0)], **many)]
    assert [curve.label for curve in read_curves(runs)] == ["a", "b"]


def test_missing_values_are_an_error(tmp_path: Path) -> None:
    a = run(tmp_path / "a", [(10, None)])
    b = run(tmp_path / "b", [(10, 1.0), (20, 1.0)])
    c = run(tmp_path / "c", [(30, 1.0)])
    with pytest.raises(BadInputError, match="no values of mean_return yet"):
        read_curves([a])
    with pytest.raises(BadInputError, match=r"Did you mean mean_return\? Metrics: me"):
        read_curves([b], "return")
    with pytest.raises(BadInputError, match=r"ends at step 20 and another .* 30"):
        read_curves([b, c])
    for name in ("d", "x" * 300):
        with pytest.raises(RunFolderError, match="expected a run folder"):
            read_curves([tmp_path / name])


@pytest.mark.parametrize("name", ["_x", "$\\bad{$", "a$b$c", "\udcff", "\x1b[2J\n"])
def test_curves_are_labelled_with_any_folder_name(name: str, tmp_path: Path) -> None:
    # `RunFolder.create` rejects a name that is not UTF-8.
    path = run(tmp_path / "run", [(10, 1.0), (20, 2.0)]).rename(tmp_path / name)
    out = tmp_path / "curves.png"
    assert ppo("plot", path, "--out", out) == (0, f"Plot: {out}\n", "")


def test_settings_of_matplotlib_cannot_run_latex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file `matplotlibrc` in the working directory can contain this setting.
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    monkeypatch.setenv("PATH", "")  # if Matplotlib runs LaTeX, it finds none
    path = run(tmp_path / "a", [(10, 1.0), (20, 2.0)])
    assert ppo("plot", path)[0] == 0


def test_without_matplotlib_the_error_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadInputError, match=re.escape(install_command("plot"))):
        draw_curves([], "mean_return", tmp_path / "curves.png")


def test_ppo_plot_writes_a_png_or_reports_why_it_cannot(tmp_path: Path) -> None:
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
    for name in ("curves.gif7", "missing/curves.png", "x" * 300, "/", ".."):
        code, _, error = ppo("plot", *runs, "--out", tmp_path / name)
        assert code == 2
        assert "expected a writable image file, for example curves.png" in error
        assert error.count("\n") == 1
