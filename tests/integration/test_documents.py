"""The docs site builds, and the code and commands in the README and docs run.

Names of other hosts are replaced with the addresses of local servers. Commands that
serve are interrupted once they are ready, and training runs are short. Commands that
need other tools are in `ELSEWHERE`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.envserve.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(python|sh)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)

#: Commands that other files run: a pattern that matches the line, and the file.
ELSEWHERE = {
    r"make (train|test|test-integration|bench|chaos|examples)\b": "Makefile",
    r"docker[ -]compose": "scripts/run_compose.py",
    r"kubectl": "scripts/run_pods.py",
    r"pip install|python3 -m venv|\. \.venv/bin/activate": "Makefile",
    r"git clone": "tests/test_documents.py",
    r"envserve replay FILE": "tests/envserve/test_replay.py",
    r"\w+\$ ": "tests/test_three_commands.py",
    r"python scripts/(bench|chaos)\.py|cat runs/chaos": "tests/chaos/test_command.py",
    r"python scripts/scaling\.py": "tests/benchmarks/test_scaling.py",
    r"ppo train my_atari\.toml": "tests/ppo/test_convolution.py",
    r"envserve demo": "tests/integration/test_demo.py",
    r"envserve (join|invite)": "tests/test_three_commands.py",
    r".*(ray start|--on ray|ray://)": "tests/integration/test_ray.py",
    r"ppo train .*dns://": "scripts/run_pods.py",
    r"export TF_CONFIG|ppo train .*--distribute": "tests/ppo/test_learners.py",
}
#: Commands that run until they are interrupted. They print an address when ready;
#: only `top` prints a table instead.
SERVES = re.compile(r"envserve (start|page|top)\b|ppo train .*--page|tensorboard ")

OFFERED = ("CartPole-v1", "Pendulum-v1", "HalfCheetah-v5", "envpool/Pong-v5")
OWN_ENV = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Walk(CartPoleEnv):
    def __init__(self, render_mode=None, folder="", port=0):
        super().__init__(render_mode=render_mode)


gymnasium.register("Walk-v0", "my_env:Walk", max_episode_steps=1000)
"""
PRELUDE = """
import gymnasium, numpy as np
import envserve
from envserve.client import BatchEnv
"""
#: Code that runs before each of a page's code blocks, because the blocks assume it.
BEFORE = {
    "gymnasium.md": """
envs = None
make_env = lambda i: lambda: gymnasium.make("CartPole-v1")
""",
    "python.md": """
env = BatchEnv.local("CartPole-v1", 4, seed=0)
env.reset()
actions, rows = np.zeros(4, int), np.arange(4)
policy = lambda observation: np.zeros(len(observation), int)
class Training(list):
    __bool__ = lambda self: self.pop() if len(self) else False
training = Training([False, True, True])
""",
    "recurrent.md": """
import tensorflow as tf
num_rows = 2
observation = np.zeros((2, 4), np.float32)
class Saved:
    initial_state = staticmethod(lambda n: np.zeros((n, 32), np.float32))
    mode = sample = staticmethod(lambda observation, state, *seed: (observation, state))
tf.saved_model.load = lambda path: Saved
""",
    "training.md": """
import os, pathlib, sys, tempfile, unittest.mock
os.chdir(tempfile.mkdtemp())
pathlib.Path("runs/first").mkdir(parents=True)
pathlib.Path("runs/first/config.json").write_text('{"seed": 1}')
pathlib.Path("runs/first/metrics.jsonl").write_text('{"steps": 8, "kl": null}')
sys.modules["wandb"] = unittest.mock.MagicMock()
""",
    "trainers.md": """
from types import SimpleNamespace
args = SimpleNamespace(num_envs=4)
make_env = lambda i: lambda: gymnasium.make("CartPole-v1")
""",
    "wrappers.md": "class WindWrapper(gymnasium.Wrapper): pass\n",
}


def blocks(page: Path, kind: str) -> list[str]:
    """Return a page's code blocks, without indentation."""
    return [
        re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        for indent, found, code in BLOCK.findall(page.read_text())
        if found == kind
    ]


def commands(page: Path) -> list[str]:
    """Return a page's shell commands, without comments and with joined lines."""
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my_env.py").write_text(OWN_ENV)
    (network,) = blocks(ROOT / "docs" / "networks.md", "python")
    code = "".join(blocks(ROOT / "docs" / "research.md", "python"))
    (folder / "my_research.py").write_text(code)
    (folder / "my_config.toml").write_text('env_name = "Walk-v0"\nnum_envs = 8\n')
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "my_package").mkdir()
    (folder / "my_networks.py").write_text(network)
    (folder / "my_package" / "networks.py").write_text(network)
    return folder


@pytest.fixture(scope="module")
def addresses(folder: Path) -> Iterator[dict[str, str]]:
    """Replacements for the names of other hosts in commands."""
    with ExitStack() as stack:
        start = stack.enter_context
        for name in ("sim1", "sim2"):
            (folder / name).mkdir()
        args = (f"{folder}/my_env.py", f"{folder}/my_env.py:Walk", "--workers", "4")
        more = ("--max-processes", "64", "--import", "envserve.envpool", *OFFERED)
        one, two = (
            start(ServerProcess(folder / name, *args, *more)).address
            for name in ("sim1", "sim2")
        )
        (client,) = blocks(ROOT / "docs" / "first-server.md", "python")
        client = client.replace("tcp://127.0.0.1:5555", one).replace("+ 60", "+ 2")
        (folder / "client.py").write_text(client)
        yield {
            "tcp://127.0.0.1:5555": one,
            "tcp://sim1:5555": one,
            "tcp://sim2:5555": two,
            '"sim1"': f'"{one}"',
            " 127.0.0.1": f" {one}",
            " sim1": f" {one}",
            " sim2": f" {two}",
            "ADDRESS": one,
        }


def with_addresses(code: str, addresses: dict[str, str]) -> str:
    for name, address in addresses.items():
        code = code.replace(name, address)
    return code


def environment(folder: Path) -> dict[str, str]:
    path, modules = f"{BIN}:{os.environ['PATH']}", f"{ROOT}:{folder}"
    return os.environ | {"PATH": path, "PYTHONPATH": modules, "NO_COLOR": "1"}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [BIN / "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()


def output_of_python(page: Path, folder: Path, addresses: dict[str, str]) -> str:
    """Run a page's Python code, and return its output."""
    before = BEFORE.get(page.name, "")
    code = PRELUDE + "".join(before + each for each in blocks(page, "python"))
    # TensorFlow's AutoGraph reads the source of functions from their file.
    script = folder / "script.py"
    script.write_text(with_addresses(code, addresses))
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda p: p.name
)
@pytest.mark.timeout(600)
def test_python_runs(page: Path, folder: Path, addresses: dict[str, str]) -> None:
    output = output_of_python(page, folder, addresses)
    if page.name == "own-algorithm.md":
        returns = [float(each) for each in re.findall(r"return (\S+)", output)]
        assert len(returns) == 25
        assert returns[0] < 100.0 < 350.0 < sum(returns[-5:]) / 5
    if page.name == "index.md":
        assert re.search(r"8 rows: worker [01] .* exited with code 1", output)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page)], ids=lambda p: p.name
)
@pytest.mark.timeout(600)
def test_commands_run(page: Path, folder: Path, addresses: dict[str, str]) -> None:
    for line in commands(page):
        where = [w for pattern, w in ELSEWHERE.items() if re.match(pattern, line)]
        if where:
            assert (ROOT / where[0]).exists(), line
        else:
            run(with_addresses(line, addresses), folder)


def run(line: str, folder: Path) -> None:
    """Run a command as a reader would, but train briefly; check its exit code."""
    if line.startswith("ppo train"):
        line += " --set total_steps=2048 --set evaluation_episodes=2"
        if "algorithm=sac" in line:
            line += " --set random_steps=1000"
    if line.startswith("envserve start") and "--bind" not in line:
        line += " --bind tcp://127.0.0.1:0"
    if line.startswith("tensorboard"):
        line += " --port 0"
    process = subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    text = ""
    try:
        if SERVES.search(line):
            for text in process.stdout:
                if "://" in text or line.startswith("envserve top"):
                    break
            process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode in (0, 130), f"{line}\n{text}{rest}"
