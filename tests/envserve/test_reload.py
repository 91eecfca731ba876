"""`envserve start --reload`: saving a file restarts the server; clients continue."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.support.processes import is_running, with_descendants
from envserve.cli.app import PROGRAM
from envserve.client import BatchEnv, StepResult
from envserve.errors import EnvStartError
from envserve.server import reload
from envserve.settings import HostSettings
from envserve.slab import Status
from tests.command_line import invoke
from tests.envserve.conftest import Serve, WaitUntil

SOURCE = """
import gymnasium
import numpy as np
from shared_by_envs import VALUE

class Same(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 99, (1,), np.int64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.array([VALUE]), {}

    def step(self, action):
        return np.array([VALUE]), 1.0, False, False, {}
"""


def save(path: Path, text: str) -> None:
    """Replace a file as editors do; change its mtime even if the clock is coarse."""
    earlier = path.stat().st_mtime_ns if path.exists() else 0
    draft = path.with_suffix(".new")
    draft.write_text(text)
    os.utime(draft, ns=(earlier + 10**9, earlier + 10**9))
    draft.replace(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "envs"
    folder.mkdir(mode=0o700)
    save(folder / "my_env.py", SOURCE)
    save(folder / "shared_by_envs.py", "VALUE = 1\n")
    return folder


def test_clients_continue_with_the_saved_files(
    folder: Path, serve: Serve, wait_until: WaitUntil
) -> None:
    env_name = f"{folder / 'my_env.py'}:Same"
    server = serve("--reload", env_name, imports=(), cwd=folder)
    with BatchEnv.connect("my_env:Same", [server.address], 4) as batch:
        batch.reset()

        def step() -> StepResult:
            return batch.step(np.zeros(4, np.int64))

        def num_reattaches() -> int:
            (stats,) = batch.stats().lanes.values()
            return int(stats["reattaches"])

        assert step().observation.tolist() == [[1]] * 4
        save(folder / "my_env.py", SOURCE + "\nthis is no Python")
        wait_until(
            lambda: "my_env.py changed, but the envs cannot be imported" in server.log
        )
        assert "SyntaxError: invalid syntax (my_env.py, line " in server.log
        steps = [step()]
        assert steps[0].valid.all()
        for number, (name, text, value) in enumerate(
            [("my_env.py", SOURCE, 1), ("shared_by_envs.py", "VALUE = 2\n", 2)], 1
        ):
            save(folder / name, text)  # `my_env` imports the other module
            while num_reattaches() < number or not steps[-1].valid.all():
                steps.append(step())
            assert steps[-1].observation.tolist() == [[value]] * 4
        status = np.stack([each.status for each in steps])
        assert ((status == Status.SERVER_LOST).sum(axis=0) == 2).all()
        assert ((status == Status.OK) | (status == Status.SERVER_LOST)).all()
        assert num_reattaches() == 2
    log = server.end(signal.SIGTERM)
    assert "changed; restarting the server" in log
    assert "Traceback" not in log


def test_a_server_exits_when_its_parent_is_killed(
    folder: Path, serve: Serve, wait_until: WaitUntil
) -> None:
    server = serve("--reload", f"{folder / 'my_env.py'}:Same", imports=(), cwd=folder)
    _, *others = with_descendants(server.process.pid)
    assert others
    server.process.kill()
    wait_until(lambda: not any(map(is_running, others)))


def test_a_server_stops_gracefully_when_its_terminal_is_closed(
    folder: Path, serve: Serve
) -> None:
    server = serve("--reload", f"{folder / 'my_env.py'}:Same", imports=(), cwd=folder)
    server.end(signal.SIGHUP)


@pytest.mark.parametrize(
    ("exit_code", "code", "error"),
    [
        (5, 5, ""),
        (-signal.SIGKILL, 1, "Error: expected the server to run until it is stopped; "),
        (-signal.SIGINT, 130, ""),  # Ctrl-C while the server starts
    ],
)
def test_the_command_exits_with_a_documented_code_if_a_signal_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, exit_code: int, code: int, error: str
) -> None:
    monkeypatch.setattr(reload, "serve_with_reload", lambda *_: exit_code)
    result = invoke(PROGRAM, ["start", "--reload"])
    assert result.exit_code == code
    assert result.stderr.startswith(error)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import nothing_like_it", "No module named 'nothing_like_it'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import os; os._exit(3)", "a process ended while it imported "),
    ],
)
def test_envs_that_cannot_be_imported_are_an_error_at_the_start(
    folder: Path, text: str, error: str
) -> None:
    save(folder / "shared_by_envs.py", text)
    host = HostSettings(env_names=(f"{folder / 'my_env.py'}:Same",))
    with pytest.raises(EnvStartError, match=error):
        reload.serve_with_reload(host, lambda host, send: 0)


def test_envs_that_a_module_registers_by_name_are_imported(folder: Path) -> None:
    registrations = (
        'gymnasium.register("Lazy-v0", "not_installed:Env")\n'
        'gymnasium.register("Lazy-v1", "no_mujoco:Env")\n'
        'gymnasium.register("Lazy-v2", "my_env:Same")\n'
    )
    missing = (
        "from gymnasium.error import DependencyNotInstalled as Missing\nraise Missing"
    )
    save(folder / "no_mujoco.py", missing)
    save(folder / "lazy_envs.py", f"import gymnasium\n{registrations}")
    save(folder / "my_env.py", "1 / 0")
    host = HostSettings(import_modules=(str(folder / "lazy_envs.py"),))
    with pytest.raises(EnvStartError, match="ZeroDivisionError"):
        reload.serve_with_reload(host, lambda host, send: 0)


def test_mocks_of_modules_do_not_prevent_the_start(folder: Path) -> None:
    mocks = "class Anything:\n    def __getattr__(self, name): return Anything()\n"
    mocks += "import sys; sys.modules['pybullet'] = Anything()\n"
    save(folder / "shared_by_envs.py", f"{mocks}VALUE = 1\n")
    host = HostSettings(env_names=(f"{folder / 'my_env.py'}:Same",))
    assert reload.serve_with_reload(host, lambda host, send: 5) == 5


def test_the_exit_code_of_a_server_that_exits_by_itself_is_returned(
    folder: Path,
) -> None:
    host = HostSettings(env_names=(f"{folder / 'my_env.py'}:Same",))
    assert reload.serve_with_reload(host, lambda host, send: 5) == 5


def test_a_server_that_exits_before_it_is_ready_is_restarted_by_a_change(
    folder: Path,
) -> None:
    source, probed = folder / "my_env.py", folder / "probed"

    def serve(*_: object) -> int:
        if probed.exists():
            return 6
        # The server exits while the changed file is being imported.
        save(
            source, f"{SOURCE}\nimport time\nopen({str(probed)!r}, 'w')\ntime.sleep(1)"
        )
        while not probed.exists():
            time.sleep(0.01)
        return 5

    host = HostSettings(env_names=(f"{source}:Same",))
    assert reload.serve_with_reload(host, serve) == 6


def test_a_file_that_disappears_while_it_is_checked_counts_as_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editor may replace the file at this moment."""
    num_checks = itertools.count()

    def stat(path: str) -> os.stat_result:
        if next(num_checks) == 2:  # after the first check of both files
            raise FileNotFoundError(path)
        return os.stat(path)

    def serve(*_: object) -> int:
        if (marker := folder / "started").exists():
            return 6
        marker.touch()
        time.sleep(40)  # until SIGINT
        return 5

    monkeypatch.setattr(reload, "os", SimpleNamespace(**{**vars(os), "stat": stat}))
    host = HostSettings(env_names=(f"{folder / 'my_env.py'}:Same",))
    assert reload.serve_with_reload(host, serve) == 6


def test_a_signal_during_a_restart_ends_the_new_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, start = folder / "my_env.py", ForkProcess.start
    started: list[ForkProcess] = []

    def send_signal_and_start(process: ForkProcess) -> None:
        started.append(process)
        if len(started) == 4:  # a probe and a server, and both again
            os.kill(os.getpid(), signal.SIGTERM)
        start(process)

    def serve(*_: object) -> int:
        if len(started) < 4:
            save(source, f"{SOURCE}\n")
        time.sleep(60)
        return 5

    monkeypatch.setattr(ForkProcess, "start", send_signal_and_start)
    host = HostSettings(env_names=(f"{source}:Same",))
    # A signal that the main thread blocks may arrive in another thread.
    has_ended = threading.Event()
    thread = threading.Thread(target=has_ended.wait)
    thread.start()
    try:
        assert reload.serve_with_reload(host, serve) == -signal.SIGTERM
    finally:
        has_ended.set()
        thread.join()
