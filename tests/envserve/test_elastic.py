"""Elastic batches move rows of lost servers to others, and use new servers."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv, StepResult
from envserve.client.link import placement, server_pool
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.session_driver import SessionDriver
from envserve.errors import (
    AddressError,
    ConnectError,
    EnvStartError,
    ServerLost,
    SpaceError,
)
from envserve.lane import Reset
from envserve.slab import Status
from tests.envserve.conftest import Serve, WaitUntil
from tests.envserve.interrupts import run_traced
from tests.envserve.pool_driver import gather, step
from tests.envserve.server_process import (
    LEDGER,
    LEDGER_OPTIONS,
    ServerProcess,
    make_config,
)
from tests.oracle.batch_driver import BatchDriver
from tests.oracle.journal import Array
from tests.oracle.ledger import Ledger

LENGTH = 10
#: A module that registers an env with different spaces under the ledger env's name.
OTHERS = f"""
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Other(CartPoleEnv):
    def __init__(self, **arguments):
        super().__init__()


gymnasium.envs.registration.registry[{LEDGER!r}].entry_point = Other
"""
#: A module after whose import no ledger env can be created.
BROKEN = f"""
import gymnasium

gymnasium.envs.registration.registry[{LEDGER!r}].entry_point = "no_such_module:Env"
"""
Play = Callable[..., BatchDriver]
Shared = dict[int, list[ServerProcess]]


class Player(BatchDriver):
    """A driver whose steps take some time, so that servers have cores to start on."""

    def step(self, actions: Array | None = None) -> StepResult:
        time.sleep(0.04)
        return super().step(actions)


class Source:
    """Running servers, and the file that lists their addresses."""

    def __init__(
        self, path: Path, serve: Serve, shared: Shared, wait_until: WaitUntil
    ) -> None:
        self.url = f"file://{path}"
        self.servers: list[ServerProcess] = []
        self._path, self._serve, self._wait_until = path, serve, wait_until
        self._shared = {room: [*servers] for room, servers in shared.items()}

    def start(self, room: int, *options: str, **more: Any) -> ServerProcess:
        """Start a server that has room for `room` envs, with two blocks per lane."""
        server = self._serve(*options_for(room), *options, **more)
        self.list(server)
        return server

    def lend(self, room: int, *, is_listed: bool = True) -> ServerProcess:
        """Return a server that other tests use too, so this test must not harm it."""
        server = self._shared[room].pop()
        self._wait_until(lambda: server.welcome().free_envs == room, 60)
        if is_listed:
            self.list(server)
        return server

    def list(self, server: ServerProcess) -> None:
        self.servers.append(server)
        lines = [f"{one.address}  # {n}" for n, one in enumerate(self.servers)]
        self._path.write_text("\n".join(lines))


def options_for(room: int) -> tuple[str, ...]:
    return (*LEDGER_OPTIONS, "--envs-per-worker", str(room // 2))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Provide servers by the number of envs for which they have room."""
    with contextlib.ExitStack() as stack:
        yield {
            room: [
                stack.enter_context(
                    ServerProcess(tmp_path_factory.mktemp("server"), *options_for(room))
                )
                for _ in range(number)
            ]
            for room, number in ((4, 2), (8, 1))
        }


@pytest.fixture(scope="module")
def different(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose envs have other spaces; tests share it."""
    folder = tmp_path_factory.mktemp("different")
    (folder / "others.py").write_text(OTHERS)
    options = (*options_for(4), "--import", str(folder / "others.py"))
    with ServerProcess(folder, *options) as server:
        yield server


@pytest.fixture
def source(
    tmp_path: Path, serve: Serve, shared: Shared, wait_until: WaitUntil
) -> Source:
    return Source(tmp_path / "servers", serve, shared, wait_until)


@pytest.fixture
def play(
    tmp_path: Path, source: Source, random_generator: np.random.Generator
) -> Iterator[Play]:
    """Make players; finally, compare their ledgers with the envs' journals."""
    players: list[BatchDriver] = []
    journal = tmp_path / "journal"
    journal.mkdir()

    def make(
        num_envs: int,
        addresses: list[str] | None = None,
        autoreset: str = "same_step",
        **more: Any,
    ) -> BatchDriver:
        kwargs = {"length": LENGTH, "journal": str(journal)}
        sources = addresses or [source.url]
        more |= {"autoreset": autoreset, "env_kwargs": kwargs}
        batch = BatchEnv.connect(LEDGER, sources, num_envs, seed=5, **more)
        ledger = Ledger(num_envs, 5, length=LENGTH, autoreset=autoreset)
        players.append(Player(batch, ledger, random_generator))
        return players[-1]

    yield make
    for player in players:
        player.batch.close()
        player.ledger.finish(journal)


def free_address() -> str:
    """Return an address on which a server can be started later."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def rows_at(player: BatchDriver, server: ServerProcess) -> Array:
    """Return the rows that are currently on a server."""
    sizes = [lane.num_envs for lane in player.batch.lanes]
    names = [lane.name for lane in player.batch.lanes]
    return np.flatnonzero(np.repeat([name == server.address for name in names], sizes))


def step_until_valid(player: BatchDriver, struck: Array) -> None:
    """Step until all rows are valid; only the `struck` rows may ever be invalid."""
    others = np.setdiff1d(np.arange(player.batch.num_envs), struck)
    result = player.step()
    while not result.valid.all():
        assert result.valid[others].all()
        result = player.step()


def test_an_ipc_server_is_replaced_as_soon_as_its_socket_refuses(
    source: Source, play: Play, tmp_path: Path
) -> None:
    bind = (f"ipc://{tmp_path}/first",)
    first, other = source.start(4, bind=bind), source.lend(4)
    player = play(4, [first.address, other.address], server_lost_after=3600.0)
    player.step()
    first.kill()
    step_until_valid(player, np.arange(4))
    assert len(rows_at(player, other)) == 4


def test_other_listed_servers_take_over_if_they_have_free_envs(
    source: Source, play: Play
) -> None:
    servers = [source.start(4), source.lend(4), source.lend(8)]
    player = play(12, [server.address for server in servers])
    step_until_valid(player, np.array([], int))
    rows = rows_at(player, servers[0])
    servers[0].kill()
    while rows_at(player, servers[0]).size:
        assert np.delete(player.step().valid, rows).all()
    step_until_valid(player, rows)
    assert len(rows_at(player, servers[2])) == 8


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_rows_spread_again_when_a_server_is_back(
    source: Source, play: Play, monkeypatch: pytest.MonkeyPatch, autoreset: str
) -> None:
    """With next_step, the move costs nothing in a block whose episodes have just ended.

    That is at least one of both blocks, because the move waits for the last episode.
    """
    monkeypatch.setattr(server_pool, "SPREAD_POLL_SECONDS", 0.2)
    first, other = source.start(8), source.lend(8)
    player = play(8, autoreset=autoreset)
    player.step()
    rows = rows_at(player, first)
    first.kill()
    while len(rows_at(player, other)) < 8:
        assert np.delete(player.step().valid, rows).all()
    step_until_valid(player, rows)
    assert player.ledger.losses[Status.SERVER_LOST] == 4
    first.restart()
    while not (moved := rows_at(player, first)).size:
        result = player.step()
        assert result.valid[rows_at(player, other)].all()
    player.step()
    step_until_valid(player, moved)
    assert len(moved) == 4
    for _ in range(3 * LENGTH):
        assert player.step().valid.all()
    assert {len(rows_at(player, each)) for each in (first, other)} == {4}
    num_lost = (8,) if autoreset == "same_step" else (4, 6)
    assert player.ledger.losses[Status.SERVER_LOST] in num_lost


def reset_first(lane: RemoteLane, pool: server_pool.ServerPool) -> SessionDriver:
    """Reset the only lane of a pool once its envs are granted; return its driver."""
    lane.finish_start(time.monotonic() + 40)
    blocks = [block.index for block in lane.blocks]
    lane.submit_reset([Reset(block) for block in blocks])
    gather(lane, blocks)
    (driver,) = pool.placement.locations
    assert isinstance(driver, SessionDriver)
    return driver


def test_a_lane_keeps_its_envs_until_the_target_of_its_move_has_granted_the_same(
    source: Source, wait_until: WaitUntil, different: ServerProcess
) -> None:
    first, full = source.lend(4), source.lend(4)
    addresses = [server.address for server in (first, full, different)]
    pool = server_pool.ServerPool(addresses, insecure=False)
    lane = RemoteLane(first.address, make_config(), server_pool=pool)
    user = RemoteLane(full.address, make_config())
    with contextlib.closing(lane), contextlib.closing(user):
        user.finish_start(time.monotonic() + 40)
        driver = reset_first(lane, pool)
        for server in (full, different):
            pool.placement.targets[driver] = server.address
            while pool.placement.targets:
                lane.rows.terminated[:] = True
                assert not any(outcome.faults for outcome in step(lane, 1))
            assert lane.name == pool.placement.locations[driver] == first.address
        wait_until(lambda: different.welcome().free_envs == 4, 60)
        user.close()
        pool.placement.targets[driver] = full.address
        wait_until(lambda: driver.is_moving, 60)
        assert [each.welcome().free_envs for each in (first, full)] == [0, 0]
        lane.rows.terminated[:] = True
        assert all(outcome.faults for outcome in step(lane, 1))
        assert not any(outcome.faults for outcome in step(lane, 1))
        assert lane.name == full.address
        wait_until(lambda: first.welcome().free_envs == 4, 60)
        assert full.welcome().free_envs == 0


def test_an_interrupt_during_a_move_leaves_the_lane_on_one_server(
    source: Source, wait_until: WaitUntil, random_seed: int
) -> None:
    """The test interrupts at some of the lines of the move, selected by the seed."""
    servers = [source.start(4, "--lease-seconds", "3") for _ in range(2)]
    pool = server_pool.ServerPool([each.address for each in servers], insecure=False)
    lane = RemoteLane(servers[0].address, make_config(), server_pool=pool)
    driver = reset_first(lane, pool)
    blocks = [block.index for block in lane.blocks]

    def move(line: int) -> int:
        """Move to the other server, interrupt before a line, and step twice."""
        before = lane.name
        (target,) = (each.address for each in servers if each.address != before)
        pool.placement.targets[driver] = target
        step(lane, 1)
        wait_until(lambda: driver.is_moving, 60)
        lane.rows.terminated[:] = True
        places = run_traced(
            lambda: lane.submit_step(blocks), line, lambda path: "/client/" in path
        )
        if len(places) == line:
            lane.invalidate("a call was interrupted")
        else:
            gather(lane, blocks)
        step(lane, 1)
        assert all(not outcome.faults for outcome in step(lane, 1))
        assert lane.name == driver.connection.address
        assert lane.name == pool.placement.locations[driver]
        free = {each.address: each.welcome().free_envs for each in servers}
        assert free.pop(lane.name) == 0
        other = next(each for each in servers if each.address in free)
        wait_until(lambda: other.welcome().free_envs == 4, 60)
        return len(places)

    try:
        num_lines = move(-1)
        assert num_lines > 50
        stride = num_lines // 6
        for line in range(1 + random_seed % stride, num_lines, stride):
            move(line)
    finally:
        lane.close()


def test_addresses_and_sources_can_be_combined(source: Source, play: Play) -> None:
    source.start(4)
    named, looked_up = (source.lend(4, is_listed=False).address for _ in range(2))
    sources = [named, source.url, looked_up.replace("tcp:", "dns:")]
    player = play(12, sources)
    step_until_valid(player, np.array([], int))
    names = [lane.name for lane in player.batch.lanes]
    assert names == [named, source.servers[0].address, looked_up]


def test_servers_with_different_spaces_are_rejected_with_a_one_line_error(
    source: Source, play: Play, different: ServerProcess
) -> None:
    first = source.lend(4)
    source.list(different)
    remedy = "install the same env version everywhere"
    both = f"{different.address} and {first.address} have different spaces"
    line = rf"^{both}: .*{remedy}.*\Z"
    with pytest.raises(SpaceError, match=line):
        play(8)


def test_a_batch_without_live_servers_waits_and_then_moves(
    source: Source, play: Play
) -> None:
    server = source.start(4)
    player = play(4)
    player.step()
    server.kill()
    other = source.lend(4)
    assert (player.step().status == Status.SERVER_LOST).all()
    assert len(rows_at(player, other)) == 4
    assert player.step().valid.all()


def test_an_unresponsive_server_is_replaced_and_its_late_messages_are_ignored(
    source: Source, play: Play
) -> None:
    first, _ = source.start(4), source.lend(8)
    player = play(8, server_lost_after=5.0)
    step_until_valid(player, np.array([], int))
    rows = rows_at(player, first)
    first.signal(signal.SIGSTOP)  # after SIGCONT, it finishes the step in flight
    while rows_at(player, first).size:
        assert np.delete(player.step().valid, rows).all()
    first.signal(signal.SIGCONT)
    step_until_valid(player, rows)
    for _ in range(3 * LENGTH):
        assert player.step().valid.all()
    assert player.ledger.losses[Status.SERVER_LOST] == 4


@pytest.mark.parametrize("workers", [1, 4])
def test_rows_can_move_to_a_server_with_another_number_of_workers(
    source: Source, play: Play, workers: int
) -> None:
    first, _ = source.start(4), source.lend(4)
    player = play(8, num_splits=2)
    rows = rows_at(player, first)
    blocks = player.batch.blocks
    each = ("--envs-per-worker", str(4 // workers))
    other = source.start(4, "--workers", str(workers), *each)
    first.kill()
    while not rows_at(player, other).size:
        assert np.delete(player.step().valid, rows).all()
    step_until_valid(player, rows)
    for _ in range(3 * LENGTH):
        assert player.step().valid.all()
    assert player.batch.blocks == blocks


def test_a_server_with_other_envs_gets_no_rows_and_is_reported(
    source: Source,
    play: Play,
    caplog: pytest.LogCaptureFixture,
    different: ServerProcess,
) -> None:
    first, _ = source.start(4), source.lend(4)
    player = play(8)
    rows = rows_at(player, first)
    source.list(different)
    first.kill()
    message = (
        f"{different.address}: expected the same envs as before from {first.address}"
    )
    while message not in caplog.text:
        assert np.delete(player.step().valid, rows).all()
    assert "observation space: expected Box(" in caplog.text
    fit = source.lend(4)
    step_until_valid(player, rows)
    assert len(rows_at(player, fit)) == 4


def test_a_server_whose_key_is_unknown_gets_no_messages(
    source: Source, play: Play, tmp_path: Path
) -> None:
    first, _ = source.start(4), source.lend(4)
    player = play(8)
    rows = rows_at(player, first)
    home = {"ENVSERVE_HOME": str(tmp_path / "other")}
    rogues = [source.start(4, environment=home), source.start(4, "--insecure-no-auth")]
    first.kill()
    for _ in range(2):
        while player.step().valid[rows].all():
            pass
    fit = source.lend(4)
    step_until_valid(player, rows)
    assert len(rows_at(player, fit)) == 4
    for rogue in rogues:
        assert "lease" not in rogue.log


# Servers that start after the batch.


def test_a_batch_starts_with_few_servers_and_adds_later_ones(
    source: Source, tmp_path: Path, serve: Serve
) -> None:
    early, late = [source.lend(4), source.lend(4)], [free_address(), free_address()]
    addresses = [*(server.address for server in early), *late]
    (tmp_path / "servers").write_text("\n".join(addresses))
    journal = tmp_path / "own"
    journal.mkdir()
    ledger = Ledger(16, 5, length=LENGTH)
    with BatchEnv.connect(
        LEDGER,
        [source.url],
        16,
        seed=5,
        env_kwargs={"length": LENGTH, "journal": str(journal)},
        connect_timeout=8.0,
        min_servers=2,
    ) as batch:
        observation = batch.reset()
        assert observation.shape == (16, 4)
        here = np.arange(8)
        ledger.reset(observation[here], here)

        def step() -> Array:
            """Step and check the result; return the padded rows."""
            nonlocal here
            time.sleep(0.04)
            actions = np.arange(16)
            result = batch.step(actions)
            assert result.observation.shape == (16, 4)
            ledger.step(actions[here], part_of(result, here), here)
            assert result.valid[:8].all()
            come = np.flatnonzero(result.status == Status.SERVER_LOST)
            new = np.setdiff1d(come, here)
            if new.size:
                assert result.truncated[new].all()
                ledger.reset(result.observation[new], new)
                here = np.union1d(here, new)
            away = np.setdiff1d(np.arange(16), here)
            assert (result.status[away] == Status.PENDING).all()
            assert not result.observation[away].any()
            return away

        for _ in range(2 * LENGTH):
            assert step().tolist() == list(range(8, 16))
        serve(*options_for(4), bind=(late[1],), waits_until_ready=False)
        while len(step()) > 4:
            pass
        serve(*options_for(4), bind=(late[0],), waits_until_ready=False)
        while len(step()):
            pass
        assert {lane.name for lane in batch.lanes} == {*addresses}
        while not batch.step(np.zeros(16, np.int64)).valid.all():
            pass


def test_a_server_that_cannot_create_the_envs_does_not_end_a_start(
    source: Source, tmp_path: Path
) -> None:
    """It is not ready either: its only named env cannot be imported."""
    (tmp_path / "broken.py").write_text(BROKEN)
    good = source.lend(8)
    bad = source.start(8, "--import", str(tmp_path / "broken.py"), "--env", LEDGER)
    assert bad.welcome().is_starting
    assert not good.welcome().is_starting
    connect = functools.partial(BatchEnv.connect, LEDGER, [source.url], 8, seed=5)
    with pytest.raises(EnvStartError, match="no_such_module"):
        connect()
    with connect(min_servers=1) as batch:
        batch.reset()
        while not batch.step(np.zeros(8, np.int64)).valid.all():
            pass
        assert [lane.name for lane in batch.lanes] == [good.address] * 2


def part_of(result: Any, rows: Array) -> Any:
    """Return the given rows of a result."""
    picked = {
        name: value[rows] if isinstance(value, np.ndarray) else value
        for name, value in result._asdict().items()
    }
    return result._replace(**{**picked, "infos": {}})


def test_envs_can_be_spread_over_servers_that_have_no_address_yet(
    source: Source,
) -> None:
    source.lend(4)
    connect = functools.partial(BatchEnv.connect, LEDGER, [source.url], 8, seed=5)
    with connect(num_servers=2) as batch:
        batch.reset()
        result = batch.step(np.zeros(8, np.int64))
        assert result.status[4:].tolist() == [Status.PENDING] * 4
        batch.reset()
        with pytest.raises(ServerLost, match="no server is available for these rows"):
            batch.get_attr("spec")
        added = source.lend(4)
        while not batch.step(np.zeros(8, np.int64)).valid.all():
            pass
        assert batch.lanes[1].name == added.address
        assert batch.reset().shape == (8, 4)


def test_the_only_server_gets_the_rows_of_servers_that_will_never_exist(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "SHARE_SECONDS", 0.0)
    addresses = [source.lend(8).address]
    options: dict[str, Any] = {"num_servers": 2, "padding_after": math.inf}
    with BatchEnv.connect(LEDGER, addresses, 8, seed=5, **options) as batch:
        batch.reset()
        result = batch.step(np.zeros(8, np.int64))
    assert result.status.tolist() == [Status.OK] * 4 + [Status.SERVER_LOST] * 4


def test_too_few_servers_are_an_error(source: Source) -> None:
    gone = source.start(4)
    source.lend(4)
    connect = functools.partial(BatchEnv.connect, LEDGER, [source.url], 8)
    with pytest.raises(AddressError, match="now; got 3; reduce it, or pass more"):
        connect(min_servers=3)
    with pytest.raises(ValueError, match="min_servers: expected at least 1; got 0"):
        connect(min_servers=0)
    gone.kill()
    for few in (None, 2):
        with pytest.raises(ConnectError, match=re.escape(gone.address)):
            connect(connect_timeout=2.0, min_servers=few)


def test_rows_wait_while_the_source_of_addresses_cannot_be_read(
    source: Source, play: Play, tmp_path: Path
) -> None:
    first, other = source.start(4), source.lend(4)
    player = play(8)
    rows = rows_at(player, first)
    added = source.lend(4)
    listed = (tmp_path / "servers").read_text()
    (tmp_path / "servers").unlink()
    first.kill()
    while (player.step().status[rows] != Status.PENDING).all():
        pass
    assert player.step().valid[rows_at(player, other)].all()
    (tmp_path / "servers").write_text(listed)
    step_until_valid(player, rows)
    assert len(rows_at(player, added)) == 4
