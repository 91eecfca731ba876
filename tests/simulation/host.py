"""A host: a server with in-memory pools whose operations take time.

The host crashes, pauses or stops on request. After each start, its server has a new
boot id and none of its earlier state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from envserve.errors import EnvError, EnvStartError, ServerError
from envserve.lane import Outcome
from envserve.session.server.decisions import (
    Decision,
    EndPool,
    PoolDecision,
    Reply,
    ReplyWelcome,
    SessionId,
    StartPool,
)
from envserve.session.server.server_protocol import ServerProtocol
from envserve.settings import HostSettings
from envserve.slab import Status
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer, Peer, decode
from tests.simulation.clock import PausableProcess
from tests.simulation.hijacker import Hijacker
from tests.simulation.journal import Violation
from tests.simulation.pool import SPEC, MemoryPool, Operation
from tests.simulation.profile import log_uniform

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

#: Seconds for which a stopping server waits for its clients.
_STOP_SECONDS: Final = 2.0
#: Maximum number of ended sessions that a server may remember per user.
_MAX_REMEMBERED: Final = 256


class Host(PausableProcess):
    """Carries out the decisions of a ServerProtocol.

    Attributes:
      protocol: The server's sessions; None while the server is not running.
      granted: Ids of the sessions whose envs are built.
      fails_next_message: Whether the server raises at its next message.
      ignored: Types of operations that the server ignores, although it replies to PING.
      is_stuck: Whether operations never end, although PONG reports them as running.
    """

    def __init__(self, simulation: Simulation) -> None:
        """Create a host and start its server."""
        super().__init__(simulation.clock)
        profile = simulation.profile
        self.protocol: ServerProtocol | None = None
        self.pools: dict[SessionId, MemoryPool] = {}
        self.granted: set[SessionId] = set()
        self.num_starts = 0
        self.fails_next_message = self.is_stuck = False
        self.ignored: frozenset[MessageType] = frozenset()
        self._simulation = simulation
        self._hijacker = Hijacker()
        self._boot = 0
        self._started: set[SessionId] = set()
        self._poll_at = float("inf")
        self._policy = HostSettings(
            num_workers=profile.num_workers,
            envs_per_worker=profile.envs_per_worker,
            max_processes=4 * profile.num_workers,
            lease_seconds=profile.lease_seconds,
        )
        self.start()

    def __repr__(self) -> str:
        return f"<Host of boot {self._boot}>"

    # Lifecycle.

    def start(self) -> None:
        """Start a server unless one is running."""
        if self.protocol is None:
            self.num_starts += 1
            self._boot = next(self._simulation.unique_numbers)
            self._started = set()
            self._poll_at = float("inf")
            policy, most = self._policy, self._policy.total_envs
            if self.num_starts % 2 == 0:  # restart with another layout
                policy = replace(policy, num_workers=1, envs_per_worker=most)
            self.protocol = ServerProtocol(policy, (SPEC.env_name,), self._boot)

    def crash(self, seconds: float) -> None:
        """Kill the server with all its envs, and restart it after some seconds."""
        self.protocol = None
        for session, pool in self.pools.items():
            self._end_envs(session, pool)
        self.pools.clear()
        self.clock.schedule(self.clock.now + seconds, self.start)

    def mute(self, kinds: Iterable[MessageType], seconds: float) -> None:
        """Ignore operations of these types for some seconds."""
        self.ignored = frozenset(kinds)
        self.clock.schedule(self.clock.now + seconds, self.recover)

    def hang(self, seconds: float) -> None:
        """Finish no operation for some seconds, but report it as running."""
        self.is_stuck = True
        self.clock.schedule(self.clock.now + seconds, self.recover)

    def recover(self) -> None:
        """End the effects of `mute` and `hang`."""
        self.ignored, self.is_stuck = frozenset(), False
        for session, pool in self.pools.items():
            for block, operation in pool.running.items():
                self._schedule_finish(session, pool, block, operation)

    def drain(self, seconds: float) -> None:
        """Drain the server; stop it after some seconds."""
        if self.protocol is not None:
            self.carry_out(self.protocol.begin_drain(seconds))
            self._schedule(seconds, self.stop)
            self._check_end()

    def stop(self) -> None:
        if self.protocol is not None:
            self.carry_out(self.protocol.stop(self.clock.now))
            self._schedule(_STOP_SECONDS, self._end_stop)
            self._check_end()

    def _check_end(self) -> None:
        if self.protocol is not None and self.protocol.has_ended:
            self._end_stop()

    def _end_stop(self) -> None:
        self.crash(log_uniform(self.clock.random, 0.1, 10.0))

    # Messages.

    def receive(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        if self.protocol is None or decode(frames).type in self.ignored:
            return
        self._hijacker.intercept(self.protocol, frames, self.clock.now)
        if self.fails_next_message:
            self.fails_next_message = False
            self.carry_out(self.protocol.receive_failed(peer, frames))
        else:
            self.carry_out(self.protocol.receive(peer, frames, self.clock.now))
        self._check_end()

    def _schedule(
        self, seconds: float, event: Callable[..., None], *arguments: Any
    ) -> None:
        """Schedule an event that is dropped if the server restarts before it is due."""
        at = self.clock.now + seconds
        self.clock.schedule(at, self._happen, self._boot, event, *arguments)

    def _happen(self, boot: int, event: Callable[..., None], *arguments: Any) -> None:
        self.run_when_awake(self._if_running, boot, event, *arguments)

    def _if_running(
        self, boot: int, event: Callable[..., None], *arguments: Any
    ) -> None:
        if self.protocol is not None and boot == self._boot:
            event(*arguments)

    @property
    def _running(self) -> ServerProtocol:
        if self.protocol is None:
            raise Violation("a server that is not running was used")
        return self.protocol

    # Decisions.

    def carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Reply):
                self._simulation.deliver(self, decision)
            elif isinstance(decision, ReplyWelcome):
                request, protocol = decision.request, self._running
                body = protocol.leases.welcome_for(request.peer[-1]).encode()
                self.carry_out(protocol.reply(request, body))
            elif isinstance(decision, StartPool):
                self._start_pool(decision)
            elif isinstance(decision, EndPool):
                self._end_pool(decision.session)
            elif isinstance(decision, PoolDecision):
                pool = self.pools.get(decision.session)
                if pool is None or decision.session not in self.granted:
                    raise Violation(f"session {decision.session} has no envs")
                for block, operation in pool.begin(decision):
                    self._schedule_finish(decision.session, pool, block, operation)
                if pool.absent:
                    self._report(decision.session, pool, [])

    def _start_pool(self, decision: StartPool) -> None:
        session, source = decision.session, self.clock.random
        if session in self._started:
            raise Violation(f"session {session} was started twice")
        self._started.add(session)
        pool = MemoryPool(decision.settings, self._simulation.journal)
        self.pools[session] = pool
        num_envs = sum(pool.config.num_envs for pool in self.pools.values())
        if num_envs > self._simulation.profile.total_envs:
            raise Violation(
                f"{num_envs} envs were leased; the capacity is "
                f"{self._simulation.profile.total_envs}"
            )
        seconds = log_uniform(source, 0.01, 10.0)
        if source.random() < self._simulation.profile.failures:
            self._schedule(seconds, self.fail_pool, session, EnvStartError("no envs"))
        else:
            self._schedule(seconds, self._grant, session)
        self._schedule_poll()

    def _grant(self, session: SessionId) -> None:
        pool = self.pools.get(session)
        if pool is not None:
            self.granted.add(session)
            self.carry_out(
                self._running.pool_ready(
                    session, SPEC, pool.blocks, pool.rows, self.clock.now
                )
            )

    def _end_pool(self, session: SessionId) -> None:
        pool = self.pools.get(session)
        if pool is None:  # the pool was not started
            self.carry_out(self._running.pool_closed(session))
            return
        if pool.is_closing:
            raise Violation(f"{pool!r} was closed twice")
        self._end_envs(session, pool)
        self._schedule(log_uniform(self.clock.random, 1e-3, 2.0), self._close, session)

    def _end_envs(self, session: SessionId, pool: MemoryPool) -> None:
        pool.end(applied=self.clock.random.random() < 0.5)
        self.granted.discard(session)

    def _close(self, session: SessionId) -> None:
        if self.pools.pop(session, None) is not None:
            self.carry_out(self._running.pool_closed(session))

    def fail_pool(self, session: SessionId, error: EnvError) -> None:
        if session in self.pools:
            self.carry_out(self._running.pool_failed(session, error))

    def break_pool(self, session: SessionId) -> None:
        """Remove a pool, as after an unexpected error."""
        pool = self.pools.pop(session, None)
        if pool is not None:
            self._end_envs(session, pool)
            error = ServerError("the pool broke")
            decisions = self._running.pool_broken(session, error)
            # The pool is already gone.
            self.carry_out([d for d in decisions if not isinstance(d, EndPool)])

    # Operations.

    def _schedule_finish(
        self, session: SessionId, pool: MemoryPool, block: int, operation: Operation
    ) -> None:
        """Schedule the end of an operation, unless its worker is being replaced."""
        if pool.blocks[block].worker not in pool.down:
            source = self.clock.random
            seconds = self._simulation.profile.pace * 2.0 * source.random() ** 2
            if source.random() < 0.01:
                seconds += log_uniform(source, 0.1, 20.0)
            self._schedule(seconds, self._finish, session, pool, block, operation)

    def _finish(
        self, session: SessionId, pool: MemoryPool, block: int, operation: Operation
    ) -> None:
        if pool.running.get(block) is not operation or pool.is_closing or self.is_stuck:
            return
        if pool.blocks[block].worker in pool.down:
            return  # scheduled again when the worker is restarted
        draw = self.clock.random.random
        if draw() < self._simulation.profile.failures:
            outcome = pool.fail(block)
        else:
            outcome = pool.finish(
                block, int(draw() < self._simulation.profile.env_errors)
            )
        self._report(session, pool, [outcome])

    def _report(
        self, session: SessionId, pool: MemoryPool, outcomes: Sequence[Outcome]
    ) -> None:
        self.carry_out(self._running.pool_finished(session, outcomes, pool.absent))

    def lose_worker(self, session: SessionId, worker: int, seconds: float) -> None:
        pool = self.pools.get(session)
        if pool is None or pool.is_closing or session not in self.granted:
            return
        source = self.clock.random
        status = source.choice((Status.WORKER_DIED, Status.TIMEOUT))
        ended = pool.lose_worker(worker, status, applied=source.random() < 0.5)
        self._schedule(seconds, self._restart_worker, session, pool, worker)
        self._report(session, pool, ended)

    def _restart_worker(
        self, session: SessionId, pool: MemoryPool, worker: int
    ) -> None:
        pool.down.discard(worker)
        for block, operation in list(pool.running.items()):
            if pool.blocks[block].worker == worker:
                self._schedule_finish(session, pool, block, operation)

    # Leases.

    def _schedule_poll(self) -> None:
        deadline = self._running.next_deadline()
        if deadline < self._poll_at:
            self._poll_at = deadline
            self._schedule(deadline - self.clock.now, self._poll)

    def _poll(self) -> None:
        self._poll_at = float("inf")
        self.carry_out(self._running.expire_leases(self.clock.now))
        self._schedule_poll()

    def check_bounds(self) -> None:
        if self.protocol is None:
            return
        remembered = self.protocol.leases.ended_sessions.values()
        if (most := max(map(len, remembered), default=0)) > _MAX_REMEMBERED:
            raise Violation(
                f"expected at most {_MAX_REMEMBERED} sessions per user; got {most}"
            )

    def check_all_free(self) -> None:
        if (
            self.pools
            or self._running.leases.num_free_envs != self._simulation.profile.total_envs
        ):
            raise Violation(
                f"{len(self.pools)} pools remain, and "
                f"{self._running.leases.num_free_envs} of "
                f"{self._simulation.profile.total_envs} envs are free although all "
                "clients have closed"
            )
