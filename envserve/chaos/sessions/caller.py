"""A caller: a client's half of the conversation, and somebody who uses it.

It steps, resets and calls as a BatchEnv may, compares all that comes back with what it
asked for, and attaches anew when its session is over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from envserve import codec
from envserve.chaos.sessions.clock import Clock, Patient
from envserve.chaos.sessions.host import Host
from envserve.chaos.sessions.ledger import SPEC, Ledger, Violation
from envserve.chaos.sessions.link import Link
from envserve.chaos.sessions.profile import Profile, log_uniform
from envserve.chaos.sessions.rows import RowView, end_steps
from envserve.errors import (
    ActionError,
    CallError,
    ConnectError,
    EnvError,
    EnvserveError,
    LeaseLost,
    LocalProtocolError,
    ProtocolError,
    ServerError,
    ServerLost,
)
from envserve.lane import Block, Call, Outcome, Reset
from envserve.session import ClientSession, ClientState
from envserve.wire import Attach, Buffer

__all__ = ["Caller"]

_CONNECT_SECONDS: Final = 10.0
_LOST_SECONDS: Final = 60.0
_CLOSE_SECONDS: Final = 1.5
#: A ping is sent only so often, and a silence is noticed only after it.
_PING_SECONDS: Final = 1.0
_MARGIN_SECONDS: Final = 1e-6
_BAD_ACTION: Final = -1
_MAX_ENVS: Final = 4
#: Of these a session may die, when something has failed.
_FATAL: Final = (ConnectError, EnvError, LeaseLost, ServerError)


@dataclass(slots=True)
class Asked:
    """An operation under way on one block.

    Attributes:
      ticket: The one it was submitted with.
      kind: "step", "refused", or a Reset or Call.
      actions: Of a step.
    """

    ticket: int
    kind: str | Reset | Call
    actions: Sequence[int] = ()


class Caller(Patient):
    """Uses envs of one host after the other.

    Attributes:
      session: The client's half; None between two sessions.
      link: Its connection.
      num_finished: How many operations have ended.
      num_valid: How many rows of steps were valid.
      num_sessions: How many sessions it has begun.
      is_done: Whether it will not attach again.
    """

    def __init__(
        self,
        clock: Clock,
        profile: Profile,
        ledger: Ledger,
        numbers: itertools.count[int],
        hosts: Sequence[Host],
        name: int,
    ) -> None:
        """Begins to attach soon."""
        super().__init__(clock)
        self.session: ClientSession | None = None
        self.link = Link(clock, profile, name, self._arrive)
        self.profile = profile
        self.num_finished = 0
        self.num_valid = 0
        self.num_sessions = 0
        self.is_done = False
        self._name = name
        self._hosts = hosts
        self._ledger = ledger
        self._numbers = numbers
        self._ticket = 0
        self._views: list[RowView] = []
        self._in_flight: dict[int, Asked] = {}
        self._wake_at = math.inf
        self._is_tenacious = False
        self._heard_at = 0.0
        self._is_thinking = False
        self._pause_seconds = 0.0
        self._rounds_left: set[int] | None = None
        self._plan(clock.random.random(), self._attach)

    def _plan(self, seconds: float, event: object, *arguments: object) -> None:
        self.clock.plan(self.clock.now + seconds, self.do, event, *arguments)

    def __repr__(self) -> str:
        return f"<Caller {self._name}>"

    # Sessions.

    def _attach(self) -> None:
        if self.session is not None or self.is_done:
            return
        source, profile = self.clock.random, self.profile
        num_envs = source.randint(1, min(_MAX_ENVS, profile.total_envs))
        seed = next(self._numbers)
        self._is_tenacious = source.random() < 0.2
        attach = Attach(
            env_name=SPEC.env_name,
            num_envs=num_envs,
            num_splits=source.randint(1, 2),
            seed=seed,
        )
        self.session = ClientSession(
            "tcp://host",
            attach,
            session=self._draw_number(),
            now=self.clock.now,
            timeout_seconds=_CONNECT_SECONDS,
            server_lost_after_seconds=_LOST_SECONDS,
            pads_when_lost=self._is_tenacious,
        )
        self.num_sessions += 1
        self.num_envs = num_envs
        self._views = [
            RowView(self._ledger, seed, row, self._is_tenacious)
            for row in range(num_envs)
        ]
        self._in_flight.clear()
        self._heard_at = self.clock.now
        self._wake_at = math.inf
        host = source.choice(self._hosts)
        if not self.link.is_connected or self.link.host is not host:
            self.link.is_connected = False
            self._plan(0.01, self._connect, self.session, host)
        else:
            self.session.connected(self.clock.now)
        self._look()

    def _draw_number(self) -> int:
        return self.clock.random.getrandbits(63) + 1

    def _connect(self, session: ClientSession, host: Host) -> None:
        if session is self.session and not self.link.is_connected:
            self.link.connect(host)
            session.connected(self.clock.now)
            self._look()

    def lose_link(self, seconds: float) -> None:
        """Loses the connection, and makes another after a while."""
        if self.session is not None and self.link.host and self.link.is_connected:
            self.link.reset()
            self.session.disconnected(self.clock.now)
            self._plan(seconds, self._connect, self.session, self.link.host)

    def close(self) -> None:
        """Gives the envs back; after a moment, whether that was heard or not."""
        if self.session is not None:
            self.session.begin_close(self.clock.now)
            self._in_flight.clear()
            self._plan(_CLOSE_SECONDS, self._let_go, self.session)
            self._look()

    def kill(self) -> None:
        """Ends without a word."""
        self._let_go(self.session)

    def _let_go(self, session: ClientSession | None) -> None:
        if session is not None and session is self.session:
            self.session = None
            self._in_flight.clear()
            if not self.is_done:
                wait = log_uniform(self.clock.random, 0.1, 2.0)
                self._plan(wait, self._attach)

    def calm(self, profile: Profile) -> None:
        """From now on steps all rows until each was valid once, and then closes."""
        self.profile = profile
        self.link.calm(profile)
        self._rounds_left = set(range(_MAX_ENVS))
        self.wake()

    # What happens to the session.

    def _arrive(self, frames: Sequence[Buffer]) -> None:
        self.do(self._receive, frames)

    def _receive(self, frames: Sequence[Buffer]) -> None:
        if self.session is not None:
            self._heard_at = self.clock.now
            self.session.receive(frames, self.clock.now)
            self._look()

    def _wake(self, session: ClientSession, at: float) -> None:
        if session is self.session and at == self._wake_at:  # else there is a later one
            self._wake_at = math.inf
            session.advance(self.clock.now)
            self._check_silence(session)
            self._look()

    def _look(self) -> None:
        """Sends, takes what has ended, and plans what is next."""
        session = self.session
        if session is None:
            return
        outbox = session.outbox
        if self.link.is_connected:
            while (frames := outbox.first()) is not None:
                outbox.pop()
                self.link.send(frames)
        elif len(outbox) > 2 * len(self._views) + 2:
            raise Violation(f"{len(outbox)} messages wait to be sent")
        if session.has_finished:
            for finished in session.take_finished():
                self._take(session, finished)
        if session.state.is_over:
            self._end(session)
            return
        deadline = session.next_deadline()
        if deadline < self._wake_at:
            self._wake_at = deadline
            self.clock.plan(deadline, self.do, self._wake, session, deadline)
        if (
            not self._is_thinking
            and _is_usable(session)
            and len(self._in_flight) < len(session.blocks)
        ):
            self._is_thinking = True
            wait = self.profile.pace * self.clock.random.random() ** 2
            self._plan(wait + self._pause_seconds, self._think)
            self._pause_seconds = 0.0

    def _end(self, session: ClientSession) -> None:
        if self._in_flight:
            raise Violation(f"{self._in_flight} never ended")
        error = session.error
        is_fatal = isinstance(error, _FATAL) and not isinstance(error, ProtocolError)
        if session.state is ClientState.LOST and not is_fatal:
            raise Violation(f"a session ended with {error!r}")
        if not session.num_leases and "from before" in str(error):
            raise Violation(f"an attempt to attach was ended by another: {error}")
        self._let_go(session)

    # What the caller wants.

    def _think(self) -> None:
        """Does something, if it can."""
        self._is_thinking = False
        session = self.session
        if session is None or not _is_usable(session):
            return
        idle = [b for b in session.blocks if b.index not in self._in_flight]
        if self._rounds_left is not None:
            self._last_rounds(session, idle)
        elif idle:
            if self._in_flight and self.clock.random.random() < 0.02:
                self._ask_too_early(session)
            self._ask(session, idle)
        self._look()

    def _last_rounds(self, session: ClientSession, idle: list[Block]) -> None:
        rows = {r for r in self._rounds_left or () if r < len(self._views)}
        if rows and idle:
            if not self._reset_unknown(session, idle):
                self._step(session, idle)
        elif not rows and not self._in_flight:
            self.is_done = True
            self.close()

    def _ask(self, session: ClientSession, idle: list[Block]) -> None:
        source = self.clock.random
        if len(idle) > 1:
            idle = source.sample(idle, source.randint(1, len(idle)))
        if self._reset_unknown(session, idle):
            return
        draw = source.random()
        if draw < 0.85:
            self._step(session, idle)
        elif draw < 0.91:
            self._reset(session, idle)
        elif draw < 0.96:
            self._call(session, idle[0])
        elif draw < 0.98:
            self._ask_in_vain(session, idle)
        else:
            session.settle()  # must not change anything

    def _submitted(self, blocks: Sequence[Block], kind: str | Reset | Call) -> int:
        self._ticket += 1
        for block in blocks:
            self._in_flight[block.index] = Asked(self._ticket, kind)
        return self._ticket

    def _reset_unknown(self, session: ClientSession, idle: Sequence[Block]) -> bool:
        """Resets blocks with rows that have no episode, if there are any."""
        unknown = [
            block
            for block in idle
            if any(v.observation is None for v in self._views[block.start : block.stop])
        ]
        if unknown:
            resets = [Reset(block.index) for block in unknown]
            self._submit_resets(session, unknown, resets)
        return bool(unknown)

    def _reset(self, session: ClientSession, idle: Sequence[Block]) -> None:
        source = self.clock.random
        resets = []
        for block in idle:
            rows = seeds = None
            if source.random() < 0.5:
                whole = range(block.start, block.stop)
                rows = tuple(source.sample(whole, source.randint(1, len(whole))))
                seeds = tuple(source.getrandbits(20) for _ in rows)
            resets.append(Reset(block.index, rows, seeds))
        self._submit_resets(session, idle, resets)

    def _submit_resets(
        self, session: ClientSession, blocks: Sequence[Block], resets: Sequence[Reset]
    ) -> None:
        self._ticket += 1
        for block, reset in zip(blocks, resets, strict=True):
            self._in_flight[block.index] = Asked(self._ticket, reset)
        session.submit_reset(resets, self.clock.now, self._ticket)

    def _step(self, session: ClientSession, blocks: Sequence[Block]) -> None:
        ledger, column = self._ledger, session.rows.action[0]
        self._ticket += 1
        for block in blocks:
            views = self._views[block.start : block.stop]
            actions = [ledger.new_action(view.observation or []) for view in views]
            column[block.start : block.stop] = actions
            self._in_flight[block.index] = Asked(self._ticket, "step", actions)
        is_alone = self.clock.random.random() < 0.3
        indices = [block.index for block in blocks]
        session.submit_step(indices, self.clock.now, self._ticket, is_alone)

    def _call(self, session: ClientSession, block: Block) -> None:
        call = Call(block.start, "call", "render", (self._ledger.new_call(),))
        ticket = self._submitted([block], call)
        session.submit_call(call, self.clock.now, ticket)

    def _ask_in_vain(self, session: ClientSession, blocks: Sequence[Block]) -> None:
        """Steps with an action that no env may get."""
        for block in blocks:
            session.rows.action[0][block.start : block.stop] = _BAD_ACTION
        ticket = self._submitted(blocks, "refused")
        for block in blocks:
            self._in_flight[block.index].actions = [_BAD_ACTION] * 4
        indices = [block.index for block in blocks]
        session.submit_step(indices, self.clock.now, ticket)

    def _ask_too_early(self, session: ClientSession) -> None:
        """Uses a block that is in flight."""
        try:
            session.submit_step([next(iter(self._in_flight))], self.clock.now)
        except LocalProtocolError:
            return
        raise Violation("a block was used that is in flight")

    # What comes of it.

    def _take(self, session: ClientSession, finished: Outcome) -> None:
        asked = self._in_flight.pop(finished.block, None)
        self.num_finished += 1
        if asked is None or asked.ticket != finished.ticket:
            raise Violation(f"{finished} belongs to nothing; in flight is {asked}")
        block = session.blocks[finished.block]
        views = self._views[block.start : block.stop]
        if finished.error is not None:
            self._take_error(session, asked, finished.error, views)
        elif asked.kind in ("step", "refused"):
            self._take_step(session, asked, finished, block)
        elif isinstance(asked.kind, Reset):
            rows = asked.kind.env_indices or range(block.start, block.stop)
            for row in rows:
                self._views[row].begin(session.rows.observation[0][row].tolist())
        elif isinstance(asked.kind, Call):
            expected = codec.encode([asked.kind.env_index, *asked.kind.arguments])
            if finished.result != expected:
                raise Violation(f"{asked.kind} was answered with another's result")

    def _take_step(
        self, session: ClientSession, asked: Asked, finished: Outcome, block: Block
    ) -> None:
        before = {row: self._views[row].observation for row in finished.infos}
        for row, info in finished.infos.items():
            if info != {"episode": (before[row] or [0])[0]}:
                raise Violation(f"row {row} got the info of another: {info}")
        num_valid = end_steps(self._views, block, asked.actions, session.rows)
        self.num_valid += num_valid
        if num_valid == block.stop - block.start and self._rounds_left:
            self._rounds_left.difference_update(range(block.start, block.stop))

    def _take_error(
        self,
        session: ClientSession,
        asked: Asked,
        error: EnvserveError,
        views: Sequence[RowView],
    ) -> None:
        is_expected = (
            session.state is ClientState.LOST
            or (isinstance(error, ActionError) and _is_refused(asked, views))
            or (isinstance(asked.kind, Call) and isinstance(error, CallError))
            # A defect; or of an env that is built anew, whatever was asked of it.
            or isinstance(error, (ServerError, EnvError))
        )
        if not is_expected or isinstance(error, ProtocolError):
            raise Violation(f"{asked} has failed: {error!r}")
        if isinstance(error, ServerLost):
            self._pause_seconds = 1.0  # it is given up: it will not be back at once
        is_env = isinstance(error, EnvError) and not isinstance(asked.kind, Call)
        if asked.kind == "step" or isinstance(asked.kind, Reset) or is_env:
            for view in views:
                view.observation = None

    # What must hold.

    def _check_silence(self, session: ClientSession) -> None:
        silence = self.clock.now - self._heard_at
        limit = _LOST_SECONDS + _PING_SECONDS + _MARGIN_SECONDS
        if silence > limit and not session.state.is_over and not self._is_tenacious:
            raise Violation(f"{session!r} waits, after a silence of {silence:.1f} s")

    def wake(self) -> None:
        """Goes on after a pause; what was silent meanwhile was itself."""
        self._heard_at = self.clock.now
        super().wake()

    def check_ended(self) -> None:
        """Checks that it could use envs, and has closed."""
        if not self.is_done or self.session is not None:
            raise Violation(
                f"{self.session!r} does not get on: {self._in_flight}, rows to step "
                f"{self._rounds_left}"
            )


def _is_refused(asked: Asked, views: Sequence[RowView]) -> bool:
    """Whether its action is bad, or that of a step before it that was overdue."""
    is_late = any(_BAD_ACTION in view.pending for view in views)
    return asked.kind == "refused" or is_late


def _is_usable(session: ClientSession) -> bool:
    return session.state is ClientState.READY or (
        session.is_recovering and not session.state.is_over
    )
