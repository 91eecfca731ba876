"""Training runs that are killed at random moments and then resumed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from ppo.run_folder.metrics_file import read_metrics

_KILLS = 6


def test_killed_and_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, random_seed: int
) -> None:
    command = [sys.executable, "-m", "tests.ppo.preload", "tests.ppo.killed_training"]
    result = subprocess.run(
        [*command, str(tmp_path), str(random_seed), str(_KILLS)],
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["codes"] == [0, 0], result.stderr
    before = 0
    for kind, code, reported, saved in report["ends"]:
        assert code == (0 if kind.startswith("finished") else -9), result.stderr
        # Checkpoints are written every second iteration, and after the first.
        assert saved >= before
        assert reported - saved <= 2
        before = saved
    assert before >= 2
    np.testing.assert_array_equal(
        np.load(tmp_path / "straight.npy"), np.load(tmp_path / "killed.npy")
    )
    straight, killed = (
        read_metrics(tmp_path / name / "metrics.jsonl")
        for name in ("straight", "killed")
    )
    lines = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(1, 13))
    for name in ("policy_loss", "reward_scale", "observation_std_max", "learning_rate"):
        assert [row[name] for row in straight] == [row[name] for row in killed]
    evaluated = [row["iteration"] for row in killed if "evaluation_return" in row]
    assert evaluated == [3, 6, 9, 12]
    names = sorted(path.name for path in (tmp_path / "killed/checkpoints").iterdir())
    assert len(names) == 3
    assert {"00000003", "00000012"} < set(names)  # the best, and the two newest
