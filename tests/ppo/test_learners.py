"""Several learners that train one policy, locally and on Ray."""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from envserve.text import install_command
from ppo.algorithms.ppo.ppo import PPO
from ppo.cli import on_ray
from ppo.cli.app import main
from ppo.config import Config
from ppo.environments import env_maker
from ppo.errors import ConfigError, LearnerLostError
from ppo.learners import SINGLE_LEARNER, Learners
from ppo.rollout import Rollout
from ppo.run_folder.checkpoint import Counters
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics_file import read_metrics
from ppo.training_run import TrainingRun
from tests.ppo import cluster, one_update
from tests.ppo.cluster import eager_main
from tests.ppo.runs import counters, eagerly, ppo, rows_of

# Learners are processes that load TensorFlow and compile, on a shared machine.
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("one_launcher")]

SETTINGS = (
    *("num_envs=4", "horizon=16", "minibatch_size=32", "epochs=1", "seed=3"),
    *("total_steps=1000000000", "jit_compile=false", "checkpoint_every=64"),
    *("evaluation_episodes=2", "policy_layers=4", "value_layers=4"),
)


SET_OPTIONS = tuple(word for each in SETTINGS for word in ("--set", each))
COMMON = ("train", "--distribute", "--num-workers=1")


@pytest.fixture(scope="module")
def update_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    codes = cluster.exit_codes(one_update.main, [[folder], [folder]], folder)
    assert codes == [0, 0], cluster.outputs(folder)
    return folder


@pytest.mark.parametrize("max_kl", [0.0, one_update.CONFIG.max_kl])
def test_update_of_two_learners_equals_that_of_one_with_all_envs(
    update_of_two: Path, max_kl: float
) -> None:
    config = one_update.CONFIG.replace(max_kl=max_kl, jit_compile=False)
    expected_metrics, expected = one_update.expected(config)
    assert expected_metrics["undone_epochs"] == (max_kl > 0)
    for index in range(2):
        got = np.load(update_of_two / f"{max_kl}-{index}.npz")
        for name, value in zip(got.files, expected, strict=True):
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5)
        report = json.loads((update_of_two / f"{index}.json").read_text())
        assert report[str(max_kl)] == pytest.approx(
            expected_metrics, rel=1e-4, abs=1e-5
        )
    both = [np.load(update_of_two / f"{max_kl}-{index}.npz") for index in range(2)]
    for name in both[0].files:
        np.testing.assert_array_equal(both[0][name], both[1][name])


def test_learners_collect_the_same_rows_as_a_single_one() -> None:
    config = one_update.CONFIG.replace(env_name="CartPole-v1", jit_compile=False)

    def collected(learners: Learners) -> Rollout:
        share = config.per_learner(learners.num)
        first = learners.index * share.num_envs
        make_env = env_maker(share, None, 1, first_env_index=first)
        with make_env(num_envs=share.num_envs, seed=7, is_training=True) as env:
            run = TrainingRun(config, env, Counters(), PPO, lambda: None, learners)
            return run.simulation.run((5, 6))

    whole = collected(SINGLE_LEARNER)
    halves = [collected(Learners(["a:1", "b:1"], index)) for index in range(2)]
    for name in ("observation", "action", "log_prob", "reward", "terminated"):
        got = np.concatenate([getattr(half, name) for half in halves], axis=1)
        np.testing.assert_allclose(got, getattr(whole, name), rtol=1e-5, atol=1e-6)


def test_gather_returns_all_values_and_broadcast_those_of_the_chief(
    update_of_two: Path,
) -> None:
    for index in range(2):
        report = json.loads((update_of_two / f"{index}.json").read_text())
        assert report["texts"] == [
            {"from": 0, "text": "ö" * 3, "number": 7.0},
            {"from": 1, "text": "ö" * 43, "number": 0.5},
        ]
        assert report["broadcast"] == [[1.0, 2.0], [True, False], [200]]


def test_sums_leave_no_threads(update_of_two: Path) -> None:
    for index in range(2):
        report = json.loads((update_of_two / f"{index}.json").read_text())
        assert report["new_threads"] < 50


def test_compiled_collective_is_not_reported_as_a_lost_learner() -> None:
    learners = Learners(["a:1", "b:1"], 0)
    compiled = tf.function(learners.sum, jit_compile=True)
    with (
        pytest.raises(tf.errors.InvalidArgumentError, match="ollective"),
        learners.guard_collectives(),
    ):
        compiled(tf.constant(1.0))


def test_unresponsive_learner_counts_as_lost(update_of_two: Path) -> None:
    report = json.loads((update_of_two / "0.json").read_text())
    assert "another learner exited or became unreachable" in report["lost"]


def wait_for(condition: Any, processes: Any, folder: Path) -> None:
    while not condition():
        assert all(process.is_alive() for process in processes), cluster.outputs(folder)
        time.sleep(0.1)


def steps_of(run: Path) -> int:
    """Return the steps of a run, and check that each iteration has one row."""
    found = [(row["iteration"], row["steps"]) for row in rows_of(run)]
    assert found == [(number, 64 * number) for number in range(1, len(found) + 1)]
    assert counters(run).steps == 64 * len(found)
    return 64 * len(found)


def test_run_is_resumed_after_a_learner_was_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    other = (*COMMON, "CartPole-v1", *SET_OPTIONS)
    first = (*other, "--run-dir", str(run))
    with cluster.started_learners(main, [[first], [other]], tmp_path) as processes:
        wait_for(RunFolder(run).has_checkpoint, processes, tmp_path)
        processes[1].kill()
        assert cluster.wait_for_exit(processes[0]) == 1
    errors = [
        line for line in cluster.outputs(tmp_path)[0].splitlines() if "rror" in line
    ]
    assert len(errors) == 1
    assert errors[0].startswith("Error: Learner 0: learner 1 exited or became unr")
    steps = counters(run).steps
    assert steps > 0
    # The chief writes the metrics, with the env steps of both learners.
    assert rows_of(run)[0]["steps"] == 64

    first = (*COMMON, "--resume", str(run))
    with cluster.started_learners(
        eager_main, [[first], [other]], tmp_path
    ) as processes:
        metrics = run / "metrics.jsonl"  # the last line may be incomplete
        wait_for(
            lambda: read_metrics(metrics)[-1]["steps"] > steps, processes, tmp_path
        )
        os.kill(processes[1].pid or 0, signal.SIGINT)
        assert [*map(cluster.wait_for_exit, processes)] == [0, 0]
    steps = steps_of(run)
    assert "Learner 1 finished after" in cluster.outputs(tmp_path)[1]

    longer = f"total_steps={steps + 3 * 64}"
    alone = ("train", "--num-workers=1", "--resume", run, "--set", longer)
    with eagerly():
        assert ppo(*alone)[0] == 0
    assert steps_of(run) == steps + 3 * 64


STOPS = """
def stop(run, metrics, rollout):
    if (run.learners.index, run.counters.iteration) == (1, 2):
        run.stop()
"""


def test_stop_by_one_learner_stops_all(tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(STOPS)
    run = tmp_path / "run"
    callbacks = f'callbacks=["{tmp_path}/stops.py:stop"]'
    other = (*COMMON, "--restartable", "CartPole-v1", *SET_OPTIONS, "--set", callbacks)
    first = (*other, "--run-dir", str(run))
    codes = cluster.exit_codes(eager_main, [[first], [other]], tmp_path)
    assert codes == [0, 0], cluster.outputs(tmp_path)
    assert json.loads((run / "evaluation.json").read_text())["steps"] == 128

    # A finished run is not trained further, but evaluated again.
    first = (*COMMON, "--resume", str(run), "--set", "total_steps=128")
    codes = cluster.exit_codes(eager_main, [[first], [other]], tmp_path)
    assert codes == [0, 0], cluster.outputs(tmp_path)
    assert counters(run).steps == 128


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{",
        '{"task": {"type": "worker", "index": 0}}',
        '{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}',
        '{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0.0}}',
        '{"cluster": {"worker": ["a:65536"]}, "task": {"type": "worker", "index": 0}}',
    ],
)
def test_invalid_tf_config_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, text: str | None, tmp_path: Path
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)
    run = tmp_path / "run"
    code, _, errors = ppo("train", "cartpole", "--distribute", "--run-dir", run)
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert errors.startswith("Error: --distribute: expected a TF_CONFIG like {")
    assert f"got {text!r}; set it for each learner" in errors
    assert not run.exists()


def test_doubled_address_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["a:1", "b:1", "a:1"]}
    text = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    monkeypatch.setenv("TF_CONFIG", text)
    code, _, errors = ppo("train", "cartpole", "--distribute")
    line = "Error: --distribute: TF_CONFIG lists the address a:1 twice; give each "
    assert (code, errors) == (2, f"{line}worker its own host and port.\n")


@pytest.mark.parametrize("setting", ["num_envs", "minibatch_size"])
def test_indivisible_batch_is_an_error_before_envs_start(
    monkeypatch: pytest.MonkeyPatch, setting: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("TF_CONFIG", cluster.tf_configs(3)[0])
    run = tmp_path / "run"
    changes = ["num_envs=15", "horizon=12", "minibatch_size=15", f"{setting}=20"]
    options = [word for each in changes for word in ("--set", each)]
    arguments = ("train", "CartPole-v1", "--distribute", "--run-dir", run, *options)
    code, _, errors = ppo(*arguments)
    assert code == 2
    assert errors.startswith("Error: num_envs, minibatch_size: expected multiples of")
    assert not run.exists()


def test_only_the_chief_accepts_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TF_CONFIG", cluster.tf_configs()[1])
    code, _, errors = ppo("train", "--resume", tmp_path, "--distribute")
    assert code == 2
    assert errors.startswith(
        "Error: --distribute cannot be combined with --seeds. Only"
    )


ON_RAY = ["cartpole", "--on", "ray", "--learners", "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (ON_RAY[:3], "--on ray: expected CONFIG, --learners N"),
        (ON_RAY[1:], "--on ray: expected CONFIG, --learners N"),
        ([*ON_RAY[:1], *ON_RAY[3:]], "--learners, --resources: require --on ray; "),
        ([*ON_RAY[:1], "--resources", '{"GPU": 1}'], "--resources: require --on ray"),
        ([*ON_RAY, "--restartable"], "with --restartable, --run-dir DIR"),
        ([*ON_RAY, "--seeds", "3"], "combined with --seeds, --resume, --distribute"),
        ([*ON_RAY, "--page"], "combined with --seeds, --resume, --distribute"),
        ([*ON_RAY, "--distribute"], "combined with --seeds, --resume, --distribute"),
        ([*ON_RAY[:4], "0"], "--learners: expected an int >= 1; got '0'"),
        ([*ON_RAY[:2], "moon", *ON_RAY[3:]], "--on: expected one of ray; got 'moon'"),
        (ON_RAY, f"Ray is not installed; run {install_command('ray')}"),
    ],
)
def test_invalid_option_with_on_ray_is_a_one_line_error(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # Ray is not installed
    monkeypatch.chdir(tmp_path)
    code, _, errors = ppo("train", *arguments)
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert errors.startswith("Error: ")
    assert message in errors
    assert not any(tmp_path.iterdir())


def test_learners_on_ray_share_a_run_folder_that_the_final_error_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner_arguments: list[list[str]] = []
    restart_commands: list[list[str]] = []

    def fail(ray: object, needs: object, words: list[str], command: list[str]) -> int:
        learner_arguments.append(words)
        restart_commands.append(command)
        raise LearnerLostError("exit code 9")

    ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=OSError))
    monkeypatch.setattr(on_ray, "connect_to_cluster", lambda **_: ray)
    monkeypatch.setattr(on_ray, "_train_once", fail)
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppo", "train", *ON_RAY])
    code, _, errors = ppo("train", *ON_RAY)
    words = ["cartpole", "--run-dir", "runs/cartpole-now"]
    options = ["--distribute", "--restartable", "--trust"]
    assert learner_arguments == 3 * [[*words, *options]]
    text = "Error: Gave up after 3 failures: exit code 9; to continue the run, use "
    text += "--run-dir runs/cartpole-now"
    assert (code, errors.splitlines()[-1]) == (1, text)
    assert not Path("runs/cartpole-now").exists()
    assert restart_commands == 3 * [["ppo", "train", *ON_RAY, *words[1:]]]
    monkeypatch.setattr(sys, "argv", ["ppo", "train", *ON_RAY, "--run-dir", "own"])
    ppo(*sys.argv[1:])
    assert learner_arguments[3][:3] == [*words[:2], "own"]
    assert restart_commands[3] == sys.argv  # which already names the folder
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    _, _, errors = ppo(*sys.argv[1:], "--log-format", "json")
    texts = [json.loads(line)["message"] for line in errors.splitlines()]
    assert texts[:2] == 2 * ["Restarting all learners: exit code 9"]


def test_learners_with_different_settings_are_an_error(tmp_path: Path) -> None:
    first = (*COMMON, "CartPole-v1", *SET_OPTIONS, "--run-dir", str(tmp_path / "run"))
    other = (*COMMON, "CartPole-v1", *SET_OPTIONS, "--set", "discount=0.5")
    assert cluster.exit_codes(main, [[first], [other]], tmp_path) == [2, 2]
    for text in cluster.outputs(tmp_path):
        assert (
            "Learner 1: expected the settings of learner 0, but these differ: disc"
            in text
        )
    assert not (tmp_path / "run").exists()


def test_the_loss_of_a_learner_that_has_just_connected_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def exit_of_learner_0(*_: Any) -> None:
        raise tf.errors.UnavailableError(
            None, None, "Collective ops is aborted by: /job:worker/task:0 has exited"
        )

    monkeypatch.setenv("TF_CONFIG", cluster.tf_configs()[1])
    monkeypatch.setattr(Learners, "connect", lambda *_: None)
    monkeypatch.setattr(Learners, "gather", exit_of_learner_0)
    code, _, errors = ppo(*COMMON, "CartPole-v1", *SET_OPTIONS)
    assert code == 1
    assert "Error: Learner 1: learner 0 exited or became unreachable" in errors


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_learner_without_the_others_ends_with_one_line_or_at_a_signal(
    tmp_path: Path, number: signal.Signals | None
) -> None:
    timeout = "0.5" if number is None else "300"
    first = (*COMMON, "CartPole-v1", *SET_OPTIONS, "--rendezvous-timeout", timeout)
    first = (*first, "--run-dir", str(tmp_path / "run"))
    with cluster.started_learners(main, [[first]], tmp_path, 1) as (process,):
        if number is not None:
            waits = "waiting for 1 other learners"
            wait_for(
                lambda: waits in "".join(cluster.outputs(tmp_path)), [process], tmp_path
            )
            os.kill(process.pid or 0, number)
        code = cluster.wait_for_exit(process)
    (output,) = cluster.outputs(tmp_path)
    errors = [line for line in output.splitlines() if line.startswith("Error")]
    if number is None:
        (error,) = errors
        assert error.startswith(
            "Error: Learner 0: expected to connect to learner 1 (127"
        )
        assert "within 0.5 s (no connection); start all learners" in error
    assert (code, len(errors)) == ((1, 1) if number is None else (130, 0))
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_per_learner_divides_envs_and_minibatches() -> None:
    config = Config(env_name="x", num_envs=12, minibatch_size=48, horizon=16)
    share = config.per_learner(3)
    assert (share.num_envs, share.minibatch_size, share.horizon) == (4, 16, 16)
    assert config.per_learner(1) == config
    with pytest.raises(ConfigError, match="num_envs"):
        config.per_learner(5)
    recurrent = config.replace(recurrent_size=4)
    text = "Each of 6 learners has num_envs = 2 and minibatch_size = 8: .* a multiple"
    with pytest.raises(ConfigError, match=text):
        recurrent.per_learner(6)
