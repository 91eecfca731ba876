"""The server's shell: one ROUTER, a pool per lease, and a timer; nothing ever waits.

It carries out what the session decides. A reply that cannot be sent is dropped: the
client asks again, and the answer still stands in the rows. Whatever fails unexpectedly
is logged and costs one session; the server goes on to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence
from typing import Final

import zmq

from envserve.errors import EnvserveError, EnvStartError, ServerError
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.server.leased_pool import LeasedPool
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
from envserve.transport import (
    NOBLOCK,
    FrameReceiver,
    Frames,
    can_receive,
    descriptor_of,
)
from envserve.wire.constants import MAX_FRAMES

__all__ = ["Front"]

_LOGGER: Final = logging.getLogger(__name__)
_MORE: Final = NOBLOCK | int(zmq.SNDMORE)
#: Rows so long are sent from where they are. They may change before a copy of an answer
#: has left, but only once the client has had another one: it drops this copy.
_ZERO_COPY_BYTES: Final = 256 << 10
#: How long workers may take to end, unless the server is about to.
_CLOSE_SECONDS: Final = 1.0
#: Messages handled before the loop turns to pools and timers.
_MESSAGES_AT_ONCE: Final = 64


class Front:
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
        self._receiver = FrameReceiver(socket, MAX_FRAMES + 2, 2)
        self._session = session
        self._launcher = launcher
        self._loop = loop
        self._pools: dict[int, LeasedPool] = {}
        self._lease_timer: asyncio.TimerHandle | None = None
        self._planned_read: asyncio.Handle | None = None
        self._has_ended = asyncio.Event()
        self._close_seconds = _CLOSE_SECONDS
        loop.add_reader(descriptor_of(socket), self._read)
        self._plan_read()

    async def drain(self, grace_seconds: float) -> None:
        """Grants no more leases, and waits until those there are have ended.

        Args:
          grace_seconds: For the clients: when `stop` will be called at the latest.
        """
        self._carry_out(self._session.begin_drain(grace_seconds))
        self._check_end()
        self._plan_read()
        await self._has_ended.wait()

    async def stop(self, timeout_seconds: float, why: str = "") -> None:
        """Ends all sessions and their workers; tells the clients.

        The socket must stay open until they know: what a client has received but not
        read is lost with its connection.

        Args:
          timeout_seconds: Longest that it takes; workers are killed after half of it.
          why: For the clients, what has ended a drain.
        """
        self._close_seconds = timeout_seconds / 2
        self._carry_out(self._session.stop(why))
        for leased in self._pools.values():  # also those that are closing already
            leased.pool.begin_close(self._close_seconds)
            leased.plan()
        self._check_end()
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
                leased.stop()
            _LOGGER.info(
                "%d replies could not be sent; %d messages were none of ours; "
                "%d failures",
                self.dropped_replies,
                self._session.dropped_messages,
                self.failures,
            )

    def _read(self) -> None:
        """Handles messages that have come.

        ZeroMQ's descriptor shows an edge only: it stays silent about what is left
        unread, and about what came in during a send.
        """
        if self._planned_read is not None:
            self._planned_read.cancel()
            self._planned_read = None
        try:
            for _ in range(_MESSAGES_AT_ONCE):
                frames = self._receiver.receive()
                if frames is None:
                    break
                self._handle(bytes(frames[0]), frames[1:])
            self._check_end()
        finally:
            self._plan_read()

    def _handle(self, route: bytes, message: Frames) -> None:
        try:
            decisions = self._session.receive(route, message, self._loop.time())
        except Exception:
            self.failures += 1
            _LOGGER.exception("a message could not be handled")
            decisions = self._session.receive_failed(route, message)
        self._carry_out(decisions)

    def _check_end(self) -> None:
        if self._session.has_farewelled:
            self._has_ended.set()

    def _plan_read(self) -> None:
        if self._planned_read is None and can_receive(self._socket):
            self._planned_read = self._loop.call_soon(self._read)

    def _on_pool(self, session: int) -> None:
        try:
            self._advance_pool(session)
        except Exception as error:
            self._abandon(session, error)
        finally:
            self._check_end()
            self._plan_read()

    def _advance_pool(self, session: int) -> None:
        """Passes on what has happened in a pool."""
        leased = self._pools[session]
        finished, error = leased.collect()
        if finished:
            self._carry_out(self._session.pool_finished(session, finished))
        if not leased.is_announced:
            self._announce(session, leased, error)
        elif error is not None and not leased.pool.is_closed:
            self._carry_out(self._session.pool_failed(session, error))
        if leased.pool.is_closed:
            self._remove(session)
        else:
            leased.plan()

    def _announce(
        self, session: int, leased: LeasedPool, error: EnvserveError | None
    ) -> None:
        if error is not None:
            leased.is_announced = True
            self._carry_out(self._session.pool_failed(session, error))
        elif leased.pool.is_ready:
            leased.is_announced = True
            pool = leased.pool
            self._carry_out(
                self._session.pool_ready(
                    session, pool.spec, pool.blocks, pool.rows, self._loop.time()
                )
            )

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Reply):
                self._send(decision)
                continue
            try:
                if isinstance(decision, StartPool):
                    self._start(decision)
                elif isinstance(decision, EndPool):
                    self._end(decision.session)
                else:
                    self._run(decision)
            except Exception as error:
                self._abandon(decision.session, error)

    def _abandon(self, session: int, error: Exception) -> None:
        """Gives a session up, at once, since what it needs here has failed."""
        self.failures += 1
        _LOGGER.error("session %016x is given up", session, exc_info=error)
        leased = self._pools.pop(session, None)
        try:
            if leased is not None:
                leased.stop()
        finally:
            text = f"the server failed: {type(error).__name__}: {error}"
            self._carry_out(self._session.pool_broken(session, ServerError(text)))

    def _send(self, reply: Reply) -> None:
        *others, last = reply.frames
        try:
            self._socket.send(reply.route, _MORE)
            for frame in others:
                self._socket.send(frame, _MORE)
            self._socket.send(last, NOBLOCK, copy=len(last) < _ZERO_COPY_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.dropped_replies += 1

    def _start(self, decision: StartPool) -> None:
        session = decision.session
        try:
            with contextlib.ExitStack() as stack:
                label = f"session {session:016x}"
                pool = stack.enter_context(
                    Pool(decision.config, launcher=self._launcher, label=label)
                )
                self._pools[session] = LeasedPool(
                    pool, self._loop, lambda: self._on_pool(session)
                )
                stack.pop_all()
        except EnvserveError as error:
            self._carry_out(self._session.pool_failed(session, error))
        except OSError as error:  # of descriptors, processes, or memory
            failure = EnvStartError(
                f"no workers can be started now: {error}; end other sessions, or raise "
                f"the server's limits (ulimit -n, ulimit -u)"
            )
            _LOGGER.error("session %016x: %s", session, failure)
            self._carry_out(self._session.pool_failed(session, failure))
        self._plan_lease_end()

    def _run(self, decision: RunStep | RunReset | RunCall) -> None:
        leased = self._pools[decision.session]
        try:
            if isinstance(decision, RunStep):
                leased.pool.submit_step(decision.blocks, 0, decision.is_alone)
            elif isinstance(decision, RunReset):
                leased.pool.submit_reset(decision.resets)
            else:
                leased.pool.submit_call(decision.call)
        except EnvserveError as error:
            _LOGGER.error("session %016x: %s", decision.session, error)
            self._carry_out(self._session.pool_failed(decision.session, error))
        leased.plan()

    def _end(self, session: int) -> None:
        leased = self._pools.get(session)
        if leased is None:  # it could not even be started
            self._carry_out(self._session.pool_closed(session))
            return
        leased.pool.begin_close(self._close_seconds)
        leased.plan()

    def _remove(self, session: int) -> None:
        self._pools.pop(session).stop()
        self._carry_out(self._session.pool_closed(session))

    def _plan_lease_end(self) -> None:
        if self._lease_timer is None:
            deadline = self._session.next_deadline()
            if deadline != math.inf:
                self._lease_timer = self._loop.call_at(deadline, self._end_leases)

    def _end_leases(self) -> None:
        self._lease_timer = None
        try:
            self._carry_out(self._session.poll(self._loop.time()))
        finally:
            self._plan_lease_end()
            self._plan_read()
