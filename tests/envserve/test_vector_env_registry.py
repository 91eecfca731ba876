"""Envs made through Gymnasium's registry, and a single env as `gymnasium.Env`."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.wrappers import TimeAwareObservation

import envserve
from envserve.client.vector_env import VectorEnv
from envserve.errors import ActionError, CallError, LocalProtocolError, UnknownEnv
from tests.envserve.conftest import StartServer
from tests.oracle.probe_envs import MODULE
from tests.oracle.random_envs import RANDOM_ENV

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*A Box observation space m.*imum value is:UserWarning"
    ),
    pytest.mark.usefixtures("one_launcher"),
]


@pytest.fixture
def registry() -> Iterator[None]:
    """Restore Gymnasium's registry after the test."""
    before = {
        name: spec.vector_entry_point for name, spec in gymnasium.registry.items()
    }
    yield
    for name in [*gymnasium.registry]:
        if name in before:
            gymnasium.registry[name].vector_entry_point = before[name]
        else:
            del gymnasium.registry[name]
    sys.modules.pop("envserve.gym", None)


def where(address: str) -> dict[str, Any]:
    return {"addresses": [address]} if address else {"num_workers": 1}


def test_wrong_arguments_and_names_are_the_errors_of_gymnasium(
    shared_address: str,
) -> None:
    makers: list[Callable[..., Any]] = [gymnasium.make_vec, envserve.make_vec]
    for make in makers:
        options = where(shared_address) if make is envserve.make_vec else {}
        with pytest.raises(TypeError, match="unexpected keyword argument 'length'"):
            make("CartPole-v1", num_envs=2, length=3, **options)
        with pytest.raises(gymnasium.error.UnregisteredEnv, match="CartPol") as caught:
            make("CartPol-v1", num_envs=2, **options)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value)
    assert isinstance(copied, UnknownEnv)


def test_gymnasium_makes_vector_envs(registry: None, shared_address: str) -> None:
    options: Any = {"render_mode": "rgb_array", **where(shared_address)}
    envs = gymnasium.make_vec("envserve.gym:HalfCheetah-v5", num_envs=2, **options)
    with contextlib.closing(envs):
        assert isinstance(envs, VectorEnv)
        assert repr(envs) == "VectorEnv(HalfCheetah-v5, num_envs=2)"
        assert envs.render_mode == "rgb_array"
        envs.reset(seed=1)
        _, reward, *_ = envs.step(np.zeros((2, 6), np.float32))
        assert reward.shape == (2,)
        assert envs.spec is not None
        with contextlib.closing(gymnasium.make_vec(envs.spec)) as others:
            assert isinstance(others, VectorEnv)
            assert others.spec == envs.spec


def test_unregistered_envs_are_made_with_the_id_of_remote_envs(
    registry: None, shared_address: str
) -> None:
    name = "envserve.gym:envserve/Remote-v0"
    options: Any = {"env": "CartPole-v1", **where(shared_address)}
    with contextlib.closing(gymnasium.make_vec(name, 3, **options)) as envs:
        assert isinstance(envs, VectorEnv)
        assert envs.reset()[0].shape == (3, 4)
    address: Any = {"address": shared_address} if shared_address else {}
    with contextlib.closing(gymnasium.make(name, env="CartPole-v1", **address)) as env:
        assert env.reset()[0].shape == (4,)


def test_arguments_of_envs_can_be_mixed_with_options(registry: None) -> None:
    options: Any = {
        "max_episode_steps": 2,
        "sutton_barto_reward": True,
        "num_workers": 1,
    }
    envs = gymnasium.make_vec("envserve.gym:CartPole-v1", num_envs=1, **options)
    with contextlib.closing(envs):
        envs.reset()
        assert envs.step([0])[1] == 0.0  # the reward is 1 without the argument
        assert envs.step([0])[3].tolist() == [True]


def test_registered_arguments_are_not_sent_to_servers(
    registry: None, shared_address: str
) -> None:
    """A server rejects arguments, even if they are registered there, too."""
    options: Any = where(shared_address)
    envs = gymnasium.make_vec("envserve.gym:FrozenLake-v1", num_envs=2, **options)
    with contextlib.closing(envs):
        assert envs.single_observation_space == gymnasium.spaces.Discrete(16)
        assert envs.reset()[0].tolist() == [0, 0]
    if not shared_address:
        name = "envserve.gym:FrozenLake8x8-v1"
        with contextlib.closing(
            gymnasium.make_vec(name, num_envs=1, map_name="4x4", **options)
        ) as envs:
            assert envs.single_observation_space == gymnasium.spaces.Discrete(16)


def test_options_may_be_numpy_numbers() -> None:
    options: Any = {"num_workers": np.int64(1), "reset_timeout": np.float32(60.0)}
    seed: Any = np.int64(3)
    with contextlib.closing(
        envserve.make_vec("CartPole-v1", 2, seed=seed, **options)
    ) as envs:
        assert envs.spec is not None
        assert envs.spec.kwargs["seed"] == 3
    with contextlib.closing(envserve.make("CartPole-v1", seed=seed)) as env:
        assert env.spec is not None
        assert env.spec.kwargs["seed"] == 3


def test_the_env_checker_can_be_disabled_as_in_gymnasium() -> None:
    options: Any = {"disable_env_checker": True}
    for make in (gymnasium.make_vec, envserve.make_vec):
        envs = make("Pendulum-v1", 2, **options)
        with contextlib.closing(envs):
            assert envs.reset()[0].shape == (2, 3)


def test_the_spec_of_a_vector_env_makes_an_equal_one(registry: None) -> None:
    kwargs = {"render_mode": "rgb_array"}
    with contextlib.closing(
        envserve.make_vec("CartPole-v1", 2, num_workers=1, env_kwargs=kwargs)
    ) as envs:
        assert envs.spec is not None
        assert envs.spec.max_episode_steps == 500
        with contextlib.closing(gymnasium.make_vec(envs.spec)) as others:
            assert isinstance(others, VectorEnv)
            assert (others.num_envs, others.render_mode) == (2, "rgb_array")


def test_specs_apply_the_additional_wrappers_of_an_env_once(registry: None) -> None:
    gymnasium.register(
        "TimeAwareCart-v0",
        entry_point="gymnasium.envs.classic_control:CartPoleEnv",
        max_episode_steps=9,
        additional_wrappers=(TimeAwareObservation.wrapper_spec(),),
    )
    one = envserve.make("TimeAwareCart-v0")
    several = envserve.make_vec("TimeAwareCart-v0", num_workers=1)
    with contextlib.closing(one), contextlib.closing(several):
        assert one.spec is not None
        assert several.spec is not None
        expected = one.observation_space
        assert expected.shape == (5,)
        with contextlib.closing(gymnasium.make(one.spec)) as env:
            assert env.observation_space == expected
        with contextlib.closing(envserve.make(one.spec)) as env:
            assert env.observation_space == expected
        with contextlib.closing(gymnasium.make_vec(several.spec)) as envs:
            assert envs.single_observation_space == expected


def test_envs_keep_their_own_vector_env(registry: None) -> None:
    entry_point = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
    gymnasium.register("Several-v0", vector_entry_point=entry_point)
    options: Any = {"num_workers": 1, "vectorized": True}
    with contextlib.closing(
        gymnasium.make_vec("envserve.gym:Several-v0", 2, **options)
    ) as envs:
        assert isinstance(envs, VectorEnv)
        assert envs.reset()[0].shape == (2, 4)


def test_only_importing_envserve_gym_changes_the_registry() -> None:
    code = """if True:
        import gymnasium, envserve
        envserve.make_vec, envserve.make, envserve.BatchEnv
        before = {spec.vector_entry_point for spec in gymnasium.registry.values()}
        assert not any("envserve" in str(entry) for entry in before), before
        import envserve.gym
        assert gymnasium.spec("CartPole-v1").vector_entry_point
        sync = gymnasium.make_vec("CartPole-v1", vectorization_mode="sync")
        assert isinstance(sync, gymnasium.vector.SyncVectorEnv)
        try:
            envserve.gym.Nothing
        except AttributeError as error:
            print(error)
    """
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert finished.stdout == "module 'envserve.gym' has no attribute 'Nothing'\n"


def test_one_env_passes_the_checks_of_gymnasium(shared_address: str) -> None:
    with contextlib.closing(
        envserve.make("CartPole-v1", shared_address or None, render_mode="rgb_array")
    ) as env:
        assert env.metadata["render_modes"] == ["rgb_array"]
        check_env(env)


def test_one_env_returns_all_frames_of_an_episode(shared_address: str) -> None:
    address = shared_address or None
    env: Any = envserve.make("CartPole-v1", address, render_mode="rgb_array_list")
    with contextlib.closing(env):
        env.reset(seed=1)
        for _ in range(50):
            env.step(0)
        frames = env.render()
        assert len(frames) == 51
        assert sum(frame.nbytes for frame in frames) > 32 << 20  # the limit of a call
        assert not np.array_equal(frames[0], frames[-1])
        assert env.render() == []
        again = gymnasium.make(env.spec)
        assert again.render_mode == env.render_mode == "rgb_array_list"
        again.close()


def test_one_env_may_collect_its_frames_itself(registry: None) -> None:
    class FilmEnv(gymnasium.Env[np.int64, np.int64]):
        metadata: dict[str, Any] = {"render_modes": ["rgb_array_list"]}  # noqa: RUF012
        observation_space = action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, render_mode: str | None = None) -> None:
            assert render_mode in self.metadata["render_modes"]
            self.render_mode = render_mode

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.int64(0), {}

        def render(self) -> Any:
            return [np.zeros((2, 2, 3), np.uint8)] * 3

    film: Any = FilmEnv
    gymnasium.register("Film-v0", film)
    envs: list[Any] = [film, "Film-v0"]
    for each in envs:
        env: Any = envserve.make(each, render_mode="rgb_array_list")
        with contextlib.closing(env):
            env.reset()
            assert env.render_mode == "rgb_array_list"
            assert [frame.shape for frame in env.render()] == [(2, 2, 3)] * 3


def test_a_lost_episode_of_a_single_env_ends_with_its_last_observation_and_the_reason(
    shared_address: str,
) -> None:
    imports: Any = {} if shared_address else {"import_modules": [MODULE]}
    name = "envserve/Faulty-v0"
    with contextlib.closing(
        envserve.make(name, shared_address or None, **imports)
    ) as env:
        env.reset()
        assert env.step(0)[1:] == (1.0, False, False, {})
        observation, _, terminated, truncated, info = env.step(1)
        np.testing.assert_array_equal(observation, 1)
        assert (terminated, truncated, info["valid"]) == (False, True, False)
        assert info["fault"]["status"] == "ENV_ERROR"
        with pytest.raises(LocalProtocolError, match="have ended"):
            env.step(0)
        env.reset()
        assert env.step(0)[1:] == (1.0, False, False, {})
        with pytest.raises(
            ActionError, match=r"^action: expected shape \[\]; got \[2\]"
        ):
            env.step([0, 1])


def test_wrapper_attributes_of_one_env_are_those_in_the_worker() -> None:
    with contextlib.closing(envserve.make("CartPole-v1")) as ours:
        theirs = gymnasium.make("CartPole-v1")
        for env in (ours, theirs):
            env.reset(seed=0)
            assert env.set_wrapper_attr("force_mag", 1.0)
            assert env.get_wrapper_attr("force_mag") == 1.0
            assert env.has_wrapper_attr("gravity")
            assert not env.has_wrapper_attr("nothing")
            assert not env.set_wrapper_attr("nothing", 1.0, force=False)
            assert env.has_wrapper_attr("env")  # its value cannot be sent
            env.unwrapped.gravity = 3.0  # type: ignore[attr-defined]
        assert ours.step(1)[0].tolist() == theirs.step(1)[0].tolist()
        assert ours.get_wrapper_attr("gravity") == 3.0
        assert ours.has_wrapper_attr("_max_episode_steps")
        assert ours.get_wrapper_attr("_max_episode_steps") == 500
        assert ours.unwrapped.has_wrapper_attr(name="gravity")
        with pytest.raises(AttributeError, match="'nothing'"):
            _ = ours.nothing
        assert ours.get_wrapper_attr("set_wrapper_attr")
        assert ours.action_space == theirs.action_space


def test_private_attributes_of_one_env_can_be_set() -> None:
    for make in (gymnasium.make, envserve.make):
        env: Any = make("CartPole-v1")
        with contextlib.closing(env):
            env.reset()
            env._max_episode_steps = 1
            env.unwrapped._goal = 5
            assert env.step(0)[3]  # truncated
            assert env.unwrapped._goal == env.get_wrapper_attr("_goal") == 5
            assert not hasattr(env, "_nothing")


def test_servers_expose_the_attributes_of_one_env_by_name(
    start_server: StartServer,
) -> None:
    address = start_server(
        "tcp://127.0.0.1:0", "--expose", "gravity", "--expose", "set:gravity"
    )
    with contextlib.closing(envserve.make("CartPole-v1", address)) as env:
        assert env.set_wrapper_attr("gravity", 3.0)
        assert env.get_wrapper_attr("gravity") == 3.0
        assert not env.has_wrapper_attr("force_mag")
        with pytest.raises(CallError, match="not allowed"):
            env.set_wrapper_attr("force_mag", 1.0)


def test_the_observation_of_one_env_may_contain_an_empty_dict() -> None:
    with contextlib.closing(gymnasium.make(RANDOM_ENV, kind="nested")) as theirs:
        expected, _ = theirs.reset(seed=1)
    env = envserve.make(RANDOM_ENV, env_kwargs={"kind": "nested"})
    with contextlib.closing(env):
        observation, _ = env.reset(seed=1)
    assert data_equivalence(observation, expected, exact=True)


@pytest.mark.parametrize("limit", [3, 700, -1])
def test_the_spec_of_one_env_contains_its_time_limit(limit: int) -> None:
    with contextlib.closing(
        gymnasium.make("CartPole-v1", max_episode_steps=limit)
    ) as theirs:
        assert theirs.spec is not None
        expected = theirs.spec.max_episode_steps
    env = envserve.make("CartPole-v1", max_episode_steps=limit, env_kwargs=[{}])
    with contextlib.closing(env):
        assert env.spec is not None
        assert env.spec.max_episode_steps == expected
    with contextlib.closing(gymnasium.make(env.spec)) as again:
        assert again.spec is not None
        assert again.spec.max_episode_steps == expected


def test_one_env_is_stepped_after_the_end_as_in_gymnasium() -> None:
    wrappers = [{"name": "TimeLimit", "max_episode_steps": 1}]
    with contextlib.closing(envserve.make("Pendulum-v1", wrappers=wrappers)) as env:
        env.reset()
        assert env.step([0.0])[3]
        assert env.step([0.0])[3]
