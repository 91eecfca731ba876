"""Ctrl-C at any line of a remote lane: an episode is lost at worst, and nothing wrong.

The server's half, in memory, cannot be interrupted: in truth it is in another process.
"""

from __future__ import annotations

import collections
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.client.link import connection, remote_lane
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.zmq_guards.wakeup import Waker
from envserve.lane import Outcome, Reset, pop_harmless_mark
from envserve.slab import Status
from envserve.wire.message import Buffer
from envserve.wire.sockets import Frames
from tests.envserve.interrupts import Place, run_traced
from tests.envserve.server_process import make_config
from tests.envserve.session_fakes import FakeServer, make_call

STRIDE = 16
BLOCKS: Final = (0, 1)
#: What only clients run, or what is interrupted only there.
CLIENT_FILES: Final = (
    *(
        f"/envserve/session/client/{name}.py"
        for name in ("attachment", "client_session", "client_blocks", "requests")
    ),
    "/envserve/session/states.py",
    "/envserve/client/link/connection.py",
    "/envserve/client/link/remote_lane.py",
    "/envserve/wire/rows.py",
)


def untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing in here is interrupted."""

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
    """A connection to a server in memory, whose envs take no time.

    Attributes:
      server: The server.
      slow: Blocks whose operations do not end, and that are absent.
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

    flush = connection.Connection.flush  # as it is, to be interrupted at any line

    def _take(self) -> None:
        # What is not copied now would change with the rows.
        for frames in self.server.take_replies():
            self._replies.append([bytes(frame) for frame in frames])

    @untraced
    def receive(self) -> Frames | None:
        if not self._replies:
            now = time.monotonic()
            for session, pool in list(self.server.pools.items()):
                outcomes = [pool.finish(b) for b in {*pool.running} - self.slow]
                absent = self.slow & pool.running.keys()
                decisions = self.server.session.pool_finished(session, outcomes, absent)
                self.server.carry_out(decisions, now)
            self._take()
        return self._replies.popleft() if self._replies else None  # type: ignore[return-value]

    @untraced
    def receive_soon(self) -> Frames | None:
        frames = self.receive()
        if frames is None:
            time.sleep(0.001)
        return frames

    def is_endless(self, is_connected: bool) -> bool:
        return False

    def look(self) -> tuple[bool, bool]:
        return bool(self._replies), True

    def wait(self, timeout_seconds: float, *, for_writing: bool) -> None:
        pass

    def close(self, linger_seconds: float = 0.0) -> None:
        self.waker.close()


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    MemoryConnection.made = []
    monkeypatch.setattr(remote_lane, "Connection", MemoryConnection)
    monkeypatch.setattr(remote_lane, "_KEEPER_SECONDS", 1000.0)


class Run:
    """A lane that is stepped, and what must hold of it."""

    def __init__(self) -> None:
        self.lane = RemoteLane("tcp://memory:1", make_config("Fake-v0"))
        self.lane.finish_start(time.monotonic() + 20)
        (self.connection,) = MemoryConnection.made
        MemoryConnection.made.clear()
        self.servers = [self.connection.server]
        self.num_faults = 0
        self.num_lost = [0, 0]
        self.count = 0
        self.reset()

    def restart(self) -> None:
        self.num_faults += 1
        self.servers.append(FakeServer(boot=len(self.servers) + 1))
        self.connection.server = self.servers[-1]

    def gather(self, line: int, submit: Callable[[], None]) -> list[Place]:
        """Carries out an operation of all blocks; with a line, interrupted there."""
        self.outcomes: dict[int, Outcome] = {}
        self.count += 1

        def call() -> None:
            try:
                submit()
                while len(self.outcomes) < len(BLOCKS):
                    for outcome in self.lane.collect(5.0, len(BLOCKS)):
                        self.outcomes[outcome.block] = outcome
            except KeyboardInterrupt as error:
                if not pop_harmless_mark(error):
                    self.lane.invalidate("a call was interrupted")
                raise

        if not line:
            call()
            return []
        places = run_traced(call, line, lambda path: path.endswith(CLIENT_FILES))
        if 0 < line <= len(places):
            self.num_faults += 1
            self.connection.slow = set()
            while self.lane.is_busy:
                self.lane.collect(5.0)
            self.outcomes.clear()
        return places

    def reset(self, line: int = 0) -> list[Place]:
        resets = [Reset(block) for block in BLOCKS]
        return self.gather(line, lambda: self.lane.submit_reset(resets))

    def step(self, line: int = 0) -> list[Place]:
        rows, before = self.lane.rows, self.lane.rows.observation[0].copy()
        self.action = (self.count + 1) % 100
        rows.action[0][:] = self.action
        blocks: Sequence[int] = BLOCKS
        places = self.gather(line, lambda: self.lane.submit_step(blocks))
        for index, outcome in self.outcomes.items():
            block = self.lane.blocks[index]
            part = slice(block.start, block.stop)
            assert outcome.error is None
            if not outcome.faults:
                assert (rows.status[part] == Status.OK).all()
                assert (rows.reward[part] == self.action).all()
                expected = before[part] + [1, 0]
                expected[:, 1] = self.action
                np.testing.assert_array_equal(rows.observation[0][part], expected)
                continue
            self.num_lost[index] += 1
            assert (rows.status[part] == Status.SERVER_LOST).all()
            assert rows.truncated[part].all()
            np.testing.assert_array_equal(rows.observation[0][part], 0)
            last = rows.final_observation[0][part, 0] - before[part, 0]
            assert ((last == 0) | (last == 1)).all()
        return places

    def finish(self) -> None:
        """Steps until all is well again, and checks what that has cost."""
        for _ in range(1 + self.num_faults):
            self.step()
        assert not any(outcome.faults for outcome in self.outcomes.values())
        assert max(self.num_lost) <= self.num_faults
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
        self.lane.close()


def step(run: Run, line: int) -> list[Place]:
    return run.step(line)


def step_after_a_restart(run: Run, line: int) -> list[Place]:
    run.restart()
    return run.step(line)


def step_while_a_block_is_absent(run: Run, line: int) -> list[Place]:
    """Once it was seen to be absent, it is back."""
    run.connection.slow = {1}
    collect = run.lane.collect

    def collect_once(timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        outcomes = collect(timeout_seconds, min_finished)
        if run.lane.absent:
            run.connection.slow = set()
        return outcomes

    run.lane.collect = collect_once  # type: ignore[method-assign]
    return run.step(line)


def reset_after_a_restart(run: Run, line: int) -> list[Place]:
    run.restart()
    return run.reset(line)


def call_and_lose(run: Run, line: int) -> list[Place]:
    def submit() -> None:
        run.lane.rows.action[0][:] = 50
        run.lane.submit_call([make_call([0], "call", "render")])
        run.lane.submit_step([1])
        run.lane.invalidate("it was enough")
        run.lane.rows.action[0][:] += 1
        run.lane.submit_step(BLOCKS)

    run.num_faults += 1
    return run.gather(line, submit)


SCENARIOS: Final = (
    step,
    step_after_a_restart,
    step_while_a_block_is_absent,
    reset_after_a_restart,
    call_and_lose,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda item: item.__name__)
def test_an_interrupt_at_any_line_costs_an_episode_at_worst(
    scenario: Callable[[Run, int], list[Place]], random_seed: int
) -> None:
    """Another part of the lines each time, all of them within `STRIDE` runs."""
    with Run() as probe:
        probe.step()
        places = scenario(probe, -1)
        probe.finish()
    first: dict[Place, int] = {}
    for line, place in enumerate(places, 1):
        first.setdefault(place, line)
    lines = list(first.values())
    assert len(lines) > 50
    for line in lines[random_seed % STRIDE :: STRIDE]:
        with Run() as run:
            run.step()
            scenario(run, line)
            run.finish()


def test_an_interrupt_while_nothing_but_time_passes_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However long this test is kept from the processor, it does not look around first.
    monkeypatch.setattr(connection, "SLICE_SECONDS", 1000.0)
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
        run.lane.rows.action[0][:] = 7
        run.lane.submit_step(BLOCKS)
        with pytest.raises(KeyboardInterrupt) as caught:
            run.lane.collect(5.0)
        assert pop_harmless_mark(caught.value)
        outcomes = run.lane.collect(5.0, len(BLOCKS))
        assert [(o.block, o.faults) for o in outcomes] == [(0, ()), (1, ())]
        np.testing.assert_array_equal(run.lane.rows.reward, 7)


def interrupt_once(run: Run, monkeypatch: pytest.MonkeyPatch, *, is_sent: bool) -> None:
    """Interrupts the next sending of a message, after or before that is sent."""
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
        batch = BatchEnv([run.lane])
        batch.reset()
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


def test_an_interrupt_before_the_last_block_is_sent_loses_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Run() as run:
        batch = BatchEnv([run.lane])
        batch.reset()
        submit_step = run.lane.submit_step

        def interrupt(blocks: Sequence[int]) -> None:
            if tuple(blocks) == BLOCKS[-1:]:
                raise KeyboardInterrupt
            submit_step(blocks)

        monkeypatch.setattr(run.lane, "submit_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            batch.send(np.full(batch.num_envs, 7))
        monkeypatch.undo()
        assert batch.num_in_flight == 0
        assert (
            batch.step(np.full(batch.num_envs, 8)).status == Status.SERVER_LOST
        ).all()
        np.testing.assert_array_equal(batch.step(np.full(batch.num_envs, 9)).reward, 9)
