"""The benchmark harness: alternating cases, skipped cases and failing cases."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.harness import BenchmarkError, Case, Skip, chosen, measure_cases
from envserve.errors import UnknownEnv
from tests.benchmarks import harness_cases


def counting(name: str, log: Path) -> Case:
    return Case(name, harness_cases.counting, {"name": name, "log": log})


def raising(error: Exception) -> Case:
    return Case("bad", harness_cases.raising, {"error": error})


ABSENT = raising(Skip("there is no simulator here"))


def test_cases_alternate_in_separate_processes_and_are_closed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    progress: list[str] = []
    cases = [counting(name, log) for name in ("a", "b", "c")]
    measured = measure_cases([*cases, ABSENT], 3, progress.append)
    lines = log.read_text().split("\n")[:-1]
    assert lines[:9] == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert sorted(lines[9:]) == ["end of a", "end of b", "end of c"]
    assert [measured.values(name, "value") for name in "abc"] == [[1.0, 2.0, 3.0]] * 3
    assert progress[:3] == [f"... starting {name}" for name in "abc"]
    pids = [pid for name in "abc" for pid in measured.values(name, "pid")]
    assert len({*pids, os.getpid()}) == 4
    assert measured.skipped == {"bad": "there is no simulator here"}


def test_skipping_all_cases_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="bad: there is no simulator here"):
        measure_cases([ABSENT], 1)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (raising(RuntimeError("no licence")), "RuntimeError: no licence"),
        (raising(UnknownEnv("no env named 'Hoper'")), "bad failed: no env named"),
        (Case("bad", harness_cases.dying), "exited with code 7"),
    ],
)
def test_a_case_that_fails_ends_the_benchmark_and_closes_the_others(
    bad: Case, text: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with pytest.raises(BenchmarkError, match=text) as caught:
        measure_cases([counting("a", log), bad], 1)
    assert str(caught.value).startswith("bad")
    assert log.read_text().endswith("end of a\n")


def test_cases_are_selected_by_a_part_of_their_name() -> None:
    names = ["limit", "envserve tcp", "envserve ipc"]
    cases = [Case(name, harness_cases.raising) for name in names]

    def only(*words: str) -> list[str]:
        return [case.name for case in chosen(cases, words)]

    assert only() == names
    assert only("ENV") == ["envserve tcp", "envserve ipc"]
    assert only("ipc", "limit") == ["limit", "envserve ipc"]
    with pytest.raises(BenchmarkError, match=r"name \(limit, envserve tcp"):
        only("limit", "udp")
