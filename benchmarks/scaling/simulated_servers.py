"""Simulated servers: many in one process, each with its own socket.

Simulated servers use real sessions and messages, but have no workers or envs. Their
rows never change, and they reply to a step after the time that envs would take.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

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
from envserve.session.server.server_protocol import ServerProtocol
from envserve.settings import HostSettings, PoolSettings
from envserve.slab import Rows
from envserve.spaces.env_spec import EnvSpec

#: Prefix of env names; the size of the observation in bytes follows.
NAME: Final = "Idle-"
_ENV_NAMES: Final = tuple(f"{NAME}{size}" for size in (16, 1_024, 28_224))
_USER: Final = ""
_MAX_ENVS: Final = 4096


class Stalls(NamedTuple):
    """Random stalls: a fraction of all steps takes `seconds` instead of the usual time.

    All envs of a server stall together.
    """

    fraction: float = 0.0
    seconds: float = 0.0


NO_STALLS: Final = Stalls()


class _Pool:
    """The spaces, blocks and rows of one lease, without workers."""

    def __init__(self, settings: PoolSettings) -> None:
        size = int(settings.env_name.removeprefix(NAME))
        box = spaces.Box(0, 255, (size,), np.uint8)
        self.spec = EnvSpec(settings.env_name, box, spaces.Discrete(2))
        self.blocks = make_blocks(settings.num_envs, 1, settings.num_splits)
        self.rows = Rows.allocate(self.spec, settings.num_envs)


class SimulatedServer:
    """A simulated server.

    Attributes:
      address: Address at which it listens.
      socket: ROUTER socket.
      due: Operations in progress, each with the monotonic time at which it completes,
      its session and its outcomes.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        env_seconds: float,
        *,
        insecure: bool,
        stalls: Stalls,
    ) -> None:
        host = HostSettings(num_workers=1, envs_per_worker=_MAX_ENVS)
        self._protocol = ServerProtocol(host, _ENV_NAMES, boot=1 + id(self))
        self._pools: dict[Any, _Pool] = {}
        self._env_seconds = env_seconds
        self._stalls, self._random = stalls, random.Random(id(self))
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
        """Handle all messages that have arrived."""
        while self.socket.poll(0):
            route, *frames = self.socket.recv_multipart()
            now = time.monotonic()
            self._execute(self._protocol.receive((route, _USER), frames, now), now)

    def reply(self, now: float) -> None:
        """Complete the operations that are due."""
        while self.due and self.due[0][0] <= now:
            _, session, outcomes = self.due.pop(0)
            if session in self._pools:  # the client may have detached
                self._execute(self._protocol.pool_finished(session, outcomes), now)

    def _execute(self, decisions: Any, now: float) -> None:
        """Execute the decisions of the protocol, as the event loop of a server does."""
        for decision in decisions:
            if isinstance(decision, Reply):
                self.socket.send_multipart([decision.peer[0], *decision.frames])
            elif isinstance(decision, ReplyWelcome):
                body = self._protocol.leases.welcome_for(_USER).encode()
                self._execute(self._protocol.reply(decision.request, body), now)
            if not isinstance(decision, PoolDecision):
                continue
            session = decision.session
            if isinstance(decision, StartPool):
                pool = self._pools[session] = _Pool(decision.settings)
                decisions = self._protocol.pool_ready(
                    session, pool.spec, pool.blocks, pool.rows, now
                )
                self._execute(decisions, now)
            elif isinstance(decision, EndPool):
                del self._pools[session]
                self._execute(self._protocol.pool_closed(session), now)
            elif isinstance(decision, RunStep):
                outcomes = [Outcome(block) for block in decision.blocks]
                is_stalled = self._random.random() < self._stalls.fraction
                seconds = self._stalls.seconds if is_stalled else self._env_seconds
                self.due.append((now + seconds, session, outcomes))
            elif isinstance(decision, RunReset):
                outcomes = [Outcome(reset.block) for reset in decision.resets]
                self.due.append((now, session, outcomes))


@contextlib.contextmanager
def simulated_servers(
    count: int,
    env_seconds: float = 0.0,
    *,
    insecure: bool = True,
    stalls: Stalls = NO_STALLS,
) -> Iterator[list[str]]:
    """Run `count` simulated servers in a separate process; yield their addresses."""
    context = multiprocessing.get_context("spawn")
    connection, child_end = context.Pipe()
    arguments = (child_end, count, env_seconds, insecure, stalls)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    child_end.close()
    try:
        yield connection.recv()
    finally:
        process.kill()
        process.join()


def _serve(
    parent: Connection, count: int, env_seconds: float, insecure: bool, stalls: Stalls
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context = zmq.Context()
    servers = [
        SimulatedServer(context, env_seconds, insecure=insecure, stalls=stalls)
        for _ in range(count)
    ]
    poller = zmq.Poller()
    for server in servers:
        poller.register(server.socket, zmq.POLLIN)
    by_socket = {server.socket: server for server in servers}
    parent.send([server.address for server in servers])
    while True:
        latest = time.monotonic() + 1.0
        next_due = min((s.due[0][0] for s in servers if s.due), default=latest)
        # `poll` takes whole milliseconds, so sleep for the remaining fraction.
        milliseconds = max(0, int(1000 * (next_due - time.monotonic())))
        for socket, _ in poller.poll(milliseconds):
            by_socket[socket].receive()
        now = time.monotonic()
        if not milliseconds and now < next_due:
            time.sleep(next_due - now)
        for server in servers:
            if server.due:
                server.reply(time.monotonic())
