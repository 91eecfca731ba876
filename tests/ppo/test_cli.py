"""The command: fast answers to bad input, exit codes, what is shown, and signals."""

import io
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from envserve.errors import ServerLost, WrapperError
from ppo.commands.shared import plain_warnings, which_checkpoint
from ppo.commands.stop_signals import StopSignals
from ppo.commands.train import hints_at_resuming, progress_bar
from ppo.config import Config
from ppo.run_folder.folder import RunFolder
from ppo.train import Progress
from tests.ppo.runs import ppo


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cartpol"], "Did you mean cartpole?"),
        ([], "Expected a CONFIG: one of cartpole"),
        (["cartpole", "--set", "learnin_rate=1"], "Did you mean learning_rate?"),
        (
            ["cartpole", "--set", "num_envs=zero"],
            "expected a valid integer, got 'zero'",
        ),
        (
            ["cartpole", "--set", 'wrappers=[{name = "ActionRepeat", amount = 0}]'],
            "amount: expected an int from 1 to 1000; got 0",
        ),
        (["cartpole", "--seed", "-1"], "seed: expected at least 0, got -1"),
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
    code, _, error = ppo("train", "cartpole", "--run-dir", tmp_path)
    assert code == 2
    assert f"--resume {tmp_path}" in error
    # Nor is it resumed with the config of another env.
    code, _, error = ppo("train", "pendulum", "--resume", tmp_path)
    assert code == 2
    assert "whose env is CartPole-v1: leave out CONFIG" in error


def test_resuming_is_not_proposed_where_it_would_fail_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "00000001").mkdir(parents=True)
    notes = []
    for error in (WrapperError("no such wrapper"), ServerLost("gone")):
        with pytest.raises(type(error)), hints_at_resuming(RunFolder(tmp_path)):
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
        timeout=110,
    )
    assert "loaded: []" in result.stdout


def shown(is_terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=120)
    with progress_bar(console, total_steps=4096) as show:
        show(Progress(1024, 900.0, math.nan, 0))
        show(Progress(2048, 1234.5, 21.25, 0))
        show(Progress(4096, 2345.6, 33.75, 1234))
    return stream.getvalue()


def test_a_terminal_shows_a_bar_with_steps_speed_and_return() -> None:
    text = shown(is_terminal=True)
    for part in ("4,096/4,096 steps", "2,346 steps/s", "return 33.8, 1,234 lost"):
        assert part in text


def test_elsewhere_there_is_a_line_at_first_and_at_the_end() -> None:
    assert shown(is_terminal=False).splitlines() == [
        "1,024/4,096 steps, 900 steps/s, return -",
        "4,096/4,096 steps, 2,346 steps/s, return 33.8, 1,234 lost",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_interrupts(number: int) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop.has_fired()
        os.kill(os.getpid(), number)
        assert stop.has_fired()
        assert stop.received == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_thread_learns_of_signals_while_the_main_thread_runs_no_python() -> None:
    announced = threading.Event()
    with StopSignals(announced.set) as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGINT)
        assert announced.wait(10)
        stop.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    # Leaving has waited for the listener, so both have been counted.
    with pytest.raises(KeyboardInterrupt):
        stop.check()
