"""Sessions with a real server: leases are granted, rejected and ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.support.processes import is_running, with_descendants
from envserve.client.link.remote_lane import RemoteLane
from envserve.errors import EnvsBusy, EnvStartError, ServerLost, UnknownEnv
from envserve.lane import Outcome
from envserve.session.client.liveness import Timeouts
from tests.envserve.conftest import Attach, Join, Serve, WaitUntil
from tests.envserve.pool_driver import FAULTY, step
from tests.envserve.server_process import LEDGER, ServerProcess


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    allowed = ("--allow-kwarg", "length", "--allow-kwarg", "fault:any")
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, "--lease-seconds", "4", *allowed) as server:
        yield server


@pytest.fixture
def server(shared_server: ServerProcess, wait_until: WaitUntil) -> ServerProcess:
    """A server that all tests share, once the envs of earlier tests are free."""
    wait_until(lambda: shared_server.welcome().free_envs == 128)
    return shared_server


def step_lost(lane: RemoteLane) -> list[Outcome]:
    """Return the outcomes of a step on a lane that is lost, or soon will be."""
    try:
        return step(lane, 0)
    except ServerLost as error:
        return [Outcome(0, error=error)]


def test_two_sessions_have_separate_envs(server: ServerProcess, attach: Attach) -> None:
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


def test_an_env_that_is_not_offered_is_an_error_with_similar_names(
    serve: Serve, attach: Attach
) -> None:
    server = serve("--env", "CartPole-v1")
    with pytest.raises(UnknownEnv, match="did you mean CartPole-v1"):
        attach(server, "CartPole-v7")
    with pytest.raises(UnknownEnv, match="there is only CartPole-v1"):
        attach(server, "Pendulum-v1")


def test_arguments_are_rejected_unless_allowed(
    server: ServerProcess, attach: Attach
) -> None:
    attach(server, env_kwargs={"length": 3, "render_mode": "rgb_array"})
    with pytest.raises(EnvStartError, match="'reset_seconds' may not be"):
        attach(server, env_kwargs={"reset_seconds": 9.0})


def test_the_envs_of_a_silent_client_are_freed_when_its_lease_expires(
    server: ServerProcess, join: Join, attach: Attach, wait_until: WaitUntil
) -> None:
    join(server, 100)  # from now on, this client sends nothing
    with pytest.raises(EnvsBusy):
        attach(server, LEDGER, 100)
    wait_until(lambda: server.welcome().free_envs == 128)
    attach(server, LEDGER, 100)


_CLIENT = f"""
import sys, threading, time
sys.path[:] = {sys.path!r}
from tests.envserve.server_process import make_config
from envserve.client.link.remote_lane import RemoteLane
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


def test_the_envs_of_a_killed_client_are_freed(
    server: ServerProcess, wait_until: WaitUntil
) -> None:
    client = start_client(server)
    assert server.welcome().free_envs == 124
    client.kill()
    client.wait()
    wait_until(lambda: server.welcome().free_envs == 128)


def test_a_client_that_does_not_close_its_lane_can_exit(server: ServerProcess) -> None:
    assert start_client(server, "exit").wait(timeout=60) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_server_that_ends_leaves_no_processes_and_its_lane_is_lost(
    serve: Serve, attach: Attach, tmp_path: Path, number: int, wait_until: WaitUntil
) -> None:
    """A stopping server notifies its clients; a killed one is lost after a timeout."""
    server = serve("--drain-grace", "0", bind=(f"ipc://{tmp_path}/envs",))
    lane = attach(server, patience=Timeouts(lost_seconds=1.0))
    processes = with_descendants(server.process.pid)[1:]
    assert len(processes) >= 2
    server.signal(number)
    log = server.end()
    wait_until(lambda: not any(is_running(pid) for pid in processes))
    assert "Traceback" not in log
    outcomes = step_lost(lane)
    assert {type(outcome.error) for outcome in outcomes} == {ServerLost}
    assert server.address in str(outcomes[0].error)
    if number == signal.SIGKILL:
        assert len(outcomes) == 2
    else:
        assert server.process.returncode == 0
        assert "the server was stopped" in str(outcomes[0].error)
    with pytest.raises(ServerLost):
        lane.submit_step([0])


def test_a_dead_worker_does_not_affect_other_sessions(
    server: ServerProcess, attach: Attach
) -> None:
    lane = attach(server)
    faulty = attach(server, FAULTY, 2, env_kwargs={"fault": "kill"})
    step(lane, 3)
    outcomes = step(faulty, 1)
    assert sum(len(outcome.faults) for outcome in outcomes) == 2
    assert faulty.rows.truncated.all()
    assert not any(outcome.faults for outcome in step(lane, 4))
    np.testing.assert_array_equal(lane.rows.observation[0][:, 2], [2, 2, 2, 2])


def test_a_server_listens_on_all_its_addresses(
    serve: Serve, attach: Attach, tmp_path: Path
) -> None:
    binds = (f"ipc://{tmp_path}/envs", "tcp://127.0.0.1:0", "tcp://[::1]:0")
    server = serve(bind=binds)
    assert len(server.addresses) == 3
    for address in server.addresses:
        assert address in server.ready_line
        attach(address)
