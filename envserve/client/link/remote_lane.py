"""Envs of a server, over ZeroMQ.

Every use of the socket is under the lane's lock, in the thread that calls. A keeper
thread attaches, and then looks after an idle lane, so that a long update of the
learner does not lose the lease, and that a lost server is attached to anew meanwhile.
It receives messages, but leaves the rows to who collects.
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
from envserve.client.link.server_pool import Fleet
from envserve.client.link.session_driver import Exchange
from envserve.client.link.zmq_guards.diagnosis import Diagnosis
from envserve.errors import (
    EnvserveError,
    EnvStartError,
    LocalProtocolError,
    ServerError,
)
from envserve.lane import Block, Call, Lane, Outcome, Reset
from envserve.session.client.attachment import attach_of
from envserve.session.client.client_session import ClientSession
from envserve.session.client.liveness import Timeouts
from envserve.session.states import ClientState
from envserve.settings import EnvRequest
from envserve.slab import Rows
from envserve.spaces.env_spec import EnvSpec
from envserve.worker.channel import MAX_ANSWER_BYTES

__all__ = ["RemoteLane"]

What = TypeVar("What")

_LOGGER: Final = logging.getLogger(__name__)
_KEEPER_SECONDS: Final = 0.5
#: The same while the session gets envs anew, which takes some messages.
_RECOVERY_SECONDS: Final = 0.05
_CLOSE_SECONDS: Final = 1.5
#: How long a last message may take to leave.
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
      is_waiting: Whether a call that was interrupted did nothing but wait or send.
    """

    def __init__(
        self,
        address: str,
        request: EnvRequest,
        patience: Timeouts | None = None,
        *,
        insecure: bool = False,
        context: SharedContext | None = None,
        fleet: Fleet | None = None,
        like: Lane | None = None,
    ) -> None:
        """Begins to attach; `finish_start` waits for it.

        Args:
          address: The server's, like "tcp://sim1:5555" or "ipc:///tmp/envs".
          request: What to ask for.
          patience: How long to wait for the server; None for the defaults.
          insecure: Whether to go without keys; see `KeyFolder.keys_for`.
          context: What the lanes of a batch share.
          fleet: Knows others, which may take the server's place.
          like: Whose envs are such as these will be, once a server comes.

        Raises:
          EnvserveError: As for `Connection`, and for `attach_of`.
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
            client=f"{socket.gethostname()[:100]}:{os.getpid()}",
        )
        self._lock = threading.Lock()
        self.is_waiting = self._is_midway = False  # see `lose`
        self._has_started, self._has_closed = threading.Event(), threading.Event()
        self._exchange = Exchange(self._session, self._connection, fleet)
        self._descriptor = self._connection.descriptor
        self._diagnosis = Diagnosis(address, keys := self._connection.keys)
        self._unheard = _STARTING[: 1 if keys else 2]  # keys show who is there
        self._is_watched = self._is_closing = False  # watched: its descriptor
        self._close_by = math.inf
        if like is not None:
            self._session.attachment.assume(like, time.monotonic())
            self._has_started.set()
        self._let_go = weakref.finalize(self, _let_go, self._exchange)
        self._keeper = threading.Thread(
            target=_keep,
            args=(weakref.ref(self), self._has_closed),
            name=f"keeper of {address}",
            daemon=True,
        )
        self._keeper.start()

    def finish_start(self, deadline: float) -> None:
        """Waits until the envs are granted.

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
        return self._session.operations.spec

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, which partition the rows."""
        return self._session.blocks

    @property
    def rows(self) -> Rows:
        """Private memory, written by `collect` straight from messages."""
        return self._session.rows

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight, or has ended and was not collected."""
        with self._lock:
            if self._is_midway:
                self._lose()
            return self._session.num_in_flight > 0

    @property
    def absent(self) -> frozenset[int]:
        """Blocks in flight whose envs were not there at the end of `collect`."""
        return self._session.operations.absent

    @property
    def given_up(self) -> EnvserveError | None:
        """Why absent blocks are not worth waiting for, though it is tried on."""
        return self._session.given_up

    def submit_step(self, blocks: Sequence[int]) -> None:
        """Asks for a step of these blocks, with the actions now in `rows.action`."""
        self._submit(self._session.submit_step, blocks)

    def submit_reset(self, resets: Sequence[Reset]) -> None:
        """Asks for resets, each of another block."""
        self._submit(self._session.submit_reset, resets)

    def submit_call(self, calls: Sequence[Call]) -> None:
        """Asks for attribute access, each on envs of another block."""
        with self._lock:
            self._exchange.accept(MAX_ANSWER_BYTES, time.monotonic())
        self._submit(self._session.submit_call, calls)

    def _submit(self, submit: Callable[[What, float], None], what: What) -> None:
        with self._lock:
            if self._is_midway:
                self._lose()
            self._is_midway = True
            now = time.monotonic()
            try:
                submit(what, now)
            except EnvserveError:  # it was refused, and nothing was changed
                self._is_midway = False
                raise
            exchange, outbox = self._exchange, self._session.outbox
            if max(map(len, outbox.values()), default=1) == 1:
                # From here on an interrupt costs nothing: what was not sent, or maybe
                # was, is sent again. In a message of more frames it would cut that.
                self._is_midway = False
                self.is_waiting = True
            self._connection.flush(outbox)  # at once: the server has no other work
            if self._is_watched or now >= exchange.due_at:
                self.is_waiting = False
                self._is_midway = True
                exchange.run(now)
                self._wake()
            self.is_waiting = self._is_midway = False

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        """Waits until so many operations have ended; see `Lane.collect`."""
        session, exchange = self._session, self._exchange
        now = time.monotonic()
        deadline = now + timeout_seconds
        self.is_waiting = False
        with self._lock:
            if self._is_midway:
                self._lose()
            operations = session.operations
            # While it waits, an interrupt costs nothing: of a message that is received
            # and not kept, the session gets a copy.
            while True:
                if self._is_closing:
                    raise LocalProtocolError(f"{self!r} can no longer be used")
                self._is_midway = True
                if now >= exchange.due_at or deadline - now < SLICE_SECONDS:
                    exchange.run(now)
                if operations.is_ready(min_finished) or now >= deadline:
                    break
                self._is_midway = False
                self.is_waiting = True
                frames = None
                if deadline - now < SLICE_SECONDS:
                    exchange.wait(deadline)
                else:
                    frames = self._connection.receive_soon()
                now = time.monotonic()
                self.is_waiting = False
                self._is_midway = True
                if frames is not None:
                    session.receive(frames, now)
                if frames is None or session.outbox:
                    exchange.due_at = now
            if self._is_watched:
                self._descriptor.sleep()
                exchange.run(now)
            outcomes = session.take_outcomes()
            self._is_midway = False
            return outcomes

    def lose(self, text: str) -> None:
        """Takes all envs for lost, and forgets what is in flight.

        A call is midway while it changes what is known of blocks, requests and rows, or
        is inside a message. If an interrupt ends it there, the next call begins with
        this: an episode is lost, and nothing can be wrong.
        """
        with self._lock:
            self._lose(text)

    def _lose(self, text: str = "a call was interrupted") -> None:
        self._is_midway = True
        now = time.monotonic()
        self._session.lose(text, now)
        self._exchange.run(now)
        self._is_midway = False

    def stats(self) -> Mapping[str, int]:
        """Returns how often what has happened; see `ClientSession.stats`."""
        return self._session.stats()

    def fileno(self) -> int:
        """A descriptor that is readable when `collect(0)` may have something."""
        if not self._is_watched:
            with self._lock:
                self._is_watched = True
                if not self._is_midway:
                    self._exchange.run(time.monotonic())
                self._wake()
        return self._descriptor.fileno()

    def begin_close(self) -> None:
        """Gives the envs back, without waiting for the server to confirm it."""
        if self._has_closed.is_set():
            return
        self._is_closing = True
        self._close_by = time.monotonic() + _CLOSE_SECONDS
        self._has_closed.set()
        self._keeper.join()
        with self._lock:
            self._give_back()

    def close(self) -> None:
        """Gives the envs back, within 2 seconds; may be called twice."""
        self.begin_close()
        with self._lock:
            if not self._let_go.alive:
                return
            self._give_back()  # a second time, in case the first was interrupted
            while (
                self._session.state is ClientState.CLOSING
                and time.monotonic() < self._close_by
            ):
                self._exchange.wait(self._close_by)
                self._exchange.run(time.monotonic())
            self._let_go()
        if (fleet := self._exchange.fleet) is not None:
            fleet.leave(self._exchange, self._close_by)

    def _give_back(self) -> None:
        now = time.monotonic()
        self._session.begin_close(now)
        self._exchange.run(now)

    def _look_after(self) -> float:
        """Attaches; later pings and reads answers, unless the lane is being used.

        Returns:
          Seconds until it is to be called again.
        """
        if not self._has_started.is_set():
            with self._lock:
                self._exchange.run(time.monotonic())
                if self._session.state in self._unheard:
                    self._diagnose()
                if self._session.state in _STARTING:
                    self._exchange.wait(time.monotonic() + SLICE_SECONDS)
                    return 0.0
            self._has_started.set()
        elif self._lock.acquire(blocking=False):
            try:
                if not self._is_midway:  # else it is for the next call to clean up
                    self._exchange.run(time.monotonic())
                    self._wake()
            finally:
                self._lock.release()
        is_recovering = self._session.attachment.is_recovering
        return _RECOVERY_SECONDS if is_recovering else _KEEPER_SECONDS

    def _diagnose(self) -> None:
        """Finds out why there is no connection; ends the lane if there will be none."""
        attachment = self._session.attachment
        attachment.refusal = self._diagnosis.look(time.monotonic())
        if attachment.refusal is not None and self._diagnosis.is_final:
            attachment.fail(attachment.refusal)

    def _wake(self) -> None:
        """Makes the descriptor readable for what was received meanwhile."""
        operations = self._session.attachment.operations
        if operations is not None and (operations.ended or operations.is_stale):
            self._descriptor.wake()

    def __repr__(self) -> str:
        state = "CLOSED" if self._is_closing else self._session.state.name
        count = self._session.num_in_flight
        return f"<RemoteLane {self.name} {state}, {count} in flight>"


def _keep(reference: weakref.ref[RemoteLane], has_closed: threading.Event) -> None:
    """Runs in the keeper thread, until the lane is closed or nobody has it any more."""
    seconds = 0.0
    while not has_closed.wait(seconds):
        lane = reference()
        if lane is None:
            return
        try:
            seconds = lane._look_after()
        except Exception as error:  # nobody else would see it
            _fail(lane, error)
            return
        del lane


def _fail(lane: RemoteLane, error: Exception) -> None:
    """Ends a lane by what should not have happened in its keeper."""
    _LOGGER.error("%s: its keeper has failed", lane.name, exc_info=error)
    with lane._lock:
        if not lane._session.state.is_over:
            text = f"{lane.name}: {type(error).__name__}: {error!s:.500}"
            lane._session.attachment.fail(ServerError(text))
        lane._wake()
    lane._has_started.set()


def _let_go(exchange: Exchange) -> None:
    """Tells the server, if a lane was dropped without being closed; frees all."""
    exchange.session.begin_close(time.monotonic())
    exchange.connection.flush(exchange.session.outbox)
    exchange.connection.close(linger_seconds=_LINGER_SECONDS)
