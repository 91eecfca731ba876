"""Kill a training run repeatedly at random moments, and check that it resumes.

    python scripts/kill_training.py --kills 20
    python scripts/kill_training.py --set overlap=true

Runs `ppo train cartpole` as a separate process, and kills it with SIGKILL: every
fourth time at a random moment after its start, otherwise after its first checkpoint.
Exits with 1 if a process does not resume the run, if more than a checkpoint interval is
lost, or if an iteration is missing from or repeated in the metrics of the finished run.
"""

import contextlib
import json
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from envserve.python_process import main_command
from ppo.run_folder.checkpoint import read_counters
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics_file import last_iteration

_SETTINGS = {
    "num_envs": 8,
    "horizon": 32,
    "total_steps": 10**9,
    "checkpoint_every": 256 * 4,  # 4 iterations
    "evaluate_every": 256 * 50,
    "curve_episodes": 4,
    "evaluation_episodes": 4,
    "num_splits": 1,
}
_ITERATIONS_PER_CHECKPOINT = 4


def start(
    config: str, folder: Path, more: list[str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a run with additional settings, or resume it if it exists."""
    settings = [f"--set={k}={v}" for k, v in _SETTINGS.items()]
    exists = (folder / "config.json").exists()
    where = ["--resume", str(folder)] if exists else ["--run-dir", str(folder)]
    command = main_command("ppo.__main__", "train", *where, *settings)
    command += [f"--set={setting}" for setting in more]
    if not exists:
        command += [config]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def progress(folder: Path) -> tuple[int, int]:
    """Return the last reported iteration, and the iteration of the last checkpoint."""
    saved = 0
    run_folder = RunFolder(folder)
    if run_folder.has_checkpoint():
        saved = read_counters(run_folder.checkpoints).iteration
    return last_iteration(run_folder.metrics_path), saved


def kill_after(
    process: subprocess.Popen[bytes], folder: Path, seconds: float, *, is_late: bool
) -> bool:
    """Kill a process after some seconds; return whether it was still running.

    With `is_late`, count the seconds from the next checkpoint.
    """
    saved = progress(folder)[1]
    try:
        while is_late and progress(folder)[1] == saved:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
                return False
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    return False


def main(
    config: Annotated[
        str, typer.Argument(help="Config, as for `ppo train`.")
    ] = "cartpole",
    kills: Annotated[int, typer.Option(min=1, help="Number of kills.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the kill times.")] = 0,
    longest: Annotated[
        float, typer.Option(help="Maximum seconds before a kill.")
    ] = 3.0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Setting, as for `ppo train`.")
    ] = None,
) -> None:
    generator = random.Random(seed)
    console = Console()
    problems = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, log = Path(temporary) / "run", Path(temporary) / "log"
        for number in range(1, kills + 1):
            process = start(config, folder, settings or [], log)
            seconds, is_late = generator.uniform(0.0, longest), number % 4 != 0
            if not kill_after(process, folder, seconds, is_late=is_late):
                problems.append(f"{number}: exited with code {process.returncode}")
            reported, saved = progress(folder)
            partial = [p.name for p in folder.glob("checkpoints/*.partial")]
            lost = reported - saved
            if lost > _ITERATIONS_PER_CHECKPOINT:
                problems.append(f"{number}: lost {lost} iterations")
            console.print(
                f"{number}: killed {seconds:.2f} s after its "
                f"{'first checkpoint' if is_late else 'start'}, reported iteration "
                f"{reported}, saved {saved} {' '.join(partial)}"
            )
        last_setting = f"total_steps={(saved + 40) * 256}"
        started = time.monotonic()
        code = start(config, folder, [*(settings or []), last_setting], log).wait()
        console.print(f"last run: exit code {code}, {time.monotonic() - started:.0f} s")
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        iterations = [json.loads(line)["iteration"] for line in lines]
        if code != 0 or iterations != list(range(1, saved + 41)):
            problems.append(f"last run: exit code {code}, {iterations[-3:]}")
        if problems:
            console.print(log.read_text()[-3000:])
    console.print("\n".join(problems) or f"{kills} kills, no problem")
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
