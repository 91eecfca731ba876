"""The whole command with real workers: stopped by a signal, resumed, evaluated."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ppo.runs import rows_of

#: Every start of TensorFlow takes seconds, and many on a machine with other work.
_PATIENCE = 280
pytestmark = pytest.mark.timeout(600)

SMALL = (
    "--num-workers=1",
    *("--set", "num_envs=4", "--set", "horizon=32", "--set", "minibatch_size=32"),
    *("--set", "epochs=1", "--set", "jit_compile=false"),
    *("--set", "evaluation_episodes=5"),
)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from ppo.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    """Wait for a command that does what was asked; returns the rest of its output."""
    with process:
        try:
            output, error = process.communicate(timeout=_PATIENCE)
        finally:
            process.kill()
    assert (process.returncode, error) == (0, "")
    return output


def interrupt(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send a signal once training is under way; returns the rest of the output."""
    assert process.stdout is not None
    assert "steps/s" in process.stdout.readline()
    process.send_signal(number)
    output = finished(process)
    assert "Stopping after this iteration" in output
    assert f"Stopped by {number.name} after" in output
    return output


def test_signals_save_and_a_resumed_run_ends_with_an_evaluation(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    new = start("train", "cartpole", *SMALL, "--run-dir", str(folder))
    output = interrupt(new, signal.SIGINT)
    assert f"ppo train --resume {folder}" in output
    interrupt(start("train", "--resume", str(folder)), signal.SIGTERM)
    newest = max((folder / "checkpoints").iterdir())
    stopped_at = json.loads((newest / "counters.json").read_text())["steps"]
    more = f"total_steps={stopped_at + 256}"
    output = finished(start("train", "--resume", str(folder), "--set", more))
    assert "over 5 episodes" in output
    assert f"Run folder: {folder}" in output
    steps = [row["steps"] for row in rows_of(folder)]
    assert steps == list(range(128, stopped_at + 257, 128))
    assert json.loads((folder / "evaluation.json").read_text())["episodes"] == 5
    output = finished(start("train", "cartpole", "--resume", str(folder)))
    assert f"already at {stopped_at + 256:,} steps; --set total_steps=" in output


def test_a_second_signal_stops_at_once_and_names_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = (*SMALL, "--set", "horizon=4096")  # seconds per iteration
    with start("train", "cartpole", *settings, "--run-dir", str(folder)) as process:
        assert process.stdout is not None
        assert "steps/s" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert "Stopping after this iteration" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=_PATIENCE)
    assert process.returncode == 130
    assert f"newest checkpoint is {folder / 'checkpoints' / '00000001'}." in error
    assert f"ppo train --resume {folder}" in error
    assert "Stopped by" not in output


def test_a_recurrent_policy_needs_no_more_threads_than_the_command_has(
    tmp_path: Path,
) -> None:
    # What waits for another thread of TensorFlow's pool waits for ever with one.
    arguments = (
        *(*SMALL, "--inter-op-threads=1", "--set", "total_steps=128"),
        *("--set", "recurrent_size=4", "--set", "sequence_length=8"),
    )
    folder = tmp_path / "run"
    output = finished(start("train", "cartpole", *arguments, "--run-dir", str(folder)))
    assert "over 5 episodes" in output


@pytest.mark.parametrize(
    ("setting", "message"),
    [("env_name=CartPol-v1", "CartPole-v1"), ('env_kwargs={"colour": 1}', "colour")],
)
def test_envs_that_cannot_be_made_are_one_line_of_error(
    tmp_path: Path, setting: str, message: str
) -> None:
    arguments = ["train", "cartpole", *SMALL, "--set", setting]
    with start(*arguments, "--run-dir", str(tmp_path / "run")) as process:
        output, error = process.communicate(timeout=_PATIENCE)
    assert process.returncode == 2
    assert error.splitlines()[-1].startswith("Error: ")
    assert message in error.splitlines()[-1]
    assert output == ""
    assert not (tmp_path / "run").exists()
