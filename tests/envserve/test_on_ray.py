"""`envserve start --on ray` and `ray://` addresses, tested without a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import envserve.ray
from envserve.cli.app import PROGRAM
from envserve.errors import AddressError, ServerError
from envserve.keys.key_folder import KeyFolder
from envserve.python_process import stop_signals
from envserve.text import install_command

NEEDED = f"Ray is not installed; run {install_command('ray')}"


@pytest.fixture
def without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import ray` fail in this process and in its children."""
    (tmp_path / "ray.py").write_text("raise ImportError")
    path = [str(tmp_path), os.environ["PYTHONPATH"]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setitem(sys.modules, "ray", None)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.usefixtures("without_ray")
def test_without_ray_the_error_names_the_extra() -> None:
    started = run("-m", "envserve", "start", "--on", "ray", "CartPole-v1")
    assert (started.returncode, started.stderr) == (2, f"Error: {NEEDED}\n")
    checked = run("-m", "envserve", "health", "ray://default/envs")
    assert (checked.returncode, checked.stderr) == (2, f"Error: {NEEDED}\n")
    with pytest.raises(AddressError) as found:
        envserve.ray.addresses("default", "envs")
    assert str(found.value) == NEEDED


def test_a_lookup_that_ends_without_output_is_an_error_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(envserve.ray, "main_command", lambda *_: command)
    with pytest.raises(AddressError, match="Ray exited with code 3; see `ray status`"):
        envserve.ray.addresses("default", "envs")


def test_no_other_module_imports_ray(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise SystemExit('it is imported')")
    modules = (
        "envserve.cli.app, envserve.client.make_vec, envserve.server, envserve.ray, "
    )
    modules += "ppo.cli.app, ppo.cli.on_ray, ppo.environments"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {modules}; "
    code += "programs = envserve.cli.app.PROGRAM, ppo.cli.app.PROGRAM; "
    code += "[p.command(name) for p in programs for name in p.names]"
    assert run("-c", code).stderr == ""
    assert run("-c", f"{code}; import ray").stderr == "it is imported\n"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of `EnvServers`, which raises instead of starting servers."""
    arguments: list[Any] = []

    def start_servers(*args: Any, **kwargs: Any) -> None:
        arguments.extend([*args, kwargs])
        raise AddressError("enough")

    monkeypatch.setattr(envserve.ray, "EnvServers", start_servers)
    return arguments


def start(*words: str) -> int:
    with pytest.raises(SystemExit) as ending:
        PROGRAM.main(["start", *words])
    return int(ending.value.code or 0)


def test_servers_get_all_options_and_settings(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVSERVE_STEP_TIMEOUT", "7")
    monkeypatch.setenv("ENVSERVE_DEBUG_ERRORS", "false")
    Path("some.toml").write_text(
        "bind = 'tcp://0.0.0.0:5555'\ndrain-grace = 0\nexpose = ['a', 'b']\n"
    )
    words = ["my_env.py:Walk", "CartPole-v1", "--reload", "--config", "some.toml"]
    place = ["--on", "ray://lab/sims", "--servers", "3", "--resources", '{"CPU": 8}']
    assert start(*words, *place) == 2
    number, options, named = started
    assert number == 3
    assert named == {"resources": {"CPU": 8.0}, "address": "ray://lab/sims"}
    words = [f"{tmp_path}/my_env.py:Walk", "CartPole-v1", "--reload"]
    words += ["--step-timeout", "7", "--expose", "a", "--expose", "b"]
    assert options == [*words, "--drain-grace", "0"]


def test_servers_get_no_options_by_default(started: list[Any]) -> None:
    assert start("--on", "ray") == 2
    assert started == [1, [], {"resources": None, "address": "ray://default/envs"}]


@pytest.mark.parametrize(
    ("text", "option"),
    [
        *(("3", "--resources"), ("[]", "--resources"), ("CPU", "--resources")),
        ('{"CPU": "x"}', "--resources[...]"),
    ],
)
def test_resources_must_be_numbers_by_name(
    started: list[Any], text: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("--on", "ray", "--resources", text) == 2
    assert capsys.readouterr().err.startswith(f"Error: {option}: ")
    assert started == []


@pytest.mark.parametrize(("running", "started_servers"), [(1, 2), (3, None)])
def test_scale_to_starts_only_the_missing_servers(
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    running: int,
    started_servers: int | None,
) -> None:
    def scale_down(address: str, num_servers: int) -> int:
        assert (address, num_servers) == ("ray://default/envs", 3)
        return running

    monkeypatch.setattr(envserve.ray, "scale_down", scale_down)
    code = start("--on", "ray", "--scale-to", "3", "CartPole-v1")
    if started_servers is None:
        assert (code, started) == (0, [])
    else:
        assert (code, *started[:2]) == (2, started_servers, ["CartPole-v1"])


@pytest.mark.parametrize(
    "words", [("--servers", "2"), ("--resources", "{}"), ("--scale-to", "2")]
)
def test_options_of_ray_are_rejected_without_it(
    started: list[Any], words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    # Use an invalid address, so that no server starts even if the option is accepted.
    assert start("CartPole-v1", *words, "--bind", "x") == 2
    text = f"Error: {words[0]} requires --on ray; add --on ray, or omit"
    assert capsys.readouterr().err.startswith(text)
    assert started == []


def test_keys_can_be_made_for_a_ray_address(tmp_path: Path) -> None:
    words = ("keys", "make", str(tmp_path), "server", "gpu1", "--at", "ray://lab/sims")
    with pytest.raises(SystemExit) as ending:
        PROGRAM.main(words)
    assert not ending.value.code
    server = KeyFolder(tmp_path / "server").key("server")
    assert server is not None
    assert KeyFolder(tmp_path / "gpu1").pinned_key("ray://lab/sims") == server.public


def test_an_address_of_keys_needs_namespace_and_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "keys")
    with pytest.raises(SystemExit) as ending:
        PROGRAM.main(["keys", "make", folder, "server", "--at", "ray://envs"])
    assert ending.value.code == 2
    text = "Error: --at: expected ray://namespace/name; got 'ray://envs'\n"
    assert capsys.readouterr().err == text
    assert not any(tmp_path.iterdir())


def test_resources_that_ray_rejects_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = mock.Mock(**{"util.list_named_actors.return_value": []})
    ray.exceptions.RayError = OSError
    ray.remote.side_effect = ValueError("the number of CPUs is negative")
    monkeypatch.setattr(envserve.ray, "connect_to_cluster", lambda: ray)
    with pytest.raises(ServerError, match="ray://default/envs: the number of CPUs is"):
        envserve.ray.EnvServers(1, resources={"CPU": -1})


def test_servers_that_are_killed_while_they_drain_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray = mock.Mock(**{"util.list_named_actors.return_value": []})
    ray.get.return_value = ()
    monkeypatch.setattr(envserve.ray, "connect_to_cluster", lambda: ray)
    ray.wait.side_effect = [([], []), (["first"], ["second"])]
    with envserve.ray.EnvServers(2):
        ray.kill.assert_not_called()
    assert ray.kill.call_count == 2
    assert caplog.messages == [
        "1 of 2 servers had not stopped after 60 s and were killed; their running "
        "episodes are lost; call stop() with a timeout that exceeds --drain-grace"
    ]


def test_servers_may_drain_for_the_whole_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = mock.MagicMock()
    servers.__enter__.return_value = servers
    servers.addresses.side_effect = AddressError("no server is ready")
    monkeypatch.setattr(envserve.ray, "EnvServers", lambda *_, **__: servers)
    handlers = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        assert start("--on", "ray", "--drain-grace", "300") == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    servers.stop.assert_called_once_with(360.0)
