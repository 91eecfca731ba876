"""A real server, real sockets: who gets envs, who does not, and when they are free."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lab.processes import is_running, with_descendants
from envserve.client.connection import Connection, Exchange
from envserve.client.remote_lane import RemoteLane
from envserve.errors import (
    ActionError,
    ConnectError,
    EnvsBusy,
    EnvStartError,
    ServerLost,
    UnknownEnv,
)
from envserve.lane import Outcome, Reset
from envserve.session import ClientSession, ClientState
from envserve.wire import (
    Attach,
    ErrorBody,
    ErrorCode,
    Hello,
    Message,
    MessageType,
    decode,
    encode,
)
from tests.envserve.server_process import LEDGER, ServerProcess, make_config

WaitUntil = Callable[..., None]


def attach(server: ServerProcess, *args: object, **changes: object) -> RemoteLane:
    lane = RemoteLane(server.address, make_config(*args, **changes))  # type: ignore[arg-type]
    lane.finish_start(time.monotonic() + 20)
    lane.submit_reset([Reset(block.index) for block in lane.blocks])
    collect_all(lane)
    return lane


def step(lane: RemoteLane, action: int) -> list[Outcome]:
    lane.rows.action[0][:] = action
    lane.submit_step(range(len(lane.blocks)))
    return collect_all(lane)


def collect_all(lane: RemoteLane) -> list[Outcome]:
    """The outcomes of all blocks; envs may be absent meanwhile."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(lane.blocks):
        outcomes += lane.collect(20)
    return outcomes


def silent_client(server: ServerProcess, num_envs: int) -> Connection:
    """Attaches, and then says nothing any more."""
    connection = Connection(server.address)
    session = ClientSession(
        server.address,
        Attach(env_name=LEDGER, num_envs=num_envs, seed=1),
        session=5,
        now=time.monotonic(),
    )
    exchange = Exchange(session, connection)
    while session.state is not ClientState.READY:
        exchange.run(time.monotonic())
        exchange.wait(math.inf)
    return connection


def test_two_sessions_have_envs_of_their_own(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        first, second = attach(server), attach(server, "CartPole-v1", 3)
        assert server.welcome().free_envs == 128 - 7
        step(first, 5)
        step(second, 1)
        step(first, 6)
        np.testing.assert_array_equal(first.rows.reward, [6, 6, 6, 6])
        np.testing.assert_array_equal(second.rows.reward, [1, 1, 1])
        first.close()
        assert server.welcome().free_envs == 128 - 3
        step(second, 0)
        second.close()


def test_a_busy_server_says_how_many_envs_are_free(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--envs-per-worker", "3") as server:
        lane = attach(server, LEDGER, 5)
        with pytest.raises(EnvsBusy, match="2 envs asked for, 1 of 6 free") as caught:
            attach(server, LEDGER, 2)
        assert server.address in str(caught.value)
        lane.close()
        attach(server, LEDGER, 6).close()


def test_an_unknown_env_names_near_matches(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, "--env", "CartPole-v1") as server,
        pytest.raises(UnknownEnv, match="did you mean CartPole-v1"),
    ):
        attach(server, "CartPole-v7")


def test_an_env_that_is_registered_but_not_offered_is_unknown(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, "--env", "CartPole-v1") as server,
        pytest.raises(UnknownEnv, match="is offered"),
    ):
        attach(server, "Pendulum-v1")


def test_arguments_are_refused_unless_allowed(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--allow-kwarg", "length") as server:
        attach(server, env_kwargs={"length": 3, "render_mode": "rgb_array"}).close()
        with pytest.raises(EnvStartError, match="'reset_seconds' is not allowed"):
            attach(server, env_kwargs={"reset_seconds": 9.0})


def test_an_invalid_action_costs_nothing(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        lane = attach(server)
        step(lane, 1)
        before = lane.rows.observation[0].copy()
        for outcome in step(lane, 1000):
            assert isinstance(outcome.error, ActionError)
            assert "Env 0" in str(outcome.error)
            assert server.address in str(outcome.error)
        assert all(outcome.error is None for outcome in step(lane, 2))
        np.testing.assert_array_equal(
            lane.rows.observation[0][:, 2], before[:, 2] + 1, "steps of the episode"
        )
        lane.close()


def test_a_constructor_that_raises_gives_its_traceback(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--allow-kwarg", "fault") as server:
        with pytest.raises(EnvStartError, match="no simulator licence") as caught:
            attach(server, "envserve/Faulty-v0", env_kwargs={"fault": "raise_in_init"})
        assert "Traceback" in caught.value.remote_traceback
        assert server.address in str(caught.value)
        assert server.welcome().free_envs == 128


def test_no_server_is_an_error_at_the_deadline() -> None:
    lane = RemoteLane("ipc:///nowhere/envs", make_config(), connect_timeout_seconds=0.3)
    started = time.monotonic()
    with pytest.raises(ConnectError, match=r"ipc:///nowhere/envs: no server .* 0\.3 s"):
        lane.finish_start(started + 20)
    assert time.monotonic() - started < 5


def test_a_client_of_another_version_is_told_both(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        connection = Connection(server.address)
        hello = Hello(min_version=200, max_version=201).encode()
        message = Message(type=MessageType.HELLO, version=201, body=hello)
        while not connection.send(encode(message)):
            connection.wait(1.0, for_writing=True)
        while (frames := connection.receive()) is None:
            connection.wait(5.0, for_writing=False)
        connection.close()
        body = ErrorBody.decode(decode(frames).body)
        assert body.code is ErrorCode.VERSION_MISMATCH
        assert "200 to 201" in body.text


def test_a_silent_clients_envs_are_freed_when_its_lease_ends(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    with ServerProcess(tmp_path, "--lease-seconds", "1.5") as server:
        connection = silent_client(server, 100)
        with pytest.raises(EnvsBusy):
            attach(server, LEDGER, 100)
        wait_until(lambda: server.welcome().free_envs == 128)
        connection.close()
        attach(server, LEDGER, 100).close()


_CLIENT = f"""
import sys, threading, time
sys.path[:] = {sys.path!r}
from tests.envserve.server_process import make_config
from envserve.client.remote_lane import RemoteLane
lane = RemoteLane(sys.argv[1], make_config())
lane.finish_start(time.monotonic() + 20)
print("attached", flush=True)
if len(sys.argv) == 2:
    threading.Event().wait()
"""


def start_client(server: ServerProcess, *arguments: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, server.address, *arguments],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"attached\n"
    process.stdout.close()
    return process


def test_a_killed_clients_envs_are_freed(tmp_path: Path, wait_until: WaitUntil) -> None:
    with ServerProcess(tmp_path, "--lease-seconds", "1.5") as server:
        client = start_client(server)
        assert server.welcome().free_envs == 124
        client.kill()
        client.wait()
        wait_until(lambda: server.welcome().free_envs == 128)


def test_a_client_that_forgets_to_close_can_still_exit(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        client = start_client(server, "and end")
        assert client.wait(timeout=10) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_server_tells_its_clients_and_leaves_nothing(
    tmp_path: Path, number: int, wait_until: WaitUntil
) -> None:
    with ServerProcess(
        tmp_path, "--drain-grace", "0", bind=(f"ipc://{tmp_path}/envs",)
    ) as server:
        lane = RemoteLane(server.address, make_config(), server_lost_after_seconds=1.0)
        lane.finish_start(time.monotonic() + 20)
        processes = with_descendants(server.process.pid)[1:]
        assert len(processes) >= 2
        log = server.end(number)
        wait_until(lambda: not any(is_running(pid) for pid in processes), 2.0)
        (outcome, *_) = step_lost(lane)
        assert isinstance(outcome.error, ServerLost)
        assert "the server was stopped" in str(outcome.error)
        lane.close()
        assert "Traceback" not in log


def step_lost(lane: RemoteLane) -> list[Outcome]:
    """The outcomes of a step on a lane that is lost, now or in a moment."""
    try:
        lane.submit_step(range(len(lane.blocks)))
    except ServerLost as error:
        return [Outcome(0, error=error)]
    return collect_all(lane)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_server_is_lost_and_its_workers_are_gone(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    with ServerProcess(tmp_path) as server:
        lane = RemoteLane(server.address, make_config(), server_lost_after_seconds=1.0)
        lane.finish_start(time.monotonic() + 20)
        processes = with_descendants(server.process.pid)[1:]
        server.signal(signal.SIGKILL)
        server.end()
        wait_until(lambda: not any(is_running(pid) for pid in processes), 2.0)
        outcomes = step_lost(lane)
        assert [type(outcome.error) for outcome in outcomes] == [ServerLost] * 2
        assert server.address in str(outcomes[0].error)
        with pytest.raises(ServerLost):
            lane.submit_step([0])
        lane.close()


def test_a_worker_that_dies_costs_other_sessions_nothing(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--allow-kwarg", "fault") as server:
        lane = attach(server)
        faulty = attach(server, "envserve/Faulty-v0", 2, env_kwargs={"fault": "kill"})
        step(lane, 3)
        outcomes = step(faulty, 1)
        assert sum(len(outcome.faults) for outcome in outcomes) == 2
        assert faulty.rows.truncated.all()
        assert not any(outcome.faults for outcome in step(lane, 4))
        np.testing.assert_array_equal(lane.rows.observation[0][:, 2], [2, 2, 2, 2])
        lane.close()
        faulty.close()


def test_a_server_listens_on_all_its_addresses(tmp_path: Path) -> None:
    binds = (f"ipc://{tmp_path}/envs", "tcp://127.0.0.1:0", "tcp://[::1]:0")
    with ServerProcess(tmp_path, bind=binds) as server:
        assert len(server.addresses) == 3
        assert all(address in server.ready_line for address in server.addresses)
        for address in server.addresses:
            lane = RemoteLane(address, make_config())
            lane.finish_start(time.monotonic() + 20)
            lane.close()
