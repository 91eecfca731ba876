"""Adapters import their framework only on use; errors name the missing extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from envserve.text import install_command

FRAMEWORKS = {"stable_baselines3", "tianshou", "torch"}
OTHERS = {"jax", "optuna", "ray"}
EXAMPLES = [
    str(file)
    for file in (Path(__file__).parents[2] / "examples").glob("*.py")
    if "argparse" in file.read_text()
]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("adapter", "framework"), [("sb3", "stable_baselines3"), ("tianshou", "tianshou")]
)
def test_a_missing_framework_names_the_extra(adapter: str, framework: str) -> None:
    hide = f"import sys; sys.modules[{framework!r}] = None"
    finished = run_python(f"{hide}; import envserve.{adapter}")
    assert finished.returncode == 1
    last = finished.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError:")
    assert last.endswith(f"; {install_command(adapter)}")


def test_an_example_without_its_framework_names_the_extra() -> None:
    code = f"""
import runpy, sys, traceback
sys.modules |= dict.fromkeys({[*FRAMEWORKS, *OTHERS]})
for file in {EXAMPLES}:
    try:
        runpy.run_path(file)
    except ImportError:
        print("pip install" in traceback.format_exc())
"""
    assert run_python(code).stdout.split() == ["True"] * len(EXAMPLES)


def test_vector_envs_import_no_framework() -> None:
    code = "import sys, envserve; envserve.make_vec; print(*sys.modules)"
    modules = set(run_python(code).stdout.split())
    assert {"envserve.client", *FRAMEWORKS} & modules == {"envserve.client"}
