"""Batches of which a part is absent for a while."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from envserve.client import BatchEnv, StepResult
from envserve.pool.pool import Pool
from envserve.slab import Status
from tests.envserve import gated_env
from tests.envserve.conftest import StartServer, bind_for
from tests.envserve.gated_env import GATED
from tests.envserve.pool_driver import kill
from tests.envserve.server_process import make_config

#: Steps of an episode that does not end in a test.
LONG = 1_000_000


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Closed while it exists."""
    return tmp_path / "gate"


class Halves:
    """A batch of two lanes, the first of which can be lost for as long as we like."""

    def __init__(self, batch: BatchEnv, gate: Path, kill_worker: Callable[[], None]):
        self.batch = batch
        self.gate = gate
        self._kill_worker = kill_worker
        self.count = 0

    @property
    def action(self) -> int:
        """The action of the last step, another one each time."""
        return self.count % 1000

    def lose(self) -> None:
        self.gate.touch()
        self._kill_worker()

    def step(self) -> StepResult:
        self.count += 1
        return self.batch.step(np.full(self.batch.num_envs, self.action))

    def step_until(self, status: Status) -> StepResult:
        for _ in range(100_000):
            result = self.step()
            if result.status[0] == status:
                return result
        raise AssertionError(f"no row was {status!r}")


def gated_lane(index: int, gate: Path) -> Pool:
    lane = Pool(
        make_config(
            GATED,
            2,
            first_env_index=2 * index,
            env_kwargs={"gate": str(gate), "length": LONG},
            import_modules=(gated_env.__name__,),
        )
    )
    lane.finish_start(math.inf)
    return lane


@pytest.fixture(params=["local", "ipc"])
def halves(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    gate: Path,
    start_server: StartServer,
) -> Iterator[Halves]:
    if request.param == "local":
        lanes = [gated_lane(0, gate), gated_lane(1, tmp_path / "always open")]
        with BatchEnv(lanes, padding_after=0.0) as batch:
            batch.reset()
            yield Halves(batch, gate, lambda: kill(lanes[0].worker_pids[0]))
        return
    options = {"gate": str(gate), "length": LONG}
    address = start_server(
        bind_for("ipc", tmp_path),
        *(
            "--import",
            gated_env.__name__,
            "--allow-kwarg",
            "gate:any",
            "--expose",
            "pid",
        ),
    )
    with BatchEnv.connect(
        GATED, [address], 4, env_kwargs=options, padding_after=0.0
    ) as batch:
        batch.reset()
        pid = batch.call(0, "pid")
        yield Halves(batch, gate, lambda: os.kill(pid, signal.SIGKILL))


def test_the_others_go_on_while_a_lost_half_is_pending(halves: Halves) -> None:
    first = halves.step()
    assert first.valid.all()
    last = first.observation[:2].copy()
    halves.lose()
    result = halves.step_until(Status.PENDING)
    seen = halves.count
    for _ in range(50):
        assert result.status[:2].tolist() == [Status.PENDING] * 2
        assert not (result.truncated | result.terminated).any()
        assert result.valid.tolist() == [False, False, True, True]
        assert result.reward.tolist() == [0, 0, halves.action, halves.action]
        assert result.observation[2:, 2].tolist() == [halves.count] * 2
        result = halves.step()
    assert halves.count >= seen + 50
    halves.gate.unlink()
    lost = halves.step_until(Status.WORKER_DIED)
    assert lost.truncated.tolist() == [True, True, False, False]
    assert lost.infos[0]["fault"]["status"] == "WORKER_DIED"
    assert (lost.observation[:2, 0] != last[:, 0]).all()
    assert lost.observation[:2, 1:].tolist() == [[0, 0, 0]] * 2
    after = halves.step()
    assert after.valid.all()
    assert after.observation[:2, 2].tolist() == [1, 1]
    stats = halves.batch.stats()
    assert (stats.steps, stats.rows) == (halves.count, 4 * halves.count)
    assert stats.invalid_rows["WORKER_DIED"] == 2
    assert stats.invalid_rows["PENDING"] >= 100
    assert stats.valid_rows == stats.rows - sum(stats.invalid_rows.values())
    assert 0.0 < stats.fill < 1.0
    latency = stats.latency_seconds
    assert 0.0 < latency["p50"] <= latency["p99"] <= latency["max"]
    assert len(stats.lanes) == len(halves.batch.lanes)


def test_rows_that_are_pending_are_received_and_sent_again(halves: Halves) -> None:
    halves.lose()
    halves.step_until(Status.PENDING)
    batch = halves.batch
    batch.send(np.full(4, 7))
    rows, result = batch.recv(4)
    assert rows.tolist() == [0, 1, 2, 3]
    assert result.status.tolist() == [Status.PENDING] * 2 + [Status.OK] * 2
    halves.gate.unlink()
    halves.step_until(Status.WORKER_DIED)
    assert halves.step().valid.all()


def test_a_batch_of_which_nothing_is_alive_waits_for_it(gate: Path) -> None:
    lanes = [gated_lane(index, gate) for index in range(2)]
    with BatchEnv(lanes, padding_after=0.0) as batch:
        batch.reset()
        gate.touch()
        for lane in lanes:
            kill(lane.worker_pids[0])
        opening = threading.Timer(0.5, gate.unlink)
        opening.start()
        zeros = np.zeros(4, np.int64)
        lost = np.zeros(4, bool)
        while not lost.all():
            status = batch.step(zeros).status
            assert not (status == Status.PENDING).all()
            lost |= status == Status.WORKER_DIED
        opening.join()
