"""A run of faults: its verdict, its exit code, and the goals that it is held to."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import typer

from benchmarks.lab.processes import Vitals
from tests.chaos import peers, samples
from tests.chaos.case_result import CaseResult, Check
from tests.chaos.cli import chosen_cases, main
from tests.chaos.isolated import DidNotEnd, run_isolated
from tests.chaos.samples import Leftovers, MemorySamples
from tests.chaos.trial import ChaosCase, OutOfTime, Trial, run_case

needs_proc = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are looked at in /proc: needs Linux"
)


@pytest.mark.parametrize(
    ("kind", "good", "bad", "bound"),
    [("==", 0, 1, 0), (">=", 0.96, 0.94, 0.95), ("<=", 0.1, 0.11, 0.1)],
)
def test_a_number_is_compared_with_its_goal_and_no_number_misses_it(
    kind: str, good: float, bad: float, bound: float
) -> None:
    assert Check("seconds", good, bound, kind).is_met
    assert not Check("seconds", bad, bound, kind).is_met
    assert not Check("seconds", math.nan, bound, kind).is_met


def test_the_verdict_of_a_result_is_the_worst_that_happened() -> None:
    result = CaseResult(faults=1000)
    assert result.verdict == "pass"
    result.check("zombies", 1, 0, "==")
    assert (result.verdict, result.is_sound) == ("falls short", True)
    result.error = "it took too long"
    assert (result.verdict, result.is_sound) == ("failed", False)
    result.wrong = 1
    assert (result.verdict, result.is_sound) == ("WRONG", False)


@needs_proc
def test_a_case_that_runs_out_of_time_fails_and_names_its_seed() -> None:
    def run(trial: Trial) -> None:
        trial.result.faults = 3
        raise OutOfTime("it hangs")

    case = ChaosCase("endless", "nothing", "nothing", run)
    result = run_case(case, seed=17, scale=0.5)
    assert (result.verdict, result.faults) == ("failed", 3)
    expected = "it hangs; repeat it with: chaos.py endless --seed 17 --scale 0.5"
    assert result.error == expected


def test_cases_are_chosen_by_name_or_its_beginning() -> None:
    chosen = chosen_cases(["network"])
    assert {case.name.partition("-")[0] for case in chosen} == {"network"}
    assert [case.name for case in chosen_cases(["soak", "kill"])] == ["kill", "soak"]
    with pytest.raises(typer.BadParameter, match="expected some of kill, raise"):
        chosen_cases(["kil1"])


@needs_proc
def test_a_wrong_row_makes_the_command_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--scale", "0.001", "--seed", "5", "--outdir", str(tmp_path)]
    with pytest.raises(SystemExit) as caught:
        main(["kill", "--plant", *options])
    assert caught.value.code == 1
    assert "kill: WRONG; faults" in capsys.readouterr().out
    result = json.loads((tmp_path / "kill.json").read_text())
    assert (result["verdict"], result["wrong"]) == ("WRONG", 1)
    assert "--seed 5" in result["error"]
    assert (tmp_path / "kill.log").exists()
    tables = (tmp_path / "tables.md").read_text()
    assert "| WRONG |" in tables
    assert "* kill: counts are 0.001 of the full ones" in tables


@needs_proc
def test_an_isolated_function_that_hangs_or_dies_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import sys, os; print('a last word', file=sys.stderr, flush=True)"
    assert run_isolated(exec, code, seconds=300.0, log=log) is None
    assert log.read_text() == "a last word\n"
    with pytest.raises(DidNotEnd, match="exit code 7"):
        run_isolated(os._exit, 7, seconds=300.0)
    with pytest.raises(DidNotEnd, match="did not end within 0 s"):
        run_isolated(time.sleep, 3600.0, seconds=0.1)


@needs_proc
def test_memory_that_grows_is_reported_by_role(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = {1: 100, 2: 50, 3: 70, 4: 10}
    children = {1: [1, 2, 3, 4], 4: [4]}
    monkeypatch.setattr(samples, "with_descendants", children.__getitem__)
    monkeypatch.setattr(
        samples, "vitals_of", lambda pid: Vitals(pid, "S", resident[pid], 1, 1)
    )
    taken = MemorySamples()
    for second in range(10):
        taken.take(second, {"trainer": 1, "server": 4})
        resident[1] += 10
        resident[3] += 1
    growths = taken.growths(10.0, (0.2, 0.3), (0.8, 0.9))
    assert growths == {"trainer": 60, "a process below trainer": 6, "server": 0}


@needs_proc
def test_open_files_and_processes_are_counted_as_leftovers() -> None:
    before = Leftovers.now()
    with tempfile.TemporaryFile(), subprocess.Popen(["sleep", "60"]) as process:
        try:
            during = Leftovers.now()
        finally:
            process.kill()
    compared = before.compared_with(during)
    assert compared["files"] == (before.files, before.files + 1)
    assert compared["processes"] == (before.processes, before.processes + 1)
    assert before.compared_with(Leftovers.now(before))["files"] == (before.files,) * 2


@needs_proc
def test_other_vector_envs_pair_results_with_the_wrong_actions() -> None:
    (fault,) = (name for name in peers.FAULTS if "the caller waits" in name)
    found = run_isolated(peers.probe, peers.ASYNC, fault, 0, seconds=300.0)
    assert isinstance(found, peers.Found), found
    assert found.first == "TimeoutError"
    assert found.later == {"results of another action": 20}
    # Each of 4 rows in 20 steps: two random actions are seldom the same.
    assert found.num_wrong > 60
    assert not found.has_recovered


@needs_proc
def test_envserve_recovers_from_the_same_fault() -> None:
    fault = "a worker is killed"
    found = run_isolated(peers.probe, peers.OURS, fault, 0, seconds=300.0)
    assert isinstance(found, peers.Found), found
    assert found.num_wrong == 0
    assert found.has_recovered
