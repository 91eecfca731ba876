"""The envs of a server, over ZeroMQ.

The calling thread uses the socket, under the lane's lock. A keeper thread attaches, and
later takes care of an idle lane: it answers and sends pings, so that a long update of
the learner does not cost the lease, and attaches again when a server was lost. It
receives messages, but only `collect` writes rows.

If an interrupt cuts an update of the session short, the lock is released, and
`_is_updating` stays True. Then the keeper leaves the session alone until `invalidate`.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from envserve.client.link.connection import SLICE_SECONDS, Connection, SharedContext
from envserve.client.link.server_pool import ServerPool
from envserve.client.link.session_driver import SessionDriver
from envserve.client.link.zmq_guards.diagnosis import Diagnosis
from envserve.errors import (
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
from envserve.worker.channel import MAX_ANSWER_BYTES

What = TypeVar("What")

_LOGGER: Final = logging.getLogger(__name__)
#: How often the keeper looks after an idle lane.
_KEEPER_SECONDS: Final = 0.5
#: The same while the session gets envs again, which takes several messages.
_RECOVERY_SECONDS: Final = 0.05
_CLOSE_SECONDS: Final = 1.5
#: Longest time to send the last message.
_LINGER_SECONDS: Final = 0.1
_STARTING: Final = (
    ClientState.CONNECTING,
    ClientState.HELLO_SENT,
    ClientState.ATTACHING,
)


class RemoteLane:
    """Satisfies `lane.Lane`. Methods may be called from any thread.

    Attributes:
      num_envs: Number of rows.
    """

    def __init__(
        self,
        address: str,
        request: EnvRequest,
        patience: Timeouts | None = None,
        *,
        insecure: bool = False,
        context: SharedContext | None = None,
        server_pool: ServerPool | None = None,
        like: Lane | None = None,
    ) -> None:
        """Begin to attach; `finish_start` waits for it.

        Args:
          address: Address of the server, like "tcp://sim1:5555" or "ipc:///tmp/envs".
          request: The envs.
          patience: How long to wait for the server; None for the defaults.
          insecure: Whether to use no keys; see `KeyFolder.keys_for`.
          context: The ZeroMQ context that the lanes of a batch share.
          server_pool: Other servers, which can take this one's place.
          like: A lane with the same envs, if there is no server yet: its spaces and
            blocks are used until one is found.

        Raises:
          EnvserveError: As for `Connection` and `attach_of`.
        """
        self.num_envs = request.num_envs
        self._env_name = request.env_name
        attach = attach_of(request, address)
        self._connection = Connection(address, insecure=insecure, context=context)
        self._session = ClientSession(
            address,
            attach,
            patience or Timeouts(),
            session=secrets.randbits(64) | 1,
            now=time.monotonic(),
            client_name=f"{socket.gethostname()[:100]}:{os.getpid()}",
        )
        self._lock = threading.Lock()
        self._is_updating = False
        self._has_started, self._has_closed = threading.Event(), threading.Event()
        self._driver = SessionDriver(self._session, self._connection, server_pool)
        self._waker = self._connection.waker
        self._diagnosis = Diagnosis(address, keys := self._connection.keys)
        # With keys, a connection shows that the server is the right one.
        self._diagnosed_states = _STARTING[: 1 if keys else 2]
        self._is_watched = self._is_closing = False  # watched: its descriptor is used
        self._close_by = math.inf
        if like is not None:
            self._session.attachment.start_vacant(like, time.monotonic())
            self._has_started.set()
        self._finalizer = weakref.finalize(self, _release, self._driver)
        self._keeper = threading.Thread(
            target=_run_keeper,
            args=(weakref.ref(self), self._has_closed),
            name=f"keeper of {address}",
            daemon=True,
        )
        self._keeper.start()

    def finish_start(self, deadline: float) -> None:
        """Wait until the envs are granted.

        Raises:
          ConnectError: No server answers.
          EnvStartError: The envs could not be built, or not before the deadline.
          ServerError: The server refuses (EnvsBusy), or speaks another version.
          UnknownEnv: The server does not offer the env.
        """
        has_started = self._has_started.wait(max(0.0, deadline - time.monotonic()))
        if has_started and self._session.error is None:
            return
        self.close()
        raise self._session.error or EnvStartError(
            f"{self.name}: expected {self.num_envs} {self._env_name} in time; they "
            "are still being built; raise start_timeout if that may take so long"
        )

    @property
    def name(self) -> str:
        """The server's address."""
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
        """The rows, in private memory; `collect` writes them from messages."""
        return self._session.rows

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight, or has ended and was not collected."""
        with self._lock:
            return self._session.num_in_flight > 0

    @property
    def absent(self) -> frozenset[int]:
        """Blocks in flight whose envs were absent at the end of `collect`."""
        return self._session.client_blocks.absent

    @property
    def give_up_error(self) -> EnvserveError | None:
        """The error of a server that was waited for too long; it is still tried."""
        return self._session.give_up_error

    def submit_step(self, blocks: Sequence[int]) -> None:
        """Request a step of blocks, with the actions in `rows.action`."""
        self._submit(self._session.submit_step, blocks)

    def submit_reset(self, resets: Sequence[Reset]) -> None:
        """Request resets, each of another block."""
        self._submit(self._session.submit_reset, resets)

    def submit_call(self, calls: Sequence[Call]) -> None:
        """Request attribute access, each on envs of another block."""
        self._submit(self._session.submit_call, calls, MAX_ANSWER_BYTES)

    def _submit(
        self,
        submit: Callable[[What, float], None],
        what: What,
        max_answer_bytes: int = 0,
    ) -> None:
        with self._lock:
            self._is_updating = True
            now = time.monotonic()
            driver = self._driver
            if max_answer_bytes:
                driver.accept(max_answer_bytes, now)
            try:
                submit(what, now)
            except EnvserveError:  # nothing was changed
                self._is_updating = False
                raise
            outbox = self._session.outbox
            try:  # to send it at once, because the server has nothing else to do
                self._connection.flush(outbox)
            except BaseException as error:
                # A request of one frame was sent or not, and is sent again in any case.
                # One of several frames may be cut.
                if max(map(len, outbox.values()), default=1) == 1:
                    self._is_updating = False
                    mark_harmless(error)
                raise
            if self._is_watched or now >= driver.due_at:
                self._run(now)
            self._is_updating = False

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        """Wait until operations have ended; see `Lane.collect`."""
        session, driver = self._session, self._driver
        now = time.monotonic()
        deadline = now + timeout_seconds
        with self._lock:
            operations = session.client_blocks
            self._is_updating = True
            while True:
                if self._is_closing:
                    raise LocalProtocolError(f"{self!r} can no longer be used")
                if now >= driver.due_at or deadline - now < SLICE_SECONDS:
                    driver.run(now)
                if operations.is_ready(min_finished) or now >= deadline:
                    break
                frames = None
                try:
                    if deadline - now < SLICE_SECONDS:
                        driver.wait(deadline)
                    else:
                        frames = self._connection.receive_soon()
                except BaseException as error:
                    # If a message was received and is lost now, the server answers
                    # again.
                    self._is_updating = False
                    mark_harmless(error)
                    raise
                now = time.monotonic()
                if frames is not None:
                    session.receive(frames, now)
                if frames is None or session.outbox:
                    driver.due_at = now
            if self._is_watched:
                self._waker.sleep()
                driver.run(now)
            outcomes = session.collect()
            self._is_updating = False
            return outcomes

    def invalidate(self, reason: str) -> None:
        """Give the envs back and ask for others; see `Lane.invalidate`."""
        with self._lock:
            self._is_updating = True
            now = time.monotonic()
            self._session.invalidate(reason, now)
            self._run(now)

    def _run(self, now: float) -> None:
        """Send and receive; make the descriptor readable if outcomes were received."""
        self._is_updating = True
        self._driver.run(now)
        operations = self._session.attachment.client_blocks
        if operations is not None and (operations.ended or operations.absent_is_stale):
            self._waker.wake()
        self._is_updating = False

    def stats(self) -> Mapping[str, int]:
        """Return counts by name; see `ClientSession.stats`."""
        return self._session.stats()

    def fileno(self) -> int:
        """A descriptor that is readable when `collect(0)` may have something."""
        if not self._is_watched:
            with self._lock:
                self._is_watched = True
                self._run(time.monotonic())
        return self._waker.fileno()

    def begin_close(self) -> None:
        """Give the envs back without waiting for the server's confirmation."""
        if self._has_closed.is_set():
            return
        self._is_closing = True
        self._close_by = time.monotonic() + _CLOSE_SECONDS
        self._has_closed.set()
        self._keeper.join()
        with self._lock:
            self._give_back()

    def close(self) -> None:
        """Give the envs back, within 2 seconds; may be called twice."""
        self.begin_close()
        with self._lock:
            if not self._finalizer.alive:
                return
            self._give_back()  # a second time, in case the first was interrupted
            while (
                self._session.state is ClientState.CLOSING
                and time.monotonic() < self._close_by
            ):
                self._driver.wait(self._close_by)
                self._driver.run(time.monotonic())
            self._finalizer()
        if (servers := self._driver.server_pool) is not None:
            servers.leave(self._driver, self._close_by)

    def _give_back(self) -> None:
        now = time.monotonic()
        self._session.begin_close(now)
        self._driver.run(now)

    def _look_after(self) -> float:
        """Attach; later ping and receive, unless the lane is in use.

        Returns:
          Seconds until the next call is due.
        """
        if not self._has_started.is_set():
            with self._lock:
                self._driver.run(time.monotonic())
                if self._session.state in self._diagnosed_states:
                    self._diagnose()
                if self._session.state in _STARTING:
                    self._driver.wait(time.monotonic() + SLICE_SECONDS)
                    return 0.0
            self._has_started.set()
        elif self._lock.acquire(blocking=False):
            try:
                if not self._is_updating:  # otherwise a call was interrupted
                    self._run(time.monotonic())
            finally:
                self._lock.release()
        is_recovering = self._session.attachment.is_recovering
        return _RECOVERY_SECONDS if is_recovering else _KEEPER_SECONDS

    def _diagnose(self) -> None:
        """Find out why there is no connection; end the lane if there will be none."""
        attachment = self._session.attachment
        attachment.connect_error = self._diagnosis.poll(time.monotonic())
        if attachment.connect_error is not None and self._diagnosis.is_final:
            attachment.fail(attachment.connect_error)

    def __repr__(self) -> str:
        state = "CLOSED" if self._is_closing else self._session.state.name
        count = self._session.num_in_flight
        return f"<RemoteLane {self.name} {state}, {count} in flight>"


def _run_keeper(
    reference: weakref.ref[RemoteLane], has_closed: threading.Event
) -> None:
    """Run the keeper thread, until the lane is closed or garbage."""
    seconds = 0.0
    while not has_closed.wait(seconds):
        lane = reference()
        if lane is None:
            return
        try:
            seconds = lane._look_after()
        except Exception as error:  # a thread has no caller
            _fail(lane, error)
            return
        del lane


def _fail(lane: RemoteLane, error: Exception) -> None:
    """End a lane because of an unexpected error in its keeper."""
    _LOGGER.error("%s: its keeper has failed", lane.name, exc_info=error)
    with lane._lock:
        if not lane._session.state.is_over:
            text = f"{lane.name}: {type(error).__name__}: {error!s:.500}"
            lane._session.attachment.fail(ServerError(text))
        lane._waker.wake()
    lane._has_started.set()


def _release(driver: SessionDriver) -> None:
    """Close a lane's connection, and give its envs back if that was not done."""
    driver.session.begin_close(time.monotonic())
    driver.connection.flush(driver.session.outbox)
    driver.connection.close(linger_seconds=_LINGER_SECONDS)
