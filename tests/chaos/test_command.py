"""The chaos command detects a corrupted row, and compares with other projects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import peers
from tests.chaos.cases.trainers import kill_with_workers
from tests.chaos.cli import main
from tests.chaos.isolated import run_isolated
from tests.chaos.trial import Trial
from tests.oracle.result import LedgerError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="cases read /proc, which requires Linux"
)


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
    assert "* kill: 0.001 of the full counts" in tables


@pytest.mark.parametrize(
    ("output", "error"),
    [("", "^a trainer exited with code 3 "), ("wrong: row 2", "^row 2$")],
)
def test_only_a_wrong_row_makes_a_trainer_that_has_exited_wrong(
    output: str, error: str, tmp_path: Path
) -> None:
    trial = Trial("trainer-kill", seed=0, scale=1.0, seconds=60.0, folder=tmp_path)
    words = ("sh", "-c", f"echo '{output}'; exit 3")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as trainer:
        trainer.wait()
        kind = LedgerError if output else RuntimeError
        with pytest.raises(kind, match=error):
            kill_with_workers(trainer, trial)


def test_other_vector_envs_pair_results_with_the_wrong_actions() -> None:
    (fault,) = (name for name in peers.FAULTS if "the caller waits" in name)
    found = run_isolated(peers.probe, peers.ASYNC, fault, 0, seconds=300.0)
    assert isinstance(found, peers.PeerResult), found
    assert found.first == "TimeoutError"
    assert found.later == {"results of another action": 20}
    # The probe returns 4 rows in each of 20 steps; two random actions rarely match.
    assert found.num_wrong > 60
    assert not found.has_recovered


def test_envserve_recovers_from_the_same_fault() -> None:
    fault = "a worker is killed"
    found = run_isolated(peers.probe, peers.OURS, fault, 0, seconds=300.0)
    assert isinstance(found, peers.PeerResult), found
    assert found.num_wrong == 0
    assert found.has_recovered
