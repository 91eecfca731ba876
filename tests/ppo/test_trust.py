"""Runs and configs of other users: their code and servers need the user's consent."""

import io
import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ppo.cli.options import SourceOptions, check_trust
from ppo.config import Config
from ppo.environments import MakeEnv
from ppo.errors import ConfigError, UntrustedCodeError
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.trust import EnvSource
from ppo.user_code import load_user_code
from tests.ppo.runs import ppo

PLAIN: dict[str, Any] = {"env_name": "CartPole-v1"}
#: Settings that name code, in config.json and envs.json, with what is shown.
NAMED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"env_name": "run/e.py:Walk"}, {}, "run/e.py:Walk (env_name)"),
    ({"env_name": "subprocess:Popen"}, {}, "subprocess:Popen (env_name)"),
    ({"env_name": "gymnasium:make"}, {}, "gymnasium:make (env_name)"),
    ({"import_modules": ["gymnasium", "e"]}, {}, ": e (import_modules);"),
    ({"import_modules": ["gymnasium.py"]}, {}, "gymnasium.py (import_modules)"),
    ({"import_modules": ["ppo.a/../run/e.py"]}, {}, "run/e.py (import_modules)"),
    ({"import_modules": ["gymnasium:make"]}, {}, "gymnasium:make (import_modules)"),
    (
        {
            "env_name": "envserve/Remote-v0",  # creates the env that `env` names
            "import_modules": ["envserve.gym"],
            "env_kwargs": {"env": "run/e.py:Walk", "address": "tcp://evil:1"},
        },
        {},
        "run/e.py:Walk, tcp://evil:1 (env_kwargs)",
    ),
    (
        {
            "env_name": "envserve.gym:envserve/Remote-v0",
            "env_kwargs": {"env": "run/e.py:Walk"},
        },
        {},
        "run/e.py:Walk (env_kwargs)",
    ),
    (
        {"env_name": "CartPole-v1", "env_kwargs": {"env_id": ["run/e.py:Walk"]}},
        {},
        ": run/e.py:Walk (env_kwargs)",
    ),
    ({"network": "run/e.py:net"}, {}, "run/e.py:net (network)"),
    ({"objective": "os:system"}, {}, "os:system (objective)"),
    ({"optimizer": "os:system"}, {}, "os:system (optimizer)"),
    ({"callbacks": ["a:b", "run/e.py:c"]}, {}, "a:b, run/e.py:c (callbacks)"),
    ({}, {"import_modules": ["run/e.py"]}, "run/e.py (import_modules)"),
    ({}, {"addresses": ["tcp://evil:1"]}, "tcp://evil:1 (connect)"),
    (
        {"insecure": True},
        {"addresses": ["tcp://evil:1"]},
        "tcp://evil:1 (connect without keys)",
    ),
    ({"callbacks": ["\x1b[2J:b"]}, {}, r"\x1b[2J:b (callbacks)"),
]
COMMANDS = [
    ["evaluate", "run"],
    ["visualize", "run"],
    ["export", "run", "policy"],
    ["train", "--resume", "run"],
    ["train", "CartPole-v1", "--restartable", "--run-dir", "run"],
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory for the user, with an empty key folder."""
    monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def make_foreign_run(
    config: dict[str, Any], source: dict[str, Any], path: Path = Path("run")
) -> None:
    """Write the files of a run that this user has not made; its code leaves a mark."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(PLAIN | config))
    (path / "envs.json").write_text(json.dumps(source))
    (path / "e.py").write_text("open('mark', 'w')\n")


def is_rejected(*arguments: object) -> bool:
    """Return whether a command rejects the code, in one line."""
    code, _, error = ppo(*arguments)
    assert (code, error.count("\n")) == (2, 1), error
    assert not Path("mark").exists()
    if "names code or servers" not in error:
        assert "expected a checkpoint, found none" in error
        return False
    assert "--trust" in error
    return True


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(("config", "source", "shown"), NAMED[:1] + NAMED[-3:-2])
def test_no_command_uses_the_code_of_a_foreign_run(
    command: list[str], config: dict[str, Any], source: dict[str, Any], shown: str
) -> None:
    make_foreign_run(config, source)
    code, _, error = ppo(*command)
    assert (code, error.count("\n")) == (2, 1)
    assert shown in error
    assert "--trust" in error
    assert not Path("mark").exists()


@pytest.mark.parametrize(("config", "source", "shown"), NAMED)
def test_all_code_and_servers_of_a_foreign_run_are_listed(
    config: dict[str, Any], source: dict[str, Any], shown: str
) -> None:
    make_foreign_run(config, source)
    code, _, error = ppo("evaluate", "run")
    assert (code, error.count("\n")) == (2, 1)
    assert shown in error.replace(". If you", ";")
    with pytest.raises(UntrustedCodeError):
        RunFolder.open(Path("run"))
    assert RunFolder.read(Path("run"))[1].env_name == (PLAIN | config)["env_name"]


def test_a_run_without_code_and_servers_needs_no_trust(home: Path) -> None:
    make_foreign_run({"import_modules": ["gymnasium", "envserve.envpool"]}, {})
    assert not is_rejected("evaluate", "run")
    RunFolder.open(Path("run"))
    assert not home.exists()


def test_plot_reads_only_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    make_foreign_run({"env_name": "run/e.py:Walk"}, {"addresses": ["tcp://evil:1"]})
    Path("run/metrics.jsonl").write_text('{"steps": 1, "mean_return": 2.0}\n')
    assert ppo("plot", "run")[0] == 0
    assert not Path("mark").exists()


@pytest.mark.parametrize("config", [{}, {"network": "net.py:make"}])
def test_a_run_that_was_made_here_is_trusted_wherever_it_is_copied(
    config: dict[str, Any], tmp_path: Path
) -> None:
    values = Config(**PLAIN | {"env_name": f"{tmp_path}/my_env.py:Walk"} | config)
    (tmp_path / "my_env.py").touch()
    source = EnvSource(import_modules=("mine",))
    RunFolder.create(Path("run"), values, source)
    assert not is_rejected("evaluate", "run")
    shutil.copytree("run", tmp_path / "copy")
    assert not is_rejected("evaluate", tmp_path / "copy")
    RunFolder.open(tmp_path / "copy")
    # The settings that decide what runs count, others do not.
    text = Path("run/config.json").read_text()
    Path("run/config.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    assert not is_rejected("evaluate", "run")
    for old, new in [
        ("my_env.py:Walk", "my_env.py:Other"),
        ('"env_kwargs": {}', '"env_kwargs": {"command": "rm"}'),
        ('"callbacks": []', '"callbacks": ["a:b"]'),
        ('"wrappers": []', '"wrappers": [{"name": "ClipAction"}]'),
        ('"insecure": false', '"insecure": true'),
    ]:
        assert old in text
        Path("run/config.json").write_text(text.replace(old, new))
        assert is_rejected("evaluate", "run")


@pytest.mark.usefixtures("one_launcher")
def test_changed_settings_of_a_resumed_run_are_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(_: Config, run: RunFolder, make_env: MakeEnv, **named: Any) -> None:
        assert run.env_source() == EnvSource()  # the envs have not been made yet
        make_env(num_envs=1, seed=0, is_training=True).close()
        raise ConfigError("nosuch")

    monkeypatch.setattr("ppo.train.train", train)
    run = RunFolder.create(Path("run"), Config(**PLAIN | {"network": "mine:net"}))
    resume = ("train", "--resume", "run", "--set", "callbacks=nosuch:a")
    Path("yours.py").touch()
    code, _, error = ppo(*resume, "--import", "yours.py", "--num-workers", "1")
    assert (code, "nosuch" in error) == (2, True)
    assert run.env_source().import_modules == (str(Path("yours.py").absolute()),)
    assert not is_rejected("evaluate", "run")  # the config is not saved yet
    run.save_config(RunFolder.open(run.path)[1].replace(callbacks=("nosuch:a",)))
    assert not is_rejected("evaluate", "run")


def test_replaced_code_of_a_resumed_run_is_not_trusted() -> None:
    make_foreign_run({"callbacks": ["run/e.py:c"]}, {"import_modules": ["run/e.py"]})
    Path("mine.py").touch()
    resume = ("train", "--resume", "run", "--set", "callbacks=nosuch:a")
    code, _, error = ppo(*resume, "--import", "mine.py")
    assert (code, "nosuch" in error) == (2, True)
    assert is_rejected("evaluate", "run")


def test_trust_is_remembered_for_the_same_code_only() -> None:
    make_foreign_run({"env_name": "run/e.py:Walk"}, {})
    assert not is_rejected("evaluate", "run", "--trust")
    assert not is_rejected("evaluate", "run")
    # Code inside the run folder is copied with it, so its content counts.
    Path("run/helper.py").write_text("x = 1\n")
    assert is_rejected("evaluate", "run")
    Path("run/helper.py").unlink()
    for name in ("run/e.py:A", "run/a:b/e.py:B"):  # also with a colon in the path
        Path("run/a:b").mkdir(exist_ok=True)
        Path("run/a:b/e.py").write_text("x = 1\n")
        text = json.dumps(PLAIN | {"network": name})
        Path("run/config.json").write_text(text)
        assert not is_rejected("evaluate", "run", "--trust")
        Path("run/a:b/e.py").write_text("x = 2\n")
        assert is_rejected("evaluate", "run")
    # A file of the same name in another place is other code.
    make_foreign_run({"network": "net.py:make"}, {}, Path("second"))
    Path("net.py").touch()
    assert not is_rejected("evaluate", "second", "--trust")
    assert not is_rejected("evaluate", "second")
    Path("net.py").rename("second/net.py")
    text = json.dumps(PLAIN | {"network": "second/net.py:make"})
    Path("second/config.json").write_text(text)
    assert is_rejected("evaluate", "second")


def test_a_link_to_itself_is_rejected_like_other_code() -> None:
    make_foreign_run({"network": "run/loop.py:net"}, {})
    Path("run/loop.py").symlink_to("loop.py")
    assert is_rejected("evaluate", "run")


def test_the_use_of_trusted_code_does_not_end_the_trust(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")
    make_foreign_run({"network": "run/e.py:net"}, {})
    Path("run/e.py").write_text("x = 1\n")
    check_trust(None, Path("run"), [], SourceOptions(trust=True))
    with pytest.raises(ConfigError, match="expected a function net"):
        load_user_code("network", "run/e.py:net")
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1"  # for worker processes
    assert not is_rejected("evaluate", "run")


def test_arguments_that_the_user_types_need_no_trust_and_are_not_remembered() -> None:
    make_foreign_run({"env_name": "run/e.py:Walk"}, {"addresses": ["tcp://evil:1"]})
    Path("e.py").touch()  # the user's own file of this name replaces that of the run
    options = ["--import", "e.py", "--connect", "local"]
    assert not is_rejected("evaluate", "run", *options)
    assert is_rejected("evaluate", "run")
    assert is_rejected("evaluate", "run", "--connect", "local")
    # Trust in a part does not extend to the rest.
    assert not is_rejected("evaluate", "run", "--connect", "local", "--trust")
    assert is_rejected("evaluate", "run")


@pytest.mark.parametrize(("answer", "is_accepted"), [("y\n", True), ("\n", False)])
def test_a_terminal_asks_once(answer: str, is_accepted: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    make_foreign_run({"env_name": "run/e.py:Walk"}, {})
    with (
        mock.patch("tests.command_line.io.StringIO", Terminal),
        mock.patch.object(Terminal, "readline", return_value=answer),
    ):
        code, _, error = ppo("evaluate", "run")
    assert code == 2
    assert "Use them? [y/N]" in error
    assert ("expected a checkpoint" in error) == is_accepted
    assert is_rejected("evaluate", "run") != is_accepted


def test_without_a_key_folder_one_warning_is_logged(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home.touch()  # not a folder
    config = Config(**PLAIN | {"network": "net.py:make"})
    with caplog.at_level(logging.WARNING, "envserve"):
        run = RunFolder.create(Path("run"), config)
        RunFolder.create(run.path, config)
    (warning,) = caplog.messages
    assert "cannot record that this code is trusted" in warning
    with pytest.raises(UntrustedCodeError):
        RunFolder.open(Path("run"))


def test_a_record_that_others_can_write_does_not_count(home: Path) -> None:
    RunFolder.create(Path("run"), Config(**PLAIN | {"network": "net.py:make"}))
    (home / "trusted").chmod(0o777)
    code, _, error = ppo("evaluate", "run")
    assert code == 2
    assert "can be read by others" in error
    assert "--trust" in error


def test_a_config_file_that_names_code_asks_once() -> None:
    Path("mine.toml").write_text('env_name = "nosuch.py:Walk"\n')

    def train(*options: str) -> str:
        code, _, error = ppo("train", *options)
        assert (code, error.count("\n")) == (2, 1)
        return error

    assert "nosuch.py:Walk (env_name)" in train("mine.toml")
    # Code that is named on the command line is used without a question.
    assert "no such file" in train("nosuch.py:Walk")
    assert "no such file" in train("mine.toml", "--set", "env_name=nosuch.py:Walk")
    assert "--trust" in train("mine.toml")
    assert "no such file" in train("mine.toml", "--trust")
    assert "no such file" in train("mine.toml")


def test_a_repeated_restartable_command_needs_no_trust() -> None:
    """Its code is typed again, so it also works where nothing is remembered."""
    make_foreign_run({"env_name": str(Path("walk.py:Walk").absolute())}, {})
    command = ("train", "walk.py:Walk", "--restartable", "--run-dir", "run")
    assert is_rejected("train", "other.py:Walk", *command[2:])
    code, _, error = ppo(*command)
    assert "walk.py: no such file" in error
    assert code == 2
