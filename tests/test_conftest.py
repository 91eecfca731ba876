"""The checks in tests/conftest.py fail exactly the tests that violate them."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from envserve.crashes.crash_folder import default_folder

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="orphans are found through /proc, on Linux only"
)

SAMPLE = """
import pytest, subprocess, sys, threading
import tests.leak_checks
tests.leak_checks.GRACE_SECONDS = 0.5
PYTHON = [sys.executable, "-c"]
children, release = [], threading.Event()

def test_clean():
    subprocess.run([*PYTHON, ""], check=True)
    thread = threading.Thread(target=int)
    thread.start()

def test_draws(random_generator):
    assert random_generator.random() < 0

def test_leaves_a_child():
    children.append(subprocess.Popen([*PYTHON, "input()"], stdin=subprocess.PIPE))

def test_leaves_an_orphan():
    start = '''import subprocess, sys; subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"])'''
    subprocess.run([*PYTHON, start], check=True)

def test_leaves_a_thread():
    threading.Thread(target=release.wait, name="straggler").start()

def test_after():
    release.set()
    assert children[0].wait(timeout=60) == -9
    children[0].stdin.close()

OWNER = f'''import subprocess, sys
sys.stdin.readline()
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"])
print("started", flush=True)
child.wait()'''

@pytest.fixture(scope="module")
def owner():
    pipe = subprocess.PIPE
    with subprocess.Popen([*PYTHON, OWNER], text=True, stdin=pipe, stdout=pipe) as it:
        yield it

def test_a_longer_lived_fixture_may_replace_its_process(owner):
    print(file=owner.stdin, flush=True)
    assert owner.stdout.readline() == "started\\n"
"""
ABORTING = "import os\ndef test_x():\n    os.write(2, b'last words')\n    os.abort()\n"


def run_suite(folder: Path, tests: str, *options: str) -> str:
    """Return the output of pytest with the suite's conftest.py and one test file."""
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


def test_leftover_processes_fail_their_test_and_a_seed_repeats_a_failure(
    tmp_path: Path,
) -> None:
    first = run_suite(tmp_path, SAMPLE, "--random-seed=7")
    assert "random seed: 7" in first
    assert "1 failed, 6 passed, 3 errors" in first
    for left in ("behind\n  process ", "-c input()", "signal.pause()", "thread strag"):
        assert left in first
    assert "--random-seed 7" in first

    generator = np.random.default_rng(zlib.crc32(b"7 test_draws"))
    assert f"assert {generator.random()} < 0" in first


def test_the_output_of_an_aborted_worker_is_shown(tmp_path: Path) -> None:
    options = ("--numprocesses=1", "--max-worker-restart=0")
    output = run_suite(tmp_path, ABORTING, *options)
    assert "\nlast words" in output
    assert "crashed while running" in output


def test_repro_files_of_the_suite_are_not_in_the_users_folder() -> None:
    folder = default_folder()
    assert f"envserve-suite-{os.getuid()}" in folder.parts
    assert folder.parent == Path(os.environ["TMPDIR"])  # child processes inherit it
