"""A server half with pools that run only when told to, and a link to a client half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from envserve import codec
from envserve.errors import CallError, EnvserveError, UnknownEnv
from envserve.lane import Call, Fault, Outcome, PoolConfig, Reset, make_blocks
from envserve.session import (
    ClientSession,
    ClientState,
    Decision,
    EndPool,
    Policy,
    Reply,
    RunCall,
    RunReset,
    RunStep,
    ServerSession,
    StartPool,
)
from envserve.slab import Rows, Status
from envserve.spec import EnvSpec
from envserve.wire import Attach, Buffer

ADDRESS = "tcp://fake:1"
SPEC = EnvSpec(
    "Fake-v0", spaces.Box(-np.inf, np.inf, (2,), np.float64), spaces.Discrete(100)
)


class FakeOffer:
    names: tuple[str, ...] = ("Fake-v0",)

    def check(self, name: str) -> None:
        if name not in self.names:
            raise UnknownEnv(f"no env named {name!r} is offered; did you mean Fake-v0?")


class FakePool:
    """Steps are counted per row; an operation ends when `finish` says so.

    `executed` has every operation that was begun, in order: block, and the block's
    actions for a step, or None.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.blocks = make_blocks(
            config.num_envs, config.num_workers, config.num_splits
        )
        self.rows = Rows.allocate(SPEC, config.num_envs)
        self.running: dict[int, RunStep | Reset | Call] = {}
        self.executed: list[tuple[int, tuple[int, ...] | None]] = []
        self.count = np.zeros(config.num_envs, np.int64)

    def run(self, decision: RunStep | RunReset | RunCall) -> None:
        if isinstance(decision, RunCall):
            row = decision.call.env_index
            block = next(b.index for b in self.blocks if row < b.stop)
            self._begin(block, decision.call, None)
        elif isinstance(decision, RunReset):
            for reset in decision.resets:
                self._begin(reset.block, reset, None)
        else:
            for block in decision.blocks:
                part = slice(self.blocks[block].start, self.blocks[block].stop)
                actions = tuple(int(a) for a in self.rows.action[0][part])
                self._begin(block, decision, actions)

    def _begin(
        self,
        block: int,
        operation: RunStep | Reset | Call,
        actions: tuple[int, ...] | None,
    ) -> None:
        assert block not in self.running, "one operation per block at a time"
        self.running[block] = operation
        self.executed.append((block, actions))

    def finish(
        self,
        index: int,
        faults: Sequence[Fault] = (),
        error: EnvserveError | None = None,
    ) -> Outcome:
        """Ends the operation of a block; even rows of 7, 14, ... steps are ended."""
        operation = self.running.pop(index)
        if isinstance(operation, Call):
            if operation.name == "broken":
                return Outcome(index, error=CallError("it is broken"))
            return Outcome(index, result=codec.encode([operation.name]))
        block = self.blocks[index]
        part = slice(block.start, block.stop)
        rows = self.rows
        if isinstance(operation, Reset):
            self.count[part] = 0
            rows.observation[0][part] = 0
            rows.reward[part] = 0
            rows.terminated[part] = rows.truncated[part] = False
            return Outcome(index, infos={block.start: {"reset": True}})
        self.count[part] += 1
        rows.reward[part] = rows.action[0][part]
        rows.observation[0][part, 0] = self.count[part]
        rows.observation[0][part, 1] = rows.action[0][part]
        rows.terminated[part] = self.count[part] % 7 == 0
        rows.final_observation[0][part] = rows.observation[0][part] + 1000
        rows.status[part] = Status.OK
        return Outcome(index, faults=faults, error=error)


@dataclass
class FakeServer:
    """Carries out what a ServerSession decides, except for the replies."""

    policy: Policy = field(default_factory=lambda: Policy(num_workers=2))
    boot: int = 77
    builds_at_once: bool = True
    pools: dict[int, FakePool] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = ServerSession(self.policy, FakeOffer(), self.boot)

    def receive(self, route: bytes, frames: Sequence[Buffer], now: float) -> None:
        self.carry_out(self.session.receive(route, frames, now), now)

    def carry_out(self, decisions: Sequence[Decision], now: float) -> None:
        for decision in decisions:
            if isinstance(decision, Reply):
                self.replies.append(decision)
            elif isinstance(decision, StartPool):
                self.pools[decision.session] = FakePool(decision.config)
                if self.builds_at_once:
                    self.build(decision.session, now)
            elif isinstance(decision, EndPool):
                del self.pools[decision.session]
                self.carry_out(self.session.pool_closed(decision.session), now)
            else:
                self.pools[decision.session].run(decision)

    def build(self, session: int, now: float) -> None:
        pool = self.pools[session]
        self.carry_out(
            self.session.pool_ready(session, SPEC, pool.blocks, pool.rows, now), now
        )

    def finish(self, session: int, block: int, now: float) -> None:
        finished = self.pools[session].finish(block)
        self.carry_out(self.session.pool_finished(session, [finished]), now)

    def finish_all(self, now: float) -> None:
        for session, pool in list(self.pools.items()):
            for block in list(pool.running):
                if session in self.pools:  # a drain may end a lease in between
                    self.finish(session, block, now)

    def poll(self, now: float) -> None:
        self.carry_out(self.session.poll(now), now)

    def take_replies(self) -> list[list[Buffer]]:
        replies, self.replies = self.replies, []
        return [reply.frames for reply in replies]


class OneLease(ClientSession):
    """Ends with its first lease."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._recovery.begin = self._end  # type: ignore[method-assign]

    def _end(
        self, error: EnvserveError, now: float, *, is_restart: bool = False
    ) -> None:
        self._attachment.refuse(error)


def make_attach(**changes: object) -> Attach:
    arguments: dict[str, object] = {
        "env_name": "Fake-v0",
        "num_envs": 4,
        "num_splits": 1,
        "seed": 5,
    }
    return Attach(**{**arguments, **changes})  # type: ignore[arg-type]


def make_client(
    now: float = 0.0,
    session: int = 11,
    timeout_seconds: float = 10.0,
    client: str = "",
    server_lost_after_seconds: float = 60.0,
    pads_when_lost: bool = False,
    kind: type[ClientSession] = ClientSession,
    **changes: object,
) -> ClientSession:
    return kind(
        ADDRESS,
        make_attach(**changes),
        session=session,
        now=now,
        timeout_seconds=timeout_seconds,
        client=client,
        server_lost_after_seconds=server_lost_after_seconds,
        pads_when_lost=pads_when_lost,
    )


def state_of(client: ClientSession) -> ClientState:
    """The state now: to a type checker, an attribute keeps what was asserted of it."""
    return client.state


def take_outgoing(client: ClientSession) -> list[list[Buffer]]:
    """What the client wants to send, as if it had been sent."""
    taken = []
    while (frames := client.outbox.first()) is not None:
        client.outbox.pop()
        taken.append(frames)
    return taken


def exchange(
    client: ClientSession,
    server: FakeServer,
    now: float,
    *,
    filter_request: Callable[[list[Buffer]], bool] = lambda frames: True,
    filter_reply: Callable[[list[Buffer]], bool] = lambda frames: True,
) -> None:
    """Delivers messages both ways until there are none; filters say which arrive."""
    while True:
        requests = take_outgoing(client)
        for frames in filter(filter_request, requests):
            server.receive(b"route", frames, now)
        replies = server.take_replies()
        for frames in filter(filter_reply, replies):
            client.receive(frames, now)
        if not requests and not replies:
            return


def attach(
    server: FakeServer, now: float = 0.0, session: int = 11, **changes: object
) -> ClientSession:
    """Returns a client that is READY."""
    client = make_client(now, session, **changes)  # type: ignore[arg-type]
    client.connected(now)
    exchange(client, server, now)
    assert client.state is ClientState.READY, client.error
    return client
