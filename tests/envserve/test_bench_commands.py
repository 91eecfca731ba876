"""Every sub-command of `envserve bench` once, as small as can be, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import DependencyNotInstalled

from envserve.bench import peers
from envserve.bench.bare_loops import bare_loops
from envserve.bench.case_process import BenchmarkError, Skip
from envserve.bench.cli import main
from envserve.bench.images import REUSING
from envserve.bench.load import SPEED, Load, check_env
from envserve.bench.options import OutDir
from envserve.bench.step import LIMIT
from envserve.errors import UnknownEnv
from envserve.lab.processes import proportional_set_bytes, with_descendants

TINY = ("--seconds", "0.02", "--repetitions", "1")
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    def run(*arguments: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--outdir", str(tmp_path)])
        assert caught.value.code == 0
        result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
        assert result["benchmark"] == arguments[0]
        assert all(
            np.isfinite(list(repetition.values())).all()
            for repetitions in result["repetitions"].values()
            for repetition in repetitions
        )
        return result

    return run


def test_step_measures_ours_and_every_peer_that_is_there(bench: Bench) -> None:
    # Over ipc and from one server it runs in other tests.
    cases = ("limit", "in-process", "2 servers", *peers.PEERS)
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
    assert {*measured, *skipped} >= peers.PEERS.keys()
    assert all("envserve[bench]" in reason for reason in skipped.values())
    assert measured["envserve in-process"].keys() == {SPEED, "p50_us", "p99_us"}
    assert result["results"]["ratio_to_limit"][LIMIT] == 1.0
    assert result["options"]["num_envs"] == 2


def test_images(bench: Bench) -> None:
    result = bench("images", "--num-envs", "2", *TINY, "--only", "in-process")
    assert list(result["medians"]) == [REUSING, "envserve in-process"]
    speed = result["medians"]["envserve in-process"][SPEED]
    (gigabytes,) = result["results"]["gigabytes_per_second"]["envserve in-process"]
    assert gigabytes == pytest.approx(speed * 84 * 84 * 4 / 1e9)


def test_scale(bench: Bench) -> None:
    sizes = ("--size", "4", "--size", "2", "--workers", "2")
    result = bench("scale", *sizes, *TINY)
    assert list(result["medians"]) == ["2 envs", "4 envs"]
    memory = result["results"]["proportional_set_bytes"]
    if sys.platform == "linux":
        assert all(1e6 < taken < 1e9 for taken in memory.values())
    else:
        assert set(memory.values()) == {None}


def test_start(bench: Bench) -> None:
    envs = ("--env", "CartPole-v1", "--num-envs", "2", "--workers", "2")
    only = ("--only", "envserve,", "--only", "ready")
    result = bench("start", *envs, "--repetitions", "1", *only)
    assert len(result["medians"]) == 2


def test_straggler(bench: Bench) -> None:
    small = ("--num-envs", "2", "--milliseconds", "1", "--factor", "3")
    result = bench("straggler", *small, *TINY, "--only", "in-process")
    assert len(result["medians"]) == 3
    assert all(m["replies"] >= 2 for m in result["medians"].values())


def test_slow_reset(bench: Bench) -> None:
    small = ("--num-envs", "2", "--reset-milliseconds", "2", "--episode-length", "5")
    result = bench("slow-reset", *small, "--repetitions", "1")
    assert len(result["medians"]) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_counts_a_process_and_what_it_has_started() -> None:
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


def test_the_limit_steps_every_env_with_the_same_actions_as_others() -> None:
    load = Load("CartPole-v1", 3, 2, 0.01)
    first, second = load.actions(), load.actions()
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert first[0].shape == (3,)
    with bare_loops(load) as measure:
        assert measure()[SPEED] > 0
        assert measure()[SPEED] > 0


@pytest.mark.parametrize(
    ("opener", "module"),
    [
        (peers.sb3_subprocess, "stable_baselines3"),
        (peers.tianshou_shared_memory, "tianshou"),
        (peers.envpool, "envpool"),
    ],
)
def test_a_peer_that_is_not_installed_is_skipped(
    opener: Any, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with (
        pytest.raises(Skip, match=r"pip install 'envserve\[bench\]'"),
        opener(Load("CartPole-v1", 1, 1, 0.01)),
    ):
        pass


def test_a_wrong_word_is_a_short_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["step", "--only", "udp"])
    assert caught.value.code == 1
    assert capsys.readouterr().err.startswith("envserve bench: --only: expected part")


@pytest.mark.parametrize("command", ["step", "scale"])
def test_a_wrong_env_name_is_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--env", "CartPole-v9"])
    assert caught.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("envserve bench: no env named 'CartPole-v9' is registered")
    assert "did you mean CartPole-v1" in line


def test_modules_are_imported_before_the_name_is_looked_up() -> None:
    check_env("CartPole-v1", ["envserve.bench.envs"])
    check_env("envserve/Image-v0", ["envserve.bench.envs"])


def test_the_limit_says_itself_that_there_is_no_such_env() -> None:
    load = Load("CartPole-v9", 1, 1, 0.01)
    with pytest.raises(UnknownEnv), bare_loops(load):
        pass


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            DependencyNotInstalled("MuJoCo is not installed"),
            r"^CartPole-v1 needs MuJoCo: pip install 'envserve\[mujoco\]'$",
        ),
        (
            DependencyNotInstalled("Box2D is not installed, run `pip install box2d`"),
            "^CartPole-v1 cannot be built: Box2D is not installed, run `pip install b",
        ),
        (
            ImportError("it has moved to the mujoco package"),
            "^CartPole-v1 cannot be built: it has moved to the mujoco package$",
        ),
    ],
)
def test_what_an_env_lacks_is_said_in_one_line(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("gymnasium.make", make)
    with pytest.raises(BenchmarkError, match=text):
        check_env("CartPole-v1")


def test_the_suite_leaves_out_commands_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserve.bench.cli.entry_points", lambda group: [])
    with pytest.raises(SystemExit) as caught:
        main(["suite", "--part", "train", "--outdir", str(tmp_path)])
    assert caught.value.code == 0
    assert "train: skipped" in capsys.readouterr().err


def test_the_suite_runs_a_part_into_its_folder(tmp_path: Path) -> None:
    asked = []

    def probe(outdir: OutDir = None) -> None:
        asked.append(outdir)

    with pytest.raises(SystemExit) as caught:
        main(["suite", "--part", "train", "--outdir", str(tmp_path)], {"train": probe})
    assert caught.value.code == 0
    assert asked == [tmp_path / "train"]
    assert (tmp_path / "tables.md").read_text() == ""


def test_a_part_that_fails_leaves_the_suite_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def fails(outdir: OutDir = None) -> None:
        raise BenchmarkError("pip install 'envserve[mujoco]'")

    def probe(outdir: OutDir = None) -> None:
        asked.append(outdir)

    parts = ("--part", "train", "--part", "overlap", "--outdir", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        main(["suite", *parts], {"train": fails, "overlap": probe})
    assert caught.value.code == 1
    assert asked == [tmp_path / "overlap"]
    assert (tmp_path / "tables.md").exists()
    lines = capsys.readouterr().err.splitlines()
    assert "train: failed, pip install 'envserve[mujoco]'" in lines
    assert lines[-1] == "Failed: train"


def test_the_suite_checks_all_parts_before_it_runs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def probe(outdir: OutDir = None) -> None:
        asked.append(outdir)

    parts = ("--part", "train", "--part", "trian", "--outdir", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        main(["suite", *parts], {"train": probe})
    assert caught.value.code == 1
    assert asked == []
    assert "envserve bench: --part: expected one of" in capsys.readouterr().err


def test_bench_is_a_sub_command_of_envserve() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "envserve.cli", "bench", "step", "--help"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "Measure raw stepping" in finished.stdout
    assert "envserve bench step" in finished.stdout
