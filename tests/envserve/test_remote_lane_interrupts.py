"""A KeyboardInterrupt at any line of a remote batch costs at most one episode.

The server runs in this process, but is never interrupted, because a real server is
another process.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import math
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import numpy as np
import pytest
import zmq

from envserve.client import BatchEnv, StepResult, outcome_queue
from envserve.client.link import connection, remote_lane, session_driver
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.server_pool import ServerPool
from envserve.client.link.zmq_guards.wakeup import Waker
from envserve.errors import LocalProtocolError, ServerLost
from envserve.lane import Outcome
from envserve.slab import Status
from envserve.wire.message import Buffer
from envserve.wire.sockets import Frames
from tests.envserve.conftest import WaitUntil
from tests.envserve.interrupts import Place, is_return, run_traced
from tests.envserve.server_process import make_config
from tests.envserve.session_fakes import FakeServer

STRIDE = 16
ADDRESSES: Final = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
#: The files in which interrupts occur.
CLIENT_FILES: Final = (
    *(
        f"/envserve/session/client/{name}.py"
        for name in ("attachment", "client_session", "client_blocks", "requests")
    ),
    "/envserve/session/states.py",
    "/envserve/client/absence.py",
    "/envserve/client/batch_env.py",
    "/envserve/client/lane_group.py",
    "/envserve/client/outcome_queue.py",
    "/envserve/client/link/connection.py",
    "/envserve/client/link/remote_lane.py",
    "/envserve/wire/rows.py",
)


def untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    """Disable interrupts during a method."""

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return method(*arguments, **options)
        finally:
            sys.settrace(trace)

    return call


class MemoryConnection:
    """A connection to an in-process server, whose operations finish immediately.

    Attributes:
      server: The server.
      slow: Absent blocks, whose operations do not finish.
    """

    made: list[MemoryConnection]

    def __init__(self, address: str, **_: object) -> None:
        self.address = address
        self.server = FakeServer(boot=1)
        self.slow: set[int] = set()
        self._replies: collections.deque[list[Buffer]] = collections.deque()
        self.max_frame_bytes = self.max_row_bytes = 1 << 30
        self.keys = None
        self.waker = Waker()
        self.made.append(self)

    @untraced
    def send(self, frames: list[Buffer]) -> bool:
        self.server.receive((b"route", ""), frames, time.monotonic())
        self._take()
        return True

    flush = connection.Connection.flush  # the real method, which may be interrupted

    def _take(self) -> None:
        # Copy the frames, because they are views of rows, which may change.
        for frames in self.server.take_replies():
            self._replies.append([bytes(frame) for frame in frames])

    @untraced
    def receive(self) -> Frames | None:
        if not self._replies:
            now = time.monotonic()
            for session, pool in list(self.server.pools.items()):
                outcomes = [pool.finish(b) for b in {*pool.running} - self.slow]
                absent = self.slow & pool.running.keys()
                decisions = self.server.protocol.pool_finished(
                    session, outcomes, absent
                )
                self.server.carry_out(decisions, now)
            self._take()
        return self._replies.popleft() if self._replies else None  # type: ignore[return-value]

    @untraced
    def receive_soon(self) -> Frames | None:
        frames = self.receive()
        if frames is None:
            time.sleep(0.001)
        return frames

    def exceeds_limit(self, is_connected: bool) -> bool:
        return False

    def poll(self) -> tuple[bool, bool]:
        return bool(self._replies), True

    def wait(self, timeout_seconds: float, *, for_writing: bool) -> None:
        pass

    def close(self, linger_seconds: float = 0.0) -> None:
        self.waker.close()


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    MemoryConnection.made = []
    monkeypatch.setattr(remote_lane, "Connection", MemoryConnection)
    monkeypatch.setattr(remote_lane, "_KEEPALIVE_SECONDS", 1000.0)


def two_lanes() -> list[RemoteLane]:
    addresses = ["tcp://memory:1", "tcp://memory:2"]
    lanes = [RemoteLane(at, make_config("Fake-v0")) for at in addresses]
    for lane in lanes:
        lane.finish_start(time.monotonic() + 20)
    return lanes


class Run:
    """A batch with one lane that checks every returned row.

    Attributes:
      shown: Last observations that were returned to the caller.
      num_faults: Number of interrupts and server restarts.
      num_unseen: Number of interrupted steps since the last result.
    """

    def __init__(self) -> None:
        self.lane = RemoteLane("tcp://memory:1", make_config("Fake-v0"))
        self.lane.finish_start(time.monotonic() + 20)
        (self.connection,) = MemoryConnection.made
        MemoryConnection.made.clear()
        self.servers = [self.connection.server]
        self.batch = BatchEnv([self.lane], padding_after=math.inf)
        self.shown = self.batch.reset()
        self.num_lost = np.zeros(self.batch.num_envs, int)
        self.num_faults = self.num_unseen = self.action = 0

    def restart(self) -> None:
        self.num_faults += 1
        self.servers.append(FakeServer(boot=len(self.servers) + 1))
        self.connection.server = self.servers[-1]

    def trace(self, call: Callable[[], object], line: int) -> list[Place]:
        places = run_traced(call, line, lambda path: path.endswith(CLIENT_FILES))
        if line == len(places):
            self.num_faults += 1
            self.num_unseen += 1
            self.connection.slow = set()
        return places

    def step(self) -> StepResult:
        self.action += 1
        result = self.batch.step(np.full(self.batch.num_envs, self.action))
        steps = result.observation[:, 0] - self.shown[:, 0]
        for row, status in enumerate(result.status):
            if status == Status.SERVER_LOST:
                last = result.final_observation[row, 0]
                assert result.truncated[row]
                assert result.observation[row].tolist() == [0, 0]
                # After an interrupt, a whole episode may have been lost unseen.
                if last or not self.num_unseen:
                    assert 0 <= last - self.shown[row, 0] <= 1 + self.num_unseen
                self.num_lost[row] += 1
                continue
            assert status in (Status.OK, Status.LATE)
            assert status == Status.LATE or result.reward[row] == self.action
            assert result.reward[row] == result.observation[row, 1]
            assert 1 <= steps[row] <= 1 + self.num_unseen
        self.shown, self.num_unseen = result.observation, 0
        return result

    def finish(self) -> None:
        """Step until all rows are valid; check the number of lost episodes."""
        for _ in range(1 + self.num_faults):
            result = self.step()
        assert result.valid.all()
        assert self.num_lost.max() <= self.num_faults
        executed = [
            item
            for server in self.servers
            for pool in server.pools.values()
            for item in pool.executed
            if item[1] is not None
        ]
        assert len(set(executed)) == len(executed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.batch.close()


def step(run: Run, line: int) -> list[Place]:
    return run.trace(run.step, line)


def step_after_a_restart(run: Run, line: int) -> list[Place]:
    run.restart()
    return run.trace(run.step, line)


def step_while_a_block_is_absent(run: Run, line: int) -> list[Place]:
    """Step while a block is absent; it returns once the lane has reported it."""
    run.connection.slow = {1}
    collect = run.lane.collect

    def collect_once(timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        outcomes = collect(timeout_seconds, min_finished)
        if run.lane.absent:
            run.connection.slow = set()
        return outcomes

    run.lane.collect = collect_once  # type: ignore[method-assign]
    return run.trace(run.step, line)


def step_after_an_interrupted_update(run: Run, line: int) -> list[Place]:
    collect = run.lane._session.collect

    def interrupt() -> list[Outcome]:
        run.lane._session.collect = collect  # type: ignore[method-assign]
        raise KeyboardInterrupt

    run.lane._session.collect = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.step()
    run.num_faults += 1
    run.num_unseen += 1
    return run.trace(run.step, line)


def reset_after_a_restart(run: Run, line: int) -> list[Place]:
    run.restart()
    places = run.trace(run.batch.reset, line)
    run.shown = run.batch.reset()
    return places


def call(run: Run, line: int) -> list[Place]:
    return run.trace(lambda: run.batch.call(0, "render", 5), line)


SCENARIOS: Final = (
    step,
    step_after_a_restart,
    step_while_a_block_is_absent,
    step_after_an_interrupted_update,
    reset_after_a_restart,
    call,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda item: item.__name__)
def test_an_interrupt_at_any_line_costs_at_most_one_episode(
    scenario: Callable[[Run, int], list[Place]], random_seed: int
) -> None:
    """Each run tests one of `STRIDE` parts of the lines, selected by the seed."""
    with Run() as probe:
        probe.step()
        places = scenario(probe, -1)
        probe.finish()
    first: dict[Place, int] = {}
    for line, place in enumerate(places, 1):
        if not is_return(place):  # an interrupt there may discard the result
            first.setdefault(place, line)
    lines = list(first.values())
    assert len(lines) > 50
    for line in lines[random_seed % STRIDE :: STRIDE]:
        with Run() as run:
            run.step()
            scenario(run, line)
            run.finish()


def test_an_interrupt_while_waiting_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Even on a slow machine, the driver must not poll before the interrupt.
    monkeypatch.setattr(session_driver, "SLICE_SECONDS", 1000.0)
    with Run() as run:
        run.step()
        receive_soon, is_first = run.connection.receive_soon, True

        def interrupt() -> Frames | None:
            nonlocal is_first
            if is_first:
                is_first = False
                raise KeyboardInterrupt
            return receive_soon()

        monkeypatch.setattr(run.connection, "receive_soon", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.step()
        run.num_unseen += 1
        assert run.step().valid.all()


@pytest.mark.parametrize(
    ("error", "raised"),
    [(SystemExit(), SystemExit), (zmq.ZMQError(zmq.ENOTSOCK), LocalProtocolError)],
    ids=["exits", "returns"],
)
def test_a_signal_handler_can_close_a_batch_that_waits(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    """If the handler returns, ZeroMQ finds that the socket is closed."""
    with Run() as run:

        def close() -> None:
            run.batch.close()
            raise error

        monkeypatch.setattr(run.connection, "receive_soon", close)
        with pytest.raises(raised):
            run.batch.step(np.zeros(run.batch.num_envs))
        assert run.batch.is_closed
        assert not run.connection.server.pools


def test_a_signal_handler_can_close_a_batch_that_is_being_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Locks and sockets that the interrupted call uses are left to this call."""
    with Run() as run:
        close, num_calls = run.lane.close, 0

        def close_again() -> None:
            nonlocal num_calls
            num_calls += 1
            run.batch.close()
            close()

        monkeypatch.setattr(run.lane, "close", close_again)
        run.batch.close()
        assert num_calls == 1
        assert run.batch.is_closed
        assert not run.connection.server.pools


def test_a_signal_handler_can_close_a_batch_that_waits_for_several_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = two_lanes()
    with BatchEnv(lanes) as batch:
        batch.reset()
        for connection in MemoryConnection.made:
            connection.slow = {block.index for block in lanes[0].blocks}

        def close(_: object, timeout: float) -> list[Any]:
            if not timeout:
                return []
            batch.close()
            raise OSError(errno.EBADF, "Bad file descriptor")

        monkeypatch.setattr(selectors.DefaultSelector, "select", close)
        batch.send(np.zeros(batch.num_envs))
        with pytest.raises(LocalProtocolError, match="already closed"):
            batch.recv(1)


class Targets(dict[object, str]):
    """Targets of moves, which the keep-alive thread of a lane looks up."""

    def __init__(self, look_up: Callable[[], str | None]) -> None:
        self._look_up = look_up

    def get(self, *_: object) -> str | None:  # type: ignore[override]
        return self._look_up()


def lane_with(look_up: Callable[[], str | None]) -> RemoteLane:
    server_pool = ServerPool(ADDRESSES, insecure=True)
    server_pool.placement.targets = Targets(look_up)
    return RemoteLane(ADDRESSES[0], make_config("Fake-v0"), server_pool=server_pool)


def is_closed(made: MemoryConnection) -> bool:
    with contextlib.suppress(ValueError):
        return made.waker.fileno() < 0
    return True


def test_a_lane_that_prepares_a_move_closes_both_connections(
    wait_until: WaitUntil,
) -> None:
    lane = lane_with(lambda: ADDRESSES[1])
    wait_until(lambda: len(MemoryConnection.made) == 2)
    lane.close()
    assert all(map(is_closed, MemoryConnection.made))


def test_the_garbage_collector_can_close_a_lane_in_its_keepalive_thread(
    wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    has_lane = threading.Event()

    def collect_garbage() -> None:
        has_lane.wait(60)
        lane.close()

    lane = lane_with(collect_garbage)
    has_lane.set()
    wait_until(lambda: is_closed(MemoryConnection.made[0]))
    assert caplog.text == ""


def interrupt_once(run: Run, monkeypatch: pytest.MonkeyPatch, *, is_sent: bool) -> None:
    """Interrupt the next `send`, either before or after it sends the message."""
    send = run.connection.send

    def interrupt(frames: list[Buffer]) -> bool:
        monkeypatch.setattr(run.connection, "send", send)
        if is_sent:
            send(frames)
        raise KeyboardInterrupt

    monkeypatch.setattr(run.connection, "send", interrupt)


@pytest.mark.parametrize("is_sent", [True, False])
def test_an_interrupt_while_a_step_is_sent_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    with Run() as run:
        batch = run.batch
        interrupt_once(run, monkeypatch, is_sent=is_sent)
        with pytest.raises(KeyboardInterrupt):
            batch.step(np.full(batch.num_envs, 7))
        result = batch.step(np.full(batch.num_envs, 8))
        assert result.valid.all()
        np.testing.assert_array_equal(result.reward, 8)
        np.testing.assert_array_equal(result.observation[:, 0], 2)
        for together in (True, False):
            interrupt_once(run, monkeypatch, is_sent=is_sent)
            with pytest.raises(KeyboardInterrupt):
                batch.send(np.full(2, 9), batch.blocks[0], together=together)
            _, result = batch.recv(2)
            assert result.valid.all()
            np.testing.assert_array_equal(result.reward, 9)


def test_a_reset_that_is_interrupted_once_it_was_sent_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Run() as run:
        batch = run.batch
        send_reset = batch.send_reset

        def interrupt(*arguments: Any, **options: Any) -> None:
            send_reset(*arguments, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(batch, "send_reset", interrupt)
        with pytest.raises(KeyboardInterrupt):
            batch.reset()
        monkeypatch.undo()
        run.shown = batch.reset()
        batch.send_reset()
        with pytest.raises(LocalProtocolError, match="a reset is in flight"):
            batch.reset()
        run.shown = batch.recv_reset()
        assert run.step().valid.all()


def test_an_interrupt_before_the_last_block_is_sent_loses_all_episodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Run() as run:
        batch = run.batch
        submit_step = run.lane.submit_step

        def interrupt(blocks: Sequence[int]) -> None:
            if tuple(blocks) == (1,):
                raise KeyboardInterrupt
            submit_step(blocks)

        monkeypatch.setattr(run.lane, "submit_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            batch.send(np.full(batch.num_envs, 7))
        monkeypatch.undo()
        assert batch.num_in_flight == 0
        assert (run.step().status == Status.SERVER_LOST).all()
        assert run.step().valid.all()


def test_an_interrupt_is_raised_even_if_another_lane_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    def fail(_: object) -> None:
        raise ServerLost("no reply")

    lanes = two_lanes()
    with BatchEnv(lanes) as batch:
        batch.reset()
        with monkeypatch.context() as patch:
            patch.setattr(MemoryConnection.made[0], "send", interrupt)
            patch.setattr(lanes[1], "submit_step", fail)
            with pytest.raises(KeyboardInterrupt):
                batch.step(np.zeros(batch.num_envs))


def test_rows_can_be_received_after_an_interrupt_while_descriptors_are_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With several lanes, `recv` waits for their descriptors."""
    monkeypatch.setattr(outcome_queue, "POLL_SECONDS", 0.0)
    fileno = RemoteLane.fileno
    line, is_complete = 0, False

    def trace_update(lane: RemoteLane) -> int:
        nonlocal is_complete
        monkeypatch.setattr(RemoteLane, "fileno", fileno)
        for connection in MemoryConnection.made:
            connection.slow = set()
        update = functools.partial(fileno, lane)
        lines = run_traced(update, line, lambda path: path.endswith("client_blocks.py"))
        is_complete = len(lines) < line
        if not is_complete:
            raise KeyboardInterrupt
        return fileno(lane)

    while not is_complete:
        line += 1
        MemoryConnection.made.clear()
        lanes = two_lanes()
        with BatchEnv(lanes, padding_after=math.inf) as batch:
            batch.reset()
            for connection in MemoryConnection.made:
                connection.slow = {block.index for block in lanes[0].blocks}
            batch.send(np.zeros(batch.num_envs))
            monkeypatch.setattr(RemoteLane, "fileno", trace_update)
            with contextlib.suppress(KeyboardInterrupt):
                batch.recv(1)
            while batch.num_in_flight:
                batch.recv()
            assert batch.step(np.zeros(batch.num_envs)).valid.all()
    assert line > 10


def test_a_waker_can_watch_a_descriptor_after_an_interrupt_at_any_line() -> None:
    line, is_complete = 0, False
    while not is_complete:
        line += 1
        sockets = [socket.socketpair() for _ in range(3)]
        descriptors = [reader.fileno() for reader, _ in sockets]
        waker = Waker()
        waker.watch(descriptors[0])
        watch = functools.partial(waker.watch, descriptors[1])
        lines = run_traced(watch, line)
        is_complete = len(lines) < line
        waker.watch(descriptors[2])
        for (_, writer), is_watched in zip(sockets, (False, False, True), strict=True):
            writer.send(b"!")
            assert bool(select.select([waker.fileno()], [], [], 0)[0]) == is_watched
        waker.close()
        for pair in sockets:
            for each in pair:
                each.close()
    assert line > 2
