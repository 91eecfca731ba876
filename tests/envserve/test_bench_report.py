"""What a benchmark leaves: result.json, tables, a plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

from envserve.bench.harness import Outcome
from envserve.bench.plot import Plot
from envserve.bench.report import Output, Report, publish
from envserve.bench.suite import PARTS, write_tables

MEASURED = {
    "ours": [{"speed": 8.0}, {"speed": 6.0}, {"speed": 7.0}],
    "theirs": [{"speed": 2.0}, {"speed": 2.5}, {"speed": 1.0}],
}


@pytest.fixture
def report() -> Report:
    outcome = Outcome(MEASURED, {"absent": "not installed"})
    return Report(
        name="speed",
        title="Speed of both",
        options={"num_envs": 4, "only": None},
        outcome=outcome,
        columns=["case", "steps/s"],
        rows=[[case, f"{outcome.median(case, 'speed'):g}"] for case in MEASURED],
        notes=["Medians."],
        plot=Plot("steps/s", outcome.all_values("speed")),
        results={"ratio": 3.5},
    )


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Stands in for matplotlib, which need not be installed."""
    module = ModuleType("matplotlib.figure")
    module.Figure = MagicMock()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    figure: MagicMock = module.Figure.return_value
    return figure


def test_the_folder_keeps_everything(
    report: Report, figure: MagicMock, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.json"
    folder = publish(report, Output(tmp_path / "run", copy))
    result = json.loads((folder / "result.json").read_text())
    assert copy.read_text() == (folder / "result.json").read_text()
    assert result["repetitions"] == MEASURED
    assert result["medians"] == {"ours": {"speed": 7.0}, "theirs": {"speed": 2.0}}
    assert result["skipped"] == {"absent": "not installed"}
    assert result["options"] == {"num_envs": 4, "only": None}
    assert result["results"] == {"ratio": 3.5}
    assert result["machine"]["cores"] >= 1
    assert {"numpy", "gymnasium"} <= result["machine"]["versions"].keys()
    assert (folder / "table.md").read_text() == (
        "**Speed of both**\n\n| case | steps/s |\n| --- | ---: |\n"
        "| ours | 7 |\n| theirs | 2 |\n\n* Medians.\n* absent: skipped, not installed\n"
    )
    assert "theirs" in (folder / "table.txt").read_text()


def test_bars_show_the_median_and_the_spread(
    report: Report, figure: MagicMock, tmp_path: Path
) -> None:
    publish(report, Output(tmp_path))
    axes = figure.add_subplot.return_value
    (_, middles), named = axes.barh.call_args
    assert middles == [7.0, 2.0]
    assert named["xerr"] == [[1.0, 1.0], [1.0, 0.5]]
    figure.savefig.assert_called_once_with(tmp_path / "plot.png", dpi=120)


def test_without_matplotlib_the_plot_is_skipped_with_a_word(
    report: Report,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    publish(report, Output(tmp_path))
    assert not (tmp_path / "plot.png").exists()
    captured = capsys.readouterr()
    assert "plot: skipped" in captured.err
    assert "envserve[bench]" in captured.err
    assert "absent: skipped, not installed" in captured.out


def test_markdown_goes_to_the_screen_as_to_the_file(
    report: Report,
    figure: MagicMock,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    publish(report, Output(tmp_path, markdown=True))
    assert capsys.readouterr().out == (tmp_path / "table.md").read_text()


def test_the_suite_gathers_the_tables_that_there_are(
    report: Report, figure: MagicMock, tmp_path: Path
) -> None:
    last, first = "profile-cheetah-16", "step-cheetah-16"
    for part in (last, first):
        publish(report, Output(tmp_path / part))
    write_tables(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert list(PARTS).index(first) < list(PARTS).index(last)
    assert text.index("bench step --num-envs 16") < text.index("bench profile`")
    assert text.count("| ours | 7 |") == 2
    assert "envserve bench images" not in text
    assert "Python 3" in text.splitlines()[0]
