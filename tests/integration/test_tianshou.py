"""`envserve.tianshou` returns the same data as Tianshou's vector env, for any rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from tianshou.env import DummyVectorEnv

from envserve.client.batch_env import ResetFirst
from envserve.errors import ActionError, EnvError, LocalProtocolError
from envserve.tianshou import BatchVectorEnv, make_vector_env
from tests.envserve.server_process import ServerProcess
from tests.envserve.walk_env import ENV
from tests.integration.masked_env import ENV_NAME, EPISODE_LENGTH, LOPSIDED_NAME

MODULE = "tests.integration.masked_env"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    names = ("label", "set:label", "set:is_broken")
    options = ["--workers", "1", *(part for n in names for part in ("--expose", n))]
    with ServerProcess(folder, *options, imports=(MODULE,)) as server:
        yield server


@pytest.fixture(params=["here", "server"])
def where(request: pytest.FixtureRequest, server: ServerProcess) -> dict[str, Any]:
    if request.param == "server":
        return {"addresses": [server.address]}
    return {"num_workers": 1, "import_modules": [MODULE]}


@pytest.mark.parametrize("name", ["CartPole-v1", "Taxi-v4", ENV_NAME])
def test_any_rows_equal_those_of_tianshous_vector_env(
    name: str, where: dict[str, Any], random_generator: np.random.Generator
) -> None:
    ours = make_vector_env(name, 4, **where)
    theirs = DummyVectorEnv([lambda: gymnasium.make(name)] * 4)
    both = (ours, theirs)
    for envs in both:
        envs.seed(3)
    check_equal(*(envs.reset() for envs in both))
    if name != ENV_NAME:  # whose envs share one action space
        samples = [[space.sample() for space in envs.action_space] for envs in both]
        assert samples[0] == samples[1]
    num_actions = theirs.action_space[0].n
    num_resets = 0
    for _ in range(120):
        rows = random_generator.permutation(4)[: random_generator.integers(1, 5)]
        actions = random_generator.integers(0, num_actions, len(rows))
        steps = [envs.step(actions, rows) for envs in both]
        check_equal(*steps)
        ended = rows[steps[0][2] | steps[0][3]]
        if len(ended):
            num_resets += 1
            check_equal(*(envs.reset(ended) for envs in both))
    assert num_resets > 2 or name == "Taxi-v4"
    ours.close()


def check_equal(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    assert ours[0].dtype == theirs[0].dtype
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_equal(mine.tolist(), other.tolist())


def test_attributes_images_and_seeds_are_returned(where: dict[str, Any]) -> None:
    envs = make_vector_env(ENV_NAME, 3, **where)
    assert len(envs) == 3
    assert envs.seed(5) == [[5], [6], [7]]
    assert [info["seed"] for info in envs.reset(seed=9)[1]] == [9, 9, 9]
    assert [info["seed"] for info in envs.reset([2])[1]] == [-1]
    envs.set_env_attr("label", "red", [1])
    assert envs.get_env_attr("label") == ["none", "red", "none"]
    assert [spec.id for spec in envs.get_env_attr("spec")] == [ENV_NAME] * 3
    assert np.array(envs.render()).shape == (3, 2, 2, 3)
    envs.close()
    assert envs.is_closed


def test_the_first_reset_uses_the_seed_of_the_batch(where: dict[str, Any]) -> None:
    envs = make_vector_env(ENV_NAME, 2, seed=5, **where)
    assert all(info["seed"] >= 0 for info in envs.reset()[1])
    assert [info["seed"] for info in envs.reset()[1]] == [-1, -1]
    envs.close()


def test_dict_observations_are_supported(tmp_path: Path) -> None:
    module = tmp_path / "walk.py"
    module.write_text(WALK)
    envs = make_vector_env(f"{module}:Walk", 2)
    observation, _ = envs.reset()
    assert observation.dtype == object
    np.testing.assert_equal(observation[1], {"place": np.zeros(1, np.float32)})
    envs.close()


def test_the_final_observation_of_a_lost_episode_is_the_last_one_returned() -> None:
    envs = make_vector_env(ENV, 2, num_workers=1)
    envs.reset()
    envs.step(np.array([0]), [1])
    envs.step(np.zeros(2, int))
    observation, _, _, truncated, _ = envs.step(np.array([0, 1]), [1, 0])
    assert truncated[1]
    assert observation[1] == 101
    envs.reset([0, 1])
    observation = envs.step(np.zeros(2, int))[0]
    assert observation.tolist() == [[101], [101]]
    envs.seed(3)  # also resets the envs
    observation, _, _, truncated, _ = envs.step(np.array([0, 1]))
    assert truncated.tolist() == [False, True]
    assert observation.tolist() == [[101], [100]]
    envs.close()


WALK = """
import gymnasium, numpy

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict(place=gymnasium.spaces.Box(0, 9, (1,)))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {"place": numpy.zeros(1, numpy.float32)}, {}

    def step(self, action):
        return {"place": numpy.ones(1, numpy.float32)}, 0.0, False, False, {}
"""


def test_a_first_reset_of_all_rows_by_index_suffices() -> None:
    envs = make_vector_env("CartPole-v1", 2, num_workers=1)
    envs.reset([1, 0])
    assert envs.step(np.zeros(2, int))[0].shape == (2, 4)
    envs.close()


def test_the_error_about_an_ended_episode_names_the_call_that_resets_it() -> None:
    limit = {"max_episode_steps": 1}
    envs = make_vector_env("CartPole-v1", 2, num_workers=1, env_kwargs=limit)
    envs.reset()
    assert envs.step(np.zeros(2, int))[3].all()
    with pytest.raises(LocalProtocolError, match=r"call reset\(env_id=...\) before"):
        envs.step(np.zeros(1, int), [1])
    envs.close()


def test_a_list_of_functions_determines_the_number_and_the_spec_of_the_envs() -> None:
    envs = make_vector_env([lambda: gymnasium.make("CartPole-v1")] * 2)
    assert len(envs) == 2
    assert envs.spec[1] == gymnasium.spec("CartPole-v1")
    envs.close()


def test_each_env_has_its_own_spec() -> None:
    functions = [
        lambda limit=limit: gymnasium.make("CartPole-v1", limit) for limit in (7, 8)
    ]
    envs = make_vector_env(functions)
    assert [spec.max_episode_steps for spec in envs.get_env_attr("spec")] == [7, 8]
    assert envs.get_env_attr("spec", [1])[0].max_episode_steps == 8
    envs.close()


def test_the_number_of_splits_cannot_be_set() -> None:
    with pytest.raises(TypeError, match="num_splits: expected no value, because"):
        make_vector_env("CartPole-v1", 2, num_splits=1)


def test_after_an_error_or_interrupt_the_envs_can_be_reset_and_stepped(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = make_vector_env(ENV_NAME, 3, **where)
    envs.reset()
    envs.set_env_attr("is_broken", True, [0])
    for _ in range(2):
        with pytest.raises(EnvError, match="expected observation"):
            envs.step(np.zeros(3, int))
        with pytest.raises(ResetFirst):
            envs.step(np.zeros(3, int))
        np.testing.assert_array_equal(envs.reset()[0], np.zeros((3, 1)))
    envs.set_env_attr("is_broken", False, [0])
    for again in (envs.reset, lambda: envs.seed(5)):
        interrupted_step(envs, monkeypatch)
        again()
        np.testing.assert_allclose(
            envs.step(np.zeros(3, int))[0], np.full((3, 1), 0.05)
        )
    envs.close()


def interrupted_step(envs: BatchVectorEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(envs.batch, "recv", interrupt)
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.zeros(3, int))


def test_after_an_interrupt_some_envs_can_be_stepped_or_reset(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = make_vector_env(ENV_NAME, 3, **where)
    envs.reset()
    interrupted_step(envs, monkeypatch)
    assert envs.step(np.zeros(1, int), [1])[0].tolist() == [[np.float32(0.1)]]
    assert envs.step(np.zeros(3, int))[0].tolist() == [
        [np.float32(time / EPISODE_LENGTH)] for time in (2, 3, 2)
    ]
    interrupted_step(envs, monkeypatch)
    envs.reset([0])
    assert envs.step(np.zeros(3, int))[0].tolist() == [
        [np.float32(time / EPISODE_LENGTH)] for time in (1, 5, 4)
    ]
    envs.close()


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_actions_that_exceed_bounds_by_rounding_errors_are_clipped() -> None:
    envs = make_vector_env(LOPSIDED_NAME, 2, num_workers=1, import_modules=[MODULE])
    envs.reset()
    box: Any = envs.batch.action_space
    high = box.high
    observation, *_ = envs.step(np.nextafter([high, high], np.float32(1)))
    np.testing.assert_array_equal(observation, np.stack([high, high]))
    with pytest.raises(ActionError, match="clip actions"):
        envs.step(np.stack([high + 1e-5]), [1])
    envs.close()
