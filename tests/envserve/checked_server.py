"""A correct in-process server, for tests of `envserve check`.

Subclasses break it by overriding `change_request`, `change_reply` or the envs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from envserve.check.probe_client import ServerUnderTest
from envserve.check.rules import CheckResult, check
from envserve.envs.seeding import env_seed
from envserve.errors import RemoteProtocolError
from envserve.session.server.lease import Lease
from envserve.settings import HostSettings, PoolSettings
from envserve.slab import Status
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.message import Buffer, Message, decode, encode
from tests.envserve.session_fakes import FakePool, FakeServer
from tests.simulation.pool import Operation

#: The lease is short because tests check that it expires; time is simulated. The check
#: needs no more than 8 envs.
HOST = HostSettings(num_workers=1, envs_per_worker=8, lease_seconds=2.0)


class Envs(FakePool):
    """Random walks whose observations and episode lengths depend on their seeds."""

    spec = EnvSpec(
        "Fake-v0", spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Discrete(3)
    )

    def __init__(self, config: PoolSettings) -> None:
        super().__init__(config)
        self.draws: list[Any] = [None] * config.num_envs
        self.has_ended = [False] * config.num_envs

    def _begin(self, block: int, operation: Operation) -> None:
        self.running[block] = operation

    def seed_of(self, row: int) -> int:
        index = self.config.first_env_index + row
        return env_seed(self.config.seed, index, self.config.first_incarnation)

    def _reset(self, row: int, seed: int | None = None, options: bytes = b"") -> Any:
        if seed is None and self.draws[row] is None:
            seed = self.seed_of(row)
        if seed is not None:
            self.draws[row] = np.random.default_rng(seed)
        self.count[row] = 0
        self.has_ended[row] = False
        self.rows.observation[0][row] = self.draws[row].random(2)

    def _step(self, row: int) -> Any:
        rows, draws = self.rows, self.draws[row]
        rows.status[row] = Status.OK
        rows.reward[row] = rows.terminated[row] = rows.truncated[row] = 0
        if self.has_ended[row] and self.config.autoreset == "next_step":
            return self._reset(row)
        self.count[row] += 1
        rows.reward[row] = rows.action[0][row].sum()
        rows.observation[0][row] = self.count[row], draws.random()
        if draws.random() < 0.1:
            self.end_episode(row)
        return {} if self.config.infos == "none" else {"count": int(self.count[row])}

    def end_episode(self, row: int) -> None:
        rows = self.rows
        rows.truncated[row] = self.has_ended[row] = True
        rows.final_observation[0][row] = rows.observation[0][row]
        if self.config.autoreset == "same_step":
            self._reset(row)


class Server(FakeServer):
    """A FakeServer that is connected to MemoryLinks, each of which has a route."""

    envs: type[Envs] = Envs

    def __init__(self) -> None:
        super().__init__(HOST, pool=self.envs)
        self.now = 0.0
        self.links: dict[bytes, deque[list[Buffer]]] = {}

    def change_request(self, message: Message) -> Message | None:
        """Return the request to handle instead of this one; None drops the request."""
        return message

    def change_reply(self, message: Message) -> Message | None:
        """Return the reply to send instead of this one; None drops the reply."""
        return message

    def lease_of(self, message: Message) -> Lease | None:
        """Return the lease that a message belongs to, if any."""
        record = self.protocol.leases.get(("", message.session))
        return record.lease if record else None

    def receive_frames(self, route: bytes, frames: Sequence[Buffer]) -> None:
        if max(map(len, frames)) > HOST.max_message_bytes:
            return  # ZeroMQ closes such a connection
        try:
            message = self.change_request(decode(frames))
            frames = [] if message is None else encode(message)
        except RemoteProtocolError:
            frames = frames[:4]
        if frames:
            self.receive((route, ""), frames, self.now)
            self.deliver()

    def deliver(self) -> None:
        replies, self.replies = self.replies, []
        for reply in replies:
            if (message := self.change_reply(decode(reply.frames))) is not None:
                self.links[reply.peer[0]].append(encode(message))

    def advance(self, seconds: float) -> None:
        """Finish all operations; if no reply is waiting, advance the clock."""
        self.finish_all(self.now)
        self.deliver()
        if not any(self.links.values()):
            self.now += seconds
            self.poll(self.now)
            self.deliver()


class MemoryLink:
    """An `envserve.check.probe_client.SocketLink` without a socket."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._route = str(len(server.links)).encode()
        self._inbox = server.links[self._route] = deque()

    def send(self, frames: Sequence[Buffer]) -> None:
        self._server.receive_frames(self._route, frames)

    def receive(self, seconds: float) -> Sequence[Buffer] | None:
        if not self._inbox:
            self._server.advance(seconds)
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        self._inbox.clear()


def findings(server: Server) -> Iterator[CheckResult]:
    """Run `check` against a server, and yield its results."""
    return check(ServerUnderTest(lambda: MemoryLink(server)))  # type: ignore[arg-type, return-value]
