"""`env_maker`: local envs and servers, and the same wrappers everywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from envserve.client import BatchEnv
from envserve.errors import AddressError, EnvError, EnvStartError
from ppo import environments
from ppo.cli.options import report_errors
from ppo.config import Config
from ppo.environments import env_maker, first_step
from ppo.errors import ConfigError
from ppo.evaluation.evaluate import evaluate_run
from ppo.evaluation.export import export_run
from ppo.evaluation.rendering import rendering_env_maker
from ppo.evaluation.videos import visualize_run
from ppo.run_folder.folder import RunFolder
from ppo.train import train
from tests.ppo import failing_env, film_env
from tests.ppo.runs import SMALL, eagerly

pytestmark = pytest.mark.usefixtures("one_launcher")

CONFIG = Config(
    env_name="CartPole-v1",
    env_kwargs={"sutton_barto_reward": True},
    wrappers=({"name": "ActionRepeat", "amount": 4},),
    step_timeout_seconds=7.0,
    server_lost_after_seconds=9.0,
    operation_timeout_seconds=90.0,
    padding_after_seconds=0.5,
)
#: Arguments of both `BatchEnv.local` and `BatchEnv.connect`.
COMMON = {
    "num_envs": 8,
    "seed": 5,
    "num_splits": 1,
    "env_kwargs": {"sutton_barto_reward": True},
    "wrappers": ({"name": "ActionRepeat", "amount": 4},),
    "autoreset": "same_step",
    "padding_after": 0.5,
    "first_env_index": 0,
}


@pytest.fixture
def batch_env_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of BatchEnv: the constructor, positional and named arguments."""
    calls: list[tuple[Any, ...]] = []
    for way in ("local", "connect"):
        monkeypatch.setattr(
            BatchEnv,
            way,
            lambda *arguments, way=way, **named: calls.append((way, arguments, named)),
        )
    return calls


def test_envs_are_local_by_default(batch_env_calls: list[tuple[Any, ...]]) -> None:
    env_maker(CONFIG, num_workers=3, import_modules=["mine"])(num_envs=8, seed=5)
    ((way, arguments, named),) = batch_env_calls
    assert (way, arguments) == ("local", ("CartPole-v1",))
    assert named == {
        **COMMON,
        "num_workers": 3,
        "spare_envs": False,
        "import_modules": ("mine",),
        "preload": True,
        "step_timeout": 7.0,
        "reset_timeout": 120.0,
        "max_restarts": 5,
        "on_fault": "truncate",
        "nonfinite": "raise",
    }


def test_envs_are_on_servers_if_there_are_addresses(
    batch_env_calls: list[tuple[Any, ...]],
) -> None:
    config = CONFIG.replace(
        spare_envs=True, on_fault="raise", nonfinite="mask", on_server_lost="pad"
    )
    env_maker(config, addresses=["127.0.0.1", "tcp://127.0.0.1:1"])(num_envs=8, seed=5)
    ((way, arguments, named),) = batch_env_calls
    assert way == "connect"
    assert arguments == ("CartPole-v1", ["tcp://127.0.0.1:5555", "tcp://127.0.0.1:1"])
    assert named == {
        **COMMON,
        "server_lost_after": 9.0,
        "operation_timeout": 90.0,
        "on_server_lost": "pad",
        "insecure": False,
        "on_fault": "raise",
        "nonfinite": "mask",
        "spare_envs": True,
    }


def test_first_env_index_applies_only_to_training_envs(
    batch_env_calls: list[tuple[Any, ...]],
) -> None:
    for addresses in (None, ["127.0.0.1:1"]):
        make_env = env_maker(CONFIG, addresses, first_env_index=24)
        make_env(num_envs=8, seed=5, is_training=True)
        make_env(num_envs=8, seed=5)
    indices = [named["first_env_index"] for _, _, named in batch_env_calls]
    assert indices == [24, 0, 24, 0]


def test_training_waits_for_servers_and_evaluation_uses_live_ones(
    batch_env_calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        environments, "live_servers", lambda words, insecure: [words[1]]
    )
    words = ["127.0.0.1:1", "127.0.0.1:2"]
    make_env = env_maker(CONFIG.replace(min_servers=1, num_servers=3), words)
    make_env(num_envs=8, seed=5, is_training=True)
    make_env(num_envs=8, seed=5)
    (_, trained, counts), (_, evaluated, none) = batch_env_calls
    assert (trained[1], evaluated[1]) == (words, words[1:])
    assert (counts["num_servers"], counts["min_servers"]) == (3, 1)
    assert not {"num_servers", "min_servers"} & none.keys()
    with pytest.raises(ConfigError, match="at least one env per server, got 2 for 3"):
        env_maker(CONFIG.replace(num_envs=2, num_servers=3), words)
    with pytest.raises(AddressError, match="at most 2, the number of servers that"):
        env_maker(CONFIG.replace(min_servers=3, num_servers=3), words)


def test_servers_removed_from_their_list_before_the_start_are_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = tmp_path / "servers"
    servers.write_text("127.0.0.1:1\n127.0.0.1:2")
    make_env = env_maker(CONFIG.replace(min_servers=2), [f"file://{servers}"])
    servers.write_text("127.0.0.1:1")
    with pytest.raises(SystemExit) as ending, report_errors():
        make_env(num_envs=8, seed=5, is_training=True)
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: min_servers: expected at most 1, the number of")
    assert "got 2" in line


@pytest.mark.parametrize(
    ("wrappers", "expected"),
    [
        ((), ["StaggerEpisodes"]),
        (("FlattenObservation",), ["StaggerEpisodes", "FlattenObservation"]),
        (
            ("ClipAction", "TimeLimit", "FlattenObservation"),
            ["ClipAction", "TimeLimit", "StaggerEpisodes", "FlattenObservation"],
        ),
    ],
)
@pytest.mark.parametrize("addresses", [None, ["127.0.0.1"]])
def test_only_training_envs_are_staggered_within_their_time_limit(
    batch_env_calls: list[tuple[Any, ...]],
    wrappers: tuple[str, ...],
    expected: list[str],
    addresses: list[str] | None,
) -> None:
    tables = tuple(
        {"name": name} | ({"max_episode_steps": 9} if name == "TimeLimit" else {})
        for name in wrappers
    )
    config = CONFIG.replace(wrappers=tables, stagger_episodes=True)
    make_env = env_maker(config, addresses)
    make_env(num_envs=8, seed=5)
    make_env(num_envs=8, seed=5, is_training=True)
    env_maker(CONFIG, addresses)(num_envs=8, seed=5, is_training=True)
    first, second, third = (named["wrappers"] for _, _, named in batch_env_calls)
    assert first == tables
    assert [table["name"] for table in second] == expected
    assert third == CONFIG.wrappers


def test_training_time_limit_applies_to_training_only_and_is_staggered(
    batch_env_calls: list[tuple[Any, ...]],
) -> None:
    config = CONFIG.replace(
        wrappers=({"name": "TimeLimit", "max_episode_steps": 9},), training_time_limit=7
    )
    for each in (config, config.replace(stagger_episodes=True)):
        env_maker(each)(num_envs=8, seed=5, is_training=True)
        env_maker(each)(num_envs=8, seed=5)
    cut, whole, staggered, _ = (named["wrappers"] for _, _, named in batch_env_calls)
    assert whole == config.wrappers
    assert cut == (*whole, {"name": "TimeLimit", "max_episode_steps": 7})
    assert staggered == (*cut, {"name": "StaggerEpisodes"})


#: Episodes of 5 steps, observations float64 [2].
WRAPPED = SMALL.replace(
    env_name=film_env.NAME,
    wrappers=(
        {"name": "ActionRepeat", "amount": 2},
        {"name": "FrameHistory", "past_indices": [0, 1], "flatten": True},
        {"name": "DtypeObservation", "dtype": "float32"},
    ),
    num_envs=4,
    horizon=16,
    total_steps=128,
    minibatch_size=32,
)


@eagerly()
def test_training_evaluation_films_and_exports_use_the_wrappers(tmp_path: Path) -> None:
    make_env = env_maker(WRAPPED, num_workers=1, import_modules=[film_env.__name__])
    run_folder = RunFolder.create(tmp_path / "run", WRAPPED)
    train(WRAPPED, run_folder, make_env)
    run_folder, config = RunFolder.open(tmp_path / "run")
    assert config == WRAPPED

    evaluation = evaluate_run(config, run_folder, make_env)
    assert evaluation.lengths.tolist() == [3, 3, 3]  # of 2, 2 and 1 steps

    make_rendering_env = rendering_env_maker(config, import_modules=[film_env.__name__])
    visualize_run(
        config, run_folder, make_rendering_env, tmp_path / "films", episodes=1
    )
    film = min((tmp_path / "films").glob("*.mp4"))
    steps = [
        film_env.read_frame(frame)[1] for frame in film_env.read_video(film, 36, 50)
    ]
    assert steps == [0, 2, 4, 5]

    export_run(config, run_folder, make_env, tmp_path / "policy")
    policy = tf.saved_model.load(str(tmp_path / "policy"))
    assert policy.mode(np.zeros((7, 4), np.float32)).shape == (7, 1)


def failing(**env_kwargs: Any) -> BatchEnv:
    config = Config(env_name=f"{failing_env.__name__}:Failing", env_kwargs=env_kwargs)
    return env_maker(config, num_workers=1)(num_envs=1, seed=0)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_the_first_step_shows_that_an_env_always_fails(method: str) -> None:
    with failing(method=method) as env, pytest.raises(EnvError) as caught:
        first_step(env)
    assert f"RuntimeError: a bug in {method}" in caught.value.remote_traceback


@pytest.mark.parametrize("method", ["", "reset", "step"])
def test_the_first_step_is_tried_again_if_an_env_fails_once(
    method: str, tmp_path: Path
) -> None:
    with failing(method=method, marker=str(tmp_path / "marker")) as env:
        assert first_step(env)
    assert (tmp_path / "marker").exists() == bool(method)


def test_the_first_step_neither_waits_for_slow_envs_nor_ignores_action_masks() -> None:
    for method in ("reset", "step"):
        with failing(method=method, hangs=True) as env:
            assert not first_step(env, 0.1)
    with failing(masks=True) as env:
        assert not first_step(env)


def test_an_error_about_wrappers_names_the_settings_that_add_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise EnvStartError("vector envs do not support wrappers; remove TimeLimit")

    monkeypatch.setattr(BatchEnv, "local", refuse)
    make_env = env_maker(CONFIG.replace(training_time_limit=9))
    with pytest.raises(EnvStartError) as caught:
        make_env(num_envs=2, seed=0, is_training=True)
    assert "because of training_time_limit; remove" in caught.value.__notes__[0]
