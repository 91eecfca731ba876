"""The suite's own guards: each one is made to strike."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envserve.crashes.crash_folder import default_folder

ROOT = Path(__file__).resolve().parent.parent
on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="orphans are found through /proc, on Linux only"
)


def run_suite(folder: Path, tests: str, *options: str) -> str:
    """The output of pytest, with the suite's conftest, over one file of `tests`."""
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "test_sample.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    finished = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return finished.stdout + finished.stderr


def test_clean_test_passes_and_sees_its_seed(tmp_path: Path) -> None:
    output = run_suite(
        tmp_path,
        "import subprocess, sys, threading\n"
        "def test_clean():\n"
        "    subprocess.run([sys.executable, '-c', ''], check=True)\n"
        "    thread = threading.Thread(target=int)\n"
        "    thread.start()\n",
        "--random-seed=7",
    )
    assert "1 passed" in output
    assert "random seed: 7" in output


def test_failure_prints_a_seed_that_repeats_it(tmp_path: Path) -> None:
    tests = "def test_draw(random_generator):\n    assert random_generator.random() < 0"
    first = run_suite(tmp_path, tests, "--random-seed=7")
    again = run_suite(tmp_path, tests, "--random-seed=7")
    other = run_suite(tmp_path, tests, "--random-seed=8")
    assert "--random-seed 7" in first

    def drawn(output: str) -> str:
        return next(line for line in output.splitlines() if line.startswith("E "))

    assert drawn(first) == drawn(again) != drawn(other)


@on_linux
def test_what_is_left_running_fails_its_test_and_is_ended(tmp_path: Path) -> None:
    output = run_suite(
        tmp_path,
        "import subprocess, sys, tests.left_behind, threading\n"
        "tests.left_behind.GRACE_SECONDS = 0.5\n"
        "children, release = [], threading.Event()\n"
        "def test_leaves_a_child():\n"
        "    children.append(subprocess.Popen([sys.executable, '-c', 'input()'],\n"
        "                                     stdin=subprocess.PIPE))\n"
        "def test_leaves_an_orphan():\n"
        "    start = '''import subprocess, sys; subprocess.Popen(\n"
        "        [sys.executable, '-c', 'import signal; signal.pause()'])'''\n"
        "    subprocess.run([sys.executable, '-c', start], check=True)\n"
        "def test_leaves_a_thread():\n"
        "    threading.Thread(target=release.wait, name='straggler').start()\n"
        "def test_after():\n"
        "    release.set()\n"
        "    assert children[0].wait(timeout=60) == -9\n"
        "    children[0].stdin.close()\n",
    )
    assert "4 passed, 3 errors" in output
    for left in ("behind\n  process ", "-c input()", "signal.pause()", "thread strag"):
        assert left in output


@on_linux
def test_longer_lived_fixture_may_replace_its_process(tmp_path: Path) -> None:
    output = run_suite(
        tmp_path,
        "import pytest, subprocess, sys\n"
        "CHILD = 'import sys; sys.stdin.read()'\n"
        "OWNER = f'''import subprocess, sys\n"
        "sys.stdin.readline()\n"
        "child = subprocess.Popen([sys.executable, '-c', {CHILD!r}])\n"
        "print('started', flush=True)\n"
        "child.wait()'''\n"
        "@pytest.fixture(scope='module')\n"
        "def owner():\n"
        "    with subprocess.Popen([sys.executable, '-c', OWNER], text=True,\n"
        "            stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:\n"
        "        yield process\n"
        "def test_replaces(owner):\n"
        "    print(file=owner.stdin, flush=True)\n"
        "    assert owner.stdout.readline() == 'started\\n'\n",
    )
    assert "1 passed" in output
    assert "error" not in output


@on_linux
def test_what_a_process_wrote_before_it_aborted_is_shown(tmp_path: Path) -> None:
    tests = "import os\ndef test_x():\n    os.write(2, b'last words')\n    os.abort()\n"
    output = run_suite(tmp_path, tests, "--numprocesses=1", "--max-worker-restart=0")
    assert "\nlast words" in output
    assert "crashed while running" in output


def test_repro_files_of_the_suite_push_out_none_of_the_users() -> None:
    folder = default_folder()
    assert f"envserve-suite-{os.getuid()}" in folder.parts
    assert folder.parent == Path(os.environ["TMPDIR"])  # of processes that it starts
