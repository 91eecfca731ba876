"""No program runs a file of the working directory only because of the file's name."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envserve.cli.options import add_working_directory
from envserve.crashes.repro_file import encode_repro
from envserve.python_process import search_path
from ppo.config import Config
from ppo.run_folder.folder import RunFolder
from tests.envserve.test_replay import make_repro

#: Modules that the programs import, or whose absence they or their libraries accept.
NAMES = sorted(sys.stdlib_module_names) + [
    *("envserve", "ppo", "gymnasium", "numpy", "zmq", "msgspec", "msgpack", "rich"),
    *("tensorflow", "tensorboard", "keras", "jax", "jaxlib", "torch", "ray", "pandas"),
    *("pygame", "mujoco", "matplotlib", "imageio_ffmpeg", "PIL", "cv2", "psutil"),
    *("ale_py", "envpool", "uvicorn", "starlette", "prometheus_client", "uvloop"),
    *("httptools", "usercustomize", "sitecustomize"),
]
#: A program as pip installs it: a script in another folder.
SCRIPT = "from {package}.__main__ import main\nmain()\n"
LOCAL = """
from envserve.client import BatchEnv
with BatchEnv.local("CartPole-v1", 2, 1) as env:
    env.reset()
"""
#: Timeout of a command in seconds; TensorFlow starts slowly on a busy machine.
TIMEOUT = 280
SMALL = [
    *("--num-workers=1", "--set=num_envs=2", "--set=horizon=8", "--set=epochs=1"),
    *("--set=minibatch_size=8", "--set=total_steps=16", "--set=evaluation_episodes=1"),
    *("--set=jit_compile=false",),
]
pytestmark = pytest.mark.timeout(600)
Run = Callable[..., str]


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Start `PROGRAM options` or `FILE.py` in a folder, and kill it at the end."""
    script = folder.parent / "bin" / words[0]
    with subprocess.Popen(
        [sys.executable, str(script), *words[1:]],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(folder: Path, *words: str, code: int = 0) -> str:
    """Run a command; return its output and errors."""
    with started(folder, *words) as process:
        output, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == code, f"{words}: {output}{errors}"
    return output + errors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a working directory; the programs are in a folder beside it."""
    (folder := tmp_path / "work").mkdir()
    (programs := tmp_path / "bin").mkdir()
    for package in ("envserve", "ppo"):
        (programs / package).write_text(SCRIPT.format(package=package))
    (programs / "local.py").write_text(LOCAL)
    return folder


@pytest.fixture
def filled(folder: Path) -> Iterator[Path]:
    """Fill the working directory with modules; verify that none of them was run."""
    ran = folder.parent / "ran"
    for name in NAMES:
        file = folder / f"{name}.py"
        text = f"{{{name!r}}} in {{__import__('sys').orig_argv}}\\n"
        file.write_text(f"open({str(ran)!r}, 'a').write(f{text!r})\n")
    info = folder / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[gymnasium.envs]\n__root__ = jax\n[envserve.envs]\nall = jax\n"
    )
    yield folder
    assert not ran.exists(), f"expected no module to run; these ran: {ran.read_text()}"


def test_envserve_runs_no_file_of_the_working_directory(filled: Path) -> None:
    repro = filled.parent / "repro"
    repro.write_bytes(encode_repro(make_repro("raise")))
    options = ["--crash-dir", "none", "--bind", "tcp://127.0.0.1:0"]
    with started(filled, "envserve", "start", "CartPole-v1", *options) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[3]
        small = ["--num-envs=2", "--num-workers=1", "--seconds=0.01", "--rounds=1"]
        commands = [
            ["bench", *small],
            ["check", address],
            ["describe", "CartPole-v1"],
            ["describe", "CartPole-v1", address],
            ["doctor", address],
            ["envs"],
            ["envs", address],
            ["health", address, "--ready"],
            ["page", address, "--port=0", "--end-with-stdin"],
            ["status", address],
        ]
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(run, filled, "envserve", *each) for each in commands]
            replay = ["replay", "--import", "tests.oracle.probe_envs", str(repro)]
            on_ray = ["status", "ray://default/envs"]
            waiting += [
                pool.submit(run, filled, "local.py"),
                pool.submit(run, filled, "envserve", *replay, code=1),
                pool.submit(run, filled, "envserve", *on_ray, code=2),
            ]
            with started(filled, "envserve", "demo", "--no-open", "--port=0") as demo:
                assert demo.stdout is not None
                assert "http://" in demo.stdout.readline()
                demo.send_signal(signal.SIGINT)
                demo.communicate(timeout=TIMEOUT)
            for each in waiting:
                each.result()
        run(filled, "envserve", "drain", address)


def test_ppo_runs_no_file_of_the_working_directory(filled: Path) -> None:
    runs, study = filled.parent / "run", filled.parent / "study"
    options = [*SMALL, f"--run-dir={runs}", "--page", "--film"]
    output = run(filled, "ppo", "train", "CartPole-v1", *options)
    assert "Page: http://" in output
    assert len([*runs.rglob("*.mp4")]) == 1
    run(filled, "ppo", "plot", str(runs), "--metric=entropy")
    # Fails before it loads TensorFlow, which takes seconds.
    seed = RunFolder.create(study / "seed-0", config := Config(env_name="CartPole-v1"))
    RunFolder(study).save_config(config)
    with seed.locked():
        output = run(filled, "ppo", "train", f"--resume={study}", code=1)
    assert "this run is already being trained by" in output


@pytest.mark.parametrize("is_safe", [True, False])
@pytest.mark.parametrize("flag", ["-c", "-m", "file", "-Pc"])
def test_children_search_the_working_directory_last_and_only_if_it_is_safe(
    flag: str, is_safe: bool, folder: Path
) -> None:
    """Python itself searches the working directory first with -c and -m."""
    text = "import envserve.python_process as p, sys; print(*p.search_path(), sep='|')"
    (folder / "shown.py").write_text(text)
    (folder.parent / "shown.py").write_text(text)
    folder.chmod(0o755 if is_safe else 0o777)
    arguments = {
        "-c": ["-c", text],
        "-m": ["-m", "shown"],
        "file": ["../shown.py"],
        "-Pc": ["-P", "-c", text],
    }[flag]
    found = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True
    )
    path = found.stdout.rstrip("\n").split("|")
    is_last = is_safe and flag in ("-c", "-m")
    assert [entry == str(folder) for entry in path].count(True) == is_last
    assert (path[-1] == str(folder)) == is_last
    assert (path[0] == str(folder.parent)) == (flag == "file")


def test_a_working_directory_that_is_not_accessible_is_not_searched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    lstat = os.lstat

    def fails(path: str) -> os.stat_result:
        if path == str(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return lstat(path)

    monkeypatch.setattr(os, "lstat", fails)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert not {"", str(folder)} & {*search_path()}
    add_working_directory(["no_such_module"])
    assert str(folder) not in sys.path


def test_entries_of_the_search_path_that_python_ignores_are_omitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = search_path()
    monkeypatch.setattr(sys, "path", [None, b"/tmp", *sys.path])
    assert search_path() == expected


def test_children_get_the_options_of_the_interpreter() -> None:
    shown = "print(sys.flags.optimize, sys.flags.utf8_mode, sys.warnoptions)"
    text = (
        "import subprocess, envserve.python_process as p\n"
        f"subprocess.run(p.python_command({shown!r}), check=True)"
    )
    options = ["-OO", "-X", "utf8", "-W", "ignore::DeprecationWarning"]
    found = subprocess.run(
        [sys.executable, *options, "-c", text], capture_output=True, text=True
    )
    assert found.stdout == "2 1 ['ignore::DeprecationWarning']\n"


def test_a_folder_of_pythonpath_keeps_its_place_in_children(folder: Path) -> None:
    text = "import envserve.python_process as p; print(p.search_path().index({!r}))"
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    found = subprocess.run(
        [sys.executable, "-c", text.format(str(folder))],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert found.stdout == "0\n", found.stderr


MY_ENV = """
import subprocess, sys
from gymnasium.envs.classic_control import CartPoleEnv

class Walk(CartPoleEnv):
    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        # Python finds `my_sibling` in the working directory, as in any program.
        subprocess.run([sys.executable, "-c", "import my_sibling"], check=True)
"""


@pytest.mark.parametrize("flag", ["-c", "-m", "script"])
def test_a_module_beside_the_users_program_is_found_in_workers(
    flag: str, folder: Path
) -> None:
    code = LOCAL.replace("CartPole-v1", "my_env:Walk")
    (folder / "my_env.py").write_text(MY_ENV)
    (folder / "my_sibling.py").write_text("")
    (folder / "my_program.py").write_text(code)
    words = {"-c": ["-c", code], "-m": ["-m", "my_program"]}
    finished = subprocess.run(
        [sys.executable, *words.get(flag, ["my_program.py"])],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr


def test_a_module_that_others_may_have_planted_is_not_imported(folder: Path) -> None:
    (folder / "my_code.py").write_text("open('was_here', 'w')")
    folder.chmod(0o777)
    for words in (
        ["ppo", "train", "my_code:Walk"],
        ["ppo", "train", "CartPole-v1", "--import", "my_code"],
        ["ppo", "train", "CartPole-v1", "--set", "network=my_code:make"],
        ["ppo", "train", "CartPole-v1", "--set", 'callbacks=["my_code:log"]'],
        ["envserve", "describe", "my_code:Walk"],
    ):
        (line,) = run(folder, *words, code=2).splitlines()
        assert "other users can write to the working directory" in line
        assert "my_code" in line
    assert "envserve/Ledger-v0" in run(
        folder, "envserve", "envs", "--import", "tests.oracle.probe_envs"
    )
    assert not (folder / "was_here").exists()
