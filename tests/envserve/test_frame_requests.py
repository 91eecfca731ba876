"""FRAME requests: permissions, rate limits, and real workers' frames."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from envserve.address import NamedAddress
from envserve.cli.app import PROGRAM
from envserve.client import BatchEnv
from envserve.crashes.repro_file import decode_repro
from envserve.errors import LeaseLost, LocalProtocolError
from envserve.lane import RenderedFrame
from envserve.monitoring.observer import Observer
from envserve.pool.pool import Pool
from envserve.session.server.decisions import SessionId
from envserve.slab import Status
from envserve.wire.bodies import FrameRequest, FrameResult
from envserve.wire.constants import (
    MAX_BODY_BYTES,
    MAX_FRAMES_BYTES,
    ErrorCode,
    MessageType,
)
from envserve.wire.error_body import ErrorBody
from envserve.wire.message import Message, Peer, decode, encode
from tests.command_line import invoke

from .conftest import PATIENCE, servers_in
from .pool_driver import LEDGER, SCRIPT, PoolMaker, kill, step
from .session_fakes import FakeServer, make_attach

ANN: Peer = (0, b"a", "ann")
BOB: Peer = (0, b"b", "bob")
LOCAL: Peer = (0, b"c", "local")


@dataclass
class RecordingServer(FakeServer):
    """Replies with a flight record or without frames, and records the requests."""

    frame_requests: list[tuple[SessionId, FrameRequest]] = field(default_factory=list)

    def read_frames(
        self, session: SessionId, request: FrameRequest
    ) -> tuple[FrameResult, bytes]:
        self.frame_requests.append((session, request))
        return FrameResult(), b"record" if request.record else b""


class Host:
    """A server on which Ann has lease 1 and Bob lease 2, and can request frames."""

    def __init__(self) -> None:
        self.server = RecordingServer()
        self.frame_requests = self.server.frame_requests
        self.now = 5.0
        for number, peer in enumerate((ANN, BOB), 11):
            attach = make_attach(num_envs=2).encode()
            kind = MessageType.ATTACH
            replies = self.send(peer, kind, attach, session=number, boot=77)
            assert MessageType.GRANTED in [reply.type for reply in replies]

    def send(
        self, peer: Peer, kind: MessageType, body: bytes, **numbers: Any
    ) -> list[Message]:
        message = Message(type=kind, body=body, request=1, **numbers)
        self.server.receive(peer, encode(message), self.now)
        return [decode(frames) for frames in self.server.take_replies()]

    def request_frames(self, peer: Peer, lease: int, **fields: Any) -> Message | None:
        body = FrameRequest(lease=lease, rows=(0,), **fields).encode()
        replies = self.send(peer, MessageType.FRAME, body)
        return replies[0] if replies else None


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.mark.parametrize(
    ("peer", "lease", "owner"),
    [(ANN, 1, "ann"), (BOB, 2, "bob"), (LOCAL, 1, "ann"), (LOCAL, 2, "bob")],
)
def test_users_see_their_leases_and_the_server_user_sees_all(
    host: Host, peer: Peer, lease: int, owner: str
) -> None:
    reply = host.request_frames(peer, lease)
    assert reply is not None
    assert reply.type is MessageType.FRAME_RESULT
    ((session, _),) = host.frame_requests
    assert session[0] == owner


@pytest.mark.parametrize("lease", [2, 3])
def test_leases_of_other_users_look_like_missing_ones(host: Host, lease: int) -> None:
    reply = host.request_frames(ANN, lease)
    assert reply is not None
    error = ErrorBody.decode(reply.body)
    assert error.code is ErrorCode.LEASE_LOST
    assert error.text == f"lease {lease} does not exist, or belongs to another user"
    assert host.frame_requests == []


def test_requests_are_rate_limited_per_user(host: Host) -> None:
    replies = []
    for _ in range(3000):
        replies.append(host.request_frames(ANN, 1, width=1024))
        host.now += 0.001
    assert 32 * 4 - 1 <= len([*filter(None, replies)]) <= 32 * 4 + 1
    assert host.request_frames(BOB, 2) is not None
    host.now += 100.0  # idle time is not saved up
    replies = [host.request_frames(ANN, 1) for _ in range(99)]
    assert len([*filter(None, replies)]) == 32


def test_a_flight_record_counts_as_a_second_of_requests(host: Host) -> None:
    reply = host.request_frames(ANN, 1, record=True)
    assert reply is not None
    assert reply.payload == b"record"
    assert host.request_frames(ANN, 1) is None
    host.now += 1.0
    assert host.request_frames(ANN, 1) is not None


@pytest.mark.parametrize(
    "change", [{"rows": (0,) * 65}, {"width": 7}, {"width": 1025}, {"rows": (1 << 16,)}]
)
def test_malformed_requests_are_rejected(host: Host, change: dict[str, Any]) -> None:
    body = FrameRequest(**{"lease": 1, "rows": (0,), **change}).encode()
    (reply,) = host.send(ANN, MessageType.FRAME, body)
    assert ErrorBody.decode(reply.body).code is ErrorCode.BAD_MESSAGE
    assert host.frame_requests == []


def test_the_longest_reply_fits_into_a_body() -> None:
    text = "\N{PILE OF POO}" * 1024
    numbers: Any = {"serial": 2**63 - 1, "seed": 2**63 - 1, "episode_steps": 2**63 - 1}
    each = RenderedFrame(row=65535, text=text, episode_return=1.5, **numbers)
    num_bytes = len(FrameResult(pictures=(each,) * 64).encode()) + MAX_FRAMES_BYTES
    assert num_bytes < MAX_BODY_BYTES


# Requests to a real server.


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers_in(tmp_path_factory.mktemp("server")) as start:
        yield start("tcp://127.0.0.1:0", "--workers", "2")


def number_of(observer: Observer) -> int:
    (lease,) = observer.status(PATIENCE).leases
    return lease.number


def step_until(
    batch: BatchEnv, look: Callable[[], list[RenderedFrame]], num_rows: int
) -> dict[int, RenderedFrame]:
    """Step until each row has a frame."""
    seen: dict[int, RenderedFrame] = {}
    actions = np.zeros(batch.num_envs, np.int64)
    while len(seen) < num_rows:
        for _ in range(20):
            batch.step(actions)
        seen |= {frame.row: frame for frame in look()}
    return seen


def test_a_lease_is_observed_and_its_flight_record_replayed(
    address: str, tmp_path: Path
) -> None:
    with (
        BatchEnv.connect("CartPole-v1", [address], 2, seed=3) as batch,
        Observer(address) as observer,
    ):
        batch.reset()
        lease = number_of(observer)
        seen = step_until(
            batch, lambda: observer.frames(lease, range(2), 120, PATIENCE), 2
        )
        for frame in seen.values():
            assert Image.open(io.BytesIO(frame.jpeg)).size == (120, 80)
            assert frame.seed is not None
        serials = [seen[row].serial for row in range(2)]
        latest = observer.frames(
            lease, range(2), after=serials, timeout_seconds=PATIENCE
        )
        known = [frame.serial for frame in latest]
        assert not {*known} & {*serials}
        record = observer.record(lease, 1, PATIENCE)
        with pytest.raises(
            LocalProtocolError, match="the row of an env that has been reset"
        ):
            observer.record(lease, 2, PATIENCE)
    with Observer(address) as observer, pytest.raises(LeaseLost, match="not exist"):
        observer.frames(lease, [0], timeout_seconds=PATIENCE)
    assert decode_repro(record).env_index == 1
    file = tmp_path / "row.repro"
    file.write_bytes(record)
    result = invoke(PROGRAM, ["replay", str(file)])
    assert result.exit_code == 0, result.output
    assert "was running when this was recorded" in result.output
    assert "reproduced to its end: did not crash in" in result.output


def test_watched_or_not_a_batch_has_the_same_rows(address: str) -> None:
    def play(observer: Observer | None) -> list[Any]:
        with BatchEnv.connect("CartPole-v1", [address], 2, seed=5) as batch:
            rows, lease = [batch.reset()], observer and number_of(observer)
            for step in range(200):
                result = batch.step(np.array([step % 2, 1 - step % 2]))
                rows += [result.observation, result.reward, result.terminated]
                if observer is not None and step % 20 == 0:
                    observer.frames(lease or 0, range(2), timeout_seconds=PATIENCE)
            return rows

    with Observer(address) as observer:
        watched = play(observer)
    assert all(map(np.array_equal, watched, play(None)))


def test_an_observer_accepts_short_addresses() -> None:
    for address in ("127.0.0.1", "tcp://127.0.0.1"):
        with Observer(address, insecure=True) as observer:
            assert observer.address == "tcp://127.0.0.1:5555"
    resolved = NamedAddress("tcp://127.0.0.1:5555", "tcp://sims:5555")
    with Observer(resolved, insecure=True) as observer:
        assert observer.address is resolved


def frame_of(pool: Pool, *, known: int = 0) -> tuple[RenderedFrame, list[Status]]:
    """Step until row 0 has a new frame; return the frame and the steps' statuses."""
    statuses: list[Status] = []
    request = FrameRequest(lease=0, rows=(0,), after=(known,))
    while not (found := pool.read_frames(request)[0].pictures):
        step(pool, 0)
        statuses.append(Status(pool.rows.status[0]))
    return found[0], statuses


def test_frames_continue_after_a_watched_worker_is_killed(make_pool: PoolMaker) -> None:
    pool = make_pool.and_reset(LEDGER, 1, 1)
    before, _ = frame_of(pool)
    kill(pool.worker_pids[0])
    after, statuses = frame_of(pool, known=before.serial)
    assert statuses.count(Status.WORKER_DIED) <= 1
    while after.seed == before.seed:
        after, _ = frame_of(pool, known=after.serial)
    assert after.jpeg


@pytest.mark.parametrize(
    ("script", "status", "timeout"),
    [
        ("os._exit(3)", Status.WORKER_DIED, 60.0),
        ("time.sleep(99)", Status.TIMEOUT, 3.0),
    ],
)
def test_a_render_that_never_returns_costs_two_episodes_and_no_wrong_row(
    make_pool: PoolMaker, script: str, status: Status, timeout: float
) -> None:
    init = f"self.render = lambda: {script}"
    kwargs = {"init": init}
    pool = make_pool.and_reset(
        SCRIPT, 1, 1, env_kwargs=kwargs, step_timeout_seconds=timeout
    )
    frame, statuses = frame_of(pool)
    assert frame.text == "no image: render() crashed or hung 2 times"
    assert [s for s in statuses if s is not Status.OK] == [status] * 2
