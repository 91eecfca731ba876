"""The benchmark's harness: turns, medians, ratios, cases that cannot run or fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.harness import BenchmarkError, Case, Skip, chosen, take_turns
from envserve.errors import UnknownEnv
from tests.benchmarks import harness_cases


def counting(name: str, log: Path) -> Case:
    return Case(name, harness_cases.counting, {"name": name, "log": log})


def raising(name: str, error: Exception) -> Case:
    return Case(name, harness_cases.raising, {"error": error})


ABSENT = raising("absent", Skip("there is no simulator here"))


def test_cases_take_turns_to_and_fro_and_are_closed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    said: list[str] = []
    cases = [counting(name, log) for name in ("a", "b", "c")]
    measured = take_turns(cases, 3, said.append)
    lines = log.read_text().split("\n")[:-1]
    assert lines[:9] == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert sorted(lines[9:]) == ["end of a", "end of b", "end of c"]
    assert [measured.values(name, "value") for name in "abc"] == [[1.0, 2.0, 3.0]] * 3
    assert said[:3] == [f"... starting {name}" for name in "abc"]


def test_each_case_has_a_process_of_its_own() -> None:
    cases = [Case(name, harness_cases.telling_its_pid) for name in ("a", "b")]
    measured = take_turns(cases, 2)
    first, second = measured.values("a", "pid"), measured.values("b", "pid")
    assert len({*first, *second, float(os.getpid())}) == 3
    assert first[0] == first[1]


def test_a_case_that_cannot_run_is_skipped_with_a_word(tmp_path: Path) -> None:
    cases = [ABSENT, counting("a", tmp_path / "log")]
    measured = take_turns(cases, 1)
    assert measured.skipped == {"absent": "there is no simulator here"}
    assert list(measured.by_case) == ["a"]


def test_nothing_left_to_measure_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="absent: there is no simulator here"):
        take_turns([ABSENT], 1)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (raising("bad", RuntimeError("no licence")), "RuntimeError: no licence"),
        (Case("bad", harness_cases.failing_to_measure), "ZeroDivisionError"),
        (Case("bad", harness_cases.dying), "ended with exit code 7"),
    ],
)
def test_a_case_that_fails_ends_the_benchmark(
    bad: Case, text: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with pytest.raises(BenchmarkError, match=text) as caught:
        take_turns([counting("a", log), bad], 1)
    message = str(caught.value)
    assert message.startswith("bad")
    assert "exclude it by selecting other cases with --only" in message
    assert log.read_text().endswith("end of a\n")  # the others are closed all the same


def test_of_an_error_that_explains_itself_only_the_text_is_told() -> None:
    with pytest.raises(BenchmarkError) as caught:
        take_turns([raising("bad", UnknownEnv("no env named 'Hoper'"))], 1)
    assert str(caught.value) == "bad failed: no env named 'Hoper'"


def test_only_chooses_by_part_of_the_name() -> None:
    names = ["limit", "envserve tcp", "envserve ipc"]
    cases = [Case(name, harness_cases.raising) for name in names]

    def only(*words: str) -> list[str]:
        return [case.name for case in chosen(cases, words)]

    assert only() == names
    assert only("ENV") == ["envserve tcp", "envserve ipc"]
    assert only("ipc", "limit") == ["limit", "envserve ipc"]
    with pytest.raises(BenchmarkError, match="one of limit, envserve tcp"):
        only("limit", "udp")
