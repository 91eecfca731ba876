"""The server's event loop, which connects a Router, a ServerProtocol and the pools.

All code of this module runs in the thread of one asyncio loop, and no call blocks; only
a JOIN is carried out in a thread (`_enrol`). The loop runs a callback on three events:
messages have arrived (`_on_messages`), a pool has an event or its deadline has passed
(`_on_pool_event`), or a lease expires (`_expire_leases`). Each event is passed to the
`ServerProtocol`, which does no I/O and returns decisions. `_carry_out` carries out each
decision before the next callback runs; a decision can lead to others, which are
appended to the same queue.

ZeroMQ's descriptor is edge-triggered, and a send may consume the edge. Therefore every
callback that sends calls `_schedule_read` at its end, and `_on_messages` reads until
the sockets are empty or its turn is over. A turn is limited in messages and in time, so
that floods cannot starve pools and timers.

If the queue of a peer is full, a reply waits for a moment. A reply that cannot be sent
is dropped, because the client resends its request and the reply is still in the slab.
An unexpected exception is logged and ends at most one session; the server continues to
serve the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from msgspec.structs import replace

from envserve.errors import (
    EnvserveError,
    KeyFileError,
    RemoteProtocolError,
    ServerError,
)
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.server.access import Access
from envserve.server.deferred_replies import DeferredReplies
from envserve.server.fair_share import FairShare
from envserve.server.leased_pool import LeasedPool
from envserve.server.router import Router
from envserve.server.status import ServerCounters, StatusReporter
from envserve.session.server.decisions import (
    Audit,
    Decision,
    EndPool,
    EnrolKey,
    PoolDecision,
    Reply,
    ReplyFrame,
    ReplyStatus,
    ReplyWelcome,
    RequestDecision,
    RunReset,
    RunStep,
    SessionId,
    StartPool,
)
from envserve.session.server.permissions import Rejection
from envserve.session.server.server_protocol import ServerProtocol
from envserve.settings import HostSettings
from envserve.text import LogThrottle
from envserve.wire.handshake import Welcome

_LOGGER: Final = logging.getLogger(__name__)
#: Workers of an ended lease are killed after this time, so that its client, which waits
#: for 1.5 s, finds its capacity free; `stop` sets another time.
_CLOSE_SECONDS: Final = 1.0
#: Maximum number of messages to handle before pools and timers get their turn;
#: `FairShare` limits the time.
_MAX_MESSAGES_PER_TURN: Final = 64
#: If the check for expired leases is late by more than this number of seconds, it is
#: postponed by the same number of seconds, at most `_MAX_POSTPONED` times in a row.
_LATE_SECONDS: Final = 0.5
_MAX_POSTPONED: Final = 3
#: Interval in seconds, and number, of the measurements of the loop's lag.
_TICK_SECONDS: Final = 0.5
_NUM_TICKS: Final = 20


class LoopLag:
    """The lag of an event loop over the last 10 s.

    A callback that is scheduled every 0.5 s records its own delay. Occasional requests
    could not measure the lag, because a hanging loop does not process them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lags: deque[float] = deque(maxlen=_NUM_TICKS)
        self._timer = self._schedule()

    @property
    def seconds(self) -> float:
        """The largest recorded lag, including the lag of the pending callback."""
        overdue = self._loop.time() - self._timer.when()
        return max(0.0, overdue, *self._lags)

    def stop(self) -> None:
        """Stop measuring."""
        self._timer.cancel()

    def _schedule(self) -> asyncio.TimerHandle:
        return self._loop.call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._lags.append(self._loop.time() - self._timer.when())
        self._timer = self._schedule()


class ServerLoop:
    """Passes messages and events between a Router, the protocol and the leases' pools.

    Attributes:
      pools: The leases' pools, by session.
      counters: Counts of messages, bytes and failures since the server started.
      dropped_replies: Number of replies that could not be sent.
      status: Summary of all counts, for STATUS requests and for metrics.
    """

    def __init__(
        self,
        settings: HostSettings,
        router: Router,
        protocol: ServerProtocol,
        launcher: Launcher,
        drain_requested: asyncio.Event,
        access: Access | None = None,
        audit: Callable[[Audit], None] = lambda event: None,
    ) -> None:
        """Start serving in the running event loop.

        Args:
          settings: Limits and permissions.
          router: Receives and sends messages; no other code may read from it.
          protocol: State of all sessions, without I/O.
          launcher: Starts workers.
          drain_requested: Event that is set when a client requests a drain.
          access: Keys of clients; None if the server uses no keys.
          audit: Callback that records an event in the audit log.
        """
        self._loop = asyncio.get_running_loop()
        self._router = router
        self._protocol = protocol
        self._launcher = launcher
        self._drain_requested = drain_requested
        self._access = access
        self._audit = audit
        self.pools: dict[SessionId, LeasedPool] = {}
        self.counters = ServerCounters()
        self.dropped_replies = 0
        self._lag = LoopLag(self._loop)
        self.status = StatusReporter(
            settings, protocol, self.pools, self.counters, self._welcome, self._loop
        )
        self._failure_throttle = LogThrottle()
        self._lease_timer: asyncio.TimerHandle | None = None
        self._num_postponed = 0  # number of times that the timer was postponed in a row
        self._scheduled_read: asyncio.Handle | None = None
        self._deferred = DeferredReplies()
        self._deferred_timer: asyncio.TimerHandle | None = None
        self._fair_share = FairShare(protocol.quotas)
        self._has_ended = asyncio.Event()
        self._joining: set[str] = set()  # users of the invitations being replaced
        self._close_seconds = _CLOSE_SECONDS
        router.sockets.start_reading(self._on_messages)
        self._schedule_read()

    def __repr__(self) -> str:
        return f"<ServerLoop {len(self.pools)} pools>"

    # Drain and stop.

    async def drain(self, grace_seconds: float) -> None:
        """Grant no more leases, and wait until all leases have ended.

        Args:
          grace_seconds: Seconds until the caller calls `stop`; sent to the clients.
        """
        self._carry_out(self._protocol.begin_drain(grace_seconds))
        self._schedule_read()
        await self._has_ended.wait()

    async def stop(self, timeout_seconds: float, reason: str = "") -> None:
        """End all sessions and their workers, and notify the clients.

        The socket must stay open until the clients have acknowledged the end of their
        sessions, because messages that a client has received but not read are lost with
        its connection (see the decision "A stopping server waits for its clients'
        acknowledgement").

        Args:
          timeout_seconds: Time limit; workers are killed after half of it.
          reason: Reason for cutting a drain short, sent to the clients; "" without a
            drain.
        """
        self._close_seconds = timeout_seconds / 2
        self._has_ended.clear()  # a drain may have set it
        self._carry_out(self._protocol.stop(time.monotonic(), reason))
        # Including pools that are already closing, to shorten their time limit.
        for leased_pool in self.pools.values():
            leased_pool.begin_close(self._close_seconds)
        self._schedule_read()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._has_ended.wait()
        except TimeoutError:
            _LOGGER.warning(
                "stopped before all clients had acknowledged and all workers had exited"
            )
        finally:
            self._lag.stop()
            self._router.sockets.stop_reading()
            for handle in (
                self._lease_timer,
                self._scheduled_read,
                self._deferred_timer,
            ):
                if handle is not None:
                    handle.cancel()
            for leased_pool in self.pools.values():
                leased_pool.release()
            if self.dropped_replies:  # usual when clients exit, so not a warning
                text = "replies to clients that had disconnected or read too slowly: %d"
                _LOGGER.info(text, self.dropped_replies)
            for number, text in (
                (self._protocol.num_dropped_messages, "unanswerable messages"),
                (self.counters.failures, "failures"),
            ):
                if number:
                    _LOGGER.warning("%s: %d", text, number)

    def end_sessions(self, users: Collection[str]) -> None:
        """End the sessions of users whose keys were revoked."""
        for user in users:
            self._audit(Audit("revoked", user))
        self._carry_out(self._protocol.leases.close_users(users))
        self._schedule_read()

    def disconnect(self, users: Collection[str]) -> None:
        """Disconnect users by closing all connections; ZeroMQ cannot close single ones.

        Sessions that the users have started since `end_sessions` also end.
        """
        self._carry_out(self._protocol.leases.close_users(users))
        text = f"keys were revoked: {', '.join(sorted(users))}"
        self._router.sockets.reopen(text)

    # Messages.

    def _on_messages(self) -> None:
        """Read and handle messages for one turn."""
        if self._scheduled_read is not None:
            self._scheduled_read.cancel()
            self._scheduled_read = None
        protocol, fair_share, counters = self._protocol, self._fair_share, self.counters
        has_more, previous = True, fair_share.throttled
        now = time.monotonic()
        fair_share.begin_turn(now)
        try:
            for _ in range(_MAX_MESSAGES_PER_TURN):
                received = self._router.receive()
                if received is None:
                    user = self._router.discarding_user
                    if user is None:
                        has_more = False
                    else:
                        fair_share.charge(time.monotonic(), user)
                    break
                peer, frames = received
                counters.messages_in += 1
                num_bytes = sum(map(len, frames))
                counters.bytes_in += num_bytes
                decisions: Sequence[Decision] = ()
                if fair_share.throttled is None or fair_share.admits(peer, num_bytes):
                    num_dropped = protocol.num_dropped_messages
                    try:
                        decisions = protocol.receive(peer, frames, now)
                    except Exception:
                        self._log_failure("a message could not be handled")
                        decisions = protocol.receive_failed(peer, frames)
                    if num_dropped != protocol.num_dropped_messages:
                        counters.dropped += 1
                        fair_share.record_dropped(peer[-1], 0, num_bytes)
                    self._carry_out(decisions)
                else:
                    counters.dropped += 1
                now = time.monotonic()
                is_step = bool(decisions) and isinstance(decisions[0], RunStep)
                if fair_share.charge(now, peer[-1], is_step=is_step):
                    break
        finally:
            # The turn may have ended with the last message.
            has_more = has_more and self._router.sockets.has_unread()
            pause = fair_share.end_turn(has_unread=has_more)
            if fair_share.throttled not in (None, previous):
                reason = "it uses too much of the loop's time; its messages are dropped"
                self._audit(Audit("over quota", fair_share.throttled, reason=reason))
            if fair_share.flooder is not None:
                self._router.sockets.reopen(
                    "a flood", fair_share.flooder, shut_out=True
                )
            if pause:
                self._scheduled_read = self._loop.call_later(pause, self._on_messages)
            elif has_more:
                self._schedule_read()

    def _log_failure(self, text: str) -> None:
        """Count an unexpected exception; log each `text` at most once a second."""
        self.counters.failures += 1
        more = self._failure_throttle.admit(text, time.monotonic())
        if more is not None:
            _LOGGER.exception("%s%s", text, more)

    def _schedule_read(self) -> None:
        if self._scheduled_read is None and self._router.sockets.has_unread():
            self._scheduled_read = self._loop.call_soon(self._on_messages)

    # Decisions.

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        """Carry out decisions, and the decisions that follow from them."""
        queue = [*decisions]
        for decision in queue:  # including those that this loop appends
            if isinstance(decision, Reply):
                if decision.peer in self._deferred or not self._send(decision):
                    self._defer(decision)
            elif isinstance(decision, PoolDecision):
                try:
                    queue.extend(self._apply_to_pool(decision))
                except Exception as error:
                    queue.extend(self._abandon(decision.session, error))
            elif isinstance(decision, RequestDecision):
                queue.extend(self._reply(decision))
            elif isinstance(decision, Audit):
                self._audit(decision)
            else:  # BeginDrain
                self._drain_requested.set()
        is_ending = self._protocol.leases.is_ending and not self._joining
        if is_ending and self._protocol.has_ended:
            self._has_ended.set()

    def _send(self, reply: Reply) -> bool:
        """Send or drop a reply; return False if the queue of its peer is full."""
        counters = self.counters
        try:
            if self._router.send(reply.peer, reply.frames):
                counters.messages_out += 1
                counters.bytes_out += sum(map(len, reply.frames))
                counters.resends += reply.limiter is not None
                return True
            if self._router.is_full:
                return False
        except Exception:  # other replies can still be sent
            self._log_failure("a reply could not be sent")
        self._drop(reply)
        return True

    def _drop(self, reply: Reply) -> None:
        self.counters.dropped += 1
        self.dropped_replies += 1
        if reply.limiter is not None:
            reply.limiter.num_copies -= 1

    def _defer(self, reply: Reply) -> None:
        """Keep a reply until the queue of its peer has room."""
        if not self._deferred.add(reply, time.monotonic()):
            self._drop(reply)
            return
        retry_at, timer = self._deferred[reply.peer].retry_at, self._deferred_timer
        if timer is None or retry_at < timer.when():
            if timer is not None:  # for a slower peer
                timer.cancel()
            self._deferred_timer = self._loop.call_at(retry_at, self._send_deferred)

    def _send_deferred(self) -> None:
        self._deferred_timer = None
        deferred = self._deferred
        for reply in deferred.send(self._send, self._loop.time()):
            self._drop(reply)
        if deferred:
            self._deferred_timer = self._loop.call_at(
                deferred.retry_at, self._send_deferred
            )
        self._schedule_read()

    def _reply(
        self, decision: RequestDecision, enrolled: Future[str] | None = None
    ) -> Sequence[Decision]:
        """Return the decisions that reply to a request with data of this event loop.

        `enrolled` is the result of `_enrol`.
        """
        request, now = decision.request, time.monotonic()
        user, payload = request.peer[-1], b""
        try:
            if isinstance(decision, ReplyWelcome):
                body = self._welcome(user).encode()
            elif isinstance(decision, ReplyStatus):
                body = self.status.report(user, now)
            elif isinstance(decision, ReplyFrame):
                pool = self.pools[decision.session].pool
                result, payload = pool.read_frames(decision.frame_request)
                body = result.encode()
            elif enrolled is None:
                self._enrol(decision)
                return ()
            else:
                enrolled.result()  # raises the error of the thread
                body = b""
            return self._protocol.reply(request, body, payload)
        except (Rejection, RemoteProtocolError) as error:
            return self._protocol.reject(request, error, now)
        except KeyFileError as error:
            if (more := self._failure_throttle.admit("a join failed", now)) is not None:
                _LOGGER.error("a client cannot join: %s%s", error, more)
            return self._protocol.request_failed(request)
        except Exception:
            self._log_failure("a message could not be handled")
            return self._protocol.request_failed(request)

    def _enrol(self, decision: EnrolKey) -> None:
        """Replace an invitation in a thread, because that waits for the file system.

        A copy of a JOIN that is in progress is ignored.
        """
        peer, access = decision.request.peer, self._access
        assert access is not None, "the protocol rejects JOIN without keys"
        if peer[-1] in self._joining:
            return
        self._joining.add(peer[-1])
        # Record the address that sent this message, because several clients may be
        # connected with the same invitation.
        address = self._router.sockets.by_number[peer[0]].sender_address
        enrolled: Future[str] = Future()

        def run() -> None:
            try:
                enrolled.set_result(access.enrol(peer[-1], decision.public_key))
            except Exception as error:
                enrolled.set_exception(error)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(finish)

        def finish() -> None:
            self._joining.remove(peer[-1])
            if enrolled.exception() is None:
                self._audit(Audit("joined", enrolled.result(), address=address))
            self._carry_out(self._reply(decision, enrolled))
            self._schedule_read()

        try:
            # A daemon thread, because it must not delay the end of the process.
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError:  # no thread can be started
            run()

    def _welcome(self, user: str) -> Welcome:
        """Return the WELCOME for a user; raise Rejection if its key is not valid."""
        return replace(
            self._protocol.leases.welcome_for(user),
            is_starting=not self._launcher.has_imported,
            loop_lag_ms=int(1000 * self._lag.seconds),
        )

    def _apply_to_pool(self, decision: PoolDecision) -> Sequence[Decision]:
        """Carry out a decision about a pool; return the decisions that follow."""
        session = decision.session
        if isinstance(decision, StartPool):
            return self._start_pool(decision)
        if isinstance(decision, EndPool):
            if session not in self.pools:  # the pool is closed or did not start
                return self._protocol.pool_closed(session)
            self.pools[session].begin_close(self._close_seconds)
            return ()
        leased_pool = self.pools[session]
        pool = leased_pool.pool
        try:
            if isinstance(decision, RunStep):
                pool.submit_step(decision.blocks)
            elif isinstance(decision, RunReset):
                pool.submit_reset(decision.resets)
            else:
                pool.submit_call(decision.calls)
        except EnvserveError as error:
            return self._fail_pool(session, error)
        leased_pool.schedule()
        absent = pool.absent
        return self._protocol.pool_finished(session, (), absent) if absent else ()

    def _fail_pool(self, session: SessionId, error: EnvserveError) -> list[Decision]:
        _LOGGER.error("%s: %s", self._protocol.leases.name_of(session), error)
        return self._protocol.pool_failed(session, error)

    def _start_pool(self, decision: StartPool) -> Sequence[Decision]:
        session = decision.session
        if self._lease_timer is None:
            self._schedule_lease_expiry()
        try:
            label = self._protocol.leases.name_of(session)
            with self._launcher.reserve:
                pool = Pool(
                    decision.settings,
                    launcher=self._launcher,
                    label=label,
                    owner=session[0] or label,
                )
            leased_pool = LeasedPool(
                pool, self._loop, partial(self._on_pool_event, session)
            )
            # Store it first, so that `_abandon` closes it if `watch` fails.
            self.pools[session] = leased_pool
            leased_pool.watch()
            return ()
        except EnvserveError as error:
            return self._protocol.pool_failed(session, error)
        except OSError as error:  # no descriptors, processes or memory are left
            failure = ServerError(
                f"cannot start workers now: {error}; end other sessions, or raise "
                f"the server's limits (ulimit -n, ulimit -u)"
            )
            return self._fail_pool(session, failure)

    def _abandon(self, session: SessionId, error: Exception) -> list[Decision]:
        """End a session and kill its pool after an unexpected exception."""
        self.counters.failures += 1
        _LOGGER.error(
            "%s: server failure", self._protocol.leases.name_of(session), exc_info=error
        )
        try:
            if session in self.pools:
                self._release(session)
        finally:
            text = f"the server failed: {type(error).__name__}: {error}"
            decisions = self._protocol.pool_broken(session, ServerError(text))
        return decisions

    # Pools.

    def _release(self, session: SessionId) -> None:
        """Close a pool, and add its counts to the server's counts."""
        leased_pool = self.pools.pop(session)
        if (record := self._protocol.leases.get(session)) is not None:
            record.statistics = leased_pool.statistics()
        self.status.add_closed(leased_pool.pool.metrics.counts)
        leased_pool.release()

    def _on_pool_event(self, session: SessionId) -> None:
        """Pass the events of a pool to the protocol."""
        leased_pool = self.pools[session]
        pool = leased_pool.pool
        try:
            try:
                outcomes, error = pool.collect(0), pool.error
            except EnvserveError as failure:  # the launcher cannot start processes
                outcomes, error = [], failure
            if error is not None:
                decisions = self._protocol.pool_failed(session, error)
            elif leased_pool.is_ready_reported:  # by far the most frequent case
                decisions = self._protocol.pool_finished(session, outcomes, pool.absent)
            else:
                decisions = []
                if pool.is_ready:
                    leased_pool.is_ready_reported = True
                    now = time.monotonic()
                    decisions = self._protocol.pool_ready(
                        session, pool.spec, pool.blocks, pool.rows, now
                    )
            if leased_pool.is_closing and pool.is_closed:
                self._release(session)
                decisions += self._protocol.pool_closed(session)
            else:
                leased_pool.schedule()
        except Exception as defect:
            decisions = self._abandon(session, defect)
        if decisions:
            self._carry_out(decisions)
            self._schedule_read()

    def _schedule_lease_expiry(self) -> None:
        deadline = self._protocol.next_deadline()
        if deadline != math.inf:
            self._lease_timer = self._loop.call_at(deadline, self._expire_leases)

    def _expire_leases(self) -> None:
        assert self._lease_timer is not None, "only the timer calls this"
        is_late = self._loop.time() > self._lease_timer.when() + _LATE_SECONDS
        if is_late and self._num_postponed < _MAX_POSTPONED:
            # This process was probably suspended. Clients may have sent messages in the
            # meantime, so read these before any lease expires. The number is limited
            # for loops that are always late.
            self._num_postponed += 1
            self._lease_timer = self._loop.call_later(
                _LATE_SECONDS, self._expire_leases
            )
            return
        self._lease_timer, self._num_postponed = None, 0
        try:
            self._carry_out(self._protocol.expire_leases(self._loop.time()))
        finally:
            if self._lease_timer is None:
                self._schedule_lease_expiry()
            self._schedule_read()
