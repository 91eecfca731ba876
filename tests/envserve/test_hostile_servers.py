"""Servers that break the protocol on purpose: what a client of theirs loses is a batch.

Never its memory, and never its deadlines. See `hostile_server` for what they do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.client.link.remote_lane import RemoteLane
from envserve.errors import EnvTimeout, RemoteProtocolError, ServerError
from envserve.wire.constants import MessageType
from tests.envserve.hostile_server import HostileServer
from tests.envserve.server_process import make_config

Host = Callable[..., str]

#: Endless messages that nobody has asked for, after a STEP.
FLOODS = [
    *("pongs", "late results", "others' results", "no messages", "drains", "absent"),
    *("long results", "results of long frames"),
]
NUM_ENVS = 4
ACTIONS = np.zeros(NUM_ENVS, np.int64)
#: What a loaded machine may need beyond a deadline; a pump without a budget never ends.
SLACK_SECONDS = 20.0
MAX_GROWTH_BYTES = 64 << 20


@pytest.fixture
def host() -> Iterator[Host]:
    """Starts hostile servers; returns their addresses."""
    with ExitStack() as stack:
        yield lambda *script: stack.enter_context(HostileServer(*script)).address


def connect(address: str) -> BatchEnv:
    """Connects a batch in which nothing is padding."""
    return BatchEnv.connect(
        *("Hostile-v0", [address], NUM_ENVS), seed=0, padding_after=60.0
    )


class PeakMemory:
    """Most memory that this process has had since this was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    def growth(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith(name)]
        return int(line.split()[1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("script", FLOODS)
def test_a_flood_moves_no_deadline_takes_no_memory_and_ends_the_lane(
    host: Host, script: str
) -> None:
    with connect(host(script)) as batch:
        batch.reset()
        memory = PeakMemory()
        batch.send(ACTIONS)
        started = time.monotonic()
        with pytest.raises((EnvTimeout, RemoteProtocolError)):
            batch.recv(timeout=1.0)
        assert time.monotonic() - started < 1.0 + SLACK_SECONDS
        with pytest.raises(RemoteProtocolError, match="tcp://") as error:
            batch.recv(timeout=30.0)
        assert len(str(error.value)) < 1000
        assert memory.growth() < MAX_GROWTH_BYTES
        started = time.monotonic()
    assert time.monotonic() - started < 1.0 + SLACK_SECONDS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("script", FLOODS)
def test_a_flood_keeps_nobody_from_the_rows_of_another_server(
    host: Host, script: str
) -> None:
    """Though its lane shares ZeroMQ's threads with theirs."""
    addresses = [host(script), host("nothing", MessageType.CALL)]
    with BatchEnv.connect(
        *("Hostile-v0", addresses, 2 * NUM_ENVS), seed=0, padding_after=60.0
    ) as batch:
        batch.reset()
        memory = PeakMemory()
        honest = np.arange(NUM_ENVS, 2 * NUM_ENVS)
        batch.send(ACTIONS, honest - NUM_ENVS)
        for _ in range(20):
            batch.send(ACTIONS, honest)
            started = time.monotonic()
            rows, step = batch.recv(env_indices=honest)
            assert time.monotonic() - started < SLACK_SECONDS
            assert rows.tolist() == honest.tolist()
            assert step.valid.all()
        with pytest.raises(RemoteProtocolError, match="tcp://"):
            batch.recv(env_indices=honest - NUM_ENVS, timeout=30.0)
        assert memory.growth() < MAX_GROWTH_BYTES
        started = time.monotonic()
    assert time.monotonic() - started < 2.0 + SLACK_SECONDS


def test_a_flood_ends_a_reset(host: Host) -> None:
    with (
        connect(host("pongs", MessageType.RESET)) as batch,
        pytest.raises(RemoteProtocolError, match="PONG"),
    ):
        batch.reset()


def test_a_flood_does_not_keep_a_lane_from_being_closed(host: Host) -> None:
    batch = connect(host("pongs"))
    batch.reset()
    batch.send(ACTIONS)
    started = time.monotonic()
    batch.close()
    assert time.monotonic() - started < 2.0 + SLACK_SECONDS


def test_a_flood_ends_the_wait_for_envs(host: Host) -> None:
    lane = RemoteLane(host("building", MessageType.ATTACH), make_config())
    started = time.monotonic()
    with pytest.raises(RemoteProtocolError, match="BUILDING"):
        lane.finish_start(started + 60.0)
    assert time.monotonic() - started < 30.0


def test_half_of_the_rows_are_no_answer(host: Host) -> None:
    with connect(host("half of the rows")) as batch:
        batch.reset()
        with pytest.raises(RemoteProtocolError, match=r"expected .* bytes of results"):
            batch.step(ACTIONS)


def test_half_of_the_blocks_do_not_keep_who_waits_for_all(host: Host) -> None:
    with connect(host("half of the blocks")) as batch:
        batch.reset()
        batch.send(ACTIONS, together=True)
        with pytest.raises(EnvTimeout):
            batch.recv(NUM_ENVS, timeout=0.3)
        rows, _ = batch.recv(timeout=30.0)
        assert rows.tolist() == [0]


def test_a_long_report_costs_milliseconds(host: Host) -> None:
    address = host("long report")
    with BatchEnv.connect("Hostile-v0", [address], 1024) as batch:
        batch.reset()
        started = time.thread_time()
        with pytest.raises(RemoteProtocolError, match="report"):
            batch.step(np.zeros(1024, np.int64))
        assert time.thread_time() - started < 0.5


def test_a_text_without_end_is_refused(host: Host) -> None:
    with pytest.raises(ServerError) as error:
        connect(host("long text", MessageType.ATTACH))
    assert len(str(error.value)) < 1000


def test_rows_that_would_fill_the_memory_are_refused(host: Host) -> None:
    address = host("large rows", MessageType.ATTACH)
    lane = RemoteLane(address, make_config(num_envs=4096))
    started = time.monotonic()
    with pytest.raises(RemoteProtocolError, match="max_row_mib"):
        lane.finish_start(started + 60.0)
    assert time.monotonic() - started < 40.0


def test_what_nobody_expects_in_the_keeper_is_the_lanes_error_at_once(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("envserve.session.client.attachment.ClientBlocks", fail)
    lane = RemoteLane(host("nothing"), make_config())
    started = time.monotonic()
    with pytest.raises(ServerError, match="MemoryError: no room"):
        lane.finish_start(started + 60.0)
    assert time.monotonic() - started < 40.0
    assert "MemoryError" in caplog.text
