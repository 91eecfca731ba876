"""A server in this process that `envserve check` finds nothing wrong with.

A subclass says something else in `hears`, `says` or its envs, and nothing more.
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

#: Short, so that its end can be seen; time costs nothing here.
POLICY = HostSettings(num_workers=1, lease_seconds=2.0)


class Envs(FakePool):
    """Walks of some steps, each as its seed says."""

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
        rows.reward[row] = rows.action[0][row]
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
    """Delivers over links, of which each has its route."""

    envs: type[Envs] = Envs

    def __init__(self) -> None:
        super().__init__(POLICY, pool=self.envs)
        self.now = 0.0
        self.links: dict[bytes, deque[list[Buffer]]] = {}

    def hears(self, message: Message) -> Message | None:
        """What of a message it takes note of."""
        return message

    def says(self, message: Message) -> Message | None:
        """What it sends in place of an answer."""
        return message

    def lease_of(self, message: Message) -> Lease | None:
        """The lease that it is about, if it is about one."""
        record = self.session.leases.get(("", message.session))
        return record.lease if record else None

    def listen(self, route: bytes, frames: Sequence[Buffer]) -> None:
        if max(map(len, frames)) > POLICY.max_message_bytes:
            return  # ZeroMQ ends that connection
        try:
            message = self.hears(decode(frames))
            frames = [] if message is None else encode(message)
        except RemoteProtocolError:
            frames = frames[:4]
        if frames:
            self.receive((route, ""), frames, self.now)
            self.deliver()

    def deliver(self) -> None:
        replies, self.replies = self.replies, []
        for reply in replies:
            if (message := self.says(decode(reply.frames))) is not None:
                self.links[reply.peer[0]].append(encode(message))

    def run(self, seconds: float) -> None:
        """Lets what runs end; then time passes."""
        self.finish_all(self.now)
        self.deliver()
        if not any(self.links.values()):
            self.now += seconds
            self.poll(self.now)
            self.deliver()


class MemoryLink:
    """What `envserve.check.probe_client.SocketLink` is, without a socket."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._route = str(len(server.links)).encode()
        self._inbox = server.links[self._route] = deque()

    def send(self, frames: Sequence[Buffer]) -> None:
        self._server.listen(self._route, frames)

    def receive(self, seconds: float) -> Sequence[Buffer] | None:
        if not self._inbox:
            self._server.run(seconds)
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        self._inbox.clear()


def findings(server: Server) -> Iterator[CheckResult]:
    """What `check` finds."""
    return check(ServerUnderTest(lambda: MemoryLink(server)))  # type: ignore[arg-type, return-value]
