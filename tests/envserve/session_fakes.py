"""A server with pools that tests control, and helpers for both sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from envserve.errors import CallError, EnvserveError
from envserve.lane import Call, Fault, Outcome, Reset
from envserve.session.client.client_session import ClientSession
from envserve.session.client.liveness import Timeouts
from envserve.session.server.decisions import (
    Audit,
    BeginDrain,
    Decision,
    EndPool,
    Reply,
    ReplyFrame,
    ReplyStatus,
    ReplyWelcome,
    RequestDecision,
    RunStep,
    SessionId,
    StartPool,
)
from envserve.session.server.server_protocol import ServerProtocol
from envserve.session.states import ClientState
from envserve.settings import HostSettings, PoolSettings
from envserve.slab import Status
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.bodies import Attach, FrameRequest, FrameResult
from envserve.wire.constants import MessageType
from envserve.wire.handshake import Welcome
from envserve.wire.message import Buffer, Message, Peer, decode, encode
from envserve.wire.status import ServerStatus
from tests.simulation.pool import MemoryPool, Operation

ADDRESS = "tcp://fake:1"
SPEC = EnvSpec(
    "Fake-v0", spaces.Box(-np.inf, np.inf, (2,), np.float64), spaces.Discrete(100)
)


def make_call(
    rows: Sequence[int], kind: Any, name: str, *arguments: Any, block: int = 0
) -> Call:
    packed = codec.encode([list(arguments), {}])
    return Call(block, tuple(rows), kind, name, packed)


class FakePool(MemoryPool):
    """A pool whose rows count their steps; `finish` ends an operation.

    `executed` lists all operations in the order in which they started: the block, and
    the actions of a step or None for other operations.
    """

    spec = SPEC

    def __init__(self, config: PoolSettings) -> None:
        super().__init__(config)
        self.executed: list[tuple[int, tuple[int, ...] | None]] = []
        self.count = np.zeros(config.num_envs, np.int64)

    def _begin(self, block: int, operation: Operation) -> None:
        assert block not in self.running, "expected one operation per block at a time"
        self.running[block] = operation
        actions = tuple(self.rows.action[0][self.parts[block]].tolist())
        is_step = isinstance(operation, RunStep)
        self.executed.append((block, actions if is_step else None))

    def finish(
        self,
        block: int,
        num_errors: int = 0,
        *,
        faults: Sequence[Fault] = (),
        error: EnvserveError | None = None,
    ) -> Outcome:
        operation = self.running[block]
        if isinstance(operation, Call) and operation.name == "broken":
            error = CallError("it is broken")
        outcome = super().finish(block, num_errors)
        return outcome._replace(faults=faults, error=error)

    def _reset(self, row: int, seed: int | None = None, options: bytes = b"") -> Any:
        self.count[row] = 0
        self.rows.observation[0][row] = 0
        return {"reset": True}

    def _step(self, row: int) -> None:
        """Step a row; an episode ends at every seventh step."""
        rows, action = self.rows, self.rows.action[0][row]
        self.count[row] += 1
        rows.reward[row] = action
        rows.observation[0][row] = self.count[row], action
        rows.terminated[row] = self.count[row] % 7 == 0
        rows.final_observation[0][row] = rows.observation[0][row] + 1000
        rows.status[row] = Status.OK


@dataclass
class FakeServer:
    """Carries out the decisions of a `ServerProtocol`, and collects its replies."""

    policy: HostSettings = field(default_factory=lambda: HostSettings(num_workers=2))
    boot: int = 77
    builds_at_once: bool = True
    pool: type[FakePool] = FakePool
    pools: dict[SessionId, FakePool] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)
    audits: list[Audit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.protocol = ServerProtocol(self.policy, (SPEC.env_name,), self.boot)

    def status_body(self, user: str, now: float) -> bytes:
        return ServerStatus().encode()

    def read_frames(
        self, session: SessionId, request: FrameRequest
    ) -> tuple[FrameResult, bytes]:
        return FrameResult(), b""

    def receive(self, peer: Peer, frames: Sequence[Buffer], now: float) -> None:
        self.carry_out(self.protocol.receive(peer, frames, now), now)

    def replies_to(self, kind: MessageType | int, **fields: Any) -> list[Message]:
        """Return the server's replies to a message, by default one of session 11."""
        numbers: dict[str, Any] = {"session": 11, "boot": self.boot}
        message = Message(type=kind, **{**numbers, **fields})
        self.receive((b"r", ""), encode(message), 0.0)
        return [decode(frames) for frames in self.take_replies()]

    def carry_out(self, decisions: Sequence[Decision], now: float) -> None:
        for decision in decisions:
            if isinstance(decision, Reply):
                self.replies.append(decision)
            elif isinstance(decision, Audit):
                self.audits.append(decision)
            elif isinstance(decision, RequestDecision):
                self.carry_out(self.reply(decision, now), now)
            elif isinstance(decision, StartPool):
                self.pools[decision.session] = self.pool(decision.settings)
                if self.builds_at_once:
                    self.build(decision.session, now)
            elif isinstance(decision, EndPool):
                if decision.session in self.pools:  # otherwise the ATTACH was queued
                    self.pools.pop(decision.session).close()
                self.carry_out(self.protocol.pool_closed(decision.session), now)
            elif not isinstance(decision, BeginDrain):
                self.pools[decision.session].begin(decision)

    def reply(self, decision: RequestDecision, now: float) -> Sequence[Decision]:
        request, payload = decision.request, b""
        user = request.peer[-1]
        if isinstance(decision, ReplyWelcome):
            body = self.protocol.leases.welcome_for(user).encode()
        elif isinstance(decision, ReplyStatus):
            body = self.status_body(user, now)
        else:
            assert isinstance(decision, ReplyFrame), decision
            result, payload = self.read_frames(decision.session, decision.frame_request)
            body = result.encode()
        return self.protocol.reply(request, body, payload)

    def build(self, session: SessionId, now: float) -> None:
        pool = self.pools[session]
        self.carry_out(
            self.protocol.pool_ready(session, pool.spec, pool.blocks, pool.rows, now),
            now,
        )

    def finish(self, session: SessionId, block: int, now: float) -> None:
        finished = self.pools[session].finish(block)
        self.carry_out(self.protocol.pool_finished(session, [finished]), now)

    def finish_all(self, now: float) -> None:
        for session, pool in list(self.pools.items()):
            for block in list(pool.running):
                if session in self.pools:  # a drain may already have ended the lease
                    self.finish(session, block, now)

    def poll(self, now: float) -> None:
        self.carry_out(self.protocol.expire_leases(now), now)

    def take_replies(self) -> list[list[Buffer]]:
        replies, self.replies = self.replies, []
        return [reply.frames for reply in replies]


class SingleLeaseSession(ClientSession):
    """A session that fails when it loses its first lease."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.attachment.lose_lease = self._end  # type: ignore[method-assign]

    def _end(
        self, error: EnvserveError, now: float, *, may_hold_lease: bool = True
    ) -> None:
        self.attachment.abort(error)


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
    client_name: str = "",
    timeouts: Timeouts | None = None,
    kind: type[ClientSession] = ClientSession,
    **changes: object,
) -> ClientSession:
    return kind(
        ADDRESS,
        make_attach(**changes),
        timeouts or Timeouts(),
        session=session,
        now=now,
        client_name=client_name,
    )


def state_of(client: ClientSession) -> ClientState:
    """Return the state; type checkers do not narrow it after an assertion."""
    return client.state


def take_outgoing(client: ClientSession) -> list[list[Buffer]]:
    """Remove all frames from the outbox, as if they had been sent, and return them."""
    outgoing = list(client.outbox.values())
    client.outbox.clear()
    return outgoing


def collect(client: ClientSession) -> list[Outcome]:
    """Collect outcomes as a lane does, ordered by block."""
    client.client_blocks.is_ready(1)
    return sorted(client.collect(), key=lambda outcome: outcome.block)


def finish(client: ClientSession, server: FakeServer, now: float) -> list[Outcome]:
    """Finish all operations, and collect their outcomes."""
    for _ in range(3):
        client.advance(now)
        exchange(client, server, now)
        server.finish_all(now)
        exchange(client, server, now)
    return collect(client)


def advance_to(client: ClientSession, now: float) -> None:
    """Advance the clock without messages from the server."""
    while client.next_deadline() < now:
        client.advance(client.next_deadline())
    client.advance(now)


def exchange(
    client: ClientSession,
    server: FakeServer,
    now: float,
    *,
    filter_request: Callable[[list[Buffer]], bool] = lambda frames: True,
    filter_reply: Callable[[list[Buffer]], bool] = lambda frames: True,
) -> None:
    """Deliver messages in both directions until none are left; filters drop some."""
    while True:
        requests = take_outgoing(client)
        for frames in filter(filter_request, requests):
            server.receive((b"route", ""), frames, now)
        replies = server.take_replies()
        for frames in filter(filter_reply, replies):
            client.receive(frames, now)
        if not requests and not replies:
            return


def try_to_attach(
    server: FakeServer, now: float = 0.0, **changes: Any
) -> ClientSession:
    """Return a client that has requested envs and received a reply."""
    client = make_client(now, **changes)
    client.record_connect(now)
    exchange(client, server, now)
    return client


def attach(server: FakeServer, now: float = 0.0, **changes: Any) -> ClientSession:
    """Return a client in state READY."""
    client = try_to_attach(server, now, **changes)
    assert client.state is ClientState.READY, client.error
    return client


def make_pair(**options: Any) -> tuple[FakeServer, ClientSession]:
    """Return a server and a client in state READY."""
    server = FakeServer(**options)
    return server, attach(server)


def make_welcome(**changes: Any) -> Welcome:
    arguments: dict[str, Any] = {
        "max_message_bytes": 1 << 20,
        "lease_seconds": 60.0,
        "env_names": (),
        "num_names": 0,
        "total_envs": 1,
        "free_envs": 1,
    }
    return Welcome(**{**arguments, **changes})


def step_all(
    client: ClientSession, server: FakeServer, now: float, action: int = 3
) -> list[Outcome]:
    client.rows.action[0][:] = action
    client.submit_step([0, 1], now)
    return finish(client, server, now)


def attach_and_step(num_steps: int = 3, **changes: Any) -> ClientSession:
    """Return a client that has stepped a few times on a server with boot id 1."""
    server = FakeServer(boot=1)
    client = attach(server, **changes)
    client.submit_reset([Reset(0), Reset(1)], 0.0)
    finish(client, server, 0.0)
    for action in range(num_steps):
        step_all(client, server, 0.0, action)
    return client


def attach_and_restart(
    *, is_noticed: bool = False, **options: Any
) -> tuple[ClientSession, FakeServer]:
    """Return a client that has stepped a few times, and its restarted server.

    Args:
      is_noticed: Whether the client has already attached to the restarted server.
      **options: Arguments for the restarted `FakeServer`.
    """
    client, restarted = attach_and_step(), FakeServer(boot=2, **options)
    if is_noticed:
        client.record_connect(1.0)
        finish(client, restarted, 1.0)
    return client, restarted


def absent_blocks(client: ClientSession) -> set[int]:
    """Update the client like a lane, and return its absent blocks."""
    client.client_blocks.is_ready(3)
    return set(client.client_blocks.absent)


def executed(server: FakeServer) -> list[tuple[int, tuple[int, ...] | None]]:
    (pool,) = server.pools.values()
    return pool.executed


def check_lost(client: ClientSession, outcomes: list[Outcome], last: int) -> None:
    """Assert that all rows are lost, and that their episodes had `last` steps."""
    rows = client.rows
    assert [(item.block, item.error) for item in outcomes] == [(0, None), (1, None)]
    assert rows.status.tolist() == [Status.SERVER_LOST] * 4
    assert rows.truncated.all()
    assert not rows.terminated.any()
    assert not rows.reward.any()
    np.testing.assert_array_equal(rows.final_observation[0][:, 0], last)
    np.testing.assert_array_equal(rows.observation[0], 0)
    faults = [fault for item in outcomes for fault in item.faults]
    assert [fault.env_index for fault in faults] == [0, 1, 2, 3]
    assert {fault.status for fault in faults} == {Status.SERVER_LOST}


def pass_time(
    client: ClientSession,
    server: FakeServer | None = None,
    now: float = 0.0,
    *,
    until: float = math.inf,
    **filters: Callable[[list[Buffer]], bool],
) -> float:
    """Advance the client from deadline to deadline, and return the final time.

    Args:
      client: The client.
      server: Server that replies to all messages; None for an unresponsive server.
      now: Start time.
      until: End time; return earlier if the session ends.
      **filters: Message filters, see `exchange`.
    """
    while now < 1000.0:
        if server is not None:
            exchange(client, server, now, **filters)
            server.poll(now)
        if now >= until or client.state.is_over:
            return now
        now = max(now, client.next_deadline())
        client.advance(now)
    raise AssertionError(f"expected the session to end within 1000 s; got {client!r}")
