"""Type checkers check the options of `make_vec` and `make`."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from envserve.client import BatchEnv
from envserve.client.make_vec import Options

ROOT = Path(__file__).resolve().parents[2]
FILE = """
import envserve
import gymnasium
from gymnasium.wrappers import ClipAction

envs = envserve.make_vec("A-v0", 2, num_workers=1, wrappers=[ClipAction, "ClipReward"])
envs = envserve.make_vec([lambda: gymnasium.make("A-v0")], step_timeout=1.0)
envs = envserve.make_vec(gymnasium.spec("A-v0"), vectorization_mode="async")
env = envserve.make("A-v0", max_episode_steps=3, env_kwargs={"size": 1})
envserve.make_vec("A-v0", num_worker=1)
envserve.make_vec("A-v0", step_timeot=1.0)
envserve.make_vec("A-v0", seed="x")
envserve.make("A-v0", sed=1)
"""


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="without mypy")
def test_misspelt_options_are_type_errors(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(FILE)
    first_wrong = 1 + FILE.splitlines().index('envserve.make_vec("A-v0", num_worker=1)')
    # This project's strict config, so that mypy can use its cache of earlier checks.
    finished = subprocess.run(
        [sys.executable, "-m", "mypy", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in finished.stdout.splitlines() if ": error: " in line]
    lines = [int(line.split(":")[1]) for line in errors]
    assert lines == [*range(first_wrong, first_wrong + 4)], finished.stdout
    assert 'did you mean "num_workers"' in errors[0]


def test_all_options_of_batches_are_typed() -> None:
    explicit = {"cls", "env_name", "num_envs", "num_workers", "addresses", "options"}
    for function in (BatchEnv.local, BatchEnv.connect):
        names = set(inspect.signature(function).parameters)
        assert names - explicit <= set(Options.__annotations__)
