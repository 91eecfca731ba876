"""`envserve bench`: the table of all cases, and advice about the bottleneck."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AsyncVectorEnv

from envserve.bench.cases import bare_loops, running_server, vector_env
from envserve.bench.command import REMEDIES, bottleneck
from envserve.bench.interleaved import SPEED, Measurements, interleave
from envserve.bench.workload import Workload
from envserve.cli.app import PROGRAM
from envserve.envs.user_envs import name_and_imports
from envserve.errors import EnvError, EnvStartError
from envserve.text import install_command
from envserve.worker.orphans import child_processes
from tests.command_line import invoke
from tests.envserve.conftest import WaitUntil

#: An env with Dict actions, so that each case has to split action batches into rows.
OWN_ENV = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class OwnEnv(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(CartPoleEnv())
        self.action_space = gymnasium.spaces.Dict({"push": self.env.action_space})

    def step(self, action):
        return self.env.step(action["push"])

gymnasium.register("Own-v0", "own_env:OwnEnv")
"""


def test_all_cases_can_measure_a_user_env(tmp_path: Path) -> None:
    (tmp_path / "own_env.py").write_text(OWN_ENV)
    long = tmp_path / ("x" * 100)  # too long for a socket path
    long.mkdir()
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-m", "envserve", "bench"]
        + ["--env", "Own-v0", "--import", "own_env", "--num-envs", "3"]
        + ["--num-workers", "2", "--seconds", "0.01", "--rounds", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(long)},
    )
    assert finished.returncode == 0, finished.stderr
    title, *lines = finished.stdout.splitlines()
    assert title.startswith("Own-v0, 3 envs, 2 workers")
    assert title.rstrip().endswith("medians over 1 round")
    cells = [line.split("│") for line in lines if "│" in line]
    assert [row[1].strip() for row in cells] == [
        *("limit: bare loops", "gymnasium SyncVectorEnv", "gymnasium AsyncVectorEnv"),
        *("envserve in-process", "envserve ipc", "envserve tcp"),
    ]
    assert cells[0][6].strip() == "1.00"
    assert "workers and wake-ups" in finished.stdout
    assert "us over ipc and" in finished.stdout
    assert "-bound: " in finished.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_servers_end_when_the_benchmark_ends(number: int) -> None:
    command = [sys.executable, "-m", "envserve", "bench", "--num-envs", "1"]
    with subprocess.Popen(
        [*command, "--rounds", "1000000"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        while line := process.stderr.readline():
            if line.startswith("... 1 of "):  # all cases have started
                break
        servers = [
            pid
            for pid, *_ in child_processes(process.pid)
            if b"tcp" in command_line_of(pid)
        ]
        assert servers
        watched = [os.pidfd_open(pid) for pid in servers]
        if number == signal.SIGINT:  # a terminal sends it to all processes
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        for each in watched:
            assert select.select([each], [], [], 200)[0]
            os.close(each)
        errors = process.stderr.read()
    assert process.returncode == (-9 if number == signal.SIGKILL else 130), errors
    assert "_step_in_process" not in errors


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_ctrl_c_while_the_cases_start_causes_no_traceback(
    wait_until: WaitUntil,
) -> None:
    command = [sys.executable, "-m", "envserve", "bench", "--num-envs", "1"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:

        def has_started() -> bool:
            pids = (pid for pid, *_ in child_processes(process.pid))
            return any(b"spawn_main" in command_line_of(pid) for pid in pids)

        wait_until(has_started)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "Traceback" not in errors


def command_line_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_the_path_of_a_socket_may_contain_spaces() -> None:
    with running_server(Workload("CartPole-v1", 1, 1, 0.1), "ipc://{folder}/a b") as at:
        assert at.endswith("/a b")
        assert Path(at.removeprefix("ipc://")).is_socket()


def test_a_missing_temporary_folder_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/missing")
    result = invoke(PROGRAM, ["demo", "--seconds", "1"])
    assert result.exit_code == 1
    assert "Error: cannot create a temporary folder: No such file" in result.stderr
    assert "TMPDIR" in result.stderr


def test_an_unknown_env_name_is_an_error_of_one_line() -> None:
    result = invoke(PROGRAM, ["bench", "--env", "CartPole-v9"])
    assert result.exit_code == 2
    *_, line = result.stderr.splitlines()
    assert line.startswith("Error: no env named 'CartPole-v9' is registered")
    assert "did you mean CartPole-v1" in line


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            DependencyNotInstalled("MuJoCo is not installed"),
            f"^CartPole-v1 needs .*: {re.escape(install_command('mujoco'))} on the",
        ),
        (
            DependencyNotInstalled("Box2D is not installed, run `pip install box2d`"),
            f"^CartPole-v1 needs .*: {re.escape(install_command('box2d'))} on the",
        ),
        (
            DependencyNotInstalled("jax is not installed, run `pip install jax`"),
            "^CartPole-v1 cannot be built: jax is not installed, run `pip install j",
        ),
        (
            ImportError("it has moved to the mujoco package"),
            "^CartPole-v1 cannot be built: it has moved to the mujoco package$",
        ),
    ],
)
def test_a_missing_dependency_of_an_env_is_an_error_of_one_line(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("gymnasium.make", make)
    with pytest.raises(EnvStartError, match=text):
        Workload("CartPole-v1", 1, 1, 0).check()


def test_bare_loops_step_every_env_with_the_same_actions_as_other_cases() -> None:
    load = Workload("CartPole-v1", 3, 2, 0.01)
    first, second = load.actions(), load.actions()
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert first[0].shape == (3,)
    with bare_loops(load) as measure:
        assert measure()[SPEED] > 0
        assert measure()[SPEED] > 0


@pytest.fixture
def registry() -> Iterator[None]:
    """Remove envs that a test registers, because later batches would pickle them."""
    before = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


@pytest.mark.parametrize("fault", ["raise RuntimeError", "os._exit(1)"])
def test_bare_loops_raise_if_an_env_fails(
    fault: str, registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / f"failing_{len(fault)}.py").write_text(
        "import os\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        f"class Failing(CartPoleEnv):\n    def step(self, action): {fault}\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])  # `check` adds the file's folder
    name, modules = name_and_imports(f"{file}:Failing")
    load = Workload(name, 1, 1, 0.01, import_modules=modules)
    with bare_loops(load) as measure, pytest.raises(EnvError, match="an env raised"):
        measure()


def test_processes_of_bare_loops_exit_so_that_envs_can_clean_up(
    registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "simulator.py").write_text(
        "import atexit, os\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Simulator(CartPoleEnv):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        atexit.register(open, f'{tmp_path}/{{os.getpid()}}', 'w')\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    name, modules = name_and_imports(f"{file}:Simulator")
    with bare_loops(Workload(name, 2, 2, 0.01, import_modules=modules)):
        processes = multiprocessing.active_children()
    assert all((tmp_path / str(process.pid)).exists() for process in processes)
    assert len(processes) == 2


def test_async_vector_env_ends_if_results_were_received_before_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    load = Workload("CartPole-v1", 1, 1, 0.01)
    with (
        contextlib.suppress(KeyboardInterrupt),
        vector_env(load, "AsyncVectorEnv") as measure,
    ):
        # `step` calls this method after it has received the results.
        monkeypatch.setattr(AsyncVectorEnv, "_raise_if_errors", raise_interrupt)
        measure()
        pytest.fail("expected a KeyboardInterrupt")
    for process in multiprocessing.active_children():
        process.join(20)
    assert not multiprocessing.active_children()


def test_the_order_of_cases_alternates_between_turns() -> None:
    lines: list[str] = []
    order: list[str] = []

    def measure(name: str) -> dict[str, float]:
        order.append(name)
        return {"count": float(len(order))}

    cases = {name: lambda name=name: measure(name) for name in "abc"}
    measured = interleave(cases, 3, lines.append)
    assert "".join(order) == "abccbaabc"
    assert measured.values("a", "count") == [1.0, 6.0, 7.0]
    assert lines[:4] == [
        f"... {n} of 3: {c}" for n, c in zip("1112", "abcc", strict=True)
    ]


def test_medians_and_ratios_are_taken_over_the_turns() -> None:
    def turns(*values: float) -> list[dict[str, float]]:
        return [{"speed": value} for value in values]

    measured = Measurements({"us": turns(3, 10, 8), "them": turns(1, 5, 2)})
    assert measured.median("us", "speed") == 8
    assert measured.median("us", lambda numbers: 2 * numbers["speed"]) == 16
    # The median of the turns' ratios 3, 2 and 4, not the ratio of the medians.
    assert measured.ratio("us", "them", "speed") == 3
    assert measured.ratio("us", "nobody", "speed") is None


def test_the_bottleneck_is_named_with_advice() -> None:
    parts = {"client": 10.0, "workers and wake-ups": 20.0, "envs": 70.0}
    assert bottleneck(parts, REMEDIES).startswith("env-bound: 70%")
    parts = {"client": 15.0, "workers and wake-ups": 45.0, "envs": 40.0}
    verdict = bottleneck(parts, REMEDIES)
    assert verdict.startswith("overhead-bound: only 40%")
    assert "workers and wake-ups (45%)" in verdict
    assert verdict.endswith(REMEDIES["workers and wake-ups"])
