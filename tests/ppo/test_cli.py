"""The command: fast answers to bad input, exit codes, one line of error."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from envserve.errors import ServerLost, WrapperError
from ppo.cli import _hints_at_resuming, app
from ppo.commands.options import plain_warnings, which_checkpoint
from ppo.config import Config
from ppo.run_folder.folder import RunFolder


def ppo(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cartpol"], "Did you mean cartpole?"),
        ([], "Expected a CONFIG: one of cartpole"),
        (["cartpole", "--set", "learnin_rate=1"], "Did you mean learning_rate?"),
        (["cartpole", "--set", "num_envs=zero"], "expected a whole number, got 'zero'"),
        (["cartpole", "--seed", "-1"], "seed: expected a number from 0"),
        (["--run-dir", "a", "--resume", "b"], "leave out --run-dir and --seed"),
        (["--seed", "3", "--resume", "b"], "leave out --run-dir and --seed"),
        (["--resume", "nowhere"], "nowhere: expected the folder of a run, found none"),
        (["missing.toml"], "missing.toml: expected a config file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, error = ppo("train", *arguments)
    assert code == 2
    assert output == ""
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_a_taken_run_folder_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, Config(env_name="CartPole-v1"))
    (tmp_path / "metrics.jsonl").touch()
    code, _, error = ppo("train", "cartpole", "--run-dir", str(tmp_path))
    assert code == 2
    assert f"--resume {tmp_path}" in error


def test_a_run_is_not_resumed_with_the_config_of_another_env(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, Config(env_name="CartPole-v1"))
    code, _, error = ppo("train", "pendulum", "--resume", str(tmp_path))
    assert code == 2
    assert "whose env is CartPole-v1: leave out CONFIG" in error


def test_resuming_is_not_proposed_where_it_would_fail_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "00000001").mkdir(parents=True)
    notes = []
    for error in (WrapperError("no such wrapper"), ServerLost("gone")):
        with pytest.raises(type(error)), _hints_at_resuming(RunFolder(tmp_path)):
            raise error
        notes.append(getattr(error, "__notes__", []))
    assert notes == [[], [f"Go on with: ppo train --resume {tmp_path}"]]


@pytest.mark.parametrize("command", ["evaluate", "export", "visualize"])
def test_a_checkpoint_is_named_by_its_steps_or_as_the_best(
    command: str, tmp_path: Path
) -> None:
    arguments = {"export": ["out"], "visualize": ["--outdir", "out"]}.get(command, [])
    code, _, error = ppo(command, "run", *arguments, "--checkpoint", "last")
    assert code == 2
    assert "expected a number of env steps or best, got 'last'" in error
    assert which_checkpoint("best") == "best"
    assert which_checkpoint("10,240") == 10240
    assert which_checkpoint(None) is None


def test_an_unknown_option_is_refused() -> None:
    code, _, error = ppo("train", "cartpole", "--sed", "1")
    assert code == 2
    assert "--seed" in error


def test_configs_are_listed() -> None:
    code, output, _ = ppo("configs")
    assert code == 0
    for text in ("cartpole", "CartPole-v1", "pendulum", "cheetah", "HalfCheetah-v5"):
        assert text in output


def test_all_keys_of_a_config_are_shown_with_value_and_meaning() -> None:
    code, output, _ = ppo("configs", "pendulum")
    assert code == 0
    assert "env_name = Pendulum-v1\n" in output
    assert "env_kwargs = {}\n" in output
    assert "policy_layers = [64, 64]\n    Hidden layers of the policy" in output
    assert ppo("configs", "pendulu")[0] == 2


def test_warnings_of_envs_look_the_same_whatever_the_root_logger_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    with plain_warnings():
        logging.getLogger("envserve.pool").warning("env %d failed", 3)
    assert capsys.readouterr().err == "env 3 failed\n"
    assert logging.getLogger("envserve").propagate


def test_help_and_bad_input_do_not_load_tensorflow() -> None:
    code = (
        "import sys, ppo.cli\n"
        "for arguments in (['--help'], ['train', 'cartpol'], ['configs']):\n"
        "    try:\n"
        "        ppo.cli.main(arguments)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "print('loaded:', sorted({'tensorflow', 'keras', 'zmq'} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=110,
    )
    assert "loaded: []" in result.stdout
