"""Every benchmark command runs once, with minimal options, and steps real workers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import peers
from benchmarks.cases.images import REUSING
from benchmarks.cases.ours import LIMIT
from benchmarks.cli import main
from benchmarks.command import Run, sub_command
from benchmarks.harness import BenchmarkError, Skip
from benchmarks.learning.goal import learning_sb3
from benchmarks.learning.train import training_sb3
from benchmarks.support.processes import proportional_set_bytes, with_descendants
from envserve.bench.interleaved import MICROSECONDS, SPEED, THREAD
from envserve.bench.workload import Workload
from envserve.text import install_command
from ppo.config import Config
from tests.benchmarks.conftest import Bench

TINY = ("--seconds", "0.02", "--repetitions", "1")
LOAD = Workload("CartPole-v1", 1, 1, 0.01)


def test_step_measures_envserve_and_all_installed_peers(bench: Bench) -> None:
    # Other tests cover ipc, a single server, and other projects that are not installed.
    cases = ("limit", "in-process", "2 servers", "gymnasium", peers.TIANSHOU)
    only = [word for case in cases for word in ("--only", case)]
    result = bench("step", "--env", "CartPole-v1", "--num-envs", "2", *TINY, *only)
    measured, skipped = result["medians"], result["skipped"]
    assert {
        LIMIT,
        "envserve in-process",
        "envserve tcp, 2 servers",
        "gymnasium SyncVectorEnv",
        "gymnasium AsyncVectorEnv",
    } <= measured.keys()
    assert peers.TIANSHOU in measured or "[bench]" in skipped[peers.TIANSHOU]
    assert measured["envserve in-process"].keys() == {
        *(SPEED, MICROSECONDS, THREAD, "p50_us", "p99_us")
    }
    assert result["table"]["rows"][0][:1] == [LIMIT]
    assert result["table"]["rows"][0][5] == "1.00"
    assert result["options"]["num_envs"] == 2


def test_images(bench_here: Bench) -> None:
    result = bench_here("images", "--num-envs", "2", *TINY, "--only", "in-process")
    assert list(result["medians"]) == [REUSING, "envserve in-process"]
    speed = result["medians"]["envserve in-process"][SPEED]
    gigabytes = float(result["table"]["rows"][1][1])
    assert gigabytes == pytest.approx(speed * 84 * 84 * 4 / 1e9, abs=0.006)


def test_scale(bench_here: Bench) -> None:
    sizes = ("--size", "4", "--size", "2", "--workers", "2")
    result = bench_here("scale", *sizes, *TINY)
    assert list(result["medians"]) == ["2 envs", "4 envs"]
    memory = result["results"]["proportional_set_bytes"]
    if sys.platform == "linux":
        assert all(1e6 < taken < 1e9 for taken in memory.values())
    else:
        assert set(memory.values()) == {None}


def test_guarantees(bench: Bench) -> None:
    envs = ("--env", "CartPole-v1", "--num-envs", "3", "--num-envs", "2")
    result = bench("guarantees", *envs, "--workers", "2", *TINY)
    cases = [f"CartPole-v1, {size} envs: " for size in (3, 2)]
    ways = ("bare slab", "BatchEnv.local")
    assert list(result["medians"]) == [case + way for case in cases for way in ways]
    assert [row[-1] == "1.00" for row in result["table"]["rows"]][::2] == [True] * 2


def test_start(bench: Bench) -> None:
    envs = ("--env", "CartPole-v1", "--num-envs", "2", "--workers", "2")
    only = ("--only", "envserve,", "--only", "ready")
    result = bench("start", *envs, "--repetitions", "1", *only)
    assert len(result["medians"]) == 2


def test_straggler(bench_here: Bench) -> None:
    small = ("--num-envs", "2", "--milliseconds", "1", "--factor", "3")
    result = bench_here("straggler", *small, *TINY, "--only", "in-process")
    assert len(result["medians"]) == 3
    assert all(m["replies"] >= 2 for m in result["medians"].values())


def test_slow_reset(bench_here: Bench) -> None:
    small = ("--num-envs", "2", "--reset-milliseconds", "2", "--episode-length", "5")
    result = bench_here("slow-reset", *small, "--repetitions", "1")
    assert len(result["medians"]) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_includes_descendants_of_a_process() -> None:
    code = "print('ready', flush=True); input()"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pids = with_descendants(process.pid)
        alone = proportional_set_bytes([process.pid])
        both = proportional_set_bytes(pids)
        process.communicate(b"\n")
    assert len(pids) == 2
    assert both > alone > 1e6


@pytest.mark.parametrize(
    ("opener", "arguments", "module"),
    [
        (peers.sb3_subprocess, (LOAD,), "stable_baselines3"),
        (peers.tianshou_shared_memory, (LOAD,), "tianshou"),
        (peers.envpool, (LOAD,), "envpool"),
        (learning_sb3, ("cartpole", 475.0, 1000), "torch"),
        (training_sb3, (Config(env_name="CartPole-v1"), 1, "SubprocVecEnv"), "torch"),
        (training_sb3, (Config(env_name="CartPole-v1"), 1, "DummyVecEnv"), "torch"),
    ],
)
def test_a_peer_that_is_not_installed_is_skipped(
    opener: Any,
    arguments: tuple[Any, ...],
    module: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with (
        pytest.raises(Skip, match=re.escape(install_command("bench"))),
        opener(*arguments),
    ):
        pass


def test_an_unknown_case_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["step", "--only", "udp"])
    assert caught.value.code == 1
    assert capsys.readouterr().err.startswith(
        "scripts/bench.py: --only: expected a part"
    )


@pytest.mark.parametrize(
    "command", ["step", "scale", "guarantees", "profile", "simulate", "train"]
)
def test_an_unknown_env_name_is_an_error_of_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--env", "CartPole-v9"])
    assert caught.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("scripts/bench.py: no env named 'CartPole-v9' is registered")
    assert "did you mean CartPole-v1" in line


def run_suite(folder: Path, *parts: str) -> tuple[int, list[Path | None]]:
    """Run parts of the suite; return the exit code and the folders of "overlap".

    The command "train" always fails.
    """
    folders = []

    @sub_command
    def fails(run: Run) -> None:
        raise BenchmarkError("pip install 'envserve[mujoco]'")

    @sub_command
    def probe(run: Run) -> None:
        folders.append(run.outdir)

    words = [word for part in parts for word in ("--part", part)]
    with pytest.raises(SystemExit) as caught:
        main(
            ["suite", *words, "--outdir", str(folder)],
            {"train": fails, "overlap": probe},
        )
    return int(caught.value.code or 0), folders


def test_the_suite_runs_a_part_into_its_folder(tmp_path: Path) -> None:
    assert run_suite(tmp_path, "overlap") == (0, [tmp_path / "overlap"])
    assert (tmp_path / "tables.md").read_text() == ""


def test_the_suite_continues_after_a_part_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_suite(tmp_path, "train", "overlap") == (1, [tmp_path / "overlap"])
    assert (tmp_path / "tables.md").exists()
    lines = capsys.readouterr().err.splitlines()
    assert "train: failed, pip install 'envserve[mujoco]'" in lines
    assert lines[-1] == "Failed: train"


def test_the_suite_checks_all_parts_before_it_runs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_suite(tmp_path, "overlap", "trian") == (1, [])
    assert "scripts/bench.py: --part: expected one of" in capsys.readouterr().err


def test_the_script_runs_without_an_installation() -> None:
    finished = subprocess.run(
        [sys.executable, "scripts/bench.py", "step", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Measure raw stepping" in finished.stdout
    assert "scripts/bench.py step" in finished.stdout
