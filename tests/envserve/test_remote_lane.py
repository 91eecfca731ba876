"""Remote lanes: keepalive, descriptors, large messages, reconnection and closing."""

from __future__ import annotations

import logging
import math
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from envserve.client.link import connection, remote_lane
from envserve.client.link.connection import Connection
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.session_driver import SessionDriver
from envserve.errors import ConnectError, EnvStartError, LocalProtocolError, ServerLost
from envserve.session.client import client_session, requests
from envserve.session.client.liveness import Timeouts
from envserve.slab import Status
from envserve.spaces import codec
from tests.chaos.network_faults import NetworkFaults
from tests.chaos.proxy import Proxy
from tests.envserve.conftest import Attach, Serve, WaitUntil, bind_for
from tests.envserve.pool_driver import gather, step
from tests.envserve.server_process import ServerProcess, make_config
from tests.envserve.session_fakes import make_call
from tests.envserve.stalls import fastest


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    options = ("--lease-seconds", "3", "--allow-kwarg", "reset_seconds")
    with ServerProcess(folder, *options) as server:
        yield server


@pytest.fixture
def lane(server: ServerProcess, attach: Attach) -> RemoteLane:
    return attach(server)


def finish(lane: RemoteLane) -> None:
    """Collect both blocks; check that neither has an error or a fault."""
    for outcome in gather(lane, [0, 1]):
        assert (outcome.error, list(outcome.faults)) == (None, [])


def submit(lane: RemoteLane, action: int) -> None:
    lane.rows.action[0][:] = action
    lane.submit_step([0, 1])


def test_an_idle_lane_keeps_its_lease(lane: RemoteLane) -> None:
    threading.Event().wait(3.5)  # longer than the 3 s lease
    submit(lane, 1)
    finish(lane)


def test_messages_received_by_the_keepalive_thread_make_the_descriptor_readable(
    lane: RemoteLane, wait_until: WaitUntil
) -> None:
    operations = lane._session.client_blocks
    for action in range(3):
        submit(lane, action)
        wait_until(
            lambda: len(operations.uncollected) == 2
        )  # received by the keep-alive thread
        assert select.select([lane.fileno()], [], [], 20)[0]
        assert len(lane.collect(0)) == 2
        assert lane.collect(0) == []
        assert not select.select([lane.fileno()], [], [], 0)[0]


def test_the_descriptor_shows_every_result(lane: RemoteLane) -> None:
    for action in range(300):
        submit(lane, action)
        left = 2
        while left:
            assert select.select([lane.fileno()], [], [], 30)[0]
            left -= len(lane.collect(0))


def test_a_lane_is_watched_until_the_caller_waits_for_it_alone(
    lane: RemoteLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a lane is watched, `submit` polls, so that the descriptor signals."""
    caller, polls = threading.get_ident(), list[Connection]()
    run, poll = SessionDriver.run, Connection.poll

    def run_without_deadline(driver: SessionDriver, now: float) -> None:
        run(driver, now)
        driver.due_at = math.inf  # no run is due

    def record_poll(connection: Connection) -> tuple[bool, bool]:
        if threading.get_ident() == caller:  # and not the keep-alive thread
            polls.append(connection)
        return poll(connection)

    monkeypatch.setattr(SessionDriver, "run", run_without_deadline)
    monkeypatch.setattr(Connection, "poll", record_poll)

    def polls_in_submit() -> bool:
        polls.clear()
        submit(lane, 1)
        return bool(polls)

    lane.fileno()
    assert polls_in_submit()
    assert len(lane.collect(20.0, 2)) == 2
    assert not polls_in_submit()
    assert select.select([lane.fileno()], [], [], 20)[0]


def test_a_block_is_not_absent_once_its_result_was_collected(
    lane: RemoteLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, its next step would be padding with an outdated observation."""
    run = SessionDriver.run

    def receive_results_of_absent_blocks(driver: SessionDriver, now: float) -> None:
        run(driver, now)
        blocks = driver.session.client_blocks
        blocks.absent, blocks.absent_is_stale = frozenset({0, 1}), True

    lane.fileno()
    submit(lane, 1)
    monkeypatch.setattr(SessionDriver, "run", receive_results_of_absent_blocks)
    monkeypatch.setattr(SessionDriver, "is_idle", lambda *_: False)
    left = {0, 1}
    while left:
        left -= {outcome.block for outcome in lane.collect(0)}
        assert lane.absent <= left


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_large_rows_are_received_completely(
    serve: Serve,
    attach: Attach,
    transport: str,
    tmp_path: Path,
    random_generator: np.random.Generator,
) -> None:
    """Rows of this size are sent and received without copying."""
    options = ("--allow-kwarg", "space:any", "--max-message-mib", "4")
    server = serve(*options, bind=(bind_for(transport, tmp_path),))
    lane = attach(server, "envserve/Echo-v0", 24, env_kwargs={"space": "image"})
    shape = lane.rows.action[0].shape
    for _ in range(40):
        actions = random_generator.integers(0, 256, shape, np.uint8)
        lane.rows.action[0][:] = actions
        lane.submit_step([0, 1])
        finish(lane)
        np.testing.assert_array_equal(lane.rows.observation[0], actions)


_PICTURES = """
import gymnasium, numpy
from gymnasium.envs.classic_control import CartPoleEnv
class PictureEnv(CartPoleEnv):
    def picture(self, size):
        return numpy.full(size, 7, numpy.uint8)
gymnasium.register("Picture-v0", PictureEnv)
"""


def test_large_results_of_calls_are_received_completely(
    tmp_path: Path, serve: Serve, attach: Attach
) -> None:
    """The first call opens a new connection with a higher frame size limit."""
    (tmp_path / "picture_envs.py").write_text(_PICTURES)
    options = ("--import", "picture_envs", "--expose", "picture")
    lane = attach(serve(*options, cwd=tmp_path), "Picture-v0")
    for _ in range(2):
        lane.submit_call([make_call([0], "call", "picture", 3 << 20)])
        (outcome,) = gather(lane, [0])
        (picture,) = codec.decode(outcome.result, max_bytes=4 << 20)
        np.testing.assert_array_equal(picture, np.full(3 << 20, 7))
    submit(lane, 1)
    finish(lane)


def test_collect_returns_nothing_after_its_timeout_or_if_nothing_is_in_flight(
    server: ServerProcess, lane: RemoteLane
) -> None:
    started = time.monotonic()
    assert lane.collect(20.0) == []
    assert time.monotonic() - started < 15
    server.signal(signal.SIGSTOP)
    submit(lane, 1)
    started = time.monotonic()
    assert lane.collect(0.2) == []
    assert 0.2 <= time.monotonic() - started < 15
    server.signal(signal.SIGCONT)
    finish(lane)


def test_blocks_of_a_killed_server_are_absent_until_the_server_counts_as_lost(
    serve: Serve, attach: Attach
) -> None:
    server = serve()
    lane = attach(server, patience=Timeouts(lost_seconds=6.0, pads_lost_rows=True))
    seen = lane.rows.observation[0].copy()
    server.signal(signal.SIGKILL)
    submit(lane, 1)
    assert lane.collect(20.0) == []
    assert lane.absent == {0, 1}
    assert lane.give_up_error is None
    np.testing.assert_array_equal(lane.rows.final_observation[0], seen)
    started = time.monotonic()
    while lane.give_up_error is None:
        assert lane.collect(0.1) == []
        assert time.monotonic() - started < 60
    assert isinstance(lane.give_up_error, ServerLost)
    assert lane.is_busy


def test_a_lane_that_loses_its_envs_leases_new_ones(lane: RemoteLane) -> None:
    submit(lane, 1)
    finish(lane)
    lane.submit_step([0])
    lane.invalidate("it was enough")
    assert not lane.is_busy
    outcomes = step(lane, 2)
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    assert {fault.status for fault in faults} == {Status.SERVER_LOST}
    assert "it was enough" in faults[0].text
    submit(lane, 3)
    finish(lane)
    np.testing.assert_array_equal(lane.rows.reward, 3)
    assert lane.stats()["reattaches"] == 1


def test_a_lane_can_be_closed_twice_and_then_not_be_used(lane: RemoteLane) -> None:
    assert repr(lane) == f"<RemoteLane {lane.name} READY, 0 in flight>"
    lane.close()
    lane.close()
    assert "CLOSED" in repr(lane)
    with pytest.raises(LocalProtocolError):
        lane.collect(0)
    with pytest.raises(LocalProtocolError):
        lane.submit_step([0])


def test_closing_takes_no_longer_than_two_seconds_if_the_server_hangs(
    server: ServerProcess, attach: Attach
) -> None:
    def attempt() -> float:
        lane = attach(server)
        lane.submit_step([0, 1])
        server.signal(signal.SIGSTOP)
        started = time.monotonic()
        lane.close()
        seconds = time.monotonic() - started
        server.signal(signal.SIGCONT)
        return seconds

    assert fastest(attempt, 4.0) < 4.0


def test_closing_does_not_wait_for_a_keepalive_thread_that_is_blocked(
    serve: Serve, attach: Attach, wait_until: WaitUntil
) -> None:
    lane = attach(server := serve())
    is_blocked, may_continue, has_continued = (threading.Event() for _ in range(3))

    def block(_: logging.LogRecord) -> bool:
        is_blocked.set()
        may_continue.wait(60)
        has_continued.set()
        return False

    logger = logging.getLogger(client_session.__name__)
    logger.addFilter(block)
    try:
        server.signal(signal.SIGKILL)
        assert is_blocked.wait(60)
        lane.close()
        assert not has_continued.is_set()
    finally:
        logger.removeFilter(block)
        may_continue.set()
    name = f"keepalive of {server.address}"
    wait_until(lambda: all(each.name != name for each in threading.enumerate()))


def test_lanes_finish_their_start_in_any_order(
    server: ServerProcess, wait_until: WaitUntil
) -> None:
    config = make_config(num_envs=2, env_kwargs={"reset_seconds": 0.0})
    lanes = [RemoteLane(server.address, config) for _ in range(3)]
    for lane in reversed(lanes):
        lane.finish_start(time.monotonic() + 40)
    # The envs of earlier tests may be freed only now.
    wait_until(lambda: server.welcome().free_envs == 128 - 6)
    for lane in lanes:
        lane.close()


def test_malformed_addresses_and_unencodable_arguments_are_errors() -> None:
    with pytest.raises(ConnectError, match="expected an address like tcp://"):
        RemoteLane("sim1:5555", make_config())
    with pytest.raises(EnvStartError, match="env_kwargs"):
        RemoteLane("ipc:///tmp/none", make_config(env_kwargs={"factory": print}))


def collect_by_descriptor(lane: RemoteLane, deadline: float) -> int:
    """Wait for the descriptor, and collect once; return the number of blocks."""
    select.select([lane.fileno()], [], [], max(0.0, deadline - time.monotonic()))
    return len(lane.collect(0))


def test_waiting_for_the_descriptor_resends_once_there_is_a_connection(
    server: ServerProcess, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Disable all timers, so that only the descriptor wakes the lane.
    monkeypatch.setattr(requests, "_FIRST_RESEND_SECONDS", 1000.0)
    monkeypatch.setattr(remote_lane, "_KEEPALIVE_SECONDS", 1000.0)
    monkeypatch.setattr(remote_lane, "SLICE_SECONDS", 1000.0)
    monkeypatch.setattr(connection, "SLICE_SECONDS", 1000.0)
    with Proxy(server.address) as proxy:
        lane = attach(proxy.address)
        lane.fileno()
        proxy.change(to_server=NetworkFaults(drop=1.0))
        submit(lane, 7)
    deadline = time.monotonic() + 40
    while lane._driver._is_connected:
        assert collect_by_descriptor(lane, deadline) == 0
        assert time.monotonic() < deadline
    with Proxy(server.address, port=int(proxy.address.rpartition(":")[2])):
        left = 2
        while left:
            left -= collect_by_descriptor(lane, deadline)
            assert time.monotonic() < deadline
        np.testing.assert_array_equal(lane.rows.reward, [7, 7, 7, 7])
        lane.close()
