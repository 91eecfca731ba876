"""Reading metrics.jsonl after runs that were killed or resumed."""

from pathlib import Path

import pytest

from ppo.errors import RunFolderError
from ppo.run_folder.metrics_file import last_iteration, read_metrics, truncate_after


def read(folder: Path, text: str) -> list[float]:
    path = folder / "metrics.jsonl"
    path.write_text(text)
    return [row["steps"] for row in read_metrics(path)]


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    assert read(tmp_path, '{"steps": 16, "a": 1}\n{"steps": 32, "a"') == [16]
    assert read(tmp_path, '{"steps": 16, "a": 1}\n{"ste') == [16]


def test_lines_that_are_not_rows_are_ignored(tmp_path: Path) -> None:
    assert read(tmp_path, '7\n{"a": 1}\n{"steps": null}\n{"steps": 2}\n') == [2]


@pytest.mark.parametrize(
    ("tail", "iteration", "expected"),
    [
        ("", 3, 3),
        ("", 2, 2),
        ("", 0, 0),
        ('{"iteration": 4, "ste', 3, 3),
        ('{"iteration": 4, "steps": 64}', 9, 3),  # incomplete: no newline at the end
    ],
)
def test_rows_that_a_resumed_run_will_repeat_are_removed(
    tail: str, iteration: int, expected: int, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"iteration": {k}, "steps": {16 * k}}}\n' for k in (1, 2, 3)]
    path.write_text("".join(lines) + tail)
    truncate_after(path, iteration)
    assert path.read_text() == "".join(lines[:expected])
    assert last_iteration(path) == expected


def test_a_missing_metrics_file_has_no_rows(tmp_path: Path) -> None:
    truncate_after(tmp_path / "metrics.jsonl", 3)
    assert last_iteration(tmp_path / "metrics.jsonl") == 0
    assert list(tmp_path.iterdir()) == []


def test_reading_missing_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot read the metrics; No such"):
        read_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(RunFolderError, match="at least one iteration, found none"):
        read(tmp_path, '{"steps": 1')
