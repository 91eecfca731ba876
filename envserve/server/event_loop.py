"""The server's shell: a Router, a pool per lease, and timers; nothing ever waits.

It works off a list of what the session decides; what that leads to at once goes to the
end of the list. A reply that cannot be sent is dropped: the client asks again, and the
answer still stands in the rows. Whatever fails unexpectedly is logged and costs one
session; the server goes on to read.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from envserve.errors import EnvserveError, EnvStartError, ServerError
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.pool.pool_metrics import add
from envserve.server.fair_share import Shares
from envserve.server.leased_pool import LeasedPool
from envserve.server.router import Router
from envserve.session.server.decisions import (
    Decision,
    EndPool,
    Reply,
    RunCall,
    RunReset,
    RunStep,
    SessionId,
    StartPool,
)
from envserve.session.server.quotas import tell
from envserve.session.server.server_session import ServerSession
from envserve.text import LogThrottle
from envserve.wire.message import Buffer, Peer

__all__ = ["RouterShell"]

_LOGGER: Final = logging.getLogger(__name__)
#: How long workers may take to end, unless the server is about to.
_CLOSE_SECONDS: Final = 1.0
#: Messages handled before the loop turns to pools and timers; `Shares` bounds the time.
_MESSAGES_AT_ONCE: Final = 64


class RouterShell:
    """Moves messages between a Router, a session and its pools.

    Attributes:
      pools: The pools of leases.
      past_counts: What those have counted that are gone.
      dropped_replies: Replies that could not be sent.
      failures: Messages and pools at which our own code failed.
      resends: Replies that were given before.
      messages_in: Messages that came.
      messages_out: Replies that left.
      bytes_in: In those that came.
      bytes_out: In those that left.
    """

    def __init__(
        self,
        router: Router,
        session: ServerSession,
        launcher: Launcher,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Starts to serve; nothing else may read from the router from now on."""
        self.dropped_replies = self.failures = self.resends = 0
        self.messages_in = self.messages_out = self.bytes_in = self.bytes_out = 0
        self.past_counts = add(())
        self._defects = LogThrottle()
        self._router = router
        self._session = session
        self._launcher = launcher
        self._loop = loop
        self.pools: dict[SessionId, LeasedPool] = {}
        self._lease_timer: asyncio.TimerHandle | None = None
        self._planned_read: asyncio.Handle | None = None
        self._shares = Shares(session.quotas)
        self._is_ending = False
        self._has_ended = asyncio.Event()
        self._close_seconds = _CLOSE_SECONDS
        router.read_with(self._on_messages)
        self._plan_read()

    def __repr__(self) -> str:
        return f"<RouterShell {len(self.pools)} pools>"

    @property
    def num_dropped(self) -> int:
        """Replies that could not be sent, and messages that were not handled."""
        unread = self._session.dropped_messages + self._shares.num_dropped
        return self.dropped_replies + unread

    # Its end.

    async def drain(self, grace_seconds: float) -> None:
        """Grants no more leases, and waits until those there are have ended.

        Args:
          grace_seconds: For the clients: when `stop` will be called at the latest.
        """
        self._is_ending = True
        self._carry_out(self._session.begin_drain(grace_seconds))
        self._plan_read()
        await self._has_ended.wait()

    async def stop(self, timeout_seconds: float, why: str = "") -> None:
        """Ends all sessions and their workers; tells the clients.

        The socket must stay open until they know: what a client has received but not
        read is lost with its connection (docs/decisions.md: "A stopping server waits
        for its clients' acknowledgement").

        Args:
          timeout_seconds: Longest that it takes; workers are killed after half of it.
          why: For the clients, what has ended a drain.
        """
        self._is_ending = True
        self._close_seconds = timeout_seconds / 2
        self._carry_out(self._session.stop(why))
        for leased in self.pools.values():  # also those that are closing already
            leased.begin_close(self._close_seconds)
        self._plan_read()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._has_ended.wait()
        except TimeoutError:
            _LOGGER.warning("stopped before all clients knew, or all workers ended")
        finally:
            self._router.stop_reading()
            for handle in (self._lease_timer, self._planned_read):
                if handle is not None:
                    handle.cancel()
            for leased in self.pools.values():
                leased.release()
            for number, what in (
                (self.dropped_replies, "replies could not be sent"),
                (self._session.dropped_messages, "messages were none of ours"),
                (self.failures, "failures"),
            ):
                if number:
                    _LOGGER.warning("%s: %d", what, number)

    def end_leases(self, users: Collection[str]) -> None:
        """Ends the sessions of users who may use the server no more."""
        for user in users:
            tell("revoked", user)
        self._carry_out(self._session.claims.close_users(users))

    def shut_out(self, users: Collection[str]) -> None:
        """Does so again, since they may have come back, and closes all connections."""
        if not self._is_ending:
            self._carry_out(self._session.claims.close_users(users))
            text = f"keys were taken away of {', '.join(sorted(users))}"
            self._router.recycle(text)

    # Messages.

    def _on_messages(self) -> None:
        """Handles messages that have come."""
        if self._planned_read is not None:
            self._planned_read.cancel()
            self._planned_read = None
        may_be_more, shares = True, self._shares
        now = time.monotonic()
        shares.begin_turn(now)
        try:
            for _ in range(_MESSAGES_AT_ONCE):
                received = self._router.receive()
                if received is None:
                    user = self._router.discarding
                    may_be_more = user is not None
                    if may_be_more:
                        shares.charge(time.monotonic(), user)
                    break
                peer, message = received
                self.messages_in += 1
                self.bytes_in += (num_bytes := sum(map(len, message)))
                decisions: Sequence[Decision] = ()
                if shares.admits(peer, num_bytes):
                    num_wrong = self._session.dropped_messages
                    decisions = self._receive(peer, message, now)
                    if num_wrong != self._session.dropped_messages:
                        shares.note_dropped(0, num_bytes)
                    self._carry_out(decisions)
                now = time.monotonic()
                is_step = bool(decisions) and isinstance(decisions[0], RunStep)
                if shares.charge(now, is_step=is_step):
                    break
        finally:
            pause = shares.end_turn(is_drained=not may_be_more)
            if (flooder := shares.flooder) is not None:
                shares.flooder = None
                self._router.recycle("a flood", flooder, is_sure=True)
            if pause:
                self._planned_read = self._loop.call_later(pause, self._on_messages)
            elif may_be_more:
                self._plan_read()

    def _receive(
        self, peer: Peer, message: Sequence[Buffer], now: float
    ) -> Sequence[Decision]:
        try:
            return self._session.receive(peer, message, now)
        except Exception:
            self.failures += 1
            more = self._defects.admit("message", now)
            if more is not None:
                _LOGGER.exception("a message could not be handled%s", more)
            return self._session.receive_failed(peer, message)

    def _plan_read(self) -> None:
        if self._planned_read is None and self._router.has_unread():
            self._planned_read = self._loop.call_soon(self._on_messages)

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        """Does what was decided, and what that leads to."""
        work = deque(decisions)
        while work:
            decision = work.popleft()
            if isinstance(decision, Reply):
                self._send(decision)
                continue
            try:
                work.extend(self._use_pool(decision))
            except Exception as error:
                work.extend(self._abandon(decision.session, error))
        if self._is_ending and self._session.has_ended:
            self._has_ended.set()

    def _send(self, reply: Reply) -> None:
        try:
            if self._router.send(reply.peer, reply.frames):
                self.messages_out += 1
                self.bytes_out += sum(map(len, reply.frames))
                self.resends += reply.repeats is not None
                return
        except Exception:  # of ZeroMQ: other replies need not fail
            self.failures += 1
            more = self._defects.admit("reply", time.monotonic())
            if more is not None:
                _LOGGER.exception("a reply could not be sent%s", more)
        self.dropped_replies += 1
        if reply.repeats is not None:
            reply.repeats.count -= 1

    def _use_pool(
        self, decision: StartPool | RunStep | RunReset | RunCall | EndPool
    ) -> Sequence[Decision]:
        """Does something with a pool; returns what is decided upon that."""
        session = decision.session
        if isinstance(decision, StartPool):
            return self._start_pool(decision)
        if isinstance(decision, EndPool):
            if session not in self.pools:  # it is closed, or could not be started
                return self._session.pool_closed(session)
            self.pools[session].begin_close(self._close_seconds)
            return ()
        leased = self.pools[session]
        pool = leased.pool
        try:
            if isinstance(decision, RunStep):
                pool.submit_step(decision.blocks)
            elif isinstance(decision, RunReset):
                pool.submit_reset(decision.resets)
            else:
                pool.submit_call(decision.calls)
        except EnvserveError as error:
            _LOGGER.error("%s: %s", self._session.claims.name_of(session), error)
            return self._session.pool_failed(session, error)
        deadline = pool.next_deadline()
        if deadline is not None and deadline < leased.timer_at:
            leased.look_at(deadline)
        absent = pool.absent
        return self._session.pool_finished(session, (), absent) if absent else ()

    def _start_pool(self, decision: StartPool) -> Sequence[Decision]:
        session = decision.session
        if self._lease_timer is None:
            self._plan_lease_end()
        try:
            label = self._session.claims.name_of(session)
            with self._launcher.reserve:
                pool = Pool(
                    decision.config,
                    launcher=self._launcher,
                    label=label,
                    owner=session[0] or label,
                )
            leased = LeasedPool(pool, self._loop, partial(self._on_pool, session))
            self.pools[session] = leased  # what fails from here on ends it as such
            leased.watch()
            return ()
        except EnvserveError as error:
            return self._session.pool_failed(session, error)
        except OSError as error:  # of descriptors, processes, or memory
            failure = EnvStartError(
                f"no workers can be started now: {error}; end other sessions, or raise "
                f"the server's limits (ulimit -n, ulimit -u)"
            )
            _LOGGER.error("%s: %s", self._session.claims.name_of(session), failure)
            return self._session.pool_failed(session, failure)

    def _abandon(self, session: SessionId, error: Exception) -> list[Decision]:
        """Gives a session up, at once, since what it needs here has failed."""
        self.failures += 1
        _LOGGER.error(
            "%s is given up", self._session.claims.name_of(session), exc_info=error
        )
        try:
            if session in self.pools:
                self._release(session)
        finally:
            text = f"the server failed: {type(error).__name__}: {error}"
            decisions = self._session.pool_broken(session, ServerError(text))
        return decisions

    # Pools.

    def _release(self, session: SessionId) -> None:
        """Lets go of a pool, but not of what it has counted."""
        leased = self.pools.pop(session)
        if (claim := self._session.claims.get(session)) is not None:
            claim.account = leased.account()
        self.past_counts = add((self.past_counts, leased.pool.tally.counts))
        leased.release()

    def _on_pool(self, session: SessionId) -> None:
        """Passes on what has happened in a pool."""
        leased = self.pools[session]
        pool = leased.pool
        try:
            try:
                outcomes, error = pool.collect(0), pool.error
            except EnvserveError as failure:  # no process can be started any more
                outcomes, error = [], failure
            if error is not None:
                decisions = self._session.pool_failed(session, error)
            elif leased.is_announced:  # the usual case
                decisions = self._session.pool_finished(session, outcomes, pool.absent)
            else:
                decisions = []
                if pool.is_ready:
                    leased.is_announced, now = True, time.monotonic()
                    ready = pool.spec, pool.blocks, pool.rows
                    decisions = self._session.pool_ready(session, *ready, now)
            if leased.is_ending and pool.is_closed:
                self._release(session)
                decisions += self._session.pool_closed(session)
            else:
                deadline = pool.next_deadline()
                if deadline is not None and deadline < leased.timer_at:
                    leased.look_at(deadline)
        except Exception as defect:
            decisions = self._abandon(session, defect)
        if decisions:
            self._carry_out(decisions)
            self._plan_read()

    def _plan_lease_end(self) -> None:
        deadline = self._session.next_deadline()
        if deadline != math.inf:
            self._lease_timer = self._loop.call_at(deadline, self._end_leases)

    def _end_leases(self) -> None:
        self._lease_timer = None
        try:
            self._carry_out(self._session.poll(self._loop.time()))
        finally:
            if self._lease_timer is None:
                self._plan_lease_end()
            self._plan_read()
