"""SIGTERM drains a server: episodes finish, rows are correct, and it exits with 0."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from envserve.errors import LeaseLost, ServerDraining
from envserve.server.signals import ShutdownSignals
from tests.envserve.conftest import Join, Serve, WaitUntil
from tests.envserve.server_process import ServerProcess
from tests.envserve.session_client import SessionClient
from tests.oracle.ledger_env import ledger_hash


def step_and_check(client: SessionClient, action: int) -> bool:
    """Step all envs, and check their rows; return False once the session is lost."""
    before = client.session.rows.observation[0].copy()
    outcomes = client.step(action)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        assert len(errors) == len(outcomes), "the blocks of a request end together"
        assert all(isinstance(error, LeaseLost) for error in errors)
        return False
    rows = client.session.rows
    np.testing.assert_array_equal(rows.reward, [action] * len(before))
    for old, new in zip(before, rows.observation[0], strict=True):
        assert int(new[3]) == ledger_hash(int(old[3]), action)
    return True


def test_running_episodes_end_and_every_transition_is_correct(
    serve: Serve, join: Join
) -> None:
    server = serve("--drain-grace", "60")
    client = join(server)
    client.reset()
    for action in range(13):
        assert step_and_check(client, action)
    server.signal(signal.SIGTERM)
    num_ends = np.zeros(4, np.int64)
    rows = client.session.rows
    for action in range(1000):
        if client.is_over or not step_and_check(client, action):
            break
        num_ends += rows.terminated | rows.truncated
    assert "each env of the lease ended an episode" in client.wait_for_end()
    assert num_ends.min() >= 1
    assert "Traceback" not in check_end(server)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_episode_that_does_not_end_is_cut_off_at_the_end_of_the_grace_period(
    serve: Serve, join: Join, number: int
) -> None:
    server = serve("--drain-grace", "0.4", "--allow-kwarg", "length")
    idle = join(server, 3, session=6)
    client = join(server, env_kwargs={"length": 1 << 40})
    client.reset()
    server.signal(number)
    while not client.is_over and step_and_check(client, 7):
        idle.pump()
    for each in (client, idle):
        assert "drained: its grace period of 0.4 s" in each.wait_for_end()
    check_end(server)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_cuts_the_drain_short(
    serve: Serve, join: Join, number: int, wait_until: WaitUntil
) -> None:
    server = serve("--drain-grace", "600")
    client = join(server)
    client.reset()
    server.signal(signal.SIGTERM)
    wait_until(lambda: server.welcome().is_draining)
    assert isinstance(join(server, session=6).session.error, ServerDraining)
    assert step_and_check(client, 1)
    server.signal(number)
    assert "a second signal requested an immediate stop" in client.wait_for_end()
    check_end(server)


async def test_the_first_sigterm_does_not_cut_short_a_drain_that_has_begun() -> None:
    """A terminal that is closed, or `envserve drain`, may have started the drain."""
    loop, is_handled = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, is_handled.set)
    try:
        with ShutdownSignals(loop) as signals:
            signals.requested.set()
            for number in (signal.SIGTERM, signal.SIGUSR1):  # handled in this order
                os.kill(os.getpid(), number)
            await is_handled.wait()
            assert not signals.immediate.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            await signals.immediate.wait()
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)


def test_a_silent_client_cannot_delay_the_end(serve: Serve, join: Join) -> None:
    server = serve("--drain-grace", "0.2")
    join(server)  # from now on, this client neither sends nor reads
    assert "stopped before all clients had acknowledged" in server.end(signal.SIGTERM)


def test_without_grace_period_a_server_stops_immediately(
    serve: Serve, join: Join
) -> None:
    server = serve("--drain-grace", "0")
    client = join(server)
    server.signal(signal.SIGTERM)
    assert "the server was stopped" in client.wait_for_end()
    check_end(server)


#: `envserve` on a host where no further thread can be started.
WITHOUT_THREADS = (
    "-c",
    "import asyncio\n"
    'async def fail(*_): raise RuntimeError("can\'t start new thread")\n'
    "asyncio.to_thread = fail\n"
    "from envserve.cli.app import main\n"
    "main()",
)


def test_clients_are_notified_of_a_stop_even_if_no_thread_can_be_started(
    serve: Serve, join: Join, tmp_path: Path
) -> None:
    bind = (f"ipc://{tmp_path}/envs",)  # without keys, the server needs no thread
    options = ("--metrics-port", "0", "--drain-grace", "0")
    server = serve(*options, bind=bind, program=WITHOUT_THREADS)
    client = join(server)
    server.signal(signal.SIGTERM)
    assert "the server was stopped" in client.wait_for_end()
    check_end(server)


def check_end(server: ServerProcess) -> str:
    log = server.end()
    assert server.process.returncode == 0, log
    return log
