"""`envserve start --on ray` and `ray://` as far as they go without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import envserve.ray
from envserve.cli.app import app
from envserve.errors import AddressError
from envserve.keys.key_folder import KeyFolder

NEEDED = "Ray is needed here: pip install 'envserve[ray]'"


@pytest.fixture
def without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place where Ray is not installed, here and in other processes."""
    (tmp_path / "ray.py").write_text("raise ImportError")
    path = [str(tmp_path), os.environ["PYTHONPATH"]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setitem(sys.modules, "ray", None)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.usefixtures("without_ray")
def test_without_the_extra_it_is_named() -> None:
    started = run("-m", "envserve", "start", "--on", "ray", "CartPole-v1")
    assert (started.returncode, started.stderr) == (2, f"Error: {NEEDED}\n")
    asked = run("-m", "envserve", "health", "ray://default/envs")
    assert (asked.returncode, asked.stderr) == (2, f"Error: {NEEDED}\n")
    with pytest.raises(AddressError) as found:
        envserve.ray.addresses("default", "envs")
    assert str(found.value) == NEEDED


def test_ray_is_imported_by_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise SystemExit('it is imported')")
    modules = (
        "envserve.cli.app, envserve.client.make_vec, envserve.server, envserve.ray, "
    )
    modules += "ppo.cli.app, ppo.cli.on_ray, ppo.environments"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {modules}"
    assert run("-c", code).stderr == ""
    assert run("-c", f"{code}; import ray").stderr == "it is imported\n"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What servers were asked for, in place of having them."""
    seen: list[Any] = []

    def ask(*given: Any, **named: Any) -> None:
        seen.extend([*given, named])
        raise AddressError("enough")

    monkeypatch.setattr(envserve.ray, "EnvServers", ask)
    return seen


def start(*words: str) -> int:
    with pytest.raises(SystemExit) as ending:
        app(["start", *words], prog_name="envserve")
    return int(ending.value.code or 0)


def test_a_server_gets_all_that_was_given(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVSERVE_STEP_TIMEOUT", "7")
    monkeypatch.setenv("ENVSERVE_DEBUG_ERRORS", "false")
    Path("some.toml").write_text("drain-grace = 0\nexpose = ['a', 'b']\n")
    words = ["my_env.py:Walk", "CartPole-v1", "--reload", "--config", "some.toml"]
    place = ["--on", "ray://lab/sims", "--servers", "3", "--resources", '{"CPU": 8}']
    assert start(*words, *place) == 2
    number, options, named = asked
    assert number == 3
    assert named == {"resources": {"CPU": 8.0}, "word": "ray://lab/sims"}
    words = ["--expose", "a", "--expose", "b", "--step-timeout", "7.0"]
    words += ["--drain-grace", "0.0", f"{tmp_path}/my_env.py:Walk", "CartPole-v1"]
    assert options == [*words, "--reload"]


def test_by_default_a_server_decides_itself(asked: list[Any]) -> None:
    assert start("--on", "ray") == 2
    assert asked == [1, [], {"resources": None, "word": "ray://default/envs"}]


@pytest.mark.parametrize("text", ["3", "[]", "CPU", '{"CPU": "x"}'])
def test_resources_are_names_and_numbers(
    asked: list[Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("--on", "ray", "--resources", text) == 2
    assert capsys.readouterr().err.startswith("Error: --resources: ")
    assert asked == []


@pytest.mark.parametrize("words", [("--servers", "2"), ("--resources", "{}")])
def test_what_only_ray_takes_is_refused_without_it(
    asked: list[Any], words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    # An address that is none, so that nothing is served in any case.
    assert start("CartPole-v1", *words, "--bind", "x") == 2
    text = f"Error: {words[0]}: expected --on ray beside it, got none"
    assert capsys.readouterr().err.startswith(text)
    assert asked == []


def test_keys_are_made_for_a_name(tmp_path: Path) -> None:
    words = ("keys", "make", str(tmp_path), "server", "gpu1", "--at", "ray://lab/sims")
    with pytest.raises(SystemExit) as ending:
        app(words, prog_name="envserve")
    assert not ending.value.code
    server = KeyFolder(tmp_path / "server").key("server")
    assert server is not None
    assert KeyFolder(tmp_path / "gpu1").pinned_key("ray://lab/sims") == server.public
