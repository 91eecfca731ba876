"""Half of a batch is lost and absent while the other half is stepped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from envserve.client import BatchEnv, StepResult
from envserve.slab import Status
from tests.envserve.conftest import StartServer, bind_for
from tests.oracle import probe_envs
from tests.oracle.probe_envs import GATED

#: Episode length in steps; no episode ends during a test.
LONG = 1_000_000


class Halves:
    """A batch of two blocks; no env is built while the file `gate` exists."""

    def __init__(self, batch: BatchEnv, gate: Path) -> None:
        self.batch = batch
        self.gate = gate
        self.count = 0
        batch.reset()

    def lose(self) -> None:
        pid = self.batch.call(0, "pid")
        self.gate.touch()
        os.kill(pid, signal.SIGKILL)

    @property
    def action(self) -> int:
        """The action of the last step; each step has a different one."""
        return self.count % 1000

    def step(self) -> StepResult:
        self.count += 1
        return self.batch.step(np.full(self.batch.num_envs, self.action))

    def step_until(self, status: Status) -> StepResult:
        for _ in range(100_000):
            result = self.step()
            if result.status[0] == status:
                return result
        raise AssertionError(
            f"expected row 0 to become {status!r}; got {result.status[0]}"
        )


@pytest.fixture(params=["local", "ipc"])
def halves(
    request: pytest.FixtureRequest, tmp_path: Path, start_server: StartServer
) -> Iterator[Halves]:
    gate = tmp_path / "gate"
    connect: Callable[..., BatchEnv] = BatchEnv.local
    where: tuple[object, ...] = (4, 2)
    options: dict[str, object] = {"import_modules": [probe_envs.MODULE]}
    if request.param == "ipc":
        openings = ("--allow-kwarg", "gate:any", "--expose", "pid")
        address = start_server(bind_for("ipc", tmp_path), *openings)
        connect, where, options = BatchEnv.connect, ([address], 4), {}
    kwargs = {"gate": str(gate), "length": LONG}
    with connect(GATED, *where, env_kwargs=kwargs, padding_after=0.0, **options) as it:
        yield Halves(it, gate)


def test_the_other_half_continues_while_a_lost_half_is_pending(halves: Halves) -> None:
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
