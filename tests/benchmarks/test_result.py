"""The files that a benchmark writes: result.json and tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.result import Result, median, publish, ratio, spread
from benchmarks.suite import PARTS, write_tables
from envserve.bench.interleaved import Measurements

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
        results={"ratio": 3.5},
    )


def test_the_folder_contains_results_and_table(
    result: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    publish(result, folder)
    saved = json.loads((folder / "result.json").read_text())
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
    shown = capsys.readouterr().out
    assert "theirs" in shown
    assert "absent: skipped, not installed" in shown


def test_columns_of_spreads_and_ratios() -> None:
    measured = Measurements(MEASURED)
    assert spread("speed", ".1f")(measured, "ours") == "6.0 - 8.0"
    # The median of the ratios 4, 2.4 and 7 of each repetition.
    assert ratio("theirs", "speed")(measured, "ours") == "4.00"
    assert ratio(lambda case: f"{case}: peer", "speed")(measured, "ours") == "-"


def test_the_suite_collects_existing_tables_in_order(
    result: Result, tmp_path: Path
) -> None:
    last, first = "profile-cheetah-16", "step-cheetah-16"
    for part in (last, first):
        publish(result, tmp_path / part)
    write_tables(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert list(PARTS).index(first) < list(PARTS).index(last)
    assert text.index("bench.py step --num-envs 16") < text.index("bench.py profile`")
    assert text.count("| ours | 7 |") == 2
    assert "bench.py images" not in text
    assert "Python 3" in text.splitlines()[0]
