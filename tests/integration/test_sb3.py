"""`envserve.sb3` has the same data and API as Stable-Baselines3's vector envs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from stable_baselines3.common.env_util import make_vec_env as own_make_vec_env
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

from envserve.client import BatchEnv
from envserve.client.batch_env import ResetFirst
from envserve.client.make_vec import make_batch
from envserve.errors import ActionError, CallError, EnvError
from envserve.sb3 import BatchVecEnv, make_vec_env
from tests.envserve.server_process import ServerProcess
from tests.envserve.walk_env import ENV
from tests.envserve.walk_env import EPISODE_LENGTH as WALK_LENGTH
from tests.integration.masked_env import ENV_NAME, EPISODE_LENGTH, LOPSIDED_NAME
from tests.oracle.vector_envs import MODES as VECTOR_ENVS

VECTOR_MODULE = "tests.oracle.vector_envs"
MODULE = "tests.integration.masked_env"
ATTRIBUTES = (
    "action_masks",
    "broken",
    "has_wrapper_attr",
    "label",
    "label_of",
    "times",
    "nothing",
)
EXPOSED = (*ATTRIBUTES, "set:label", "set:is_broken")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = [part for name in EXPOSED for part in ("--expose", name)]
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, *options, imports=(MODULE,)) as server:
        yield server


@pytest.fixture(params=["here", "server"])
def masked(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Any]:
    is_here = request.param == "here"
    where: dict[str, Any]
    where = {"import_modules": [MODULE]} if is_here else {"addresses": [server.address]}
    envs = make_vec_env(ENV_NAME, 3, seed=5, **where)
    yield envs
    envs.close()


@pytest.mark.parametrize("name", ["CartPole-v1", "Taxi-v4"])
def test_the_same_seed_returns_the_rows_and_infos_of_sb3_envs(name: str) -> None:
    ours, theirs = make_vec_env(name, 4, seed=3), own_make_vec_env(name, 4, seed=3)
    generator = np.random.default_rng(0)
    samples = [
        [envs.action_space.sample() for _ in range(9)] for envs in (ours, theirs)
    ]
    assert samples[0] == samples[1]
    num_actions = theirs.action_space.n
    np.testing.assert_array_equal(ours.reset(), theirs.reset())
    episodes = 0
    for _ in range(450):
        actions = generator.integers(0, num_actions, 4)
        *arrays, infos = ours.step(actions)
        *own_arrays, own_infos = theirs.step(actions)
        for array, own_array in zip(arrays, own_arrays, strict=True):
            assert array.dtype == own_array.dtype
            np.testing.assert_array_equal(array, own_array)
        for info, own_info in zip(infos, own_infos, strict=True):
            for each in (info, own_info):
                each.get("episode", {}).pop("t", None)
                episodes += "episode" in each
            np.testing.assert_equal(info, own_info)
        np.testing.assert_equal(ours.reset_infos, theirs.reset_infos)
    assert episodes > 4
    ours.close()


def test_seeds_reach_the_envs_once(masked: Any) -> None:
    masked.reset()
    assert [info["seed"] for info in masked.reset_infos] == [5, 6, 7]
    masked.reset()
    assert [info["seed"] for info in masked.reset_infos] == [-1, -1, -1]


def test_the_first_reset_uses_the_seed_of_a_batch() -> None:
    fixed = {"autoreset": "same_step", "import_modules": [MODULE]}
    envs = BatchVecEnv(make_batch(ENV_NAME, 2, None, fixed, seed=5))
    envs.reset()
    assert all(info["seed"] >= 0 for info in envs.reset_infos)
    envs.close()


def test_methods_and_attributes_of_selected_envs(masked: Any) -> None:
    masked.reset()
    masked.step(np.zeros(3, int))
    assert masked.env_method("times", 2, plus=1, indices=[0, 2]) == [3, 3]
    masked.set_attr("label", "red", indices=1)
    assert masked.get_attr("label") == ["none", "red", "none"]
    assert masked.get_attr("label", indices=1) == ["red"]
    assert masked.has_attr("times")
    assert not masked.has_attr("no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        masked.get_attr("no_such_thing")
    with pytest.raises(AttributeError, match="nothing"):
        masked.env_method("nothing")
    with pytest.raises(RuntimeError, match="broken") as raised:
        masked.get_attr("broken")
    assert not isinstance(raised.value, AttributeError)
    with pytest.raises(CallError, match="times"):
        masked.env_method("times", "too", "many")


def test_attributes_of_vector_envs_are_found() -> None:
    fixed = {"autoreset": "same_step"}
    options: Any = {"import_modules": [VECTOR_MODULE], "num_workers": 1}
    name = VECTOR_ENVS["same_step"]
    envs = BatchVecEnv(make_batch(name, 2, None, fixed, vectorized=True, **options))
    assert envs.has_attr("double")
    assert not envs.has_attr("no_such_thing")
    envs.close()


def test_some_attributes_are_returned_without_asking_the_envs(masked: Any) -> None:
    assert masked.get_attr("action_space", 1) == [masked.action_space]
    assert masked.get_attr("observation_space") == [masked.observation_space] * 3
    assert [spec.id for spec in masked.get_attr("spec")] == [ENV_NAME] * 3
    assert masked.unwrapped.metadata["render_fps"] == 7


def test_arrays_of_infos_reach_methods_as_lists(masked: Any) -> None:
    infos = np.array([{"is_success": True}, {}], object)
    assert masked.env_method("label_of", infos, indices=[1]) == ["bool"]


def test_a_reset_discards_the_step_in_flight(masked: Any) -> None:
    masked.reset()
    masked.step_async(np.zeros(3, int))
    observation = masked.reset()
    np.testing.assert_array_equal(observation, np.zeros((3, 1)))


def test_action_masks_work_with_sb3_contrib(masked: Any) -> None:
    model = MaskablePPO("MlpPolicy", masked, n_steps=16, batch_size=16, device="cpu")
    model.learn(96)
    rewards = [info["r"] for info in model.ep_info_buffer]
    assert rewards == [EPISODE_LENGTH] * len(rewards) != []


def test_wrappers_monitor_files_and_normalization_work(tmp_path: Path) -> None:
    wrappers = [{"name": "TimeLimit", "max_episode_steps": 9}]
    file = str(tmp_path / "log")
    envs = make_vec_env("CartPole-v1", 2, wrappers=wrappers, monitor_file=file)
    assert envs.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [True, True]
    assert envs.env_is_wrapped(gymnasium.wrappers.FlattenObservation, 0) == [False]
    scaled = VecNormalize(envs)
    scaled.reset()
    for _ in range(40):
        *_, infos = scaled.step(np.zeros(2, int))
    scaled.close()
    assert len(load_results(str(tmp_path))) >= 8
    assert "TimeLimit.truncated" in infos[0]


def test_arguments_of_sb3_are_accepted() -> None:
    given: Any = {
        "vec_env_cls": DummyVecEnv,
        "start_index": 1,
        "wrapper_class": gymnasium.wrappers.TransformReward,
        "wrapper_kwargs": {"func": lambda reward: 3 * reward},
    }
    makes: Any = make_vec_env, own_make_vec_env
    for make in makes:
        envs = make("CartPole-v1", 2, 7, **given)
        first = envs.reset()
        assert envs.step(np.zeros(2, np.int64))[1].tolist() == [3, 3]
        dones = np.zeros(2)
        while not dones.any():
            _, _, dones, infos = envs.step(np.zeros(2, np.int64))
        episode = infos[int(dones.argmax())]["episode"]
        assert episode["r"] == episode["l"]  # without the factor of the wrapper
        envs.seed(7)
        assert np.array_equal(envs.reset(), first)
        envs.close()


def test_each_env_has_its_own_spec() -> None:
    functions = [
        lambda limit=limit: gymnasium.make("CartPole-v1", limit) for limit in (7, 8)
    ]
    envs = make_vec_env(functions)
    assert [spec.max_episode_steps for spec in envs.get_attr("spec")] == [7, 8]
    assert envs.get_attr("spec", [1])[0].max_episode_steps == 8
    envs.close()


def test_arguments_of_subproc_vec_env_are_accepted() -> None:
    functions = [lambda: gymnasium.make("CartPole-v1")] * 2
    envs = make_vec_env(functions, start_method="spawn")
    assert envs.reset().shape == (2, 4)
    assert envs.get_attr("spec")[1] == gymnasium.spec("CartPole-v1")
    envs.close()
    with pytest.raises(ValueError, match="cannot find context for 'illegal_method'"):
        make_vec_env(functions, start_method="illegal_method")


def test_the_error_about_monitor_dir_names_monitor_file() -> None:
    with pytest.raises(TypeError, match=r"monitor_dir: .* pass its path as monitor_f"):
        make_vec_env("CartPole-v1", 2, monitor_dir="logs")
    make_vec_env("CartPole-v1", 2, monitor_dir=None).close()


@pytest.mark.parametrize("name", ["num_envs", "n_env"])
def test_the_error_about_num_envs_names_n_envs(name: str) -> None:
    options: dict[str, Any] = {name: 2}
    with pytest.raises(TypeError, match=f"unknown option '{name}'; pass n_envs"):
        make_vec_env("CartPole-v1", **options)


def test_negative_indices_count_from_the_end(masked: Any) -> None:
    masked.reset()
    masked.set_attr("label", "red", indices=[-1])
    assert masked.get_attr("label", indices=[0, -1]) == ["none", "red"]
    assert masked.env_method("times", 2, indices=-3) == [0]
    with pytest.raises(IndexError):
        masked.get_attr("label", indices=[0, 3])


@pytest.mark.parametrize("place", ["here", "server"])
def test_wrappers_that_the_env_has_applied_are_detected(
    place: str, server: ServerProcess
) -> None:
    addresses = None if place == "here" else [server.address]
    envs = make_vec_env("CartPole-v1", 3, addresses)
    assert envs.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [True] * 3
    assert envs.env_is_wrapped(gymnasium.Wrapper, -1) == [True]
    assert envs.env_is_wrapped(Monitor, [0, 2]) == [False, False]
    envs.close()


def test_envs_with_their_own_monitor_get_no_second_one() -> None:
    def make_env() -> Any:
        return Monitor(gymnasium.make("CartPole-v1", render_mode="rgb_array"))

    envs = make_vec_env([make_env] * 2, seed=3)
    assert not isinstance(envs, VecMonitor)
    assert envs.env_is_wrapped(Monitor) == [True, True]
    assert envs.render_mode == "rgb_array"
    envs.reset()
    dones = np.zeros(2)
    while not dones.any():
        _, _, dones, infos = envs.step(np.zeros(2, int))
    assert infos[int(dones.argmax())]["episode"]["l"] > 1
    envs.close()


@pytest.mark.parametrize("kind", ["Dict", "Tuple"])
def test_actions_may_be_a_list_of_the_actions_of_each_env(kind: str) -> None:
    parts: dict[str, gymnasium.Space[Any]]
    parts = {"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,))}
    space = spaces.Dict(parts) if kind == "Dict" else spaces.Tuple([*parts.values()])
    own = DummyVecEnv([lambda: ShowAction(space)] * 3)
    ours = make_vec_env([lambda: ShowAction(space)] * 3)
    space.seed(1)
    for envs in (own, ours):
        envs.reset()
    for _ in range(5):
        actions: Any = [space.sample() for _ in range(3)]
        shown = [envs.step(actions)[0] for envs in (own, ours)]
        np.testing.assert_array_equal(*shown)
        as_objects = np.empty(3, object)
        as_objects[:] = actions
        np.testing.assert_array_equal(ours.step(as_objects)[0], shown[0])
    with pytest.raises(ActionError, match="expected"):
        ours.step(actions[:2])
    ours.close()


class ShowAction(gymnasium.Env[Any, Any]):
    """Observe the action."""

    observation_space = spaces.Box(-9, 9, (3,))

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        self.action_space = space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        parts = action.values() if isinstance(action, dict) else action
        shown = np.concatenate([np.ravel(part) for part in parts]).astype(np.float32)
        return shown, 0.0, False, False, {}


def test_info_keywords_are_added_to_episodes_and_the_file(tmp_path: Path) -> None:
    keywords = {"info_keywords": ("label",)}
    file = str(tmp_path / "log")
    options: dict[str, Any] = {"import_modules": [MODULE], "num_workers": 1}
    envs = make_vec_env(
        ENV_NAME, 2, monitor_file=file, monitor_kwargs=keywords, **options
    )
    envs.reset()
    for _ in range(EPISODE_LENGTH):
        _, _, dones, infos = envs.step(np.zeros(2, int))
    assert dones.all()
    assert [info["episode"]["label"] for info in infos] == ["none", "none"]
    (pid,) = envs.venv.batch.lanes[0].worker_pids
    os.kill(pid, signal.SIGKILL)
    *_, infos = envs.step(np.zeros(2, int))
    assert [info["episode"]["label"] for info in infos] == [None, None]
    envs.close()
    labels = load_results(str(tmp_path))["label"]
    assert labels[:2].tolist() == ["none", "none"]
    assert labels[2:].isna().all()


def test_an_error_of_the_monitor_closes_the_envs() -> None:
    made = []

    def make(*args: Any, **options: Any) -> BatchEnv:
        made.append(make_batch(*args, **options))
        return made[-1]

    with (
        mock.patch("envserve.sb3.make_batch", make),
        pytest.raises(TypeError, match="nonsense"),
    ):
        make_vec_env("CartPole-v1", num_workers=1, monitor_kwargs={"nonsense": 1})
    assert made[0].is_closed


def test_a_lost_episode_is_truncated() -> None:
    envs = make_vec_env("CartPole-v1", 2, num_workers=1)
    before = envs.reset()
    (pid,) = envs.venv.batch.lanes[0].worker_pids
    os.kill(pid, signal.SIGKILL)
    _, rewards, dones, infos = envs.step(np.zeros(2, int))
    assert dones.tolist() == [True, True]
    assert rewards.tolist() == [0.0, 0.0]
    for info, last in zip(infos, before, strict=True):
        assert info["TimeLimit.truncated"]
        assert info["fault"]["status"] == "WORKER_DIED"
        np.testing.assert_array_equal(info["terminal_observation"], last)
    envs.close()


def test_the_final_observation_of_a_lost_episode_is_the_last_one_returned() -> None:
    envs = make_vec_env(ENV, 2, num_workers=1)
    envs.reset()
    for _ in range(1, WALK_LENGTH):
        envs.step(np.zeros(2, int))
    # The other row's episode ends in the step in which the worker dies.
    *_, infos = envs.step(np.array([0, 1]))
    assert [info["terminal_observation"].tolist() for info in infos] == [[104]] * 2
    envs.close()


def test_rendered_images_are_tiled() -> None:
    options: dict[str, Any]
    options = {"env_kwargs": {"render_mode": "rgb_array"}, "import_modules": [MODULE]}
    envs = make_vec_env(ENV_NAME, 2, **options)
    envs.reset()
    assert envs.render().shape == (4, 2, 3)
    envs.close()


def test_options_reach_the_envs_once_and_may_differ(masked: Any) -> None:
    masked.set_options([{}, {"label": "blue"}, {"label": "red"}])
    masked.reset()
    assert masked.get_attr("label") == ["none", "blue", "red"]
    masked.reset()
    assert masked.get_attr("label") == ["none"] * 3
    masked.set_options([{"label": "red"}, {}, {"label": "red"}])
    observation = masked.reset()
    assert masked.get_attr("label") == ["red", "none", "red"]
    steps = masked.step(np.zeros(3, np.int64))
    assert len(steps[0]) == len(observation) == 3
    masked.set_options({"label": "red"})
    masked.reset()
    assert masked.get_attr("label") == ["red"] * 3
    labels = [True, 1, np.arange(2)]  # True equals 1, and arrays have no truth value
    masked.set_options([{"label": label} for label in labels])
    masked.reset()
    assert list(map(repr, masked.get_attr("label"))) == list(map(repr, labels))


def test_different_options_reset_each_env_once() -> None:
    ours, theirs = (
        make_vec_env("CartPole-v1", 3, seed=3),
        own_make_vec_env("CartPole-v1", 3, seed=3),
    )
    for envs in (ours, theirs):
        envs.reset()
        envs.set_options([{}, {"low": -0.2}, {"low": -0.1}])
    for _ in range(2):  # the second reset also shows the state of the generators
        np.testing.assert_array_equal(ours.reset(), theirs.reset())
    ours.close()


def test_another_autoreset_mode_is_rejected() -> None:
    with pytest.raises(TypeError, match="autoreset: expected no value, because"):
        make_vec_env("CartPole-v1", autoreset="disabled")


def test_after_an_error_the_envs_can_be_reset_and_stepped(masked: Any) -> None:
    masked.reset()
    masked.set_attr("is_broken", True, indices=0)
    for _ in range(2):
        with pytest.raises(EnvError, match="expected observation"):
            masked.step(np.zeros(3, int))
        with pytest.raises(ResetFirst):
            masked.step(np.zeros(3, int))
        np.testing.assert_array_equal(masked.reset(), np.zeros((3, 1)))
    masked.set_attr("is_broken", False, indices=0)
    masked.step(np.zeros(3, int))


def test_after_an_interrupt_the_envs_can_be_stepped_without_a_reset(
    masked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked.reset()
    with monkeypatch.context() as patch:
        patch.setattr(masked.unwrapped.batch, "recv", interrupt)
        with pytest.raises(KeyboardInterrupt):
            masked.step(np.zeros(3, int))
    assert masked.env_method("times", 1) == [1, 1, 1]
    masked.step_async(np.zeros(3, int))  # never followed by step_wait
    observation, *_ = masked.step(np.zeros(3, int))
    np.testing.assert_allclose(observation, np.full((3, 1), 3 / EPISODE_LENGTH))
    for _ in range(EPISODE_LENGTH - 4):
        masked.step(np.zeros(3, int))
    masked.step_async(np.zeros(3, int))
    _, _, dones, _ = masked.step(np.zeros(3, int))
    assert dones.all()  # the discarded step ended the episodes


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_actions_that_exceed_bounds_by_rounding_errors_are_clipped() -> None:
    options: dict[str, Any] = {"import_modules": [MODULE], "num_workers": 1}
    envs = make_vec_env(LOPSIDED_NAME, 2, **options)
    envs.reset()
    low, high = envs.action_space.low, envs.action_space.high
    scaled = low + 0.5 * (np.ones((2, 1), np.float32) + 1) * (high - low)
    assert (scaled > high).all()
    observation, *_ = envs.step(scaled)
    np.testing.assert_array_equal(observation, np.stack([high, high]))
    with pytest.raises(ActionError, match="clip actions"):
        envs.step(np.stack([high, high + 1e-5]))
    envs.close()
