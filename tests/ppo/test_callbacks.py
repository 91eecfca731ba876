"""Callbacks, called after each iteration: they stop runs, change envs, add metrics."""

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest

from envserve.client import BatchEnv
from ppo.agent.agent import Agent
from ppo.config import Config
from ppo.config.named_configs import load_config
from ppo.environments import env_maker
from ppo.errors import CallbackError, ConfigError
from ppo.run_folder.checkpoint import Counters
from ppo.run_folder.folder import RunFolder
from ppo.train import Progress, train
from ppo.training_run import TrainingRun
from ppo.user_code import Callbacks, load_user_code
from tests.ppo import custom_callbacks, custom_losses, informing_env
from tests.ppo.fakes import ACTIONS, BOX
from tests.ppo.runs import SMALL, Maker, counters, eagerly, rollout_of, rows_of, run

pytestmark = pytest.mark.usefixtures("one_launcher")

FILE = custom_callbacks.__file__
DOCS = Path(__file__).parents[2] / "docs" / "research.md"
RND = DOCS.parents[1] / "examples" / "rnd.py"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    monkeypatch.setattr(custom_callbacks, "seen", seen)
    return seen


def named(*names: str) -> Config:
    callbacks = tuple(f"{custom_callbacks.__name__}:{name}" for name in names)
    return SMALL.replace(callbacks=callbacks)


@eagerly()
def test_callback_reads_and_changes_a_run_and_its_metrics_are_reported(
    seen: list[Any], tmp_path: Path
) -> None:
    config = named("records", "sets_level").replace(
        env_name=informing_env.NAME,
        objective=f"{custom_losses.__file__}:of_large_value",
        report_every=32,
        evaluate_every=32,
    )
    make_env = env_maker(config, num_workers=1, import_modules=[informing_env.__name__])
    shown: list[Progress] = []
    folder = RunFolder.create(tmp_path / "run", config)
    train(config, folder, make_env, on_progress=shown.append)
    runs, metrics, rewards = zip(*seen, strict=True)
    assert len(seen) == 4
    assert isinstance(runs[0], TrainingRun)
    assert isinstance(runs[0].env, BatchEnv)
    assert (runs[0].config, runs[0].counters) == (config, (4, 64))
    assert [each["iteration"] for each in metrics] == [1, 2, 3, 4]
    assert [("evaluation_return" in each) for each in metrics] == [False, True] * 2
    assert rewards[0].shape == (8, 2)
    rows = rows_of(tmp_path / "run")
    assert [row["steps"] for row in rows] == [32, 64]
    assert [row["own/put"] for row in rows] == [1.5, 3.5]  # means over two iterations
    assert [row["returned"] for row in rows] == [15.0, 35.0]
    assert "evaluation_x" not in rows[0]
    # The callback cannot overwrite the trainer's metrics.
    assert all(row["mean_return"] > 0.0 for row in rows)
    assert shown[-1].metrics["returned"] == 40.0
    # The metrics of one iteration have the same names as a row.
    assert {"steps", *shown[-1].metrics} == rows[-1].keys()
    # The envs have the attribute that was set, and the loss is the user's function.
    assert metrics[0]["info/level"] == 1.0
    assert 1.0 < metrics[1]["info/level"] < metrics[3]["info/level"]
    assert rows[1]["info/level"] == metrics[3]["info/level"]
    assert all(900.0 < row["policy_loss"] < 1100.0 for row in rows)


def test_callback_changes_rewards_before_the_update(
    seen: list[Any], tmp_path: Path
) -> None:
    with pytest.raises(CallbackError, match="expected finite rewards in the rollout"):
        run(tmp_path, named("RewardsTheSecondEnv"))
    assert counters(tmp_path) == (2, 32)  # the third rollout was not used
    assert [bonus for bonus, _ in seen] == [0, 1]
    assert [rewards.tolist() for _, rewards in seen] == [[[1.0, 5.0]] * 8] * 2
    rows = rows_of(tmp_path)
    assert [row["own/bonus"] for row in rows] == [0.0, 1.0]
    # Returns are those of the env, but the agent learns from the changed rewards.
    assert [row["mean_return"] for row in rows] == [3.0, 3.0]
    assert all(0.0 < row["reward_scale"] < 0.5 for row in rows)


def fake_run(**attributes: Any) -> SimpleNamespace:
    stats = SimpleNamespace(rows=0)
    env = SimpleNamespace(stats=lambda: stats, reset_infos={}, is_closed=False)
    return SimpleNamespace(env=env, rollout=rollout_of(1), **attributes)


def test_callback_may_have_nothing_but_before_update() -> None:
    callbacks, a_run = Callbacks([f"{FILE}:OnlyRewards"]), fake_run()
    assert callbacks.before_update(a_run) == {}
    assert callbacks(a_run, {"mean_return": 1.0}) == {}
    assert a_run.rollout.reward.tolist() == [[2.0]]


def test_an_exception_is_reported_even_if_its_text_or_its_file_cannot_be_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Bad(Exception):\n    __str__ = None\n"
        "class Callback:\n"
        "    def __call__(self, run, metrics, rollout):\n        raise Bad\n"
    )
    callbacks = Callbacks([f"{file}:Callback"])
    file.write_text("edited = (")  # during the run
    with pytest.raises(CallbackError, match=r"mine\.py:5: Bad: <exception str\(\) "):
        callbacks(fake_run(), {})


def test_metrics_of_callbacks_are_in_the_order_in_which_they_are_returned() -> None:
    callbacks = Callbacks([f"{FILE}:returns_letters"])
    assert "".join(callbacks(fake_run(), {"b": 0.0})) == "zyxwvuac"


def test_example_of_the_docs_does_not_end_a_resumed_run_at_once(tmp_path: Path) -> None:
    (code,) = re.findall(r"(?s)class Patience.*?(?=\n\n\n)", DOCS.read_text())
    (tmp_path / "patience.py").write_text(code)
    patience = load_user_code("callbacks", f"{tmp_path}/patience.py:Patience")()
    a_run = mock.Mock(counters=Counters(100, 200_000))
    patience(a_run, {"mean_return": math.nan}, None)
    assert not a_run.stop.called
    a_run.counters = Counters(101, 250_001)
    patience(a_run, {"mean_return": math.nan}, None)
    assert a_run.stop.called


def test_example_of_the_docs_uses_no_return_before_an_episode_has_ended(
    tmp_path: Path,
) -> None:
    (code,) = re.findall(r"(?s)def weaker.*?(?=```)", DOCS.read_text())
    (tmp_path / "weaker.py").write_text(f"import math\n{code}")
    weaker = load_user_code("callbacks", f"{tmp_path}/weaker.py:weaker")
    a_run = mock.Mock(env=mock.Mock(num_envs=2))
    for mean_return, force in ((math.nan, 10.0), (200.0, 8.0)):
        weaker(a_run, {"mean_return": mean_return}, rollout_of(1))
        a_run.env.set_attr.assert_called_with("force_mag", [force] * 2)


def test_example_rewards_observations_that_are_new() -> None:
    novelty = load_user_code("callbacks", f"{RND}:Novelty")()
    agent = Agent(BOX, ACTIONS, SMALL)
    a_run = SimpleNamespace(agent=agent)
    rows = np.random.default_rng(0).normal(size=(65, 2, 2))
    errors = []
    for _ in range(12):
        rollout = rollout_of(64, 2, observation=rows, reward=np.ones((64, 2)))
        errors.append(novelty.before_update(a_run, rollout)["novelty/error"])
        assert (rollout.reward > 1.0).all()
    assert errors[-1] < 0.9 * errors[0]
    rows[-1] = 5.0
    novelty.before_update(a_run, rollout := rollout_of(64, 2, observation=rows))
    assert rollout.reward[-1].min() > 3 * rollout.reward[:-1].mean()
    # The last observation of an episode can be new, too.
    rows, final = np.zeros((65, 2, 2)), np.zeros((64, 2, 2))
    final[7, 1], ends = 5.0, np.zeros((64, 2), np.bool_)
    ends[7, 1] = True
    rollout = rollout_of(64, 2, observation=rows, final_observation=final)
    novelty.before_update(a_run, rollout._replace(terminated=ends))
    assert rollout.reward.argmax() == 7 * 2 + 1


def test_resumed_run_creates_a_new_instance_of_a_callback_class(
    seen: list[Any], tmp_path: Path
) -> None:
    config = named("records", "CountsCalls", "raises")
    config = config.replace(total_steps=160, evaluate_every=96)
    with pytest.raises(CallbackError, match=":28: ValueError"):
        run(tmp_path, config)
    assert counters(tmp_path) == (2, 32)
    result = run(tmp_path, config.replace(callbacks=config.callbacks[:2]), resume=True)
    assert (result.steps, result.is_finished) == (64, True)
    assert counters(tmp_path) == (4, 64)
    rows = rows_of(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert [row.get("calls") for row in rows] == [1, None, 1, 2]
    assert [row.get("doubled") for row in rows] == [20, None, 60, 80]
    # An evaluation follows the last iteration, also if a callback ends the run.
    assert [step for step, _ in result.curve] == [64]


def test_a_schedule_that_fails_during_the_run_ends_it_with_a_checkpoint(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    # The schedule is called 100 times before training, and then once per iteration.
    lines = ("calls = []", "def rate(progress):", "    calls.append(progress)")
    file.write_text("\n".join((*lines, "    return 1 / (len(calls) < 103)")))
    name = f"{file}:rate"
    config = SMALL.replace(learning_rate_schedule=name, checkpoint_every=0)
    message = f"^learning_rate_schedule {name}: {file}:4: ZeroDivisionError: "
    with pytest.raises(CallbackError, match=message):
        run(tmp_path / "run", config)
    assert counters(tmp_path / "run") == (2, 32)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "28: ValueError: in iteration 2"),
        ("breaks_the_config", "32: ConfigError: num_envs: .* got 0"),
        ("returns_text", "35: ValueError: could not convert .*'many'"),
        ("returns_a_list", "39: TypeError: expected a dict or None"),
        ("returns_integer_keys", "59: TypeError: expected names of metrics, got 0"),
        ("returns_surrogates", "87: UnicodeEncodeError: "),
    ],
)
def test_error_of_a_callback_is_one_line(name: str, message: str) -> None:
    called = Callbacks([f"{FILE}:{name}"])
    a_run = fake_run(config=SMALL, counters=Counters(2, 32))
    line = f"^callbacks {FILE}:{name}: {FILE}:{message}"
    with pytest.raises(CallbackError, match=line) as caught:
        called(a_run, {"iteration": 2.0})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "verbs"),
    [
        ("resets_envs", "step or reset"),
        ("steps_envs", "step or reset"),
        ("closes_envs", "close"),
    ],
)
def test_callback_that_steps_resets_or_closes_the_envs_is_an_error(
    name: str, verbs: str, tmp_path: Path
) -> None:
    with pytest.raises(CallbackError, match=f"{name}: .*must not {verbs} run.env"):
        run(tmp_path, named(name))


def test_functions_of_a_file_share_its_globals_until_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def one(): pass\ndef two(): pass\n")
    one, two = (
        load_user_code("callbacks", f"{file}:{name}") for name in ("one", "two")
    )
    assert one.__globals__ is two.__globals__
    file.write_text("def one(): return 1\n")
    assert load_user_code("callbacks", f"{file}:one")() == 1


def test_files_import_modules_in_their_folder_unless_others_can_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(folder: str) -> tuple[Any, Config]:
        file = tmp_path / folder / "own.py"
        file.parent.mkdir()
        file.with_name(f"beside_{folder}.py").write_text("NUMBER = 3\n")
        text = f"import ppo.config\nfrom beside_{folder} import NUMBER\n"
        text += "def f(run, metrics, rollout): return {'number': NUMBER}\n"
        text += "config = ppo.config.Config(env_name='A', seed=NUMBER)\n"
        file.write_text(text)
        if folder == "writable":
            file.parent.chmod(0o777)
        return load_user_code("callbacks", f"{file}:f"), load_config(str(file))

    monkeypatch.setattr(sys, "path", [*sys.path])
    callback, config = load("own")
    assert (callback(None, {}, None), config.seed) == ({"number": 3}, 3)
    text = r"own.py:2: ModuleNotFoundError: No module named 'beside_writable'; modules "
    with pytest.raises(ConfigError, match=f"{text}in .* can write to /.*/writable"):
        load("writable")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("takes_two_arguments", f"{FILE}:43: TypeError: too many positional arguments"),
        ("NeedsArgument", f"{FILE}:47: TypeError: .*argument"),
        ("NotCallable", f"{FILE}:55: TypeError: .*not a callable"),
        ("TakesNoRollout", f"{FILE}:96: TypeError: too many positional arguments"),
        ("record", "found none. Did you mean records?"),
    ],
)
def test_invalid_callback_is_a_one_line_error_before_any_env_starts(
    name: str, message: str, tmp_path: Path
) -> None:
    maker = Maker()
    with pytest.raises(ConfigError, match=message) as caught:
        run(tmp_path, named(name), maker)
    assert len(str(caught.value).splitlines()) == 1
    assert maker.made == []


def test_file_of_a_callback_can_also_register_the_env(tmp_path: Path) -> None:
    file = tmp_path / "walk.py"
    file.write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Walk(CartPoleEnv):\n"
        "    pass\n"
        "gymnasium.register('Walk-v0', Walk)\n"
        "def callback(run, metrics, rollout):\n"
        "    return {'mine': 1.0}\n"
    )
    config = SMALL.replace(env_name="Walk-v0", callbacks=(f"{file}:callback",))
    folder = RunFolder.create(tmp_path / "run", config)
    try:
        with eagerly():
            train(config, folder, env_maker(config, num_workers=1))
    finally:
        del gymnasium.registry["Walk-v0"]
    assert [row["mine"] for row in rows_of(tmp_path / "run")] == 4 * [1.0]
