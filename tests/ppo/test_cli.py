"""The ppo command: errors for invalid input, exit codes, output, and signals."""

import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from sysconfig import get_path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from envserve.errors import ConnectError, ServerLost, WrapperError
from envserve.text import install_command
from ppo.__main__ import main as program
from ppo.cli.options import (
    SourceOptions,
    open_run,
    parse_checkpoint,
    plain_warnings,
    report_errors,
    resolve_env_source,
    user_command,
    with_absolute_paths,
)
from ppo.cli.run_setup import RunPlan, create_folder, plan_resumed_run
from ppo.cli.stop_signals import StopSignals
from ppo.cli.train import resume_hints
from ppo.config import Config
from ppo.config.named_configs import CONFIGS, apply_settings
from ppo.environments import env_maker
from ppo.errors import ConfigError, RunFolderError, TrainingStopped
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.trust import EnvSource, code_names
from tests.ppo import failing_env, informing_env
from tests.ppo.runs import ppo, save_run

#: A name that the file system rejects, as it rejects those in other users' folders.
LONG = "x" * 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cartpol"], "Did you mean cartpole?"),
        ([], "Expected the name of a config"),
        (["cartpole", "--set", "num_envs=zero"], "expected an int; got 'zero'"),
        (["cartpole", "--seed", "-1"], "Error: --seed: expected an int >= 0; got '-1'"),
        (["--run-dir", "a", "--resume", "b"], "omit --run-dir, --seed and --seeds"),
        (["--seed", "3", "--resume", "b"], "omit --run-dir, --seed and --seeds"),
        (["cartpole", "--restartable"], "--restartable requires --run-dir"),
        (
            ["--resume", "b", "--run-dir", "b", "--restartable"],
            "combined with --resume",
        ),
        (["--resume", "nowhere"], "nowhere: expected a run folder, found none"),
        (["--resume", LONG], "folder that you can read; File name too long"),
        (["--restartable", "--run-dir", LONG], "Expected the name of a config"),
        ([f"{LONG}.py"], "expected a Python file, found none"),
        (["missing.toml"], "missing.toml: cannot read the config file"),
        (
            ["cartpole", "--set", "step_timeout=3"],
            "unknown key 'step_timeout'. Did you mean step_timeout_seconds?",
        ),
        (["cartpole", "--set", "lr=1e-3"], "unknown key 'lr'. Did you mean learning_r"),
        (
            ["Pendulum-v1", "--set", "algorithm=sac", "--set", "random_steps=99999999"],
            "expected at most",
        ),
        (["CartPole-v1", "--set", "algorithm=sac"], "sac: expected a Box action space"),
        (["CartPole"], "got 'CartPole'. Did you mean CartPole-v1?"),
        (["FrozenLake"], "got 'FrozenLake'. Did you mean FrozenLake-v1?"),
        (["Pusher"], "got 'Pusher'. Did you mean Pusher-v5?"),
        (["CartPol-v1"], "did you mean CartPole-v1?"),
        (["nosuch:Walk-v0"], "No module named 'nosuch'"),
        (["nosuch.py:Walk"], "nosuch.py: no such file"),
        (["cartpole", "--set", "network=nosuch.py:make"], "nosuch.py: no such file"),
        (["cartpole", "--set", "callbacks=nosuch.py:f"], "nosuch.py: no such file"),
        (["CartPole-v1", "--set", 'env_kwargs={"colour": 1}'], "colour"),
        (["cartpole", "--connect", "a b"], "--connect: expected an address like sim1"),
        (["cartpole", "--connect", "file:///x/y"], "///x/y': expected a file with"),
        (
            ["cartpole", "--connect", "127.0.0.1:1", "--min-servers", "2"],
            "an address now, got 2; reduce it, or pass more addresses",
        ),
    ],
)
def test_invalid_input_is_a_one_line_error_with_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, error = ppo("train", *arguments)
    assert code == 2
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert message in error
    assert output == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["file:///x/y"], ["127.0.0.1:1", "--min-servers", "2"]]
)
def test_unreachable_servers_are_exit_code_1_for_a_restartable_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    again = ("--restartable", "--run-dir", "run")
    code, _, error = ppo("train", "cartpole", *again, "--connect", *words)
    assert code == 1
    assert error.startswith("Error: ")
    assert list(tmp_path.iterdir()) == []
    code, _, _ = ppo("train", "cartpol", *again)
    assert code == 2


@pytest.mark.parametrize(("is_restartable", "code"), [(True, 3), (False, 1)])
def test_a_restartable_run_that_loses_all_servers_asks_for_a_restart(
    is_restartable: bool, code: int
) -> None:
    with (
        pytest.raises(SystemExit, match=rf"^{code}$"),
        report_errors(is_restartable=is_restartable),
    ):
        raise ServerLost("tcp://sim1:5555: no reply for 60 s")


@pytest.mark.parametrize("package", ["starlette.applications", "uvicorn"])
def test_packages_of_the_page_are_checked_before_tensorflow_starts(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("app", "serve"):
        monkeypatch.delitem(
            sys.modules, f"envserve.monitoring.page.{name}", raising=False
        )
    code, output, error = ppo("train", "CartPole-v1", "--page")
    assert (code, output) == (2, "")
    assert install_command("page") in error
    assert list(tmp_path.iterdir()) == []


def test_runs_that_start_in_the_same_second_have_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    for name, folder in [
        ("cartpole", "cartpole-now"),
        ("a/cartpole.toml", "cartpole-now-2"),
        ("my_env.py:cartpole", "cartpole-now-3"),
    ]:
        assert create_folder(name) == Path("runs", folder)


def test_a_default_folder_that_cannot_be_created_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    with pytest.raises(RunFolderError, match=r"^runs/cartpole-\d+-\d+: cannot create"):
        RunFolder.create(create_folder("cartpole"), Config(env_name="CartPole-v1"))


def test_options_override_the_saved_env_source(tmp_path: Path) -> None:
    config = Config(env_name="CartPole-v1")
    made = EnvSource(addresses=("127.0.0.1:7",), import_modules=("mine",))
    run = RunFolder.create(tmp_path / "run", config, made)
    assert run.env_source() == made
    assert resolve_env_source(made, SourceOptions()) == made
    moved = resolve_env_source(made, SourceOptions(["127.0.0.2"]))
    assert moved == EnvSource(addresses=("127.0.0.2",), import_modules=("mine",))
    here = resolve_env_source(made, SourceOptions(["local"], ["file.py", "module"]))
    assert here == EnvSource(import_modules=(str(Path("file.py").absolute()), "module"))
    run.env_source_path.unlink()  # as in run folders of older versions
    assert run.env_source() == EnvSource()
    run.env_source_path.write_text("[]")
    with pytest.raises(
        RunFolderError, match="Remove this file, and repeat the options"
    ):
        run.env_source()


def test_addresses_are_saved_only_if_their_servers_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object, **named: object) -> None:
        raise ConnectError("tcp://127.0.0.1:7: no server replied")

    monkeypatch.setattr("ppo.environments.BatchEnv.connect", connect)
    config = Config(env_name="CartPole-v1")
    made = EnvSource(addresses=("127.0.0.1:6",))
    run = RunFolder.create(tmp_path / "run", config, made)
    code, _, error = ppo("train", "--resume", run.path, "--connect", "127.0.0.1:7")
    assert code == 1
    assert "no server replied" in error
    assert run.env_source() == made


@pytest.mark.parametrize(
    ("moment", "interrupt"),
    [
        ("RunFolder.create", signal.SIGINT),
        ("RunFolder.create", signal.SIGHUP),
        ("shutil.rmtree", signal.SIGINT),
    ],
)
def test_two_interrupts_at_the_start_leave_no_folder(
    moment: str,
    interrupt: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both arrive while the folder is created, or the second while it is removed."""

    def interrupting(call: Callable[..., Any], number: int) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            for _ in range(number):
                signal.raise_signal(interrupt)
            result = call(*arguments, **options)
            for _ in range(number):
                signal.raise_signal(interrupt)
            return result

        return wrapped

    number = 2 if moment == "RunFolder.create" else 1
    create = staticmethod(interrupting(RunFolder.create, number))
    monkeypatch.setattr(RunFolder, "create", create)
    if moment == "shutil.rmtree":
        path = "ppo.run_folder.folder.shutil.rmtree"
        monkeypatch.setattr(path, interrupting(shutil.rmtree, 1))
    code, _, error = ppo("train", "cartpole", "--run-dir", tmp_path / "run")
    assert (code, list(tmp_path.iterdir())) == (130, [])
    assert "the run cannot be resumed" in error


def test_an_env_file_that_has_moved_is_named_by_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    file = tmp_path / "new" / "my_moved_env.py"
    file.write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Walk(CartPoleEnv): pass\n"
    )
    save_run(tmp_path / "run", Config(env_name="CartPole-v1", policy_layers=(4,)))
    run, config = RunFolder.open(tmp_path / "run")
    old = "/nowhere/my_moved_env.py"
    run.save_config(config.replace(env_name=f"{old}:Walk", import_modules=(old,)))
    export = ("export", run.path, tmp_path / "policy")
    code, _, error = ppo(*export, "--trust")
    assert (code, f"{old}: no such file" in error) == (2, True)
    assert ppo(*export, "--import", file)[0] == 0
    # Resuming fails before TensorFlow is started, which takes seconds.
    monkeypatch.setitem(sys.modules, "ppo.learners", None)
    resumed = ppo("train", "--resume", run.path, "--trust")
    assert resumed == (2, "", f"Error: {old}: no such file\n")
    plan = plan_resumed_run(run.path, None, [], SourceOptions(None, [str(file)]))
    assert plan.config.env_name == f"{file}:Walk"
    assert plan.config.import_modules == (str(file),)


def test_own_code_is_found_from_other_working_directories_and_when_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    names = ["network=my.py:net", "objective=my.py:loss", 'callbacks=["my.py:f"]']
    names += ["optimizer=my.py:opt", "learning_rate_schedule=my.py:rate"]
    config = apply_settings(CONFIGS["cartpole"], ["algorithm=my.py:Mine", *names])

    def paths(config: Config) -> set[str]:
        code = code_names(config).values()
        return {name.rpartition(":")[0] for names in code for name in names}

    absolute = with_absolute_paths(config)
    assert paths(absolute) == {str(tmp_path / "my.py")}
    assert len(code_names(absolute)) == len(code_names(config)) == 6
    run = RunFolder.create(tmp_path / "run", absolute, EnvSource(import_modules=("m",)))
    monkeypatch.chdir("new")
    code, _, error = ppo("evaluate", run.path)  # trusted, although the file is missing
    assert (code, "expected a checkpoint" in error) == (2, True)
    Path("my.py").touch()
    Path("other.py").touch()
    options = SourceOptions(import_modules=["my.py", "other.py"])
    plan = plan_resumed_run(run.path, None, [], options)
    assert paths(plan.config) == {str(tmp_path / "new" / "my.py")}
    # Workers do not import the file of the algorithm, but all other modules.
    assert plan.env_source.import_modules == (str(tmp_path / "new" / "other.py"),)
    changed = plan_resumed_run(run.path, None, ["callbacks=my.py:g"], SourceOptions())
    assert changed.config.callbacks == (f"{Path.cwd()}/my.py:g",)


def test_a_used_run_folder_is_rejected(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, Config(env_name="CartPole-v1"))
    (tmp_path / "metrics.jsonl").write_text('{"steps": 1, "iteration": 1}\n')
    code, _, error = ppo("train", "cartpole", "--run-dir", tmp_path)
    assert code == 2
    assert f"--resume {tmp_path}" in error
    # A run cannot be resumed with the config of another env.
    code, _, error = ppo("train", "pendulum", "--resume", tmp_path)
    assert code == 2
    assert "whose env is CartPole-v1; omit CONFIG" in error


def test_a_run_is_resumed_with_its_own_algorithm_only(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, Config(env_name="CartPole-v1", epochs=4))
    code, _, error = ppo("train", "--resume", tmp_path, "--set", "algorithm=sac")
    assert (code, error.count("\n")) == (2, 1)
    assert "expected ppo, the algorithm of the run, found sac; start a new" in error
    config = Config(
        env_name="CartPole-v1",
        algorithm="/old/my.py:Mine",
        algorithm_settings={"speed": 3},
    )
    run.save_config(config)
    moved = plan_resumed_run(
        tmp_path, None, ["algorithm=/new/my.py:Mine"], SourceOptions()
    )
    assert moved.config == config.replace(algorithm="/new/my.py:Mine")


def test_a_resumed_run_reports_settings_that_differ_from_the_given_config(
    tmp_path: Path,
) -> None:
    def remark(config: Config, name: object, *changes: str) -> str:
        run = RunFolder.create(tmp_path / str(next(numbers)), config)
        return plan_resumed_run(run.path, str(name), [*changes], SourceOptions()).remark

    numbers = itertools.count()
    cartpole = CONFIGS["cartpole"]
    longer = ("total_steps=2000000",)
    for config, name, changes in (
        (cartpole.replace(seed=3), "cartpole", longer),
        (cartpole.replace(epochs=4), "CartPole-v1", longer),
        (cartpole.replace(epochs=4), "cartpole", ("epochs=5",)),
    ):
        assert remark(config, name, *changes) == ""
    assert remark(cartpole.replace(epochs=4, callbacks=("/a.py:f",)), "cartpole") == (
        "The run keeps its settings, which differ from cartpole: epochs = 4 (not 10), "
        'callbacks = ["/a.py:f"] (not []). Use --set to change them.'
    )
    file = tmp_path / "my.toml"
    file.write_text(
        'env_name = "Pendulum-v1"\nalgorithm = "sac"\n[sac]\nbatch_size = 9'
    )
    sac = Config(env_name="Pendulum-v1", algorithm="sac")
    assert f"from {file}: batch_size = 256 (not 9). Use" in remark(sac, file)
    with pytest.raises(ConfigError, match="whose algorithm is ppo; omit CONFIG"):
        remark(Config(env_name="Pendulum-v1"), file)
    assert remark(sac, "Pendulum-v1") == ""
    file.write_text('env_name = "Pendulum-v1"\nalgorithm = "/my.py:Mine"\nspeed = 0.1')
    mine = Config(env_name="Pendulum-v1", algorithm="/my.py:Mine")
    for text in ("0.1", "1e-1"):
        assert remark(apply_settings(mine, [f"speed={text}"]), file) == ""
    assert 'speed = "0.2" (not 0.1)' in remark(
        apply_settings(mine, ["speed=0.2"]), file
    )


def test_resuming_is_not_suggested_after_errors_that_would_recur(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints" / "00000001").mkdir(parents=True)
    notes = []
    monkeypatch.setattr("ppo.cli.train.user_command", str)

    def fail(error: Exception, runs: list[RunFolder]) -> None:
        runs.append(RunFolder(tmp_path))
        raise error

    for error in (WrapperError("no such wrapper"), ServerLost("gone")):
        with pytest.raises(type(error)), resume_hints() as runs:
            fail(error, runs)
        notes.append(getattr(error, "__notes__", []))
    assert notes == [[], [f"Resume with: ppo train --resume {tmp_path}"]]


def test_json_logs_include_errors_and_hints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    missing = ("--resume", tmp_path / "missing")
    code, output, error = ppo("train", *missing, "--log-format", "json")
    assert (code, output) == (2, "")
    assert "expected a run folder, found none" in json.loads(error)["message"]
    logger = mock.Mock(spec=logging.Logger)
    with pytest.raises(SystemExit, match="130"), resume_hints(logger=logger):
        raise KeyboardInterrupt
    logger.warning.assert_called_once()
    with pytest.raises(SystemExit, match="130"), resume_hints(130, logger, 1):
        raise KeyboardInterrupt
    assert logger.warning.call_args.args == ("Learner 1 stopped immediately.",)


@pytest.mark.parametrize("command", ["evaluate", "export", "visualize"])
def test_the_checkpoint_option_accepts_steps_or_best(
    command: str, tmp_path: Path
) -> None:
    arguments = {"export": ["out"], "visualize": ["--outdir", "out"]}.get(command, [])
    code, _, error = ppo(command, "run", *arguments, "--checkpoint", "last")
    assert code == 2
    assert "expected a number of env steps or 'best'; got 'last'" in error
    assert parse_checkpoint("best") == "best"
    assert parse_checkpoint("10,240") == 10240
    assert parse_checkpoint(None) is None


def test_commands_on_a_run_do_not_need_its_minimum_of_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppo.cli.options.start_tensorflow", lambda *_: None)
    config = Config(env_name="CartPole-v1", min_servers=2, num_servers=4)
    RunFolder.create(
        tmp_path, config, EnvSource(addresses=("127.0.0.1:1", "127.0.0.1:2"))
    )
    options = SourceOptions(["local"])
    with open_run(tmp_path, None, options) as (_, config, _, source, _):
        env_maker(config, source.addresses)  # must not raise an error


def test_an_interrupt_while_the_program_loads_is_exit_code_130(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "ppo.cli.app", SimpleNamespace(main=interrupted))
    with pytest.raises(SystemExit, match="130"):
        program()


def test_ppo_configs_lists_all_named_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, output, _ = ppo("configs")
    assert code == 0
    for name, config in CONFIGS.items():
        assert re.search(rf"^{name} +{config.env_name} ", output, re.MULTILINE)
    assert re.search(
        r"^pendulum .* 300k +-154 \(-160 to -148\) +2 min", output, re.MULTILINE
    )


def test_ppo_configs_shows_changed_settings_and_all_settings_on_request() -> None:
    code, output, _ = ppo("configs", "pendulum")
    changed = CONFIGS["pendulum"].non_defaults()
    assert (code, re.findall(r"^(\w+) = ", output, re.MULTILINE)) == (0, [*changed])
    num_others = len(Config.__dataclass_fields__) - len(changed)
    assert f"\n--all also shows the {num_others} settings with" in output
    code, output, _ = ppo("configs", "pendulum", "--all")
    assert code == 0
    keys = re.findall(r"^(\w+) = ", output, re.MULTILINE)
    assert sorted(keys) == sorted(Config.__dataclass_fields__)
    assert keys[: len(changed)] == list(changed)
    assert "env_name = Pendulum-v1\n" in output
    assert "env_kwargs = {}\n" in output
    assert (
        "policy_layers = [64, 64]\n    Sizes of the policy network's hidden layers"
        in output
    )
    assert output.index("\nNetworks\n") < output.index("\npolicy_layers")
    assert ppo("configs", "pendulu")[0] == 2


def test_ppo_configs_escapes_control_characters(tmp_path: Path) -> None:
    file = tmp_path / LONG[:200] / "my.json"  # a path that is no valid env name
    file.parent.mkdir()
    file.write_text(r'{"env_name": "X-v0\u001b[2J\nseed = 1"}')
    code, output, _ = ppo("configs", file)
    assert (code, r"env_name = X-v0\x1b[2J\nseed = 1" in output) == (0, True)


def test_errors_of_envs_name_the_settings_of_ppo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit), report_errors():
        raise ServerLost(
            "sim1: gone; raise server_lost_after or operation_timeout, or use the "
            "checkpoint"
        )
    text = "server_lost_after_seconds or operation_timeout_seconds, or use the "
    text += "checkpoint\n"
    assert capsys.readouterr().err.endswith(text)


def test_env_warnings_are_plain_regardless_of_the_root_logger(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    with plain_warnings():
        logging.getLogger("envserve.pool").warning("env %d failed", 3)
    assert re.fullmatch(r"\d\d:\d\d:\d\d env 3 failed\n", capsys.readouterr().err)
    assert logging.getLogger("envserve").propagate


def test_help_and_invalid_input_do_not_load_tensorflow() -> None:
    code = (
        "import os, sys, ppo.cli.app\n"
        "for arguments in (['--help'], ['train', 'cartpol'], ['configs'], []):\n"
        "    if not arguments:  # complete a name\n"
        "        os.environ |= {'_PPO_COMPLETE': '1', 'COMP_LINE': 'ppo train che'}\n"
        "    try:\n"
        "        ppo.cli.app.main(arguments)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "print('loaded:', sorted({'tensorflow', 'keras', 'zmq'} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.endswith("\ncheetah\ncheetah-sac\nloaded: []\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_recorded_and_the_second_interrupts(number: int) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop.has_fired()
        os.kill(os.getpid(), number)
        assert stop.has_fired()
        assert stop.received == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_sighup_stops_gracefully_however_often_it_arrives() -> None:
    with StopSignals() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received == signal.SIGHUP
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_sighup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.has_fired()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_listener_thread_receives_signals() -> None:
    announced = threading.Event()
    with StopSignals(announced.set) as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGINT)
        assert announced.wait(60)
        stop.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    # The listener thread was joined at the exit, so both signals have been counted.
    with pytest.raises(KeyboardInterrupt):
        stop.check()


def test_envs_that_do_not_reply_end_the_iteration_after_one_signal() -> None:
    # The listener thread and the handler ask; the step ends between the first two.
    results = itertools.chain([True, False], itertools.repeat(True))
    with StopSignals(is_waiting=lambda: next(results), stalled_seconds=0.01) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(TrainingStopped):
            threading.Event().wait(60)
        assert stop.received == signal.SIGTERM
        threading.Event().wait(0.05)  # it is raised only once
        stop.check()  # there was no second signal


def test_a_longer_run_warns_about_decaying_settings_that_increase(
    tmp_path: Path,
) -> None:
    earlier = CONFIGS["cheetah"].replace(total_steps=100 * 2048, decay_clip_range=True)
    longer = earlier.replace(total_steps=200 * 2048 + 1)

    def warning(config: Config, steps: int, before: Config | None = earlier) -> str:
        return RunPlan(
            RunFolder(tmp_path), config, "", EnvSource(), before
        ).decay_warning(steps)

    assert warning(longer, 100 * 2048).endswith(
        "increase from 0 % to 50 % of their initial values: learning_rate, clip_range."
    )
    assert "from 75 % to 88 % of" in warning(longer, 25 * 2048)
    assert "from 0 % to 25 % of" in warning(longer, 150 * 2048)  # was longer before
    assert warning(earlier, 100 * 2048) == ""
    assert warning(longer, 0, None) == ""
    plain = {"learning_rate_schedule": "constant", "decay_clip_range": False}
    assert warning(longer.replace(**plain), 100 * 2048) == ""


@pytest.mark.usefixtures("one_launcher")
def test_an_env_that_cannot_be_stepped_is_an_error_before_tensorflow_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for method in ("__init__", "reset", "step"):
        kwargs = f"env_kwargs={json.dumps({'method': method})}"
        code, output, error = ppo(
            "train", f"{failing_env.__name__}:Failing", "--set", kwargs
        )
        assert (code, output) == (1 if method == "step" else 2, "")
        assert f"RuntimeError: a bug in {method}" in error.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_the_header_of_a_measured_config_states_the_expected_return(
    tmp_path: Path,
) -> None:
    plan = RunPlan(RunFolder(tmp_path), CONFIGS["pendulum"], "of pendulum", EnvSource())
    expected = "  expect a mean return of about -154 (-160 to -148), after about 2 min "
    expected += "on one core"
    assert plan.header(1)[-1] == expected
    for other in (
        plan._replace(config=plan.config.replace(total_steps=10_000)),
        plan._replace(earlier_config=plan.config),
    ):
        assert "expect" not in "".join(other.header(1))


def test_the_header_states_that_an_env_has_no_time_limit(tmp_path: Path) -> None:
    config = Config(env_name="CliffWalking-v1")
    plan = RunPlan(RunFolder(tmp_path), config, "suited", EnvSource())
    note = "  limit  none; evaluations cut episodes off after 10,000 steps"
    assert plan.header(1)[-1] == note
    limit = {"name": "TimeLimit", "max_episode_steps": 9}
    argument = {"max_episode_steps": 9}
    limited = [config.replace(wrappers=(limit,)), config.replace(env_kwargs=argument)]
    for other in (*limited, CONFIGS["pendulum"]):
        assert note not in plan._replace(config=other).header(1)
    unlimited = CONFIGS["pendulum"].replace(env_kwargs={"max_episode_steps": -1})
    assert plan._replace(config=unlimited).header(1)[-1] == note


def test_programs_are_named_by_their_path_unless_they_are_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = Path(get_path("scripts"))
    monkeypatch.chdir(tmp_path)  # the checkout can contain the environment
    monkeypatch.setenv("PATH", str(scripts))
    assert user_command("python") == "python"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert user_command("python") == str(scripts / "python")
    monkeypatch.chdir(scripts.parent)
    assert user_command("python") == f"{scripts.name}/python"
    (tmp_path / "python").touch(0o700)  # of another environment
    assert user_command("python") == f"{scripts.name}/python"
    assert user_command("not-installed") == "not-installed"
    monkeypatch.setenv("PATH", "/missing")
    (deleted := tmp_path / "deleted").mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    assert user_command("python") == str(scripts / "python")


@pytest.mark.usefixtures("one_launcher")
def test_a_finished_run_proposes_only_commands_that_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(
        env_name="CartPole-v1",
        num_envs=4,
        horizon=5,
        total_steps=20,  # fewer than the 100 steps of the saved run
        minibatch_size=20,
        policy_layers=(4,),
        evaluation_episodes=1,
        jit_compile=False,
    )
    without_images = config.replace(
        env_name=informing_env.NAME, import_modules=(informing_env.__name__,)
    )
    for name, saved in (("run", config), ("without_images", without_images)):
        save_run(tmp_path / name, saved)
        row = '{"iteration": 1, "steps": 100}\n'
        (tmp_path / name / "metrics.jsonl").write_text(row)

    def proposed(name: str) -> list[str]:
        code, output, error = ppo("train", "--resume", tmp_path / name, "--trust")
        assert (code, error) == (0, "")
        assert " --set total_steps=200  # train for more steps" in output
        return re.findall(
            r"^  (\w+(?: [a-z]+)?) .*  # ", output.partition("\nNext:\n")[2], re.M
        )

    monkeypatch.setattr("ppo.cli.train.user_command", str)
    everything = ["ppo visualize", "ppo plot", "tensorboard", "ppo train"]
    assert proposed("run") == everything
    assert proposed("without_images") == everything[1:]
    for package in ("pygame", "matplotlib", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    assert proposed("run") == ["ppo train"]
