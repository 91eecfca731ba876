"""SIGTERM to a real server: episodes end, nothing wrong is delivered, exit code 0."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from envserve.errors import LeaseLost, ServerDraining
from envserve.testing import ledger_hash
from tests.envserve.server_process import ServerProcess
from tests.envserve.session_client import SessionClient

WaitUntil = Callable[..., None]


def step_and_check(client: SessionClient, action: int) -> bool:
    """Steps all envs, and looks at their books; False once the session is lost."""
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


@pytest.mark.parametrize("num_steps_before", [1, 13])
def test_running_episodes_end_and_every_transition_is_right(
    tmp_path: Path, num_steps_before: int
) -> None:
    with (
        ServerProcess(tmp_path, "--drain-grace", "60") as server,
        SessionClient(server.address) as client,
    ):
        client.reset()
        for action in range(num_steps_before):
            assert step_and_check(client, action)
        server.signal(signal.SIGTERM)
        num_ends = np.zeros(4, np.int64)
        rows = client.session.rows
        for action in range(1000):
            if client.is_over or not step_and_check(client, action):
                break
            num_ends += rows.terminated | rows.truncated
        client.wait_for_end()
        assert num_ends.min() >= 1
        assert "each of its envs ended an episode" in str(client.session.error)
        log = server.end()
        assert server.process.returncode == 0, log
        assert "Traceback" not in log


def test_an_episode_that_does_not_end_is_cut_off_at_the_end_of_the_grace_period(
    tmp_path: Path,
) -> None:
    with (
        ServerProcess(
            tmp_path, "--drain-grace", "0.4", "--allow-kwarg", "length"
        ) as server,
        SessionClient(server.address, 3, session=6) as idle,
        SessionClient(server.address, env_kwargs={"length": 1 << 40}) as client,
    ):
        client.reset()
        server.signal(signal.SIGTERM)
        while not client.is_over and step_and_check(client, 7):
            idle.pump()
        for each in (client, idle):
            each.wait_for_end()
            assert "drained: its grace period of 0.4 s" in str(each.session.error)
        log = server.end()
        assert server.process.returncode == 0, log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_cuts_the_drain_short(
    tmp_path: Path, number: int, wait_until: WaitUntil
) -> None:
    with (
        ServerProcess(tmp_path, "--drain-grace", "600") as server,
        SessionClient(server.address) as client,
    ):
        client.reset()
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.welcome().is_draining)
        with SessionClient(server.address, session=6) as other:
            assert isinstance(other.session.error, ServerDraining)
        assert step_and_check(client, 1)
        server.signal(number)
        client.wait_for_end()
        assert "it was told not to wait" in str(client.session.error)
        log = server.end()
        assert server.process.returncode == 0, log


def test_a_client_that_does_not_answer_cannot_hold_the_end_up(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, "--drain-grace", "0.2") as server,
        SessionClient(server.address),  # which says and reads nothing from now on
    ):
        server.signal(signal.SIGTERM)
        log = server.end()
        assert server.process.returncode == 0, log
        assert "stopped before all clients knew" in log


def test_without_a_grace_period_a_server_stops_at_once(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, "--drain-grace", "0") as server,
        SessionClient(server.address) as client,
    ):
        server.signal(signal.SIGTERM)
        client.wait_for_end()
        assert "the server was stopped" in str(client.session.error)
        log = server.end()
        assert server.process.returncode == 0, log
