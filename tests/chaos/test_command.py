"""What a run of faults says, on the screen, in its folder, and by its exit code."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import typer

from benchmarks.lab.processes import Vitals
from tests.chaos import peers, samples
from tests.chaos.case_result import CaseResult, Check
from tests.chaos.case_tables import row_of, save_case, save_peers
from tests.chaos.cases.table import CASES
from tests.chaos.cli import chosen_cases, main
from tests.chaos.isolated import DidNotEnd, run_isolated
from tests.chaos.samples import Leftovers, MemorySamples
from tests.chaos.trial import ChaosCase, OutOfTime, Trial, run_case

needs_proc = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are looked at in /proc: needs Linux"
)


def make_case(name: str = "kill") -> ChaosCase:
    return ChaosCase(name, "workers are killed", "one lost row", lambda trial: None)


def make_result() -> CaseResult:
    return CaseResult(
        faults=1000,
        row_steps=1_000_000,
        losses=Counter({"WORKER_DIED": 8000}),
        seconds=[0.01] * 99 + [0.02],
    )


@pytest.mark.parametrize(
    ("kind", "good", "bad", "bound"),
    [("==", 0, 1, 0), (">=", 0.96, 0.94, 0.95), ("<=", 0.1, 0.11, 0.1)],
)
def test_a_number_is_held_to_its_goal_and_none_reaches_no_goal(
    kind: str, good: float, bad: float, bound: float
) -> None:
    assert Check("seconds", good, bound, kind).is_met
    assert not Check("seconds", bad, bound, kind).is_met
    assert not Check("seconds", math.nan, bound, kind).is_met


def test_the_worst_is_said_of_an_result() -> None:
    result = make_result()
    assert result.verdict == "pass"
    result.check("zombies", 1, 0, "==")
    assert (result.verdict, result.is_sound) == ("falls short", True)
    result.error = "it took too long"
    assert (result.verdict, result.is_sound) == ("failed", False)
    result.wrong = 1
    assert (result.verdict, result.is_sound) == ("WRONG", False)


@needs_proc
def test_what_ends_a_case_early_is_named_with_its_seed() -> None:
    def run(trial: Trial) -> None:
        trial.result.faults = 3
        raise OutOfTime("it hangs")

    case = ChaosCase("endless", "nothing", "nothing", run)
    result = run_case(case, seed=17, scale=0.5)
    assert result.verdict == "failed"
    assert result.faults == 3
    expected = "it hangs; repeat it with: chaos.py endless --seed 17 --scale 0.5"
    assert result.error == expected


def test_a_seed_draws_the_same_again_but_not_in_every_case(tmp_path: Path) -> None:
    def draw(name: str, seed: int) -> int:
        trial = Trial(name, seed=seed, scale=1, seconds=1, folder=tmp_path)
        return trial.draw_seed()

    assert draw("kill", 1) == draw("kill", 1)
    assert len({draw("kill", 1), draw("kill", 2), draw("hang", 1)}) == 3


def test_a_folder_holds_the_tables_of_all_that_was_put_into_it(tmp_path: Path) -> None:
    failed = CaseResult(error="it hangs; repeat it with: ...\nTraceback")
    failed.check("zombies", 2, 0, "==")
    failed.check("seconds", math.nan, 1)
    options = {"scale": 0.5, "seed": 3}
    save_case(tmp_path, make_case("zeal"), failed, {**options, "position": 0})
    save_case(tmp_path, make_case(), make_result(), {**options, "position": 1})
    save_peers(tmp_path, [["A", "a kill", "an error", "errors", "0", "no"]], {})
    result = json.loads((tmp_path / "kill.json").read_text())
    assert result["verdict"] == "pass"
    assert result["options"]["seed"] == 3
    assert result["latency_seconds"]["count"] == 100
    lines = (tmp_path / "tables.md").read_text().splitlines()
    start = "| kill | workers are killed | one lost row | pass | 1,000 | 1,000,000 | 0"
    (row,) = (line for line in lines if line.startswith(start))
    assert "| 8,000 WORKER_DIED | 10.0 | 10.1 | 20.0 |" in row
    assert [line.split()[1] for line in lines if " failed " in line or line == row] == [
        "zeal",
        "kill",
    ]
    assert "* zeal: it hangs; repeat it with: ..." in lines
    assert "* zeal: zombies: 2, goal == 0" in lines
    assert "* zeal: seconds: nothing, goal <= 1" in lines
    assert "* zeal, kill: counts are 0.5 of the full ones" in lines
    assert "| A | a kill | an error | errors | 0 | no |" in lines


def test_padding_and_late_rows_stand_beside_the_lost_ones() -> None:
    result = CaseResult(padding=1200, late=8)
    words = {"case": "pause", "does": "", "goal": ""}
    assert "-; 1,200 padded; 8 late" in row_of({**words, **result.as_json()})


def test_cases_are_chosen_by_name_or_its_beginning() -> None:
    assert chosen_cases([]) == list(CASES)
    assert {case.name.partition("-")[0] for case in chosen_cases(["network"])} == {
        "network"
    }
    names = [case.name for case in chosen_cases(["soak", "kill"])]
    assert names == ["kill", "soak"]
    with pytest.raises(typer.BadParameter, match="expected some of kill, raise"):
        chosen_cases(["kil1"])


def test_the_list_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--list"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(case.name in text for case in CASES)


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


@needs_proc
def test_an_isolated_function_cannot_hang_or_take_us_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import sys, os; print('a last word', file=sys.stderr, flush=True)"
    assert run_isolated(exec, code, seconds=300.0, log=log) is None
    assert log.read_text() == "a last word\n"
    with pytest.raises(DidNotEnd, match="exit code 7"):
        run_isolated(os._exit, 7, seconds=300.0)
    with pytest.raises(DidNotEnd, match="did not end within 0 s"):
        run_isolated(time.sleep, 3600.0, seconds=0.1)


@needs_proc
def test_memory_is_told_by_what_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_is_left_open_shows() -> None:
    before = Leftovers.now()
    with tempfile.TemporaryFile(), subprocess.Popen(["sleep", "60"]) as process:
        try:
            during = Leftovers._look()
        finally:
            process.kill()
    compared = before.compared_with(during)
    assert compared["files"] == (before.files, before.files + 1)
    assert compared["processes"] == (before.processes, before.processes + 1)
    assert before.compared_with(Leftovers.now(before))["files"] == (before.files,) * 2


@needs_proc
def test_peers_are_seen_to_pair_results_with_other_actions() -> None:
    (fault,) = (name for name in peers.FAULTS if "the caller waits" in name)
    found = run_isolated(peers.probe, peers.ASYNC, fault, 0, seconds=300.0)
    assert isinstance(found, peers.Found), found
    assert found.first == "TimeoutError"
    assert found.later == {"results of another action": 20}
    # Each of 4 rows in 20 steps: two random actions are seldom the same.
    assert found.num_wrong > 60
    assert not found.has_recovered


@needs_proc
def test_ours_recovers_beside_them() -> None:
    found = run_isolated(
        peers.probe, peers.OURS, "a worker is killed", 0, seconds=300.0
    )
    assert isinstance(found, peers.Found), found
    assert found.num_wrong == 0
    assert found.has_recovered
