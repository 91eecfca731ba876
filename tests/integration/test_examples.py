"""The examples run like the original code, on servers and while workers are killed."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo.run_folder.metrics_file import read_metrics
from tests.envserve.server_process import ROOT, ServerProcess
from tests.integration.example_runs import (
    GOALS,
    TRAINED_WHILE_KILLING,
    killing_workers,
    original_form,
    run_example,
    source_of,
    two_servers,
)

BUDGETS = {"optuna_sweep": ("--steps", "600", "--trials", "2")}
TINY = ("--steps", "2048")
#: Check that a single seed gives each row or game its own seed, as in Gymnasium.
SINGLE_SEEDS = (
    """
from examples.jax_env import JaxCartPole

envs = JaxCartPole(2)
rows = envs.reset(seed=3)[0]
assert (rows == envs.reset(seed=[3, 4])[0]).all()
assert (rows[0] != rows[1]).all()
""",
    """
from examples.pettingzoo_agents import AgentsEnv

envs, seeds = AgentsEnv(4, "pettingzoo.classic.rps_v2"), []
for game in envs.games:
    reset = game.reset
    game.reset = lambda seed, reset=reset: seeds.append(seed) or reset(seed)
envs.reset(seed=3)
assert seeds == [3, 5]
""",
)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    with two_servers() as servers:
        yield servers


def test_every_training_example_has_a_target_return() -> None:
    files = (ROOT / "examples").glob("*.py")
    assert {f.stem for f in files if "mean return:" in f.read_text()} == GOALS.keys()


@pytest.mark.parametrize("name", GOALS)
def test_an_example_differs_in_few_lines_from_the_trainers_original_code(
    name: str,
) -> None:
    source = source_of(name)
    ours = [line for line in source.splitlines() if "original" not in line.lower()]
    changes = list(difflib.ndiff(original_form(source).splitlines(), ours))
    assert 1 <= sum(line.startswith("+ ") for line in changes) <= 3
    assert sum(line.startswith("- ") for line in changes) <= 3
    assert "envserve" not in original_form(source)


@pytest.mark.parametrize("name", GOALS)
def test_training_on_servers_equals_training_on_the_trainers_own_envs(
    name: str, servers: list[ServerProcess]
) -> None:
    budget = BUDGETS.get(name, TINY)
    addresses = [server.address for server in servers]
    remote = run_example(name, *budget, "--connect", *addresses)
    own = run_example(name, *budget, original=True)
    assert remote.returns == own.returns
    assert remote.steps_per_second > 0


@pytest.mark.timeout(660)
def test_ppo_can_be_swept_and_pruned(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "optuna_ppo.py")
    budget = ("--steps", "10240", "--trials", "4", "--runs", str(tmp_path))
    done = subprocess.run(
        [sys.executable, example, *budget],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    pruned = re.search(r"^trials: 4, of which (\d) were pruned$", done.stdout, re.M)
    assert pruned is not None
    rows = [read_metrics(path) for path in tmp_path.glob("trial-*/metrics.jsonl")]
    ended_early = [each for each in rows if each[-1]["steps"] < 10240]
    assert (len(rows), len(ended_early)) == (4, int(pruned[1]))
    assert float(done.stdout.rpartition(" ")[2]) > 9.0


@pytest.mark.timeout(660)
def test_a_batched_simulator_in_jax_is_learnt(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "jax_env.py")
    done = subprocess.run(
        [sys.executable, example],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rpartition(" ")[2]) > 195.0


@pytest.mark.parametrize("code", SINGLE_SEEDS, ids=["jax", "pettingzoo"])
def test_rows_of_a_vector_env_differ_if_they_are_reset_with_one_seed(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize("name", TRAINED_WHILE_KILLING)
def test_training_continues_while_workers_are_killed(
    name: str, servers: list[ServerProcess]
) -> None:
    addresses = [server.address for server in servers]
    options = ("--steps", "8192", "--connect", *addresses)
    with killing_workers(servers, seconds=0.5) as kills:
        run = run_example(name, *options, on_trained=kills.is_over.set)
    assert len(kills.pids) >= 3
    assert run.mean_return > 15.0
