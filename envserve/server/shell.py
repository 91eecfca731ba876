"""The server's shell: one ROUTER, a pool per lease, and timers; nothing ever waits.

It works off a list of what the session decides; what that leads to at once goes to the
end of the list. A reply that cannot be sent is dropped: the client asks again, and the
answer still stands in the rows. Whatever fails unexpectedly is logged and costs one
session; the server goes on to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import zmq

from envserve.errors import EnvserveError, EnvStartError, ServerError
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.session import (
    Decision,
    EndPool,
    Reply,
    RunCall,
    RunReset,
    RunStep,
    ServerSession,
    StartPool,
)
from envserve.transport import NOBLOCK, FrameReceiver, descriptor_of
from envserve.wire.constants import MAX_FRAMES

__all__ = ["RouterShell"]

_LOGGER: Final = logging.getLogger(__name__)
_MORE: Final = NOBLOCK | int(zmq.SNDMORE)
_POLLIN: Final = int(zmq.POLLIN)
#: Rows so long are sent from where they are. They may change before a copy of an answer
#: has left, but only once the client has had another one: it drops this copy.
_ZERO_COPY_BYTES: Final = 256 << 10
#: How long workers may take to end, unless the server is about to.
_CLOSE_SECONDS: Final = 1.0
#: Messages handled before the loop turns to pools and timers.
_MESSAGES_AT_ONCE: Final = 64


class _LeasedPool:
    """A lease's pool in the event loop.

    Attributes:
      pool: The pool.
      is_announced: Whether its being ready was reported.
      is_ending: Whether it was told to close.
      timer: When to look after it though it has said nothing.
      timer_at: When that is; infinity while there is no timer.
    """

    def __init__(self, pool: Pool, on_timer: Callable[[], None]) -> None:
        self.pool = pool
        self.is_announced = self.is_ending = False
        self.timer: asyncio.TimerHandle | None = None
        self.timer_at = math.inf
        self._on_timer = on_timer

    def look_at(self, instant: float, loop: asyncio.AbstractEventLoop) -> None:
        """Sets the timer."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer_at = instant
        self.timer = loop.call_at(instant, self._on_timer)

    def release(self, loop: asyncio.AbstractEventLoop) -> None:
        """Looks after it no more; ends a pool that is not closed yet by force."""
        loop.remove_reader(self.pool.fileno())
        if self.timer is not None:
            self.timer.cancel()
        self.pool.close()


class RouterShell:
    """Moves messages between a ROUTER, a session and its pools.

    Attributes:
      dropped_replies: Replies that could not be sent.
      failures: Messages and pools at which our own code failed.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        session: ServerSession,
        launcher: Launcher,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Starts to serve.

        Args:
          socket: A ROUTER that is bound; nothing else may use it from now on.
          session: The server's half of all conversations.
          launcher: Starts the workers of all pools.
          loop: The event loop that this thread runs.
        """
        self.dropped_replies = 0
        self.failures = 0
        self._socket = socket
        self._readable = [(socket, _POLLIN)]
        self._receiver = FrameReceiver(socket, MAX_FRAMES + 2, 2)
        #: Past a layer of Python that serves other types of sockets.
        self._send_frame: Callable[..., object] = super(zmq.Socket, socket).send
        self._session = session
        self._launcher = launcher
        self._loop = loop
        self._pools: dict[int, _LeasedPool] = {}
        self._lease_timer: asyncio.TimerHandle | None = None
        self._planned_read: asyncio.Handle | None = None
        self._is_ending = False
        self._has_ended = asyncio.Event()
        self._close_seconds = _CLOSE_SECONDS
        loop.add_reader(descriptor_of(socket), self._on_messages)
        self._plan_read()

    def __repr__(self) -> str:
        return f"<RouterShell {len(self._pools)} pools>"

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
        for session in self._pools:  # also those that are closing already
            self._close_pool(session)
        self._plan_read()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._has_ended.wait()
        except TimeoutError:
            _LOGGER.warning("stopped before all clients knew, or all workers ended")
        finally:
            self._loop.remove_reader(descriptor_of(self._socket))
            for handle in (self._lease_timer, self._planned_read):
                if handle is not None:
                    handle.cancel()
            for leased in self._pools.values():
                leased.release(self._loop)
            _LOGGER.info(
                "%d replies could not be sent; %d messages were none of ours; "
                "%d failures",
                self.dropped_replies,
                self._session.dropped_messages,
                self.failures,
            )

    # Messages.

    def _on_messages(self) -> None:
        """Handles messages that have come.

        ZeroMQ's descriptor shows an edge only: it stays silent about what is left
        unread, and about what came in during a send.
        """
        if self._planned_read is not None:
            self._planned_read.cancel()
            self._planned_read = None
        may_be_more = True
        try:
            for _ in range(_MESSAGES_AT_ONCE):
                frames = self._receiver.receive()
                if frames is None:
                    may_be_more = self._receiver.is_discarding
                    break
                route, message = bytes(frames[0]), frames[1:]
                try:
                    decisions = self._session.receive(route, message, time.monotonic())
                except Exception:
                    self.failures += 1
                    _LOGGER.exception("a message could not be handled")
                    decisions = self._session.receive_failed(route, message)
                self._carry_out(decisions)
        finally:
            if may_be_more:
                self._plan_read()

    def _plan_read(self) -> None:
        if self._planned_read is None and zmq.zmq_poll(self._readable, 0):
            self._planned_read = self._loop.call_soon(self._on_messages)

    def _send(self, reply: Reply) -> None:
        route, frames = reply
        send = self._send_frame
        try:
            send(route, _MORE)
            for frame in frames[:-1]:
                send(frame, _MORE)
            send(frames[-1], NOBLOCK, len(frames[-1]) < _ZERO_COPY_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.dropped_replies += 1

    # Decisions.

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

    def _use_pool(
        self, decision: StartPool | RunStep | RunReset | RunCall | EndPool
    ) -> Sequence[Decision]:
        """Does something with a pool; returns what is decided upon that."""
        session = decision.session
        if isinstance(decision, StartPool):
            return self._start_pool(decision)
        if isinstance(decision, EndPool):
            if session not in self._pools:  # it is closed, or could not be started
                return self._session.pool_closed(session)
            self._close_pool(session)
            return ()
        leased = self._pools[session]
        pool = leased.pool
        try:
            if isinstance(decision, RunStep):
                pool.submit_step(decision.blocks)
            elif isinstance(decision, RunReset):
                pool.submit_reset(decision.resets)
            else:
                pool.submit_call(decision.call)
        except EnvserveError as error:
            _LOGGER.error("session %016x: %s", session, error)
            return self._session.pool_failed(session, error)
        deadline = pool.next_deadline()
        if deadline is not None and deadline < leased.timer_at:
            leased.look_at(deadline, self._loop)
        absent = pool.absent
        return self._session.pool_finished(session, (), absent) if absent else ()

    def _start_pool(self, decision: StartPool) -> Sequence[Decision]:
        session = decision.session
        if self._lease_timer is None:
            self._plan_lease_end()
        try:
            with contextlib.ExitStack() as stack:
                label = f"session {session:016x}"
                pool = stack.enter_context(
                    Pool(decision.config, launcher=self._launcher, label=label)
                )
                leased = _LeasedPool(pool, partial(self._on_look, session))
                self._loop.add_reader(pool.fileno(), self._on_pool, session)
                stack.pop_all()
            self._pools[session] = leased
            leased.look_at(time.monotonic(), self._loop)
            return ()
        except EnvserveError as error:
            return self._session.pool_failed(session, error)
        except OSError as error:  # of descriptors, processes, or memory
            failure = EnvStartError(
                f"no workers can be started now: {error}; end other sessions, or raise "
                f"the server's limits (ulimit -n, ulimit -u)"
            )
            _LOGGER.error("session %016x: %s", session, failure)
            return self._session.pool_failed(session, failure)

    def _close_pool(self, session: int) -> None:
        leased = self._pools[session]
        leased.is_ending = True
        leased.pool.begin_close(self._close_seconds)
        leased.look_at(time.monotonic(), self._loop)

    def _abandon(self, session: int, error: Exception) -> list[Decision]:
        """Gives a session up, at once, since what it needs here has failed."""
        self.failures += 1
        _LOGGER.error("session %016x is given up", session, exc_info=error)
        try:
            if session in self._pools:
                self._pools.pop(session).release(self._loop)
        finally:
            text = f"the server failed: {type(error).__name__}: {error}"
            decisions = self._session.pool_broken(session, ServerError(text))
        return decisions

    # Pools.

    def _on_pool(self, session: int) -> None:
        """Passes on what has happened in a pool."""
        leased = self._pools[session]
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
                decisions = self._announce(session, leased)
            if leased.is_ending and pool.is_closed:
                self._pools.pop(session).release(self._loop)
                decisions += self._session.pool_closed(session)
            else:
                deadline = pool.next_deadline()
                if deadline is not None and deadline < leased.timer_at:
                    leased.look_at(deadline, self._loop)
        except Exception as defect:
            decisions = self._abandon(session, defect)
        if decisions:
            self._carry_out(decisions)
            self._plan_read()

    def _announce(self, session: int, leased: _LeasedPool) -> list[Decision]:
        """Says that a pool is ready, once it is."""
        pool = leased.pool
        if not pool.is_ready:
            return []
        leased.is_announced = True
        return self._session.pool_ready(
            session, pool.spec, pool.blocks, pool.rows, time.monotonic()
        )

    def _on_look(self, session: int) -> None:
        leased = self._pools[session]
        leased.timer, leased.timer_at = None, math.inf
        self._on_pool(session)

    # Leases.

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
