"""Fake workers without processes, which a test controls, and a pool of them."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Any, cast

from gymnasium import spaces

from envserve.errors import WorkerError
from envserve.lane import Outcome
from envserve.pool.launcher import Launcher, WorkerProcess
from envserve.pool.pool import Pool
from envserve.pool.supervisor import SupervisedWorker
from envserve.pool.worker_states import Exit, WorkerState
from envserve.settings import PoolSettings
from envserve.slab import Status
from envserve.spaces import codec
from envserve.spaces.env_spec import describe
from envserve.worker.channel import (
    Channel,
    ChannelMessage,
    MessageDecoder,
    MessageKind,
    pack_message,
)

from .pool_driver import gather, wait_for

DISCRETE = describe(spaces.Discrete(3))


class FakeWorker:
    """A worker without a process: the worker's end of a socket pair."""

    def __init__(self, launcher: FakeLauncher, *selector_arguments: Any) -> None:
        self.was_killed = self.is_ready = False
        ours, self.theirs = socket.socketpair()
        number = len(launcher.workers)
        channel = Channel(ours, *selector_arguments)
        self.process = WorkerProcess(
            cast(Launcher, launcher), number, channel, self.theirs
        )
        self.process.pid = 1000 + number
        self.theirs.settimeout(40.0)
        self._reader = MessageDecoder()
        self._messages: list[ChannelMessage] = []

    def receive(self) -> ChannelMessage:
        while not self._messages:
            self._messages += self._reader.feed(self.theirs.recv(1 << 16))
        return self._messages.pop(0)

    def take_over(self, pool: Pool, *kinds: MessageKind) -> None:
        """Reply to the operations that a pool sends to a lost worker's successor."""
        self.theirs.setblocking(False)
        for kind in kinds:
            deadline = time.monotonic() + 40.0
            while not self._messages:
                assert time.monotonic() < deadline, f"expected {kind!r} within 40 s"
                assert pool.collect(0.01) == []
                with contextlib.suppress(BlockingIOError):
                    self._messages += self._reader.feed(self.theirs.recv(1 << 16))
            assert self._messages[0].kind is kind
            self.reply()
        self.theirs.settimeout(40.0)

    def send(self, *message: Any) -> None:
        self.theirs.sendall(pack_message(*message))

    def reply(self, payload: bytes = b"") -> None:
        message = self.receive()
        self.send(MessageKind.DONE, message.block, message.sequence, payload)

    def become_ready(self, action: dict[str, Any] = DISCRETE) -> None:
        assert self.receive().kind is MessageKind.BUILD
        both = {"observation": DISCRETE, "action": action}
        self.send(MessageKind.READY, 0, 0, codec.encode(both))
        self.is_ready = True

    def close(self) -> None:
        self.theirs.close()

    def exit(self, code: int) -> None:
        self.process.exit = Exit(1000, code)

    def die(self, code: int) -> None:
        self.close()
        self.exit(code)


class FakeLauncher:
    """Starts fake workers; a killed fake worker exits immediately."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.can_kill = True
        self.num_failing = 0  # number of launches that fail
        self.import_note = ""
        self.ends_in_import = False
        self.reserve = contextlib.nullcontext()  # reserves no descriptors

    def launch(
        self, selector: selectors.BaseSelector, selector_data: object
    ) -> WorkerProcess:
        if self.num_failing:
            self.num_failing -= 1
            raise WorkerError("Too many open files")
        worker = FakeWorker(self, selector, selector_data)
        self.workers.append(worker)
        return worker.process

    def kill(self, process: WorkerProcess, *, wants_stack: bool = False) -> None:
        self.workers[process.fork_number].was_killed = True
        if self.can_kill:
            self.workers[process.fork_number].die(-9)

    def poll(self) -> None:
        """Do nothing, because the test itself reports exits."""


class PoolOfFakeWorkers:
    """A pool of two envs on fake workers, with methods that step and lose workers."""

    def __init__(self, num_workers: int = 1, num_splits: int = 2) -> None:
        self.launcher = FakeLauncher()
        self.extra_seconds = 0.0
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
            clock=lambda: time.monotonic() + self.extra_seconds,
        )

    def close(self) -> None:
        """End the workers, and close the pool."""
        for worker in self.launcher.workers:
            with contextlib.suppress(OSError):
                worker.die(0)
        self.pool.close()

    @property
    def worker(self) -> FakeWorker:
        return self.launcher.workers[-1]

    @property
    def supervised(self) -> SupervisedWorker:
        """The first worker, which outlives its processes."""
        return self.pool._workers.all[0]

    def start_step(self) -> ChannelMessage:
        self.worker.become_ready()
        wait_for(self.pool, lambda: self.pool.is_ready)
        assert self.worker.receive().kind is MessageKind.SLAB
        self.pool.submit_step([0])
        message = self.worker.receive()
        assert message.kind is MessageKind.STEP
        return message

    def replace(
        self, culprit: FakeWorker, action: dict[str, Any] = DISCRETE
    ) -> FakeWorker:
        """Wait for a worker's successor, and make it ready."""
        wait_for(self.pool, lambda: self.worker is not culprit)
        self.worker.become_ready(action)
        if action is DISCRETE:
            supervised = self.supervised
            wait_for(self.pool, lambda: supervised.state is WorkerState.SERVING)
            assert self.worker.receive().kind is MessageKind.SLAB
        return self.worker

    def replace_and_collect(self, culprit: FakeWorker) -> Outcome:
        """Let a successor take over; return the outcome of the interrupted step."""
        self.replace(culprit).take_over(self.pool, MessageKind.RESET)
        (outcome,) = gather(self.pool, [0])
        assert self.pool.rows.status[0] == Status.WORKER_DIED
        assert self.pool.rows.truncated[0]
        return outcome
