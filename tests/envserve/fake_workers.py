"""Workers that a test plays, and a pool over them: no process is behind either."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Any, cast

from gymnasium import spaces

from envserve.lane import Outcome
from envserve.pool.launcher import Launcher, WorkerProcess
from envserve.pool.pool import Pool
from envserve.pool.worker_states import Exit, WorkerState
from envserve.settings import PoolSettings
from envserve.slab import Status
from envserve.spaces import codec
from envserve.spaces.env_spec import describe
from envserve.worker.channel import (
    Channel,
    ChannelMessage,
    Kind,
    MessageDecoder,
    pack_message,
)

from .pool_driver import gather, wait_for

DISCRETE = describe(spaces.Discrete(3))


class FakeWorker:
    """The far end of a worker's socket, with no process behind it."""

    def __init__(self, launcher: FakeLauncher, *wakes: Any) -> None:
        self.was_killed = False
        ours, self.theirs = socket.socketpair()
        number = len(launcher.workers)
        self.process = WorkerProcess(
            cast(Launcher, launcher), number, Channel(ours, *wakes)
        )
        self.process.pid = 1000 + number
        self.theirs.settimeout(40.0)
        self._reader = MessageDecoder()
        self._frames: list[ChannelMessage] = []

    def receive(self) -> ChannelMessage:
        while not self._frames:
            self._frames += self._reader.feed(self.theirs.recv(1 << 16))
        return self._frames.pop(0)

    def take_over(self, pool: Pool, *kinds: Kind) -> None:
        """Answers what a pool asks of the successor of a worker that was lost."""
        self.theirs.setblocking(False)
        for kind in kinds:
            give_up_at = time.monotonic() + 40.0
            while not self._frames:
                assert time.monotonic() < give_up_at, f"waited 40 s for {kind!r}"
                assert pool.collect(0.01) == []
                with contextlib.suppress(BlockingIOError):
                    self._frames += self._reader.feed(self.theirs.recv(1 << 16))
            assert self._frames[0].kind is kind
            self.answer()
        self.theirs.settimeout(40.0)

    def send(self, *frame: Any) -> None:
        self.theirs.sendall(pack_message(*frame))

    def answer(self, payload: bytes = b"") -> None:
        frame = self.receive()
        self.send(Kind.DONE, frame.block, frame.sequence, payload)

    def become_ready(self, action: dict[str, Any] = DISCRETE) -> None:
        assert self.receive().kind is Kind.BUILD
        both = {"observation": DISCRETE, "action": action}
        self.send(Kind.READY, 0, 0, codec.encode(both))

    def close(self) -> None:
        self.theirs.close()

    def exit(self, code: int) -> None:
        self.process.exit = Exit(1000, code)

    def die(self, code: int) -> None:
        self.close()
        self.exit(code)


class FakeLauncher:
    """Starts fake workers; what it kills is dead at once."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.can_kill = True
        self.reserve = contextlib.nullcontext()  # of descriptors

    def launch(self, selector: selectors.BaseSelector, owner: object) -> WorkerProcess:
        worker = FakeWorker(self, selector, owner)
        self.workers.append(worker)
        return worker.process

    def kill(self, process: WorkerProcess, *, has_stack: bool = False) -> None:
        self.workers[process.number].was_killed = True
        if self.can_kill:
            self.workers[process.number].die(-9)

    def poll(self) -> None:
        """Exits are reported by the test itself."""


class Scene:
    """A pool of two envs over fake workers, reset and in the middle of a step."""

    def __init__(self, num_workers: int = 1, num_splits: int = 2) -> None:
        self.launcher = FakeLauncher()
        self.seconds_gone = 0.0
        config = PoolSettings(
            env_name="Fake-v0",
            num_envs=2,
            num_workers=num_workers,
            num_splits=num_splits,
            seed=0,
            max_restarts=2,
            max_infos_kib=64,
        )
        self.pool = Pool(
            config,
            launcher=cast(Launcher, self.launcher),
            clock=lambda: time.monotonic() + self.seconds_gone,
        )

    @property
    def worker(self) -> FakeWorker:
        return self.launcher.workers[-1]

    def start_step(self) -> ChannelMessage:
        self.worker.become_ready()
        wait_for(self.pool, lambda: self.pool.is_ready)
        assert self.worker.receive().kind is Kind.SLAB
        self.pool.submit_step([0])
        frame = self.worker.receive()
        assert frame.kind is Kind.STEP
        return frame

    def replace(
        self, culprit: FakeWorker, action: dict[str, Any] = DISCRETE
    ) -> FakeWorker:
        """Waits for the next worker, and has it take over."""
        wait_for(self.pool, lambda: self.worker is not culprit)
        self.worker.become_ready(action)
        if action is DISCRETE:
            state = self.pool._workers.all[0]
            wait_for(self.pool, lambda: state.state is WorkerState.SERVING)
            assert self.worker.receive().kind is Kind.SLAB
        return self.worker

    def lose(self, culprit: FakeWorker) -> Outcome:
        """What the step has come to, once the next worker has taken over."""
        self.replace(culprit).take_over(self.pool, Kind.RESET)
        (outcome,) = gather(self.pool, [0])
        assert self.pool.rows.status[0] == Status.WORKER_DIED
        assert self.pool.rows.truncated[0]
        return outcome
