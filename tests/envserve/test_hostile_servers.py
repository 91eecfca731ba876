"""Clients of servers that break the protocol on purpose, see `hostile_server`.

A client loses its batch at most. Its memory stays bounded, and it meets its deadlines.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.sessionless_requests import request_welcome
from envserve.errors import EnvTimeout, RemoteProtocolError, ServerError, ServerLost
from envserve.slab import Status
from envserve.wire.constants import MessageType
from tests.envserve.hostile_server import HostileServer
from tests.envserve.server_process import make_config

Host = Callable[..., str]

#: Scripts that reply to STEP with an endless stream of unsolicited messages.
FLOODS = [
    *("pongs", "late results", "others' results", "no messages", "drains", "absent"),
    *("long results", "results of long frames"),
]
#: The scripts with the shortest and the longest messages.
EXTREME_FLOODS = ["pongs", "long results", "results of long frames"]
NUM_ENVS = 4
ACTIONS = np.zeros(NUM_ENVS, np.int64)
#: Seconds by which a busy machine may miss a deadline. Without a read budget, a
#: flooded call never returns.
SLACK_SECONDS = 20.0
MAX_GROWTH_BYTES = 64 << 20


@pytest.fixture
def host() -> Iterator[Host]:
    """Return a function that starts a hostile server and returns its address."""
    with ExitStack() as stack:
        yield lambda *script: stack.enter_context(HostileServer(*script)).address


def connect(address: str) -> BatchEnv:
    """Connect a batch that waits for all rows instead of padding them."""
    return BatchEnv.connect(
        *("Hostile-v0", [address], NUM_ENVS), seed=0, padding_after=60.0
    )


class PeakMemory:
    """This process's peak memory since this object was created."""

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
def test_a_flood_delays_no_deadline_uses_no_memory_and_ends_the_lane(
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
@pytest.mark.parametrize("script", EXTREME_FLOODS)
def test_a_flood_does_not_delay_the_rows_of_another_server(
    host: Host, script: str
) -> None:
    """The lanes to both servers share ZeroMQ's threads."""
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
        # On a busy machine, the connection may be lost before the flood is noticed, and
        # the rows then move to the other server.
        with contextlib.suppress(RemoteProtocolError):
            _, step = batch.recv(env_indices=honest - NUM_ENVS, timeout=30.0)
            assert step.lost.all()
        assert memory.growth() < MAX_GROWTH_BYTES
        started = time.monotonic()
    assert time.monotonic() - started < 2.0 + SLACK_SECONDS


@pytest.mark.parametrize(
    ("script", "kind"), [("nothing", MessageType.RESET), ("running", MessageType.STEP)]
)
def test_a_server_that_replies_only_to_pings_does_not_block_calls_forever(
    host: Host, script: str, kind: MessageType
) -> None:
    is_silent = script == "nothing"
    text = f"ignores {kind.name}" if is_silent else f"not finished {kind.name}"
    with BatchEnv.connect(
        *("Hostile-v0", [host(script, kind)], NUM_ENVS),
        padding_after=0.1,
        server_lost_after=3.0,
        operation_timeout=60.0 if is_silent else 3.0,
    ) as batch:
        started = time.monotonic()
        with pytest.raises(ServerLost, match=f"{text} of block 0"):  # noqa: PT012
            batch.reset()
            batch.step(ACTIONS)
        assert time.monotonic() - started < 10.0 + SLACK_SECONDS


def test_rows_of_a_server_that_ignores_steps_are_padding_until_it_is_lost(
    host: Host,
) -> None:
    addresses = [host("nothing"), host("nothing", MessageType.CALL)]
    with BatchEnv.connect(
        *("Hostile-v0", addresses, 2 * NUM_ENVS), padding_after=0.1, num_servers=2
    ) as batch:
        batch.reset()
        step = batch.step(np.zeros(2 * NUM_ENVS, np.int64))
        assert step.status[:NUM_ENVS].tolist() == [Status.PENDING] * NUM_ENVS
        assert step.valid[NUM_ENVS:].all()


def test_rows_move_away_from_a_server_that_ignores_steps(host: Host) -> None:
    addresses = [host("nothing"), host("nothing", MessageType.CALL)]
    with BatchEnv.connect(
        *("Hostile-v0", addresses, NUM_ENVS), num_servers=1, server_lost_after=4.0
    ) as batch:
        batch.reset()
        step = batch.step(ACTIONS)
        assert step.status.tolist() == [Status.SERVER_LOST] * NUM_ENVS
        assert "ignores STEP of block 0" in step.infos[0]["fault"]["text"]
        assert batch.step(ACTIONS).valid.all()
        assert batch.lanes[0].name == addresses[1]


def test_a_call_that_a_server_ignores_fails(host: Host) -> None:
    with BatchEnv.connect(
        *("Hostile-v0", [host("nothing", MessageType.CALL)], NUM_ENVS),
        server_lost_after=3.0,
    ) as batch:
        batch.reset()
        with pytest.raises(ServerLost, match="ignores CALL of block 0"):
            batch.get_attr("render_mode")


def test_a_flood_ends_a_reset(host: Host) -> None:
    with (
        connect(host("pongs", MessageType.RESET)) as batch,
        pytest.raises(RemoteProtocolError, match="PONG"),
    ):
        batch.reset()


def test_a_flood_does_not_delay_the_close_of_a_lane(host: Host) -> None:
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


def test_the_error_of_a_probe_names_a_peer_that_sends_no_messages(host: Host) -> None:
    address = host("no messages", MessageType.HELLO)
    with pytest.raises(RemoteProtocolError, match=f"^{address}: expected .*; check"):
        request_welcome(address, 60.0)


def test_a_result_with_half_of_the_rows_is_a_protocol_error(host: Host) -> None:
    address = host("half of the rows")
    with connect(address) as batch:
        batch.reset()
        with pytest.raises(RemoteProtocolError, match=f"^{address}: expected .* bytes"):
            batch.step(ACTIONS)


def test_a_result_with_half_of_the_blocks_does_not_block_the_caller(host: Host) -> None:
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


def test_a_long_error_text_is_shortened(host: Host) -> None:
    with pytest.raises(ServerError) as error:
        connect(host("long text", MessageType.ATTACH))
    assert len(str(error.value)) < 1000


def test_rows_that_need_too_much_memory_are_rejected(host: Host) -> None:
    address = host("large rows", MessageType.ATTACH)
    lane = RemoteLane(address, make_config(num_envs=4096))
    started = time.monotonic()
    with pytest.raises(RemoteProtocolError, match="max_row_mib"):
        lane.finish_start(started + 60.0)
    assert time.monotonic() - started < 40.0


def test_an_unexpected_failure_in_the_keepalive_thread_ends_the_lane_immediately(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr("envserve.session.client.attachment.ClientBlocks", fail)
    lane = RemoteLane(host("nothing"), make_config())
    started = time.monotonic()
    with pytest.raises(ServerError, match="MemoryError: no memory"):
        lane.finish_start(started + 60.0)
    assert time.monotonic() - started < 40.0
    assert "MemoryError" in caplog.text
