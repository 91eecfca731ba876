"""The place of an env in its batch: `env_context`, placeholders, arguments per env."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import envserve
from envserve.client import BatchEnv
from envserve.envs.context import EnvContext
from envserve.errors import EnvStartError
from envserve.pool.launcher import Launcher
from envserve.pool.replay import load_repro
from envserve.session.server.permissions import Rejection
from envserve.session.server.quotas import Quota
from envserve.settings import HostSettings
from envserve.spaces import codec
from envserve.wire.bodies import Attach
from envserve.worker.rendering import headless_variables
from tests.envserve.conftest import Serve, WaitUntil

PLACE = """
import os, socket, time
import envserve, gymnasium, numpy as np

WHEN_IMPORTED = os.environ.get("CUDA_VISIBLE_DEVICES")

class Place(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, path="", more=None, port=0, seconds=0.0, render_mode=None):
        place = envserve.env_context()
        self.place = place and [
            place.row, place.num_envs, place.worker, place.num_workers,
        ]
        self.path, self.more, self.seconds = path, more, seconds
        self.render_mode = render_mode
        self.gpu = [WHEN_IMPORTED, os.environ.get("CUDA_VISIBLE_DEVICES")]
        self.backend = os.environ.get("MUJOCO_GL")
        self.socket = socket.create_server(("127.0.0.1", port)) if port else None
        self.is_compiled = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place_in_reset = envserve.env_context()
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if not self.is_compiled or action == 2:
            time.sleep(self.seconds)
            self.is_compiled = True
        if action == 1:
            raise RuntimeError("no luck")
        return np.zeros(1, np.float32), 1.0, True, False, {}

class Places(gymnasium.vector.VectorEnv):
    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    single_observation_space = Place.observation_space
    single_action_space = Place.action_space

    def __init__(self, num_envs, path="", render_mode=None, seconds=0.0):
        self.num_envs, self.path, self.seconds = num_envs, path, seconds
        self.row = envserve.env_context().row

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, actions):
        time.sleep(self.seconds)
        self.seconds = 0.0
        flags = np.zeros(self.num_envs, bool)
        return *self.reset()[:1], np.ones(self.num_envs), flags, flags, {}

gymnasium.register("Place-v0", Place, vector_entry_point=Places)
"""
SERVER_OPTIONS = (
    *("--allow-kwarg", "path:any", "--allow-kwarg", "more:any"),
    *("--expose", "place", "--expose", "path", "--expose", "more", "--expose", "gpu"),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("envs") / "place_file.py"
    path.write_text(PLACE)
    return str(path)


@pytest.fixture(scope="module")
def launcher(file: str) -> Iterator[Launcher]:
    """A launcher that has imported the file."""
    with contextlib.closing(Launcher([f"{file}:Place"])) as launcher:
        yield launcher


@pytest.mark.usefixtures("one_launcher")
def test_an_env_can_query_its_place_while_it_is_built(file: str) -> None:
    with BatchEnv.local(f"{file}:Place", 4, 2, first_env_index=10) as batch:
        batch.reset()
        places = batch.get_attr("place")
        assert places == [[10 + n, 14, n // 2, 2] for n in range(4)]
        assert batch.get_attr("place_in_reset") == [None] * 4
        batch.step([0, 0, 1, 0])
        assert batch.get_attr("place") == places  # also of a new env


def test_there_is_no_place_outside_of_a_worker() -> None:
    assert envserve.env_context() is None


@pytest.mark.usefixtures("one_launcher")
def test_placeholders_are_replaced_in_strings(file: str) -> None:
    more = {"list": ["{row}", 5, {"worker": "{worker}"}], "json": '{"row": {row}}'}
    kwargs = {"path": "runs/{row}-{worker}/{{row}}{x}{}", "more": more}
    with BatchEnv.local(f"{file}:Place", 4, 2, env_kwargs=kwargs) as batch:
        batch.reset()
        assert batch.get_attr("path")[2] == "runs/2-1/{row}{x}{}"
        assert batch.get_attr("more")[3] == {
            "list": ["3", 5, {"worker": "1"}],
            "json": '{"row": 3}',
        }
        batch.step([0, 0, 0, 1])  # the env that replaces a failed one
        assert batch.get_attr("path")[3] == "runs/3-1/{row}{x}{}"


def test_tuples_and_other_values_remain_as_they_are() -> None:
    context, value = EnvContext(row=3, num_envs=4), object()
    assert context.fill(("{row}", value, b"{row}")) == ("3", value, b"{row}")
    values: list[Any] = [np.str_("{}"), OrderedDict(a="{row}"), MappingProxyType({})]
    for same, filled in zip(values, context.fill(values), strict=True):
        assert filled is same


@pytest.mark.usefixtures("one_launcher")
@pytest.mark.parametrize("spare_envs", [False, True])
def test_each_env_can_have_its_own_arguments(file: str, spare_envs: bool) -> None:
    kwargs = [{"path": name, "more": {"n": n}} for n, name in enumerate("abc")]
    options: dict[str, Any] = {"env_kwargs": kwargs, "spare_envs": spare_envs}
    with BatchEnv.local(f"{file}:Place", 3, 2, **options) as batch:
        batch.reset()
        for _ in range(3):  # with spare envs, both envs of a row have a turn
            assert batch.get_attr("path") == [*"abc"]
            batch.step([0, 0, 0])
        batch.step([1, 1, 1])
        assert batch.get_attr("more") == [{"n": n} for n in range(3)]


def test_a_list_of_arguments_has_one_map_per_env(file: str) -> None:
    for count in (1, 3):
        given: list[dict[str, Any]] = [{}] * count
        text = f"env_kwargs: expected one map, or .* each of the 2 envs; got {count}"
        with pytest.raises(ValueError, match=text):
            BatchEnv.local(f"{file}:Place", 2, 1, env_kwargs=given)
    with pytest.raises(ValueError, match="a map, or a list with a map per env; got 5"):
        BatchEnv.local(f"{file}:Place", 2, 1, env_kwargs=5)  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_launcher")
def test_make_vec_passes_the_arguments_of_each_env(file: str) -> None:
    kwargs = [{"path": "a"}, {"path": "b"}]
    envs = envserve.make_vec(
        f"{file}:Place", 2, env_kwargs=kwargs, render_mode="rgb_array"
    )
    assert [*envs.get_attr("path")] == ["a", "b"]
    assert [*envs.get_attr("render_mode")] == ["rgb_array"] * 2
    envs.close()


def test_rows_are_counted_over_all_servers_also_after_a_move(
    file: str, serve: Serve, wait_until: WaitUntil
) -> None:
    options = f"{file}:Place", *SERVER_OPTIONS
    servers = [serve(*options, imports=()) for _ in range(2)]
    addresses = [server.address for server in servers]
    kwargs = [{"path": f"{n}/{{row}}"} for n in range(5)]
    with BatchEnv.connect(
        f"{file}:Place", addresses, 5, env_kwargs=kwargs, server_lost_after=1.0
    ) as batch:
        batch.reset()
        paths = [f"{n}/{n}" for n in range(5)]
        assert batch.get_attr("path") == paths
        rows = [[0, 5, 0], [1, 5, 1], [2, 5, 0], [3, 5, 1], [4, 5, 1]]
        assert [place[:3] for place in batch.get_attr("place")] == rows
        servers[0].__exit__()
        wait_until(lambda: bool(batch.step([0] * 5).valid.all()))
        assert batch.get_attr("path") == paths
        assert [place[:3] for place in batch.get_attr("place")] == rows


def test_the_arguments_of_each_env_must_be_allowed() -> None:
    host = HostSettings(allowed_kwargs=frozenset({"path:a|b-{row}"}))
    quota = Quota("", host, None)

    def check(*paths: str) -> None:
        kwargs: Any = [{"path": path} for path in paths]
        attach = Attach(env_name="A", num_envs=len(paths), seed=1, env_kwargs=kwargs)
        quota.check_env(Attach.decode(attach.encode()))

    check("a", "b-{row}")
    for invalid in ("{row}", "b-{worker}", "b-{{row}}", "b-0"):
        with pytest.raises(Rejection, match="'path' may not be"):
            check("a", invalid)


@pytest.mark.usefixtures("one_launcher")
def test_the_arguments_of_the_env_that_failed_are_recorded(
    file: str, tmp_path: Path
) -> None:
    kwargs = [{"path": "a-{row}"}, {"path": "b-{row}"}]
    options: dict[str, Any] = {"crash_dir": str(tmp_path), "env_kwargs": kwargs}
    with BatchEnv.local(f"{file}:Place", 2, 2, **options) as batch:
        batch.reset()
        batch.step([0, 1])
    (path,) = tmp_path.glob("*.repro*")
    repro = load_repro(path)
    assert repro.env_kwargs == {"path": "b-{row}"}
    assert repro.context == EnvContext(row=1, num_envs=2, worker=1, num_workers=2)


@pytest.mark.usefixtures("one_launcher")
def test_a_vector_env_has_the_place_of_its_first_row(file: str) -> None:
    options: dict[str, Any] = {"vectorized": True, "import_modules": [file]}
    options |= {"env_kwargs": {"path": "{row}"}, "autoreset": "disabled"}
    with BatchEnv.local("Place-v0", 5, 2, **options) as batch:
        assert batch.get_attr("row") == [0, 0, 2, 2, 2]
        assert batch.get_attr("path") == ["0", "0", "2", "2", "2"]
    options["env_kwargs"] = [{}] * 5
    with pytest.raises(EnvStartError, match="expected one map of env_kwargs"):
        BatchEnv.local("Place-v0", 5, 2, **options)


@pytest.mark.parametrize("preload", [True, False])
def test_each_worker_sees_its_gpu(
    file: str, preload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    options: dict[str, Any] = {"gpus": [4, "GPU-5"], "preload": preload}
    with BatchEnv.local(f"{file}:Place", 3, 3, **options) as batch:
        gpus = batch.get_attr("gpu")
    expected = ["4", "GPU-5", "4"]
    assert gpus == [["7" if preload else gpu, gpu] for gpu in expected]


def test_the_workers_of_a_server_see_their_gpus(file: str, serve: Serve) -> None:
    gpus = "--gpus", "0", "--gpus", "1,2"
    server = serve(f"{file}:Place", *SERVER_OPTIONS, *gpus, imports=())
    with BatchEnv.connect(f"{file}:Place", [server.address], 2) as batch:
        assert [seen for _, seen in batch.get_attr("gpu")] == ["0", "1,2"]


@pytest.mark.usefixtures("one_launcher")
def test_a_second_env_of_a_process_that_fails_gets_a_hint(file: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    hint = "\nHint: The first env of this worker was built, a later one was not. If "
    kwargs = {"port": port}
    with pytest.raises(EnvStartError, match="already in use") as caught:
        BatchEnv.local(f"{file}:Place", 2, 1, env_kwargs=kwargs)
    assert hint in str(caught.value)
    assert "{row} in env_kwargs" in str(caught.value)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(EnvStartError) as own:
        BatchEnv.local(f"{file}:Place", 1, 1, env_kwargs=kwargs)
    assert hint not in str(own.value)


@pytest.mark.usefixtures("one_launcher")
@pytest.mark.parametrize("spare_envs", [False, True])
def test_the_first_step_of_an_env_has_the_timeout_of_a_reset(
    file: str, spare_envs: bool
) -> None:
    options: dict[str, Any] = {"env_kwargs": {"seconds": 1.5}, "step_timeout": 0.5}
    options |= {"spare_envs": spare_envs, "padding_after": 60.0}
    with BatchEnv.local(f"{file}:Place", 2, 1, **options) as batch:
        batch.reset()
        for action in (0, 0, 0, 1, 0, 0):  # 1 replaces the env, which compiles again
            result = batch.step([0, action])
            assert result.valid.tolist() == [True, action == 0]
            assert "timed out" not in str(result.infos)
        assert not batch.step([0, 2]).valid[0]


@pytest.mark.usefixtures("one_launcher")
def test_the_first_step_of_a_vector_env_has_the_timeout_of_a_reset(file: str) -> None:
    options: dict[str, Any] = {"vectorized": True, "import_modules": [file]}
    options |= {"env_kwargs": {"seconds": 1.5}, "step_timeout": 0.5}
    options |= {"autoreset": "disabled", "padding_after": 60.0}
    with BatchEnv.local("Place-v0", 2, 1, **options) as batch:
        batch.reset()
        assert all(batch.step([0, 0]).valid.all() for _ in range(2))
        batch.set_attr("seconds", [5.0, 5.0])
        assert not batch.step([0, 0]).valid.any()


@pytest.mark.parametrize(
    ("chosen", "mode"), [("", "rgb_array"), ("", None), ("osmesa", "rgb_array")]
)
def test_a_trainers_images_need_no_screen(
    file: str, chosen: str, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    found = headless_variables(os.environ).get("MUJOCO_GL") if mode else None
    if chosen:
        monkeypatch.setenv("MUJOCO_GL", chosen)
    envs = envserve.make_vec(f"{file}:Place", 1, render_mode=mode)
    assert [*envs.get_attr("backend")] == [chosen or found]
    envs.close()


def test_a_request_of_an_older_client_can_be_read() -> None:
    attach = Attach(env_name="A", num_envs=2, seed=1, env_kwargs={"path": "a"})
    body = codec.decode(attach.encode())
    del body["num_batch_envs"]
    request = Attach.decode(codec.encode(body))
    assert request.kwargs_of(1) == {"path": "a"}
    assert request.context_of(1) == EnvContext(row=1, num_envs=2)
