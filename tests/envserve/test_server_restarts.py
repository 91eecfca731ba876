"""After a server is killed and restarted, stepping continues without stale rows."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from envserve.client import BatchEnv, StepResult
from envserve.errors import ConnectError, ServerLost
from envserve.slab import Status
from tests.envserve.conftest import Serve
from tests.envserve.server_process import LEDGER
from tests.oracle.ledger_env import ledger_hash


def test_a_restart_costs_each_row_one_lost_transition(serve: Serve) -> None:
    server = serve()
    with BatchEnv.connect(LEDGER, [server.address], 4, seed=3) as batch:
        seeds = {tuple(batch.reset()[:, 0])}
        for restart in range(2):
            hashes = 0
            for action in (1, 2):
                result = batch.step(np.full(4, action))
                # The lost step's action, 77, was not applied.
                hashes = ledger_hash(hashes, action)
                assert result.valid.all()
                np.testing.assert_array_equal(result.observation[:, 3], hashes)
            server.kill()
            server.restart()
            server.wait_until_ready()
            lost = batch.step(np.full(4, 77))
            assert lost.status.tolist() == [Status.SERVER_LOST] * 4
            assert lost.truncated.all()
            assert not lost.terminated.any()
            np.testing.assert_array_equal(lost.final_observation, result.observation)
            np.testing.assert_array_equal(lost.observation[:, 1:], 0)
            seeds.add(tuple(lost.observation[:, 0]))
            assert len(seeds) == 2 + restart
            (stats,) = batch.stats().lanes.values()
            assert stats["reattaches"] == 1 + restart


def test_with_next_step_the_infos_of_the_reset_after_a_restart_are_returned(
    serve: Serve,
) -> None:
    server = serve()
    options: dict[str, Any] = {"autoreset": "next_step", "infos": "all"}
    with BatchEnv.connect(LEDGER, [server.address], 4, **options) as batch:
        batch.reset()
        server.kill()
        server.restart()
        server.wait_until_ready()
        assert {*batch.step(np.full(4, 1)).infos[3]} == {"fault"}
        batch.reset([0])
        result = batch.step(np.full(4, 1))
        assert result.status.tolist() == [Status.PENDING, *[Status.OK] * 3]
        assert result.infos == {row: {"reset_of_episode": 0} for row in (1, 2, 3)}
        assert {*batch.step(np.full(4, 1)).infos[0]} == {"step", "weights"}


class Pair:
    """A batch over two servers with two rows each, the second of which is killed."""

    def __init__(self, folder: Path, serve: Serve, **options: object) -> None:
        full = ("--envs-per-worker", "1")  # so that the other server has no free envs
        binds = [(f"ipc://{folder}/{name}",) for name in "ab"]
        self.servers = [serve(*full, bind=bind) for bind in binds]
        addresses = [server.address for server in self.servers]
        self.batch = BatchEnv.connect(LEDGER, addresses, 4, **options)  # type: ignore[arg-type]
        self.batch.reset()
        self.step()
        self.servers[1].kill()

    def step(self) -> StepResult:
        time.sleep(0.005)  # leave the cores to the server that starts
        result = self.batch.step(np.full(4, 9))
        assert result.valid[:2].all()
        assert result.reward[:2].tolist() == [9, 9]
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.batch.close()


def test_other_rows_are_stepped_until_a_lost_server_is_an_error(
    tmp_path: Path, serve: Serve
) -> None:
    num_steps = 0
    with Pair(tmp_path, serve, server_lost_after=3.0) as pair:
        with contextlib.suppress(ServerLost):
            while True:
                result = pair.step()
                assert result.status[2:].tolist() == [Status.PENDING] * 2
                assert not result.truncated[2:].any()
                num_steps += 1
        with pytest.raises(ServerLost, match=pair.servers[1].address):
            pair.step()
    assert num_steps > 20


def test_with_padding_other_rows_are_stepped_until_the_server_is_back(
    tmp_path: Path, serve: Serve
) -> None:
    with Pair(tmp_path, serve, server_lost_after=1.2, on_server_lost="pad") as pair:
        lane = pair.batch.lanes[1]
        while "HELLO_SENT" not in repr(lane):  # until `server_lost_after` is over
            result = pair.step()
            assert result.status[2:].tolist() == [Status.PENDING] * 2
        pair.servers[1].restart()
        pair.servers[1].wait_until_ready()
        statuses = [pair.step().status[2:].tolist()]
        while statuses[-1] != [Status.OK] * 2:
            statuses.append(pair.step().status[2:].tolist())
    for column in zip(*statuses, strict=True):
        assert column.count(Status.SERVER_LOST) == 1
        at = column.index(Status.SERVER_LOST)
        assert set(column[:at]) <= {Status.PENDING}
        assert set(column[at + 1 :]) == {Status.OK}


def test_an_unknown_value_of_on_server_lost_is_an_error() -> None:
    with pytest.raises(ValueError, match="on_server_lost"):
        BatchEnv.connect(LEDGER, ["ipc:///nowhere"], 1, on_server_lost="shrink")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, 0, -1.0, "5"])
@pytest.mark.parametrize(
    "name",
    ["connect_timeout", "start_timeout", "server_lost_after", "operation_timeout"],
)
def test_a_timeout_that_is_not_positive_is_an_error_before_connecting(
    name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected a positive number; got"):
        BatchEnv.connect(LEDGER, ["ipc:///nowhere"], 1, **{name: value})


#: On a busy machine, the connection may be diagnosed before the timeout is noticed.
REASONS = "nowhere: (no server replied|connection refused)"


def test_a_batch_may_start_without_time_limit() -> None:
    with pytest.raises(ConnectError, match=REASONS):
        connect_to_nobody(start_timeout=math.inf, connect_timeout=0.1)


def test_a_server_that_has_not_replied_at_the_start_timeout_is_not_building() -> None:
    with pytest.raises(ConnectError, match=REASONS):
        connect_to_nobody(start_timeout=0.1)


def connect_to_nobody(**timeouts: Any) -> None:
    BatchEnv.connect(LEDGER, ["ipc:///nowhere"], 1, insecure=True, **timeouts)
