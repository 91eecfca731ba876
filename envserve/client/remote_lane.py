"""Envs of a server, over ZeroMQ.

Every use of the socket is under the lane's lock, in the thread that calls. A keeper
thread attaches, and then looks after an idle lane, so that a long update of the
learner does not lose the lease, and that a lost server is attached to anew meanwhile;
it hands no messages to other threads.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Final

from envserve import codec
from envserve.client.connection import SLICE_SECONDS, Connection
from envserve.errors import EnvStartError, LocalProtocolError
from envserve.lane import Block, Call, Outcome, PoolConfig, Reset
from envserve.session import ClientSession, ClientState
from envserve.slab import Rows
from envserve.spec import EnvSpec
from envserve.wire import Attach

__all__ = ["RemoteLane"]

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
    """Satisfies `lane.Lane`. Methods may be called from any thread."""

    def __init__(
        self,
        address: str,
        config: PoolConfig,
        *,
        connect_timeout_seconds: float = 10.0,
        server_lost_after_seconds: float = 60.0,
        pads_when_lost: bool = False,
    ) -> None:
        """Begins to attach; `finish_start` waits for it.

        Args:
          address: The server's, like "tcp://sim1:5555" or "ipc:///tmp/envs".
          config: What to ask for. Workers, modules and timeouts are the server's.
          connect_timeout_seconds: Longest silence until the envs are granted.
          server_lost_after_seconds: How long to wait for a server that is silent, or
            for envs that are lost, after that.
          pads_when_lost: Whether to give padding then, and try on, instead of ending.

        Raises:
          ConnectError: The address has no known form.
          EnvStartError: The env_kwargs or wrappers cannot be sent.
        """
        self._num_envs = config.num_envs
        self._env_name = config.env_name
        attach = _attach_of(config, address)
        self._connection = Connection(address)
        self._session = ClientSession(
            address,
            attach,
            session=secrets.randbits(64) | 1,
            now=time.monotonic(),
            timeout_seconds=connect_timeout_seconds,
            server_lost_after_seconds=server_lost_after_seconds,
            pads_when_lost=pads_when_lost,
            client=f"{socket.gethostname()[:100]}:{os.getpid()}",
        )
        self._lock = threading.Lock()
        self._has_started = threading.Event()
        self._is_closing = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._is_awake = False  # whether a byte is in that pair
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._connection, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._is_connected = False
        self._look_at = -math.inf  # when to look at the connection next
        self._close_by = math.inf
        self._let_go = weakref.finalize(
            self,
            _let_go,
            self._session,
            self._connection,
            (self._selector, self._wake_reader, self._wake_writer),
        )
        self._keeper = threading.Thread(
            target=_keep,
            args=(weakref.ref(self), self._is_closing),
            name=f"keeper of {address}",
            daemon=True,
        )
        self._keeper.start()

    def finish_start(self, deadline: float) -> None:
        """Waits until the envs are granted.

        Args:
          deadline: Instant of `time.monotonic`.

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
            f"{self.name}: expected {self._num_envs} {self._env_name} in time; they "
            "are still being built; raise start_timeout if that may take so long"
        )

    @property
    def name(self) -> str:
        """The server's address."""
        return self._connection.address

    @property
    def spec(self) -> EnvSpec:
        """Spaces of every env of the lane."""
        return self._session.spec

    @property
    def num_envs(self) -> int:
        """Number of rows."""
        return self._num_envs

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
            return self._session.settle()

    def submit_step(
        self, blocks: Sequence[int], ticket: int = 0, is_alone: bool = False
    ) -> None:
        """Asks for a step of these blocks, with the actions now in `rows.action`."""
        with self._lock:
            self._session.submit_step(blocks, time.monotonic(), ticket, is_alone)
            self._flush()  # at once: the server has no other work
            self._pump(is_hot=True)
            self._wake()

    def submit_reset(self, resets: Sequence[Reset], ticket: int = 0) -> None:
        """Asks for resets, each of another block."""
        with self._lock:
            self._session.submit_reset(resets, time.monotonic(), ticket)
            self._pump(is_hot=True)
            self._wake()

    def submit_call(self, call: Call, ticket: int = 0) -> None:
        """Asks for attribute access on one env, as an operation of its block."""
        with self._lock:
            self._session.submit_call(call, time.monotonic(), ticket)
            self._pump(is_hot=True)
            self._wake()

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        """Waits until some operation has ended; returns [] after the timeout.

        A server answers all blocks of a submission at once, so that `min_finished` has
        nothing to save: fewer may come back than asked for.
        """
        deadline = time.monotonic() + timeout_seconds
        session = self._session
        with self._lock:
            self._check_open()
            while not session.has_finished:
                if not self._receive_next(deadline):
                    self._pump()
                    if session.has_finished:
                        break
                    if time.monotonic() >= deadline:
                        return []
                    self._wait(deadline)
                self._check_open()
            self._sleep()
            return session.take_finished()

    def stats(self) -> Mapping[str, int]:
        """Returns how often what has happened; see `ClientSession.stats`."""
        return self._session.stats()

    def fileno(self) -> int:
        """A descriptor that is readable when `collect(0)` may have something."""
        return self._selector.fileno()

    def begin_close(self) -> None:
        """Gives the envs back, without waiting for the server to confirm it."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._close_by = time.monotonic() + _CLOSE_SECONDS
        self._keeper.join()
        with self._lock:
            self._session.begin_close(time.monotonic())
            self._pump()

    def close(self) -> None:
        """Gives the envs back, within 2 seconds; may be called twice."""
        self.begin_close()
        with self._lock:
            if not self._let_go.alive:
                return
            # A second time, in case the first was interrupted.
            self._session.begin_close(time.monotonic())
            self._pump()
            while (
                self._session.state is ClientState.CLOSING
                and time.monotonic() < self._close_by
            ):
                self._wait(self._close_by)
                self._pump()
            self._let_go()

    def _check_open(self) -> None:
        if self._is_closing.is_set():
            raise LocalProtocolError(f"{self!r} can no longer be used")

    def _attach(self) -> bool:
        """Goes on with attaching for a moment; False once that has ended."""
        with self._lock:
            self._pump()
            if self._session.state in _STARTING:
                self._wait(time.monotonic() + SLICE_SECONDS)
                return True
        self._has_started.set()
        return False

    def _look_after(self) -> float:
        """Pings and reads answers, unless the lane is being used; says when again."""
        if self._lock.acquire(blocking=False):
            try:
                self._pump()
                self._wake()
            finally:
                self._lock.release()
        is_recovering = self._session.is_recovering
        return _RECOVERY_SECONDS if is_recovering else _KEEPER_SECONDS

    def _receive_next(self, deadline: float) -> bool:
        """Waits for a message and takes it, with nothing around it.

        Returns:
          False if nothing came for a moment, or there is more to do than to wait.
        """
        session = self._session
        until = min(deadline, session.next_deadline())
        if until < time.monotonic() + SLICE_SECONDS or len(session.outbox):
            return False
        frames = self._connection.receive_soon()
        if frames is None:
            return False
        session.receive(frames, time.monotonic())
        if len(session.outbox) or self._connection.is_readable():
            self._pump(is_hot=True)
        return True

    def _pump(self, *, is_hot: bool = False) -> None:
        """Receives and sends until neither goes on.

        Ends with a receive that finds nothing: only then is the next message sure to
        show at the descriptor. Unless it is done in every step (`is_hot`), it looks at
        the connection as well: what the descriptor has shown may be a break, and it is
        not shown twice.
        """
        while True:
            now = time.monotonic()
            while (frames := self._connection.receive()) is not None:
                self._session.receive(frames, now)
            if not is_hot or now >= self._look_at:
                self._look_at_connection(now)
            self._session.advance(now)
            if not self._flush():
                return

    def _look_at_connection(self, now: float) -> None:
        """Tells the session when the connection breaks, and when it is made."""
        is_connected = self._connection.is_writable()
        if is_connected and not self._is_connected:
            self._session.connected(now)
        elif self._is_connected and not is_connected:
            self._session.disconnected(now)
        self._is_connected = is_connected
        # While there is none, a message that waits can be sent at any moment.
        self._look_at = now + SLICE_SECONDS if is_connected else now

    def _flush(self) -> bool:
        outbox = self._session.outbox
        has_sent = False
        while (frames := outbox.first()) is not None and self._connection.send(frames):
            outbox.pop()
            has_sent = True
        return has_sent

    def _wait(self, deadline: float) -> None:
        """Waits for the server, the session's next deadline, or a little while."""
        now = time.monotonic()
        until = min(deadline, self._session.next_deadline(), now + SLICE_SECONDS)
        wants_to_send = len(self._session.outbox) > 0 or not self._is_connected
        self._connection.wait(until - now, for_writing=wants_to_send)

    def _wake(self) -> None:
        """Makes the descriptor readable for results that were received meanwhile."""
        if self._session.has_finished and not self._is_awake:
            # The flag first: an interrupt between the two may cost a byte too many to
            # read, never one to wait for.
            self._is_awake = True
            self._wake_writer.send(b"!")

    def _sleep(self) -> None:
        if self._is_awake:
            with contextlib.suppress(BlockingIOError):
                self._wake_reader.recv(64)
            self._is_awake = False

    def __repr__(self) -> str:
        """Returns the address, the state, and what is in flight."""
        state = "CLOSED" if self._is_closing.is_set() else self._session.state.name
        return (
            f"<RemoteLane {self.name} {state}, {self._session.num_in_flight} in flight>"
        )


def _keep(reference: weakref.ref[RemoteLane], is_closing: threading.Event) -> None:
    """Runs in the keeper thread, until the lane is closed or nobody has it any more."""
    while not is_closing.is_set():
        lane = reference()
        if lane is None or not lane._attach():
            break
        del lane
    lane = None
    seconds = _KEEPER_SECONDS
    while not is_closing.wait(seconds):
        lane = reference()
        if lane is None:
            return
        seconds = lane._look_after()
        del lane


def _let_go(
    session: ClientSession,
    connection: Connection,
    others: tuple[selectors.BaseSelector, socket.socket, socket.socket],
) -> None:
    """Tells the server, if a lane was dropped without being closed; frees all."""
    session.begin_close(time.monotonic())
    while (frames := session.outbox.first()) is not None and connection.send(frames):
        session.outbox.pop()
    connection.close(linger_seconds=_LINGER_SECONDS)
    for other in others:
        other.close()


def _attach_of(config: PoolConfig, address: str) -> Attach:
    attach = Attach(
        env_name=config.env_name,
        num_envs=config.num_envs,
        num_splits=config.num_splits,
        seed=config.seed,
        first_env_index=config.first_env_index,
        first_incarnation=config.first_incarnation,
        env_kwargs=config.env_kwargs,
        wrappers=config.wrappers,
        autoreset=config.autoreset,
        infos=config.infos,
        spare_envs=config.spare_envs,
    )
    try:
        attach.encode()
    except codec.CodecError as error:
        raise EnvStartError(f"{address}: env_kwargs or wrappers: {error}") from None
    return attach
