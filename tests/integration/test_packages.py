"""The wheel and the sdist: their contents, and the programs that the wheel installs.

The wheel is installed into two new environments: one with the packages of a simulator
host, without TensorFlow, and one that shares the other packages with these tests.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.test_project import PROJECT

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
WORKFLOWS = ROOT / ".github" / "workflows"
#: Uses a server from Python, in an environment without TensorFlow.
CLIENT = """
import importlib.util, sys
import envserve

assert importlib.util.find_spec("tensorflow") is None
envs = envserve.make_vec("CartPole-v1", num_envs=4, addresses=[sys.argv[1]])
observations, _ = envs.reset(seed=0)
for _ in range(10):
    observations, *_, infos = envs.step(envs.action_space.sample())
    assert "fault" not in infos
envs.close()
print(envserve.__file__, envserve.__version__, observations.shape)
"""


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    """Run a program without the modules of this checkout, and return its output."""
    done = subprocess.run(
        words,
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(BIN / "pyproject-build", "--no-isolation", "--outdir", folder)
    return folder


def wheel_of(dist: Path) -> Path:
    return dist / f"envserve-{PROJECT['version']}-py3-none-any.whl"


def install(environment: Path, *words: str | Path) -> Path:
    """Create an environment, install packages, and return its folder of programs."""
    run(sys.executable, "-m", "venv", environment)
    pip = (environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--constraint", ROOT / "constraints.txt", *words)
    return environment / "bin"


def test_the_tools_of_the_index_accept_the_packages(dist: Path) -> None:
    assert len(list(dist.iterdir())) == 2
    run(BIN / "twine", "check", "--strict", *dist.iterdir())
    run(BIN / "check-wheel-contents", "--config", ROOT / "pyproject.toml", dist)


def test_links_of_the_description_are_absolute_and_lead_to_files(dist: Path) -> None:
    with zipfile.ZipFile(wheel_of(dist)) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith("/METADATA"))
        text = wheel.read(name).decode()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith("https://")] == []
    tag = f"v{PROJECT['version']}"
    folders = (
        f"{PROJECT['urls']['Source']}/blob/{tag}/",
        f"https://raw.githubusercontent.com/envserve/envserve/{tag}/",
    )
    for folder in folders:
        paths = [each.removeprefix(folder) for each in links if folder in each]
        assert paths
        assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no git checkout")
def test_both_packages_name_the_commit(dist: Path) -> None:
    git = ("git", "-c", "safe.directory=*")
    commit = run(*git, "rev-parse", "--short", "HEAD")
    with zipfile.ZipFile(wheel_of(dist)) as wheel:
        assert wheel.read("envserve/commit.txt").decode() == commit
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        file = archive.extractfile(f"{sdist.name[:-7]}/envserve/commit.txt")
        assert file is not None
        assert file.read().decode() == commit
    assert not (ROOT / "envserve" / "commit.txt").exists()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("nothing_left_behind")
def test_a_simulator_host_needs_only_the_wheel(dist: Path, tmp_path: Path) -> None:
    """Serve envs, use them from Python, and run the demo, all without TensorFlow."""
    programs = install(tmp_path / "environment", wheel_of(dist))
    start = ("start", "CartPole-v1", "--bind", "tcp://127.0.0.1:0")
    with subprocess.Popen(
        [programs / "envserve", *start],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            (address,) = re.findall(r"tcp://\S+:\d+", server.stdout.readline())
            output = run(programs / "python", "-c", CLIENT, address, cwd=tmp_path)
        finally:
            server.send_signal(signal.SIGTERM)
        server.communicate()
    assert server.returncode == 0
    file, version, shape = output.split(maxsplit=2)
    assert Path(file).is_relative_to(tmp_path)
    assert (version, shape) == (PROJECT["version"], "(4, 4)\n")
    demo = ("demo", "--terminal", "--num-envs", "8", "--seconds", "5")
    assert "transitions" in run(programs / "envserve", *demo, cwd=tmp_path)


@pytest.mark.timeout(600)
def test_the_trainer_of_the_wheel_trains(dist: Path, tmp_path: Path) -> None:
    programs = install(tmp_path / "environment", "--no-deps", wheel_of(dist))
    # A line of a .pth file adds a folder, but not the editable installations in it.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (packages,) = (tmp_path / "environment" / "lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text("\n".join(libraries))
    code = "import ppo; print(ppo.__file__)"
    file = run(programs / "python", "-c", code, cwd=tmp_path)
    assert Path(file.strip()).is_relative_to(tmp_path)
    few = ("--set", "total_steps=4096", "--set", "evaluation_episodes=2")
    run(programs / "ppo", "train", "cartpole", *few, "--run-dir", "run", cwd=tmp_path)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") > 1


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("citation-file-format", "CITATION.cff"),
        ("compose-spec", "docker-compose.yml"),
    ],
)
def test_files_of_the_repository_match_their_schemas(schema: str, pattern: str) -> None:
    files = list(ROOT.glob(pattern))
    assert files
    run(BIN / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)


def test_workflows_run_the_checks_and_publish_only_after_them() -> None:
    ci = (WORKFLOWS / "ci.yml").read_text()
    for command in (".ci/run", "python -m build", "mkdocs build --strict"):
        assert command in ci
    release = (WORKFLOWS / "release.yml").read_text()
    assert "uses: ./.github/workflows/ci.yml" in release
    assert re.search(r"  publish:\n    needs: ci\n", release)
    # Trusted publishing: the index verifies the workflow's identity, not a secret.
    assert "permissions: {id-token: write}" in release
    assert "secrets." not in release.partition("  images:")[0]
