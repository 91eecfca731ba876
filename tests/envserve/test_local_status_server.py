"""The local status server: a local batch's status, frames and flight records."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.client.link.connection import Connection
from envserve.crashes.repro_file import decode_repro
from envserve.errors import ConnectError, LeaseLost, LocalProtocolError
from envserve.monitoring.local_status_server import LocalStatusServer
from envserve.monitoring.observer import Observer
from envserve.wire.constants import MessageType
from tests.oracle.probe_envs import MODULE

from .pool_driver import LEDGER


@pytest.fixture(scope="module")
def batch() -> Iterator[BatchEnv]:
    with BatchEnv.local(LEDGER, 4, 2, seed=3, import_modules=[MODULE]) as batch:
        batch.reset()
        yield batch


@pytest.fixture(scope="module")
def status_server(batch: BatchEnv) -> Iterator[LocalStatusServer]:
    with LocalStatusServer(batch) as status_server:
        yield status_server


@pytest.fixture
def observer(status_server: LocalStatusServer) -> Iterator[Observer]:
    with Observer(status_server.address) as observer:
        yield observer


def test_the_status_reports_the_batch_as_a_lease(observer: Observer) -> None:
    status = observer.status()
    (lease,) = status.leases
    assert (status.num_workers, status.total_envs, status.num_leases) == (2, 4, 1)
    assert (lease.number, lease.env_name, lease.num_envs) == (1, LEDGER, 4)


def test_steps_and_episodes_are_counted(batch: BatchEnv, observer: Observer) -> None:
    before = observer.status().leases[0]
    batch.reset()
    for _ in range(40):
        batch.step(np.zeros(4, np.int64))
    after = observer.status().leases[0]
    assert after.steps - before.steps == 160
    assert after.num_episodes > before.num_episodes


def test_frames_and_flight_records_can_be_requested(
    batch: BatchEnv, observer: Observer
) -> None:
    frames: dict[int, Any] = {}
    observer.status()  # from now on, rewards are added up
    batch.reset()
    while len(frames) < 4:
        batch.step(np.zeros(4, np.int64))
        frames |= {frame.row: frame for frame in observer.frames(1, range(4))}
    assert all(frame.jpeg for frame in frames.values())
    assert all(isinstance(f.episode_return, float) for f in frames.values())
    assert decode_repro(observer.record(1, 3)).env_index == 3


@pytest.mark.parametrize("lease", [0, 2])
def test_an_unknown_lease_raises_lease_lost(observer: Observer, lease: int) -> None:
    with pytest.raises(LeaseLost, match=f"no lease {lease}"):
        observer.frames(lease, [0])


def test_unknown_rows_and_other_message_types_raise(observer: Observer) -> None:
    with pytest.raises(
        LocalProtocolError, match="expected the row of an env that has been reset"
    ):
        observer.record(1, 4)
    with pytest.raises(LocalProtocolError, match="FrameRequest: "):
        observer.request(MessageType.PING, MessageType.PONG, 5.0)


def test_invalid_messages_are_ignored(
    status_server: LocalStatusServer, observer: Observer
) -> None:
    with contextlib.closing(Connection(status_server.address)) as connection:
        while not connection.send([b"?"]):
            connection.wait(1.0, for_writing=True)
        assert observer.status().num_leases == 1


def test_its_socket_is_private_and_close_removes_it(batch: BatchEnv) -> None:
    with LocalStatusServer(batch) as status_server:
        folder = Path(status_server.address.removeprefix("ipc://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with Observer(status_server.address) as observer:
            assert observer.status(5.0).total_envs == 4
    status_server.close()
    assert not folder.exists()
    with Observer(status_server.address) as late, pytest.raises(ConnectError):
        late.status(0.1)


def test_a_long_path_of_the_temporary_folder_does_not_prevent_connections(
    batch: BatchEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with LocalStatusServer(batch) as server, Observer(server.address) as observer:
        assert observer.status(60.0).total_envs == 4


def test_a_closed_batch_is_reported_as_idle() -> None:
    batch = BatchEnv.local(LEDGER, 2, 1, seed=3, import_modules=[MODULE])
    with LocalStatusServer(batch) as server, Observer(server.address) as observer:
        batch.reset()
        batch.close()
        (lease,) = observer.status().leases
        assert (lease.in_flight, lease.absent) == (0, ())
        assert observer.frames(1, [0]) == []
        with pytest.raises(LocalProtocolError, match="expected the row of an env"):
            observer.record(1, 0)
