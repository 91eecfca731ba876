"""A lane whose envs run on a server.

Threads use the session and its socket only while they hold the lane's lock. First, the
`Attacher` of the batch attaches to the server. After that, two threads use the lane:
the caller's thread and a keep-alive thread, which runs the session while the lane is
idle: it exchanges pings, so that the lease does not expire during a long learner
update, and attaches again if the server is lost. The keep-alive thread receives
messages, but only the caller's thread writes rows, so rows never change while the
caller reads them.

To spread the lanes of a batch, the keep-alive thread may open a second lane on another
server, the successor. Once the successor holds the same envs, the lane takes over its
lease before one of the next steps. Until then, the lane keeps its own envs, so all
episodes continue if the other server rejects the envs.

A signal handler may interrupt the calling thread during an update of the session. Then
the lock is released, and `_is_updating` stays True. The keep-alive thread does not
touch the session until `invalidate` has reset it.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import zmq

from envserve.client.link.connection import SLICE_SECONDS, Connection, SharedContext
from envserve.client.link.server_pool import ServerPool
from envserve.client.link.session_driver import SessionDriver
from envserve.client.link.zmq_guards.diagnosis import Diagnosis
from envserve.errors import (
    ConnectError,
    EnvserveError,
    EnvStartError,
    LocalProtocolError,
    ServerError,
)
from envserve.lane import Block, Call, Lane, Outcome, Reset, mark_harmless
from envserve.session.client.attachment import attach_of
from envserve.session.client.client_session import ClientSession
from envserve.session.client.liveness import Timeouts
from envserve.session.states import ClientState
from envserve.settings import EnvRequest
from envserve.slab import Rows
from envserve.spaces.env_spec import EnvSpec
from envserve.worker.channel import MAX_REPLY_BYTES

Operations = TypeVar("Operations")

_LOGGER: Final = logging.getLogger(__name__)
#: Interval at which the keep-alive thread runs the session of an idle lane.
_KEEPALIVE_SECONDS: Final = 0.5
#: Shorter interval while the session leases envs again, which takes several messages.
_RECOVERY_SECONDS: Final = 0.05
#: Maximum time to wait for the server's confirmation of DETACH.
_CLOSE_SECONDS: Final = 1.5
#: Maximum time to send the last message.
_LINGER_SECONDS: Final = 0.1
#: States of a session that has not been granted a lease yet.
_STARTING: Final = (
    ClientState.CONNECTING,
    ClientState.HELLO_SENT,
    ClientState.ATTACHING,
)


class RemoteLane:
    """Envs on one server; implements `lane.Lane`. Methods are thread-safe.

    Attributes:
      num_envs: Number of rows.
    """

    def __init__(
        self,
        address: str,
        request: EnvRequest,
        timeouts: Timeouts | None = None,
        *,
        insecure: bool = False,
        context: SharedContext | None = None,
        server_pool: ServerPool | None = None,
        like: Lane | None = None,
    ) -> None:
        """Start to attach to the server; `finish_start` waits for it.

        The servers in `server_pool` can replace this one. If there is no server yet,
        `like` is a lane of the same batch, whose spaces and blocks are used until a
        server is found.

        Raises:
          EnvserveError: The connection or the request is invalid; see `Connection` and
            `attach_of`.
        """
        timeouts = timeouts or Timeouts()
        self.num_envs = request.num_envs
        attach = attach_of(request, address)
        context = context or SharedContext(1)
        self._connection = Connection(address, insecure=insecure, context=context)
        self._successor: RemoteLane | None = None
        self._start_successor = functools.partial(
            RemoteLane,
            timeouts=replace(timeouts, pads_lost_rows=False),
            insecure=insecure,
            context=context,
        )
        self._session = ClientSession(
            address,
            attach,
            timeouts,
            session=secrets.randbits(64) | 1,
            now=time.monotonic(),
            client_name=f"{socket.gethostname()[:100]}:{os.getpid()}",
        )
        self._connect_seconds = timeouts.connect_seconds
        # All locks that the caller's thread acquires are reentrant, because a signal
        # handler may close the batch during any call.
        self._lock = threading.RLock()
        self._is_updating = False
        self._has_started, self._has_closed = threading.Event(), threading.Event()
        self._driver = SessionDriver(self._session, self._connection, server_pool)
        self._waker = self._connection.waker
        keys = self._connection.keys
        self._diagnosis = Diagnosis(address, keys)
        # Diagnose a missing connection and, without keys, a peer that does not reply to
        # HELLO. With keys, the connection proves that the peer is the server.
        self._diagnosed_states = _STARTING[: 1 if keys else 2]
        self._is_closing = False
        #: Whether the caller waits on the descriptor. If so, each call must update the
        #: descriptor's state, which takes time.
        self._is_watched = False
        self._close_by = math.inf
        if like is not None:
            self._session.attachment.start_vacant(like, time.monotonic())
            self._has_started.set()
        self._finalizer = weakref.finalize(
            self, _release, self._driver, self._lock, os.getpid()
        )
        self._keepalive_thread = threading.Thread(
            target=_run_keepalive,
            args=(weakref.ref(self), self._has_closed),
            name=f"keepalive of {address}",
            daemon=True,
        )
        self._attacher = context.attacher
        if like is None:
            self._attacher.add(self._waker, self._attach)
        else:
            self._keepalive_thread.start()

    def finish_start(self, deadline: float) -> None:
        """Wait until the server has granted the lease and built the envs.

        Args:
          deadline: Time until which to wait, as a value of `time.monotonic()`.

        Raises:
          ConnectError: No server replies.
          EnvStartError: The envs could not be built, or not before the deadline.
          ServerError: The server rejected the request (EnvsBusy, for example), or
            speaks a different protocol version.
          UnknownEnv: The server does not offer the env.
        """
        seconds = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        has_started = self._has_started.wait(seconds)
        if has_started and self._session.error is None:
            return
        attachment, error = self._session.attachment, self._session.error
        has_reply = self._session.state not in _STARTING[:2]
        self.close()
        if error is None and not has_reply:
            error = attachment.connect_error or ConnectError(
                f"{self.name}: no server replied before start_timeout"
                f"{attachment.tried_text}; check that it is running and can be reached"
            )
        raise error or EnvStartError(
            f"{self.name}: the server is still building {self.num_envs} "
            f"{attachment.attach.env_name} envs; increase start_timeout"
        )

    @property
    def name(self) -> str:
        """Address of the server."""
        return self._session.address

    @property
    def spec(self) -> EnvSpec:
        """Spaces of every env of the lane."""
        return self._session.client_blocks.spec

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, which partition the rows."""
        return self._session.blocks

    @property
    def rows(self) -> Rows:
        """The rows, in private memory; `collect` copies received results into them."""
        return self._session.rows

    @property
    def is_busy(self) -> bool:
        """Whether any operation is in flight, or has finished but is not collected."""
        with self._lock:
            return self._session.num_in_flight > 0

    @property
    def absent(self) -> frozenset[int]:
        """Indices of blocks in flight that were absent after the last `collect`."""
        blocks = self._session.attachment.client_blocks
        return frozenset() if blocks is None else blocks.absent

    @property
    def give_up_error(self) -> EnvserveError | None:
        """Error to raise instead of waiting for a lost server; None to keep waiting."""
        return self._session.give_up_error

    def submit_step(self, blocks: Sequence[int]) -> None:
        """Send a step of these blocks, with the actions in `rows.action`."""
        if self._driver.is_moving and (successor := self._successor) is not None:
            with self._lock, successor._lock:
                self._is_updating = True
                self._driver.move_at_end(successor._session, time.monotonic())
                self._is_updating = False
        self._submit(self._session.submit_step, blocks)

    def submit_reset(self, resets: Sequence[Reset]) -> None:
        """Send resets of different blocks."""
        self._submit(self._session.submit_reset, resets)

    def submit_call(self, calls: Sequence[Call]) -> None:
        """Send requests to access attributes of envs in different blocks."""
        self._submit(self._session.submit_call, calls, MAX_REPLY_BYTES)

    def _submit(
        self,
        submit: Callable[[Operations, float], None],
        operations: Operations,
        max_reply_bytes: int = 0,
    ) -> None:
        with self._lock:
            self._is_updating = True
            now = time.monotonic()
            driver = self._driver
            if max_reply_bytes:
                driver.raise_frame_limit(max_reply_bytes, now)
            try:
                submit(operations, now)
            except EnvserveError:  # the session was not changed
                self._is_updating = False
                raise
            outbox = self._session.outbox
            try:  # send immediately, because the server may be idle
                self._connection.flush(outbox)
            except BaseException as error:
                # A message of one frame was sent completely or not at all, and sending
                # it twice is harmless. A message of several frames may be incomplete.
                if max(map(len, outbox.values()), default=1) == 1:
                    self._is_updating = False
                    mark_harmless(error)
                raise
            if now >= driver.due_at or (self._is_watched and not driver.is_idle(now)):
                self._run(now)
            elif self._is_watched:
                self._signal_changes()
            self._is_updating = False

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        """Wait until operations have finished; see `Lane.collect`."""
        session, driver = self._session, self._driver
        now = time.monotonic()
        deadline = now + timeout_seconds
        with self._lock:
            client_blocks = session.client_blocks
            self._is_updating = True
            self._is_watched &= timeout_seconds < SLICE_SECONDS
            while True:
                if self._is_closing:
                    raise self._closed_error()
                may_block = deadline - now >= SLICE_SECONDS
                if not may_block:
                    self._run_unless_answered(now)
                elif session.outbox or now >= driver.due_at:
                    driver.run(now)
                if client_blocks.is_ready(min_finished) or now >= deadline:
                    break
                frames = None
                try:
                    if may_block:
                        frames = self._connection.receive_soon()
                    else:
                        driver.wait(deadline)
                except BaseException as error:
                    if self._is_closing and isinstance(error, zmq.ZMQError):
                        continue  # a signal handler has closed the lane
                    # The session requests a message again if the interrupt has lost it.
                    self._is_updating = False
                    mark_harmless(error)
                    raise
                now = time.monotonic()
                if frames is not None:
                    session.receive(frames, now)
                elif may_block:
                    driver.run(now)
            if self._is_watched:
                self._waker.sleep()
                if not driver.is_idle(now):
                    driver.run(now)
            # `run` may have received results of absent blocks. If `absent` still listed
            # them, their next step would be padding with outdated observations.
            if client_blocks.absent_is_stale:
                client_blocks.refresh_absent()
            outcomes = session.collect()
            self._is_updating = False
            return outcomes

    def _run_unless_answered(self, now: float) -> None:
        """Receive one message; run the session only if that is not enough.

        Receiving a message is much cheaper than running the session.
        """
        driver, session = self._driver, self._session
        if (
            now < driver.due_at
            and not session.outbox
            and (frames := self._connection.receive()) is not None
        ):
            session.receive(frames, now)
            if not session.outbox:
                return
        driver.run(now)

    def invalidate(self, reason: str) -> None:
        """Release the lease and request new envs; see `Lane.invalidate`."""
        with self._lock:
            self._is_updating = True
            now = time.monotonic()
            self._session.invalidate(reason, now)
            self._driver.complete_move(now)
            self._run(now)

    def _run(self, now: float) -> None:
        """Run the session; make the descriptor readable if `collect` is due."""
        self._is_updating = True
        self._driver.run(now)
        self._signal_changes()
        self._is_updating = False

    def _signal_changes(self) -> None:
        """Make the descriptor readable if `collect` would change or return anything."""
        blocks = self._session.attachment.client_blocks
        if blocks is not None and (blocks.uncollected or blocks.absent_is_stale):
            self._waker.wake()

    def stats(self) -> Mapping[str, int]:
        """Return counters by name; see `ClientSession.stats`."""
        return self._session.stats()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `collect(0)` may return results."""
        if self._is_closing:
            raise self._closed_error()
        if not self._is_watched:
            with self._lock:
                self._is_watched = True
                self._run(time.monotonic())
        return self._waker.fileno()

    def begin_close(self) -> None:
        """Release the lease without waiting for the server's confirmation."""
        if self._has_closed.is_set():
            return
        self._is_closing = True
        self._close_by = time.monotonic() + _CLOSE_SECONDS
        self._has_closed.set()
        self._attacher.remove(self._waker)
        if self._lock_to_close():
            thread_id = self._keepalive_thread.ident
            self._lock.release()
            # The garbage collector may close an unused batch in any thread.
            if thread_id not in (None, threading.get_ident()):
                self._keepalive_thread.join(max(0.0, self._close_by - time.monotonic()))
        if self._successor is not None:
            self._successor.begin_close()
        if self._lock_to_close():
            try:
                self._release_lease()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Release the lease and close the connection, within 2 seconds; idempotent."""
        self.begin_close()
        if not self._lock_to_close():
            return  # the lane is released when it is garbage-collected
        try:
            if not self._finalizer.alive:
                return
            self._release_lease()  # a second time, in case the first was interrupted
            while (
                self._session.state is ClientState.CLOSING
                and time.monotonic() < self._close_by
            ):
                self._driver.wait(self._close_by)
                self._driver.run(time.monotonic())
            self._finalizer()
        finally:
            self._lock.release()
        if self._successor is not None:
            self._successor.close()
        if (servers := self._driver.server_pool) is not None:
            servers.remove(self._driver, self._close_by)

    def _lock_to_close(self) -> bool:
        """Acquire the lock within the time limit of `close`; return whether it was.

        A keep-alive thread that holds the lock may be waiting for another lock, which
        this thread holds if a signal handler or the garbage collector closes the lane.
        """
        return self._lock.acquire(timeout=max(0.0, self._close_by - time.monotonic()))

    def _release_lease(self) -> None:
        now = time.monotonic()
        self._session.begin_close(now)
        self._driver.run(now)

    def _attach(self) -> bool:
        """Advance the attachment to the server; then start the keep-alive thread.

        Return whether the lane is attached, has failed or is closing.
        """
        try:
            with self._lock:
                if self._is_closing:
                    return True
                self._waker.sleep()
                self._driver.run(time.monotonic())
                if self._session.state in self._diagnosed_states:
                    self._diagnose()
                if self._session.state in _STARTING:
                    return False
                self._keepalive_thread.start()
            self._has_started.set()
        except Exception as error:  # report it to the lane's caller
            _fail(self, error)
        return True

    def _maintain(self) -> float:
        """Run the session if the lane is idle; return the seconds to the next call."""
        if self._lock.acquire(blocking=False):
            try:
                # Do nothing after an interrupted update, or once the lane is released.
                if self._finalizer.alive and not self._is_updating:
                    self._run(time.monotonic())
            finally:
                self._lock.release()
        if (servers := self._driver.server_pool) is not None:
            self._prepare_move(servers)
        is_recovering = self._session.attachment.is_recovering
        return _RECOVERY_SECONDS if is_recovering else _KEEPALIVE_SECONDS

    def _prepare_move(self, servers: ServerPool) -> None:
        """Open a successor on the lane's target; close it if it is not needed any more.

        Only the keep-alive thread calls this, so an interrupt cannot stop it halfway.
        """
        driver, attachment = self._driver, self._session.attachment
        target, successor = servers.placement.targets.get(driver), self._successor
        error: Exception | None = None
        try:
            if successor is None:
                if target is not None:
                    request = attachment.next_attach
                    self._successor = self._start_successor(target, request)
                return
            successor_session = successor._session
            # A LocalProtocolError if this lane has adopted the successor's lease.
            error = successor_session.error
            if successor_session.state is ClientState.READY and not driver.is_moving:
                attachment.check_same_envs(successor_session.client_blocks)
                driver.begin_move(time.monotonic())
        except Exception as failure:  # no file descriptor is free, for example
            error = failure
        is_wanted = successor is None or successor.name == target
        is_adopted = isinstance(error, LocalProtocolError)
        if error is not None and is_wanted and not is_adopted:
            _LOGGER.warning("cannot move envs to %s: %s", target, error)
            servers.record_rejection(driver)
        if successor is not None and (
            error is not None
            or not is_wanted
            or not attachment.has_next_seeds(successor._session.attachment)
        ):
            driver.is_moving, self._successor = False, None
            successor.begin_close()

    def _diagnose(self) -> None:
        """Find out why there is no connection; fail if waiting cannot help."""
        attachment = self._session.attachment
        attachment.tried_text = self._connection.tried_text
        error = self._diagnosis.poll(time.monotonic())
        if error is not None and self._diagnosis.is_final:
            attachment.fail(error)
        elif error is not None and attachment.connect_error is None:
            # If all attempts fail, the error is raised with the remedy.
            reason, seconds = str(error).partition(";")[0], self._connect_seconds
            _LOGGER.warning("%s; retrying for up to %g s", reason, seconds)
        attachment.connect_error = error

    def _closed_error(self) -> LocalProtocolError:
        return LocalProtocolError(f"{self!r} can no longer be used")

    def __repr__(self) -> str:
        state = "CLOSED" if self._is_closing else self._session.state.name
        count = self._session.num_in_flight
        return f"<RemoteLane {self.name} {state}, {count} in flight>"


def _run_keepalive(
    reference: weakref.ref[RemoteLane], has_closed: threading.Event
) -> None:
    """Run the keep-alive thread until the lane is closed or garbage-collected."""
    seconds = 0.0
    while not has_closed.wait(seconds):
        lane = reference()
        if lane is None:
            return
        try:
            seconds = lane._maintain()
        except Exception as error:  # report it to the lane's caller
            if not has_closed.is_set():
                _fail(lane, error)
            return
        del lane


def _fail(lane: RemoteLane, error: Exception) -> None:
    """End a lane because of an unexpected error in a background thread."""
    _LOGGER.error(
        "%s: attaching to the server, or keeping the lease alive, failed",
        lane.name,
        exc_info=error,
    )
    with lane._lock:
        if not lane._session.state.is_over:
            text = f"{lane.name}: {type(error).__name__}: {error!s:.500}"
            lane._session.attachment.fail(ServerError(text))
        lane._waker.wake()
    lane._has_started.set()


def _release(driver: SessionDriver, lock: threading.RLock, owner_pid: int) -> None:
    """Close the connection of a lane; release the lease if it still has one.

    A lane that was not closed is released when the interpreter exits. Then, other
    threads may still be running: the keep-alive thread and, for longer, a daemon thread
    that waits for a step. The lane is not released if such a thread keeps the lock.
    """
    if os.getpid() != owner_pid or not lock.acquire(timeout=_LINGER_SECONDS):
        return
    try:
        driver.session.begin_close(time.monotonic())
        driver.connection.flush(driver.session.outbox)
        driver.connection.close(linger_seconds=_LINGER_SECONDS)
    finally:
        lock.release()
