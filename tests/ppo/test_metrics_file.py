"""Reading metrics: what killed and resumed runs leave behind does not show."""

from pathlib import Path

import pytest

from ppo.errors import RunFolderError
from ppo.metrics_file import read_metrics


def read(folder: Path, text: str) -> list[float]:
    path = folder / "metrics.jsonl"
    path.write_text(text)
    return [row["steps"] for row in read_metrics(path)]


def test_a_last_line_that_is_cut_is_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, '{"steps": 16, "a": 1}\n{"steps": 32, "a"') == [16]
    assert read(tmp_path, '{"steps": 16, "a": 1}\n{"ste') == [16]


def test_a_cut_line_that_a_resumed_run_has_gone_on_in_is_left_out(
    tmp_path: Path,
) -> None:
    text = '{"steps": 16}\n{"steps": 32, "a{"steps": 32}\n{"steps": 48}\n'
    assert read(tmp_path, text) == [16, 48]


def test_what_is_no_row_is_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, '7\n{"a": 1}\n{"steps": null}\n{"steps": 2}\n') == [2]


def test_iterations_that_a_resumed_run_repeats_count_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(
            f'{{"steps": {steps}, "a": {value}}}\n'
            for value, steps in enumerate([16, 32, 48, 64, 32, 48])
        )
    )
    rows = [(row["steps"], row["a"]) for row in read_metrics(path)]
    assert rows == [(16, 0), (32, 4), (48, 5)]


def test_no_metrics_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="expected the metrics of a run; No such"):
        read_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(RunFolderError, match="at least one iteration, found none"):
        read(tmp_path, '{"steps": 1')
