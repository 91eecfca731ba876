"""What a benchmark leaves: result.json, tables, a plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

from benchmarks.plot import Plot
from benchmarks.result import Output, Result, median, publish, ratio, spread
from benchmarks.suite import PARTS, write_tables
from envserve.bench.turns import Measurements

MEASURED = {
    "ours": [{"speed": 8.0}, {"speed": 6.0}, {"speed": 7.0}],
    "theirs": [{"speed": 2.0}, {"speed": 2.5}, {"speed": 1.0}],
}


@pytest.fixture
def result() -> Result:
    return Result(
        name="speed",
        title="Speed of both",
        options={"num_envs": 4, "only": None},
        measured=Measurements(MEASURED, {"absent": "not installed"}),
        columns={"steps/s": median("speed", "g")},
        notes=["Medians."],
        plot=Plot("steps/s", "speed"),
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
    result: Result, figure: MagicMock, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.json"
    folder = publish(result, Output(tmp_path / "run", copy))
    saved = json.loads((folder / "result.json").read_text())
    assert copy.read_text() == (folder / "result.json").read_text()
    assert saved["repetitions"] == MEASURED
    assert saved["medians"] == {"ours": {"speed": 7.0}, "theirs": {"speed": 2.0}}
    assert saved["skipped"] == {"absent": "not installed"}
    assert saved["options"] == {"num_envs": 4, "only": None}
    assert saved["results"] == {"ratio": 3.5}
    assert saved["machine"]["cores"] >= 1
    assert {"numpy", "gymnasium"} <= saved["machine"]["versions"].keys()
    assert (folder / "table.md").read_text() == (
        "**Speed of both**\n\n| case | steps/s |\n| --- | ---: |\n"
        "| ours | 7 |\n| theirs | 2 |\n\n* Medians.\n* absent: skipped, not installed\n"
    )
    assert "theirs" in (folder / "table.txt").read_text()


def test_columns_of_spreads_and_ratios() -> None:
    measured = Measurements(MEASURED)
    assert spread("speed", ".1f")(measured, "ours") == "6.0 - 8.0"
    # Of 4, 2.4 and 7, each within one repetition.
    assert ratio("theirs", "speed")(measured, "ours") == "4.00"
    assert ratio(lambda case: f"{case}: peer", "speed")(measured, "ours") == "-"


def test_bars_show_the_median_and_the_spread(
    result: Result, figure: MagicMock, tmp_path: Path
) -> None:
    publish(result, Output(tmp_path))
    axes = figure.add_subplot.return_value
    (_, middles), named = axes.barh.call_args
    assert middles == [7.0, 2.0]
    assert named["xerr"] == [[1.0, 1.0], [1.0, 0.5]]
    figure.savefig.assert_called_once_with(tmp_path / "plot.png", dpi=120)


def test_without_matplotlib_the_plot_is_skipped_with_a_word(
    result: Result,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    publish(result, Output(tmp_path))
    assert not (tmp_path / "plot.png").exists()
    captured = capsys.readouterr()
    assert "plot: skipped" in captured.err
    assert "envserve[bench]" in captured.err
    assert "absent: skipped, not installed" in captured.out


def test_markdown_goes_to_the_screen_as_to_the_file(
    result: Result,
    figure: MagicMock,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    publish(result, Output(tmp_path, markdown=True))
    assert capsys.readouterr().out == (tmp_path / "table.md").read_text()


def test_the_suite_gathers_the_tables_that_there_are(
    result: Result, figure: MagicMock, tmp_path: Path
) -> None:
    last, first = "profile-cheetah-16", "step-cheetah-16"
    for part in (last, first):
        publish(result, Output(tmp_path / part))
    write_tables(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert list(PARTS).index(first) < list(PARTS).index(last)
    assert text.index("bench.py step --num-envs 16") < text.index("bench.py profile`")
    assert text.count("| ours | 7 |") == 2
    assert "bench.py images" not in text
    assert "Python 3" in text.splitlines()[0]
