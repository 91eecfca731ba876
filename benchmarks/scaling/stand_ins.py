"""Servers that cost little: one process is as many as wanted, each with its socket.

Sessions and messages are the project's own. In the place of workers and envs there are
rows that never change, and an answer comes as long after its step as envs would take.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import zmq
from gymnasium import spaces

from envserve.keys.key_folder import KeyFolder
from envserve.lane import Outcome, make_blocks
from envserve.session.server.decisions import (
    EndPool,
    PoolDecision,
    Reply,
    ReplyWelcome,
    RunReset,
    RunStep,
    StartPool,
)
from envserve.session.server.server_session import ServerSession
from envserve.settings import HostSettings, PoolSettings
from envserve.slab import Rows
from envserve.spaces.env_spec import EnvSpec

#: Before the number of bytes that its observation has.
NAME: Final = "Idle-"
_ENV_NAMES: Final = tuple(f"{NAME}{size}" for size in (16, 1_024, 28_224))
_USER: Final = ""
_MAX_ENVS: Final = 4096


class _Pool:
    """Rows of one lease."""

    def __init__(self, settings: PoolSettings) -> None:
        size = int(settings.env_name.removeprefix(NAME))
        box = spaces.Box(0, 255, (size,), np.uint8)
        self.spec = EnvSpec(settings.env_name, box, spaces.Discrete(2))
        self.blocks = make_blocks(settings.num_envs, 1, settings.num_splits)
        self.rows = Rows.allocate(self.spec, settings.num_envs)


class StandIn:
    """One server.

    Attributes:
      address: Where it listens.
      socket: Its ROUTER.
      due: What has been asked for, and when it is done.
    """

    def __init__(
        self, context: zmq.Context[Any], env_seconds: float, *, insecure: bool
    ) -> None:
        host = HostSettings(num_workers=1, envs_per_worker=_MAX_ENVS)
        self._session = ServerSession(host, _ENV_NAMES, boot=1 + id(self))
        self._pools: dict[Any, _Pool] = {}
        self._env_seconds = env_seconds
        self.due: list[tuple[float, Any, list[Outcome]]] = []
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        key = None if insecure else KeyFolder().ensure_key("server")
        if key is not None:
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"

    def receive(self) -> None:
        """Takes the messages that are there."""
        while self.socket.poll(0):
            route, *frames = self.socket.recv_multipart()
            now = time.monotonic()
            self._do(self._session.receive((route, _USER), frames, now), now)

    def answer(self, now: float) -> None:
        """Ends what is due."""
        while self.due and self.due[0][0] <= now:
            _, session, outcomes = self.due.pop(0)
            if session in self._pools:  # it may have detached
                self._do(self._session.pool_finished(session, outcomes), now)

    def _do(self, decisions: Any, now: float) -> None:
        for decision in decisions:
            if isinstance(decision, Reply):
                self.socket.send_multipart([decision.peer[0], *decision.frames])
            elif isinstance(decision, ReplyWelcome):
                body = self._session.leases.welcome(_USER).encode()
                self._do(self._session.answer(decision.request, body), now)
            if not isinstance(decision, PoolDecision):
                continue
            session = decision.session
            if isinstance(decision, StartPool):
                pool = self._pools[session] = _Pool(decision.config)
                parts = pool.spec, pool.blocks, pool.rows
                self._do(self._session.pool_ready(session, *parts, now), now)
            elif isinstance(decision, EndPool):
                del self._pools[session]
                self._do(self._session.pool_closed(session), now)
            elif isinstance(decision, RunStep):
                outcomes = [Outcome(block) for block in decision.blocks]
                self.due.append((now + self._env_seconds, session, outcomes))
            elif isinstance(decision, RunReset):
                outcomes = [Outcome(reset.block) for reset in decision.resets]
                self.due.append((now, session, outcomes))


@contextlib.contextmanager
def stand_ins(
    count: int, env_seconds: float = 0.0, *, insecure: bool = True
) -> Iterator[list[str]]:
    """Runs so many in a process of their own; gives their addresses."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, count, env_seconds, insecure)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def _serve(ours: Connection, count: int, env_seconds: float, insecure: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context = zmq.Context()
    servers = [StandIn(context, env_seconds, insecure=insecure) for _ in range(count)]
    poller = zmq.Poller()
    for server in servers:
        poller.register(server.socket, zmq.POLLIN)
    of_socket = {server.socket: server for server in servers}
    ours.send([server.address for server in servers])
    while True:
        later = time.monotonic() + 1.0
        soon = min((s.due[0][0] for s in servers if s.due), default=later)
        # Whole milliseconds by the poll, the rest by sleeping.
        milliseconds = max(0, int(1000 * (soon - time.monotonic())))
        for socket, _ in poller.poll(milliseconds):
            of_socket[socket].receive()
        now = time.monotonic()
        if not milliseconds and now < soon:
            time.sleep(soon - now)
        for server in servers:
            if server.due:
                server.answer(time.monotonic())
