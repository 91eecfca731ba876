"""Batches of several lanes; test_lane_contract.py tests the guarantees of each lane."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from envserve.client import BatchEnv
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.sessionless_requests import request_welcome
from envserve.errors import CallError, ConnectError, SpaceError
from envserve.lane import Lane
from envserve.pool.pool import Pool
from envserve.settings import PoolSettings
from tests.oracle.probe_envs import MODULE

from .conftest import StartServer, WaitUntil, servers_in
from .pool_driver import kill
from .server_process import make_config
from .stalls import fastest


def lanes_of(configs: Sequence[tuple[str, PoolSettings]]) -> list[Lane]:
    """Start one lane per address; an empty address means a local pool."""
    lanes = [
        RemoteLane(address, config) if address else Pool(config)
        for address, config in configs
    ]
    for lane in lanes:
        lane.finish_start(time.monotonic() + 60)
    return list(lanes)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Start two servers, each with room for two envs."""
    with servers_in(tmp_path_factory.mktemp("servers")) as start:
        full = ("tcp://127.0.0.1:0", "--envs-per-worker", "1")
        yield [start(*full), start(*full)]


@pytest.fixture
def addresses(shared: list[str], wait_until: WaitUntil) -> list[str]:
    """The addresses of both servers, once the envs of earlier tests are free."""
    for address in shared:
        wait_until(lambda: request_welcome(address, 20.0).free_envs == 2)  # noqa: B023
    return shared


@pytest.mark.parametrize(
    "env", ["CartPole-v1", gymnasium.spec("CartPole-v1"), CartPoleEnv, [CartPoleEnv]]
)
def test_an_env_instead_of_lanes_is_an_error_that_names_local_and_connect(
    env: Any,
) -> None:
    with pytest.raises(TypeError, match=r"BatchEnv\.local.* or BatchEnv\.connect"):
        BatchEnv(env)


def test_local_and_remote_lanes_make_one_batch(addresses: list[str]) -> None:
    def config(first: int, num_envs: int) -> PoolSettings:
        return make_config("CartPole-v1", num_envs, seed=4, first_env_index=first)

    parts = [("", config(0, 3)), (addresses[0], config(3, 2)), ("", config(5, 1))]
    actions = np.array([0, 1, 0, 1, 1, 0])
    with (
        BatchEnv(lanes_of(parts)) as mixed,
        BatchEnv.local("CartPole-v1", 6, 1, seed=4) as local,
    ):
        np.testing.assert_array_equal(mixed.reset(), local.reset())
        for _ in range(200):
            ours, theirs = mixed.step(actions), local.step(actions)
            for left, right in zip(ours[:-1], theirs[:-1], strict=True):
                np.testing.assert_array_equal(left, right)
            assert ours.infos.keys() == theirs.infos.keys()
        assert mixed.get_attr("render_mode") == [None] * 6
        np.testing.assert_array_equal(mixed.reset([5, 3]), local.reset([5, 3]))


def test_a_call_that_only_one_lane_rejects_does_not_affect_the_envs(
    addresses: list[str],
) -> None:
    config = make_config("envserve/Ledger-v0", 2, import_modules=(MODULE,))
    with BatchEnv(lanes_of([("", config), (addresses[0], config)])) as batch:
        batch.reset()
        with pytest.raises(CallError, match=r"difficulty: .* 65536 ") as caught:
            batch.set_attr("difficulty", [2, 2, 2, bytes(70_000)])
        assert caught.value.env_index == 3
        assert batch.get_attr("difficulty", [3]) == [1]
        assert batch.step(np.zeros(4, np.int64)).valid.all()
        with pytest.raises(CallError, match="call of 'reset' is not allowed") as caught:
            batch.call(3, "reset")
        assert caught.value.env_index == 3


def test_unequal_spaces_are_an_error_naming_servers(addresses: list[str]) -> None:
    configs = [
        make_config("envserve/Echo-v0", 1, env_kwargs={"space": space})
        for space in ("discrete", "image")
    ]
    lanes = lanes_of(list(zip(addresses, configs, strict=True)))
    with pytest.raises(SpaceError) as caught:
        BatchEnv(lanes)
    for lane in lanes:
        lane.close()
    text = f"{addresses[1]} and {addresses[0]} have different spaces"
    assert text in str(caught.value)
    assert "observation space: expected Discrete(5), got Box(0, 255" in str(
        caught.value
    )


def test_an_unreachable_server_raises_connect_error_at_the_timeout() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening
        port = unused.getsockname()[1]
        for address in (f"tcp://127.0.0.1:{port}", "ipc:///nowhere/envs"):

            def attempt(address: str = address) -> float:
                start = time.monotonic()
                text = rf"{address}: no server .* 0\.3 s"
                with pytest.raises(ConnectError, match=text):
                    BatchEnv.connect("CartPole-v1", [address], 2, connect_timeout=0.3)
                return time.monotonic() - start

            assert fastest(attempt, 3.0) < 3.0


def test_a_failed_connect_leaves_no_envs_leased_on_other_servers(
    addresses: list[str],
) -> None:
    address = addresses[0]
    for _ in range(2):
        with pytest.raises(ConnectError):
            BatchEnv.connect(
                "CartPole-v1", [address, "tcp://127.0.0.1:1"], 4, connect_timeout=0.3
            )
    with BatchEnv.connect("CartPole-v1", [address], 2) as batch:
        assert batch.reset().shape == (2, 4)


def test_a_failed_connect_closes_all_lanes_at_the_same_time(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server takes a second to confirm, if its envs are still being built."""
    events: list[str] = []
    begin_close, close = RemoteLane.begin_close, RemoteLane.close

    def record_begin(lane: RemoteLane) -> None:
        events.append("begin")
        begin_close(lane)

    def record_close(lane: RemoteLane) -> None:
        close(lane)
        events.append("closed")

    monkeypatch.setattr(RemoteLane, "begin_close", record_begin)
    monkeypatch.setattr(RemoteLane, "close", record_close)
    servers = [*addresses, "tcp://127.0.0.1:1"]
    with pytest.raises(ConnectError):
        BatchEnv.connect("CartPole-v1", servers, 3, connect_timeout=1.0)
    assert events[:4] == ["begin", "closed", "begin", "begin"]


def test_a_batch_cannot_be_copied_or_pickled() -> None:
    with BatchEnv.local("CartPole-v1", 1, 1) as batch:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                copied(batch)


#: Keeps the lanes' threads busy, which may run while the interpreter exits.
NOT_CLOSED = """
from envserve.client import BatchEnv
from envserve.client.link import remote_lane
remote_lane._KEEPALIVE_SECONDS = 0.0005
batch = BatchEnv.connect("CartPole-v1", {}, 4)
batch.reset()
"""


def test_a_script_that_does_not_close_its_batch_exits_without_errors(
    addresses: list[str],
) -> None:
    command = [sys.executable, "-c", NOT_CLOSED.format(addresses)]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert ended.stderr == b""


#: The env hangs for longer than the test waits for the script, which ends once its
#: thread waits for a message.
USED_BY_A_THREAD = """
import sys, threading, traceback
from envserve.client import BatchEnv
failures = {{"hang": {{"actions": [1], "seconds": 1000}}}}
kwargs = {{"failures": failures}}
batch = BatchEnv.connect("envserve/Ledger-v0", [{!r}], 1, env_kwargs=kwargs)
batch.reset()
thread = threading.Thread(target=batch.step, args=([1],), daemon=True)
thread.start()
names = []
while "collect" not in names or "receive" not in names:
    stack = traceback.extract_stack(sys._current_frames()[thread.ident])
    names = [frame.name for frame in stack]
"""


def test_a_script_exits_while_a_daemon_thread_waits_for_a_step(
    start_server: StartServer,
) -> None:
    command = [sys.executable, "-c", USED_BY_A_THREAD.format(start_server())]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert ended.stderr == b""


def test_a_garbage_collected_batch_releases_its_envs(
    addresses: list[str], wait_until: WaitUntil
) -> None:
    address = addresses[0]
    batch = BatchEnv.connect("CartPole-v1", [address], 2)
    batch.reset()
    assert request_welcome(address, 20.0).free_envs == 0
    del batch
    gc.collect()
    wait_until(lambda: request_welcome(address, 20.0).free_envs == 2)


#: A wrapper with an argument that can be neither copied nor pickled.
UNPICKLABLE: dict[str, Any] = {"name": "Missing", "argument": threading.Lock()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": "3"}, "num_envs: expected an int; got '3'"),
        ({"num_envs": 2, "seed": "x"}, "seed: expected an int; got 'x'"),
        ({"num_envs": 2, "num_workers": 0}, "num_workers: expected an int >= 1; got 0"),
        ({"num_envs": 2, "padding_after": "x"}, "padding_after: expected .*got 'x'"),
        ({"num_envs": 2, "import_modules": [math]}, "expected a list of modules and"),
        ({"num_envs": 2, "import_modules": math}, "expected a list of modules and"),
        ({"num_envs": 2, "import_modules": Path("a.py")}, "expected a list of modules"),
        ({"num_envs": 2, "wrappers": [UNPICKLABLE]}, "no wrapper named 'Missing'"),
        ({"num_envs": 2, "addresses": "tcp://a:1"}, "expected a list of addresses"),
        ({"num_envs": 2, "addresses": 5555}, "expected a list of addresses"),
        ({"num_envs": 2, "addresses": []}, "one env per server"),
        ({"num_envs": 2, "addresses": ["tcp://127.0.0.1:1"] * 3}, "one env per server"),
    ],
)
def test_error_messages_name_arguments_of_a_wrong_type_or_size(
    arguments: dict[str, Any], message: str
) -> None:
    make = BatchEnv.connect if "addresses" in arguments else BatchEnv.local
    with pytest.raises((TypeError, ValueError), match=message):
        make("CartPole-v1", **arguments)


def test_seeds_and_attribute_values_must_be_one_per_env() -> None:
    with BatchEnv.local("CartPole-v1", 2, 1) as batch:
        wrong: Any
        for wrong, text in ((3, "3"), ("ab", "'ab'"), ([1], "1")):
            with pytest.raises(ValueError, match=f"2 values, one per env; got {text}$"):
                batch.set_attr("gravity", wrong)
            with pytest.raises(ValueError, match=f"2 seeds, one per env; got {text}$"):
                batch.reset(seeds=wrong)


def test_workers_are_replaced_after_a_script_has_changed_the_spaces() -> None:
    with BatchEnv.local("CartPole-v1", 2, 1, padding_after=math.inf) as batch:
        spaces: Any = batch.observation_space, batch.action_space
        spaces[0].dtype, spaces[1].n = np.float16, 5
        batch.reset()
        pool: Any = batch.lanes[0]
        kill(pool.worker_pids[0])
        assert not batch.step([0, 0]).valid.any()
        result = batch.step([0, 0])
        assert result.valid.all()
        assert result.observation.dtype == np.float32


def test_rows_are_spread_evenly_over_servers(addresses: list[str]) -> None:
    with BatchEnv.connect("CartPole-v1", addresses, 3, seed=0) as batch:
        assert [lane.num_envs for lane in batch.lanes] == [1, 2]
        assert [lane.name for lane in batch.lanes] == addresses
