"""Envs that only the user's process can create: functions, classes and specs."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import patch

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.wrappers import (
    ClipReward,
    DtypeObservation,
    FrameStackObservation,
    RecordEpisodeStatistics,
    TimeLimit,
    TransformReward,
)

import envserve
from envserve.client import BatchEnv
from envserve.envs.pickled_code import UserCode
from envserve.envs.user_envs import name_and_imports
from envserve.errors import EnvserveError, EnvStartError, UnknownEnv, WrapperError
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.pool.replay import load_repro, replay
from envserve.settings import EnvRequest, HostSettings, PoolSettings
from envserve.spaces import codec
from envserve.wire.bodies import Attach
from envserve.wrappers import register_wrapper
from envserve.wrappers.registry import WRAPPERS
from tests.envserve.conftest import Serve
from tests.envserve.pool_driver import kill

pytestmark = pytest.mark.usefixtures("one_launcher")

ROOT = Path(__file__).resolve().parents[2]
MakeEnv = Callable[[], gymnasium.Env[Any, Any]]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """A launcher that imports this module, so that its workers need not do that."""
    with contextlib.closing(Launcher([__name__])) as launcher:
        yield launcher


class Numbered(gymnasium.Env[Any, Any]):
    """An env whose infos contain its number; action 2 raises an exception."""

    metadata: dict[str, Any] = {"render_fps": 30, "x": object()}  # noqa: RUF012
    observation_space = Box(-1, 1, (2,))
    action_space = Discrete(3)

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {"number": self.number}

    def step(self, action: Any) -> Any:
        if action == 2:
            raise RuntimeError("boom")
        return np.zeros(2, np.float32), 1.0, False, False, {"number": self.number}


NUMBERED: Any = Numbered  # Gymnasium's type of entry points takes any keyword


def numbered(number: int) -> MakeEnv:
    return lambda: Numbered(number)


def locals_of_a_function() -> list[MakeEnv]:
    class Local(Numbered):
        pass

    def make(number: int) -> MakeEnv:
        def thunk() -> gymnasium.Env[Any, Any]:
            return Local(number)

        return thunk

    return [make(number) for number in range(3)]


@pytest.mark.parametrize(
    "env_fns",
    [
        [numbered(number) for number in range(3)],
        tuple(functools.partial(Numbered, number) for number in range(3)),
        locals_of_a_function(),
    ],
    ids=["lambdas", "partials", "local classes"],
)
@pytest.mark.parametrize("options", [{}, {"spare_envs": True}], ids=str)
def test_each_function_creates_the_env_of_its_row(
    env_fns: Any, options: dict[str, Any]
) -> None:
    with contextlib.closing(
        envserve.make_vec(env_fns, num_workers=2, **options)
    ) as envs:
        assert envs.num_envs == 3
        assert envs.metadata["render_fps"] == 30
        assert envs.reset(seed=1)[1]["number"].tolist() == [0, 1, 2]
        # The second exception in a row also makes the pool replace the worker.
        for actions in ([0, 2, 0], [0, 2, 0], [0, 0, 0]):
            envs.step(actions)
        assert envs.step([0, 0, 0])[4]["number"].tolist() == [0, 1, 2]


def test_wrappers_and_seeds_of_functions_are_those_of_async_vector_env() -> None:
    def make(index: int) -> MakeEnv:
        def thunk() -> gymnasium.Env[Any, Any]:
            env = gymnasium.make("CartPole-v1", sutton_barto_reward=index == 1)
            env = RecordEpisodeStatistics(TimeLimit(env, 5 + index))
            env.action_space.seed(index)
            return env

        return thunk

    env_fns = [make(index) for index in range(2)]
    all_rows = []
    for vector in (AsyncVectorEnv, envserve.make_vec):
        with contextlib.closing(vector(env_fns)) as envs:
            rows: list[Any] = [envs.reset(seed=3)[0]]
            for _ in range(20):
                *row, info = envs.step(np.ones(2, int))
                episode = info.get("episode", {})
                rows += row + [episode.get(key, 0) for key in ("r", "l")]
        all_rows.append(rows)
    assert all(map(np.array_equal, *all_rows))
    assert any(np.any(length) for length in all_rows[0][6::6])


def test_a_batch_takes_functions_classes_and_specs() -> None:
    class Mine(Numbered):
        pass

    entry_point: Any = Numbered
    spec = EnvSpec(
        "Numbered-v0", entry_point, max_episode_steps=1, kwargs={"number": 4}
    )
    for env, count, number in (
        ([numbered(7)], None, 7),
        (Mine, 2, 0),
        (functools.partial(Numbered, 5), 2, 5),
        (lambda number=6: Numbered(number), 1, 6),
        (spec, 2, 4),
    ):
        options: Any = {} if count is None else {"num_envs": count}
        with BatchEnv.local(env, num_workers=1, infos="all", **options) as batch:
            batch.reset()
            assert batch.reset_infos[0]["number"] == number
            assert batch.num_envs == (count or 1)


@pytest.fixture
def registered() -> Iterator[str]:
    name = "OfThisTest-v0"
    yield name
    gymnasium.registry.pop(name, None)


@pytest.mark.parametrize("kind", ["text", "class", "lambda"])
def test_an_env_that_the_script_registers_is_made_with_its_spec(
    kind: str, registered: str
) -> None:
    entry_points: dict[str, Any] = {
        "text": f"{__name__}:Numbered",
        "class": Numbered,
        "lambda": lambda number=0: Numbered(number),
    }
    gymnasium.register(
        registered,
        entry_points[kind],
        max_episode_steps=2,
        kwargs={"number": 3},
        additional_wrappers=(RecordEpisodeStatistics.wrapper_spec(buffer_length=4),),
    )
    with contextlib.closing(envserve.make_vec(registered, 2, num_workers=1)) as envs:
        assert envs.reset()[1]["number"].tolist() == [3, 3]
        envs.step([0, 0])
        *_, truncated, info = envs.step([0, 0])
        assert truncated.tolist() == [True, True]
        assert info["episode"]["l"].tolist() == [2, 2]


@pytest.mark.parametrize("spare_envs", [False, True])
def test_functions_share_no_objects(spare_envs: bool) -> None:
    shared = Numbered()
    env_fns: list[MakeEnv] = [lambda: shared, lambda: shared]
    envs = envserve.make_vec(env_fns, num_workers=1, spare_envs=spare_envs)
    with contextlib.closing(envs):
        envs.set_attr("number", [3, 4])
        assert envs.reset()[1]["number"].tolist() == [3, 4]


def test_envs_share_no_arguments() -> None:
    class Holder(Numbered):
        def __init__(self, owners: Any) -> None:
            super().__init__(len(owners.names))
            owners.names.append("mine")

    owners = argparse.Namespace(names=[])
    kwargs = {"owners": owners}
    with BatchEnv.local(Holder, 2, 1, infos="all", env_kwargs=kwargs) as batch:
        batch.reset()
        assert [batch.reset_infos[row]["number"] for row in range(2)] == [0, 0]


def test_functions_may_make_envs_that_the_script_has_registered(
    registered: str,
) -> None:
    gymnasium.register(registered, NUMBERED, kwargs={"number": 3})
    env_fns: list[MakeEnv] = [lambda: gymnasium.make(registered)] * 2
    with contextlib.closing(envserve.make_vec(env_fns)) as envs:
        assert envs.reset()[1]["number"].tolist() == [3, 3]


def test_functions_may_make_variants_of_gymnasiums_envs(registered: str) -> None:
    entry_point = "gymnasium.envs.classic_control:CartPoleEnv"
    gymnasium.register(registered, entry_point, max_episode_steps=1)
    with contextlib.closing(
        envserve.make_vec([lambda: gymnasium.make(registered)])
    ) as envs:
        envs.reset()
        assert envs.step([0])[3].tolist() == [True]


def test_the_specs_of_gymnasium_are_not_sent_to_workers() -> None:
    names = {*UserCode.of("Pendulum-v1")[1].specs}
    assert names & {"Pendulum-v1", "CartPole-v1", "phys2d/CartPole-v1", "Ant-v2"} == {
        "Pendulum-v1"
    }


@pytest.mark.parametrize("kind", ["entry_point", "vector_entry_point", "script"])
def test_a_registered_env_that_cannot_be_pickled_affects_no_other_env(
    kind: str, registered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = threading.Lock()
    code: dict[str, Any] = {kind: lambda **_: Numbered(lock.locked())}
    if kind == "script":
        script = sys.modules["__main__"]
        monkeypatch.setattr(script, "make_locked", code.pop(kind), raising=False)
        code["entry_point"] = "__main__:make_locked"
    gymnasium.register(registered, **code)
    with contextlib.closing(envserve.make_vec(Numbered, 2)) as envs:
        assert envs.reset()[1]["number"].tolist() == [0, 0]
    error = "make_locked" if kind == "script" else registered
    with pytest.raises(EnvStartError, match=f"{error}: .*cannot pickle"):
        envserve.make_vec(registered)


class Unloadable:
    """An object that can be pickled, but not be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_registered_env_that_cannot_be_unpickled_affects_no_other_env(
    registered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Unloadable()
    make: Any = lambda: Numbered(part.__sizeof__())  # noqa: E731
    gymnasium.register(registered, make)
    make_other: Any = numbered(3)
    other = replace(gymnasium.spec(registered), id="Other-v0", entry_point=make_other)
    monkeypatch.setitem(gymnasium.registry, "Other-v0", other)
    with contextlib.closing(envserve.make_vec(Numbered, 2)) as envs:
        assert envs.reset()[1]["number"].tolist() == [0, 0]
    with contextlib.closing(
        envserve.make_vec([lambda: gymnasium.make("Other-v0")])
    ) as envs:
        assert envs.reset()[1]["number"].tolist() == [3]
    error = f"{registered}: workers cannot unpickle .* ValueError: invalid literal"
    users: list[Any] = [registered, [lambda: gymnasium.make(registered)]]
    for env in users:
        with pytest.raises(EnvStartError, match=error):
            envserve.make_vec(env)


def test_envs_of_a_script_share_its_objects(registered: str) -> None:
    resets: list[int] = []

    class Recording(Numbered):
        def reset(self, **options: Any) -> Any:
            resets.append(self.number)
            return super().reset(**options)

    class Counting(Recording):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"number": len(resets)}

    recording: Any = Recording
    gymnasium.register(registered, recording)
    with contextlib.closing(envserve.make_vec(Counting)) as envs:
        envs.reset()
        assert envs.step([0])[4]["number"].tolist() == [1]


class Unprintable:
    """An object without text, which is too large for workers."""

    def __init__(self, num_bytes: int) -> None:
        self.data = bytes(num_bytes)

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_registered_envs_with_large_data_affect_no_other_env(
    registered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(num_bytes: int) -> Any:
        return functools.partial(NUMBERED, Unprintable(num_bytes))

    gymnasium.register(registered, large(33 << 20))
    for name in ("Half-v0", "Half-v1"):
        spec = gymnasium.spec(registered)
        half = replace(spec, id=name, entry_point=large(17 << 20))
        monkeypatch.setitem(gymnasium.registry, name, half)
    with contextlib.closing(envserve.make_vec(Numbered, 1)) as envs:
        envs.reset()
    with pytest.raises(EnvStartError, match="at most 32 MiB of data; got 33 MiB"):
        envserve.make_vec(registered)


PLUGIN = """
import random
import gymnasium, numpy as np

RANDOM = random.Random(3)

class Plugin(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return np.array([RANDOM.random()]), {}
"""


@pytest.mark.parametrize("name", ["plugin_env", "plugins.env", "tests.plugin_env"])
def test_a_module_that_imports_do_not_find_is_pickled(
    name: str, tmp_path: Path, registered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    gymnasium.register(registered, module.Plugin)
    make: Any = lambda: module.Plugin()  # noqa: E731
    for env in (module.Plugin, registered, [make, make]):
        with contextlib.closing(envserve.make_vec(env, 2, num_workers=2)) as envs:
            assert len({*envs.reset()[0][:, 0].tolist()}) == 2
    with pytest.raises(UnknownEnv, match="'Plugin' of this script"):
        envserve.make(module.Plugin, "127.0.0.1")
    with contextlib.closing(envserve.make_vec(Numbered, 1)) as envs:
        envs.reset()


def test_a_file_that_ppo_has_loaded_from_any_folder_is_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my-packages" / "plugin.py"
    module = ModuleType(str(path).replace(".", "_"))
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(PLUGIN, vars(module))
    _, code = UserCode.of([vars(module)["Plugin"]])
    pickled = code.dumps()
    del sys.modules[module.__name__]
    assert UserCode.loads(pickled, "").env_fns[0]().reset()[0].shape == (1,)


def executed() -> Any:
    namespace: dict[str, Any] = {"Numbered": Numbered}
    exec("class Executed(Numbered): pass", namespace)
    return namespace["Executed"]


@pytest.mark.parametrize("env", [executed(), type("Made", (Numbered,), {})])
def test_a_class_that_its_module_does_not_contain_is_pickled(env: Any) -> None:
    reference, _ = UserCode.of(env)
    assert name_and_imports(reference) == (reference, ())
    with contextlib.closing(envserve.make_vec(env, 1)) as envs:
        assert envs.reset()[1]["number"].tolist() == [0]


@pytest.mark.parametrize("make", [envserve.make, envserve.make_vec])
def test_a_name_without_a_version_is_the_latest_version(
    make: Any, registered: str
) -> None:
    gymnasium.register(registered, NUMBERED, kwargs={"number": 3})
    gymnasium.register(f"{registered[:-1]}2", NUMBERED, kwargs={"number": 4})
    try:
        with pytest.warns(UserWarning, match="OfThisTest-v2"):
            envs = make(registered.removesuffix("-v0"))
        with contextlib.closing(envs):
            assert envs.reset()[1]["number"] == 4
            assert envs.spec.id == "OfThisTest-v2"
    finally:
        del gymnasium.registry[f"{registered[:-1]}2"]


def test_an_env_that_exists_only_as_a_vector_env_is_made_as_one(
    registered: str,
) -> None:
    entry_point = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
    gymnasium.register(registered, vector_entry_point=entry_point)
    with contextlib.closing(envserve.make_vec(registered, 2)) as envs:
        assert envs.reset(seed=1)[0].shape == (2, 4)


def test_functions_with_different_spaces_raise_as_other_envs() -> None:
    def wide() -> gymnasium.Env[Any, Any]:
        env = Numbered()
        env.observation_space = Box(-1, 1, (3,))
        return env

    for num_workers in (1, 2):
        with pytest.raises(EnvStartError, match=r"its spaces differ|the spaces of "):
            envserve.make_vec([Numbered, wide], num_workers=num_workers)


@pytest.mark.parametrize(
    ("env", "options", "error"),
    [
        ([Numbered()], {}, r"env\[0\]: expected a function .* got <.*Numbered"),
        ([Numbered] * 2, {"num_envs": 3}, "num_envs: expected 2, the number of fun"),
        ([Numbered], {"env_kwargs": {"number": 1}}, "env_kwargs: expected no value"),
        (
            [Numbered],
            {"addresses": ["tcp://127.0.0.1:1"]},
            "envserve start my_env.py:make_env",
        ),
        ([lambda: None], {}, r"expected .*<lambda> to return an env; got None"),
        ([lambda: Numbered], {}, r"to return an env; got <class .*Numbered'>; call it"),
        (
            [lambda: gymnasium.make_vec("CartPole-v1", 2)],
            {},
            "a single env; got the vector env CartPole",
        ),
        ([], {}, "at least one function"),
        ({"id": "CartPole-v1"}, {}, "expected the name of an env, .* got {'id'"),
        (
            lambda: Numbered(),
            {"addresses": ["tcp://127.0.0.1:1"]},
            "servers can import",
        ),
    ],
)
def test_errors_about_functions_state_a_remedy(
    env: Any, options: dict[str, Any], error: str
) -> None:
    with pytest.raises((EnvserveError, TypeError, ValueError), match=error):
        envserve.make_vec(env, **options)


def test_the_error_about_code_that_cannot_be_pickled_names_the_function() -> None:
    lock = threading.Lock()

    def locked() -> gymnasium.Env[Any, Any]:
        with lock:
            return Numbered()

    with pytest.raises(EnvStartError, match=r"env\[1\]: .*'_thread.lock' object"):
        envserve.make_vec([Numbered, locked])


class Duck:
    """An env that does not derive from `gymnasium.Env`."""

    observation_space = Numbered.observation_space
    action_space = Numbered.action_space
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    render_mode = None

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {"number": 0}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, False, False, {}

    def close(self) -> None:
        pass


class ReadOnly(Numbered):
    @property
    def spec(self) -> Any:  # type: ignore[override]
        return None


class Stubborn(Numbered):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "spec":
            raise AttributeError("expected no spec")
        super().__setattr__(name, value)


class Forwarding:
    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


def forwarding() -> Any:
    return Forwarding(Numbered())


@pytest.mark.parametrize("env", [Duck, ReadOnly, Stubborn, forwarding])
def test_a_class_or_function_need_not_satisfy_gymnasium_make(env: Any) -> None:
    rows = []
    for vector, own in ((AsyncVectorEnv, [env] * 2), (envserve.make_vec, env)):
        options: Any = {"num_envs": 2} if own is env else {}
        with contextlib.closing(vector(own, **options)) as envs:
            rows.append([*envs.reset(seed=1), *envs.step(np.zeros(2, int))])
    assert str(rows[0]) == str(rows[1])
    options = {"max_episode_steps": 1}
    if issubclass(type(env), type) and issubclass(env, gymnasium.Env):
        with contextlib.closing(envserve.make_vec(env, 1, **options)) as envs:
            envs.reset()
            assert envs.step([0])[3].tolist() == [True]


class Minimal:
    """An env with nothing but what workers need."""

    observation_space = Numbered.observation_space
    action_space = Numbered.action_space
    reset, step = Duck.reset, Duck.step


@pytest.mark.parametrize("make", [envserve.make, envserve.make_vec])
def test_an_env_needs_no_metadata_and_render_mode(make: Any) -> None:
    with contextlib.closing(make(Minimal)) as env:
        assert env.render_mode is None
        assert env.reset(seed=np.int64(1))[1]["number"] == 0


def test_metadata_may_be_none() -> None:
    def without_metadata() -> Any:
        env: Any = Numbered()
        env.metadata = None  # as in envs of the old Gym that Shimmy converts
        return env

    with contextlib.closing(envserve.make_vec(without_metadata)) as envs:
        assert envs.metadata == {"autoreset_mode": AutoresetMode.NEXT_STEP}


def test_arguments_in_a_spec_may_be_arrays() -> None:
    spec = EnvSpec("Numbered-v0", NUMBERED, kwargs={"number": np.arange(3)})
    for _ in range(2):
        with contextlib.closing(envserve.make_vec(spec, 2)) as envs:
            numbers = envs.reset()[1]["number"]
            np.testing.assert_array_equal(numbers, [[0, 1, 2]] * 2)
            assert envs.spec is not None
            spec = envs.spec


def test_the_error_about_an_unregistered_env_explains_what_workers_import() -> None:
    def make_unregistered() -> Any:
        return gymnasium.make("RegisteredByAnotherModule-v0")

    with pytest.raises(
        EnvStartError, match=r"NameNotFound: .*\nHint: .*import_modules"
    ):
        envserve.make_vec(make_unregistered, 1)


class Tripled(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return 3 * reward


@pytest.mark.parametrize(
    ("wrapper", "name"),
    [
        ("RecordEpisodeStatistics", "RecordEpisodeStatistics"),
        (RecordEpisodeStatistics, "RecordEpisodeStatistics"),
        (functools.partial(TimeLimit, max_episode_steps=5), "<"),
        (ClipReward.wrapper_spec(max_reward=1), "<"),
        (DtypeObservation.wrapper_spec(dtype=np.float32), "<"),
        (functools.partial(FrameStackObservation, stack_size=200), "<"),
        (Tripled, "<"),
        (lambda env: TransformReward(env, lambda reward: 5 * float(reward)), "<"),
    ],
)
def test_a_wrapper_is_a_name_a_class_or_a_function(wrapper: Any, name: str) -> None:
    options: Any = {"num_workers": 1, "wrappers": [wrapper], "infos": "all"}
    theirs = gymnasium.make("CartPole-v1")
    if isinstance(wrapper, str):
        theirs = RecordEpisodeStatistics(theirs)
    elif callable(wrapper):
        theirs = wrapper(theirs)
    else:
        with contextlib.suppress(KeyError):
            theirs = ClipReward(theirs, **{"max_reward": wrapper.kwargs["max_reward"]})
    with BatchEnv.local("CartPole-v1", 1, **options) as batch:
        (lane,) = batch.lanes
        assert isinstance(lane, Pool)
        assert lane.config.wrappers[0].name.startswith(name)
        assert np.array_equal(batch.reset(seeds=[2])[0], theirs.reset(seed=2)[0])
        assert batch.step(np.array([1])).reward[0] == theirs.step(1)[1]


@patch.dict(WRAPPERS)
def test_a_class_may_be_registered_as_a_wrapper_in_this_process_only() -> None:
    register_wrapper("Tripled", Tripled)
    with BatchEnv.local("CartPole-v1", 1, 1, wrappers=[Tripled]) as batch:
        batch.reset()
        assert batch.step(np.array([1])).reward[0] == 3.0
    plain = UserCode().name_wrappers([Tripled], ["tests:my/Walk-v0"])
    assert plain == [{"name": "Tripled"}]  # because workers import its package


def test_arguments_of_an_env_may_be_any_objects() -> None:
    class Scaled(Numbered):
        def __init__(self, scale: Callable[[int], int], number: int) -> None:
            super().__init__(scale(number))

    options: Any = {"scale": lambda number: 2 * number, "number": 4}
    with contextlib.closing(envserve.make_vec(Scaled, 2, **options)) as envs:
        assert envs.reset()[1]["number"].tolist() == [8, 8]
    with pytest.raises(EnvStartError, match=r"scale: .*'_thread.lock' object"):
        envserve.make_vec(Scaled, **{**options, "scale": threading.Lock()})


def test_arguments_that_cannot_be_copied_are_shared() -> None:
    class Computing(Numbered):
        def __init__(self, library: Any, numbers: list[int]) -> None:
            numbers.append(2)
            super().__init__(int(library.sum(numbers)))

    options: Any = {"library": np, "numbers": [1]}
    with contextlib.closing(
        envserve.make_vec(Computing, 2, num_workers=1, **options)
    ) as envs:
        assert envs.reset()[1]["number"].tolist() == [3, 3]


def test_later_changes_of_arguments_do_not_affect_new_workers() -> None:
    number = [1]
    options: Any = {"env_kwargs": {"number": number}, "infos": "all"}
    options["wrappers"] = [{"name": "FrameHistory", "past_indices": number}]
    with BatchEnv.local(NUMBERED, 1, 1, padding_after=math.inf, **options) as batch:
        batch.reset()
        number.append(2)
        pool: Any = batch.lanes[0]
        kill(pool.worker_pids[0])
        batch.step([0])
        assert batch.step([0]).infos[0]["number"] == [1]


def test_arguments_of_each_env_may_be_any_objects() -> None:
    def calling(make_number: Any) -> gymnasium.Env[Any, Any]:
        return Numbered(make_number())

    kwargs = [{"make_number": lambda: 3}, {"make_number": lambda: 4}]
    with contextlib.closing(envserve.make_vec(calling, 2, env_kwargs=kwargs)) as envs:
        assert envs.reset()[1]["number"].tolist() == [3, 4]


def test_servers_take_wrappers_by_name_only() -> None:
    for wrapper in (Tripled, lambda env: env):
        with pytest.raises(WrapperError, match="register_wrapper in a module"):
            envserve.make_vec("CartPole-v1", 1, ["ipc:///none"], wrappers=[wrapper])
    with pytest.raises(WrapperError, match=r"wrappers\[0\]: .*got 5$"):
        envserve.make_vec("CartPole-v1", wrappers=[5])  # type: ignore[list-item]


SCRIPT = """
import multiprocessing, gymnasium, numpy as np, envserve
import sibling

GENERATOR = np.random.default_rng(0)

class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, number=0):
        self.number, self.draw = number, float(GENERATOR.random())

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.float32([self.draw]), {"number": self.number, "draw": sibling.draw()}

    def step(self, action):
        if action == 2:
            raise RuntimeError("boom")
        return np.float32([self.draw]), 1.0, False, False, {"number": self.number}

def make(number):
    return lambda: Mine(number)

def use_mine():
    for env in (Mine, [make(0)], "Mine-v0"):
        envserve.make_vec(env, num_workers=1).close()

gymnasium.register("Mine-v0", lambda: Mine(9), max_episode_steps=1)
gymnasium.register("Named-v0", "__main__:Mine", kwargs={"number": 8})

if __name__ == "__main__":
    envs = envserve.make_vec([make(number) for number in range(4)], num_workers=2)
    observation, info = envs.reset()
    assert len({*observation[:, 0].tolist()}) == 4, observation
    assert len({*info["draw"].tolist()}) == 4, info
    envs.step([0, 2, 0, 0])
    assert envs.step([0] * 4)[4]["number"].tolist() == [0, 1, 2, 3]
    envs.close()
    envs = envserve.make_vec("Mine-v0", 2)
    assert envs.reset()[1]["number"].tolist() == [9, 9]
    assert envs.step([0, 0])[3].tolist() == [True, True]
    envs.close()
    envs = envserve.make_vec("Named-v0", 2, "async", {"shared_memory": False})
    assert envs.reset()[1]["number"].tolist() == [8, 8]
    envs.close()
    one = envserve.make(Mine)
    assert one.reset()[1]["number"] == 0
    one.close()
    envserve.make_vec([lambda: gymnasium.make("Sibling-v0")]).close()
    process = multiprocessing.get_context("spawn").Process(target=use_mine)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
SIBLING = """
import random
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

RANDOM = random.Random(3)

def draw():
    return RANDOM.random()

gymnasium.register("Sibling-v0", "sibling:CartPoleEnv")
"""


def test_a_script_can_use_its_own_functions_classes_and_names(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "sibling.py").write_text(SIBLING)
    finished = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert f'File "{script}", line 20, in step\n    raise Runt' in finished.stderr
    assert "Overriding environment" not in finished.stderr


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_fault_of_a_function_states_why_it_cannot_be_replayed(
    is_registered: bool,
    tmp_path: Path,
    launcher: Launcher,
    registered: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: dict[str, Any] = {"num_workers": 1, "crash_dir": str(tmp_path)}
    env: Any = [numbered(1)]
    if is_registered:
        make: Any = numbered(1)
        gymnasium.register(registered, make)
        env = registered
    with (
        caplog.at_level(logging.WARNING),
        contextlib.closing(envserve.make_vec(env, **options)) as envs,
    ):
        envs.reset()
        envs.step([2])
    (path,) = tmp_path.iterdir()
    assert f"its actions are in {path}; to replay such faults, move" in caplog.text
    assert "envserve replay" not in caplog.text
    result = replay(load_repro(path), launcher)
    assert not result.is_reproduced
    assert is_registered or "which is defined in a script" in result.text


def test_no_request_contains_code() -> None:
    asked: dict[str, Any] = {"env_name": "CartPole-v1", "num_envs": 1, "seed": 0}
    code = UserCode(env_fns=[Numbered]).dumps()
    body = codec.encode({**vars(Attach(**asked)), "wrappers": [], "pickled_code": code})
    settings = PoolSettings.of(Attach.decode(body), HostSettings())
    assert not settings.pickled_code
    assert "pickled_code" not in {each.name for each in fields(EnvRequest)}


def test_the_error_of_a_server_names_the_option_that_registers_envs(
    registered: str, serve: Serve
) -> None:
    gymnasium.register(registered, f"{__name__}:Numbered")
    server = serve("CartPole-v1")
    with pytest.raises(UnknownEnv, match="--import MODULE if a module registers it"):
        envserve.make_vec(registered, 1, [server.address])
    with contextlib.closing(
        envserve.make_vec(gymnasium.spec("CartPole-v1"), 1, [server.address])
    ) as envs:
        assert envs.reset()[0].shape == (1, 4)
