"""A caller: somebody who uses a client's half of the conversation.

It steps, resets and calls as a BatchEnv may, and compares all that comes back with what
it asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from envserve.client import StepResult
from envserve.client.row_set import BatchBlock
from envserve.client.step_result import add_infos
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
)
from envserve.lane import Block, Call, Lane, Outcome, Reset
from envserve.session.client.client_session import ClientSession
from envserve.session.states import ClientState
from envserve.slab import Status
from envserve.spaces import codec
from envserve.wire.bodies import Attach, pack_options
from tests.oracle.journal import Array
from tests.oracle.ledger import Ledger
from tests.worlds.endpoint import Endpoint
from tests.worlds.journal import Violation, check_levels
from tests.worlds.pool import LENGTH, SPEC, answers_to
from tests.worlds.profile import Profile, log_uniform

if TYPE_CHECKING:
    from tests.worlds.world import World

MAX_ENVS: Final = 4
_CLOSE_SECONDS: Final = 1.5
_BAD_ACTION: Final = -1
#: Rows of a lane that is alone are rows of the batch.
_BLOCK: Final = BatchBlock(0, cast("Lane", None), 0, 0, MAX_ENVS, 0, 0)
#: Of these a session may die, when something has failed.
FATAL: Final = (ConnectError, EnvError, LeaseLost, ServerError)


@dataclass(slots=True)
class Asked:
    """An operation under way on one block.

    Attributes:
      kind: "step", "refused", or a Reset or Call.
      actions: Of a step.
    """

    kind: str | Reset | Call
    actions: Array | None = None


class Caller(Endpoint):
    """Uses envs of one host after the other.

    Attributes:
      is_done: Whether it will not attach again.
      ledgers: Books of all its sessions.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.is_done = False
        self.ledgers: list[Ledger] = []
        self._in_flight: dict[int, Asked] = {}
        self._is_thinking = False
        self._rounds_left: set[int] | None = None
        self._seen = np.zeros((0, 4), np.int64)  # the last observations
        self._unknown: set[int] = set()  # rows that have none
        self._given_up: set[int] = set()  # rows whose envs may be lost by ourselves
        self.plan(world.clock.random.random(), self._attach)

    def calm(self, profile: Profile) -> None:
        """From now on steps all rows until each was valid once, and then closes."""
        self._rounds_left = set(range(MAX_ENVS))
        super().calm(profile)

    # Sessions.

    def _attach(self) -> None:
        if self.session is not None or self.is_done:
            return
        source, world = self.clock.random, self.world
        num_envs = source.randint(1, min(MAX_ENVS, world.profile.total_envs))
        seed = next(world.numbers)
        self.ledgers.append(Ledger(num_envs, seed, length=LENGTH))
        self._seen = np.zeros((num_envs, 4), np.int64)
        self._unknown = set(range(num_envs))
        self._given_up = set()
        attach = Attach(
            env_name=SPEC.env_name,
            num_envs=num_envs,
            num_splits=source.randint(1, 2),
            seed=seed,
        )
        self.attach(source.choice(world.hosts), attach)

    def close(self) -> None:
        """Gives the envs back; after a moment, whether that was heard or not."""
        if self.session is not None:
            self.session.begin_close(self.clock.now)
            self._forget_operations()
            self.plan(_CLOSE_SECONDS, self._let_go, self.session)
            self.look()

    def kill(self) -> None:
        self._let_go(self.session)

    def _let_go(self, session: ClientSession | None) -> None:
        if session is not None and session is self.session:
            self._forget_operations()
            self.session = None
            if not self.is_done:
                self.plan(log_uniform(self.clock.random, 0.1, 2.0), self._attach)

    def _forget_operations(self) -> None:
        for index, asked in self._in_flight.items():
            if asked.actions is not None and self.session is not None:
                rows = _rows(self.session.blocks[index])
                self.ledgers[-1].unanswered(asked.actions, rows)
        self._in_flight.clear()

    def _look_after(self, session: ClientSession) -> None:
        if session.attachment.num_leases and session.client_blocks.is_ready(1):
            for outcome in session.collect():
                self._take(session, outcome)
            self._check_absent(session)
        if session.state.is_over:
            self._check_end(session)
            self._let_go(session)
        elif (
            not self._is_thinking
            and _is_usable(session)
            and len(self._in_flight) < len(session.blocks)
        ):
            self._is_thinking = True
            wait = self.world.profile.pace * self.clock.random.random() ** 2
            self.plan(wait, self._think)

    # What the caller wants.

    def _think(self) -> None:
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
        self.look()

    def _last_rounds(self, session: ClientSession, idle: list[Block]) -> None:
        rows = {r for r in self._rounds_left or () if r < len(self._seen)}
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
            self._call(session, idle)
        elif draw < 0.98:
            self._step(session, idle, is_refused=True)
        elif draw < 0.99:
            self._interrupt(session)

    def _note_move(self) -> None:
        self._given_up.update(range(len(self._seen)))

    def _interrupt(self, session: ClientSession) -> None:
        """Is interrupted in the middle of a call, and so loses all envs."""
        session.invalidate("a call was interrupted", self.clock.now)
        self._forget_operations()
        self._given_up.update(range(len(self._seen)))

    def _reset_unknown(self, session: ClientSession, idle: Sequence[Block]) -> bool:
        """Resets blocks with rows that have no episode, if there are any."""
        unknown = [b for b in idle if not self._unknown.isdisjoint(_rows(b))]
        if unknown:
            self._submit_resets(session, [Reset(block.index) for block in unknown])
        return bool(unknown)

    def _reset(self, session: ClientSession, idle: Sequence[Block]) -> None:
        source = self.clock.random
        resets, options = [], b""
        if source.random() < 0.5:
            options = pack_options({"level": self.world.journal.new_level()})
        for block in idle:
            rows = seeds = None
            if source.random() < 0.5:
                whole = _rows(block)
                rows = tuple(source.sample(whole, source.randint(1, len(whole))))
                if source.random() < 0.5:
                    drawn = (source.getrandbits(62) for _ in rows)
                    seeds = tuple(s if source.random() < 0.8 else None for s in drawn)
            resets.append(Reset(block.index, rows, seeds, options))
        self._submit_resets(session, resets)

    def _submit_resets(self, session: ClientSession, resets: Sequence[Reset]) -> None:
        for reset in resets:
            self._in_flight[reset.block] = Asked(reset)
        session.submit_reset(resets, self.clock.now)

    def _step(
        self, session: ClientSession, blocks: Sequence[Block], is_refused: bool = False
    ) -> None:
        """Steps; or tries to, with an action that no env may get."""
        source = self.clock.random
        for block in blocks:
            rows = _rows(block)
            if is_refused:
                actions, kind = np.full(len(rows), _BAD_ACTION), "refused"
            else:
                drawn = [source.randrange(1000) for _ in rows]
                actions, kind = np.array(drawn), "step"
            session.rows.action[0][block.start : block.stop] = actions
            self._in_flight[block.index] = Asked(kind, actions)
        indices = [block.index for block in blocks]
        session.submit_step(indices, self.clock.now)

    def _call(self, session: ClientSession, blocks: Sequence[Block]) -> None:
        source, calls = self.clock.random, []
        arguments = codec.encode([[self.world.journal.new_call()], {}])
        for block in blocks:
            rows = tuple(
                source.sample(_rows(block), source.randint(1, len(_rows(block))))
            )
            calls.append(Call(block.index, rows, "call", "render", arguments))
            self._in_flight[block.index] = Asked(calls[-1])
        session.submit_call(calls, self.clock.now)

    def _ask_too_early(self, session: ClientSession) -> None:
        try:
            session.submit_step([next(iter(self._in_flight))], self.clock.now)
        except LocalProtocolError:
            return
        raise Violation("a block was used that is in flight")

    # What comes of it.

    def _take(self, session: ClientSession, outcome: Outcome) -> None:
        asked = self._in_flight.pop(outcome.block, None)
        if asked is None:
            raise Violation(f"{outcome} belongs to nothing that is in flight")
        block = session.blocks[outcome.block]
        if outcome.error is not None:
            self._take_error(session, asked, outcome.error, _rows(block))
        elif asked.actions is not None:
            self._take_step(session, asked, outcome, block)
        elif isinstance(asked.kind, Reset):
            rows = list(asked.kind.env_indices or _rows(block))
            check_levels(outcome.infos, rows, asked.kind.options)
            observation = session.rows.observation[0][rows]
            self.ledgers[-1].reset(observation, rows, asked.kind.seeds)
            self._seen[rows] = observation
            self._unknown.difference_update(rows)
            self._given_up.difference_update(rows)
            if block.index in session.client_blocks.lost:  # it is reset once more
                self._given_up.update(rows)
        elif isinstance(asked.kind, Call):
            values = codec.decode(outcome.result)
            if values != answers_to(asked.kind):
                raise Violation(f"{asked.kind} was answered with {values}")

    def _take_step(
        self, session: ClientSession, asked: Asked, outcome: Outcome, block: Block
    ) -> None:
        infos: dict[int, Mapping[str, Any]] = {}
        add_infos(infos, outcome, _BLOCK, False)
        rows = session.rows.at(slice(block.start, block.stop))
        result = StepResult(
            rows.observation[0],
            rows.reward,
            rows.terminated,
            rows.truncated,
            rows.status == Status.OK,
            rows.final_observation[0],
            rows.status,
            infos,
        )
        if asked.kind == "refused" and result.valid.any():
            raise Violation("an action was executed that no env may get")
        self.ledgers[-1].step(asked.actions, result, _rows(block))
        for row, status in enumerate(rows.status.tolist(), block.start):
            if status:
                now = int(session.rows.observation[0][row, 0])
                self._check_loss(row, Status(status), now)
        self._seen[block.start : block.stop] = rows.observation[0]
        if result.valid.all() and self._rounds_left:
            self._rounds_left.difference_update(_rows(block))

    def _check_loss(self, row: int, status: Status, now: int) -> None:
        """Checks that the envs are lost that a row had, and that it has the next."""
        pools = self.world.journal.pools
        before, after = pools[int(self._seen[row, 0])], pools[now]
        if status is not Status.SERVER_LOST:
            is_lost = before is after
        else:
            is_given_up = row in self._given_up or self.is_tenacious
            is_lost = is_given_up or (before.is_closing and before is not after)
        if not is_lost:
            raise Violation(
                f"row {row} is {status.name}: {before} is lost, not {after}"
            )
        self._given_up.discard(row)

    def _take_error(
        self,
        session: ClientSession,
        asked: Asked,
        error: EnvserveError,
        rows: range,
    ) -> None:
        is_expected = (
            session.state is ClientState.LOST
            or (isinstance(error, ActionError) and asked.kind == "refused")
            or (isinstance(asked.kind, Call) and isinstance(error, CallError))
            # A defect; or of an env that is built anew, whatever was asked of it.
            or isinstance(error, (ServerError, EnvError))
        )
        if not is_expected or isinstance(error, ProtocolError):
            raise Violation(f"{asked} has failed: {error!r}")
        if asked.kind == "step" and asked.actions is not None:
            self.ledgers[-1].unanswered(asked.actions, rows)
        is_env = isinstance(error, EnvError) and not isinstance(asked.kind, Call)
        if asked.kind == "step" or isinstance(asked.kind, Reset) or is_env:
            self._unknown.update(rows)

    # What must hold.

    def _check_absent(self, session: ClientSession) -> None:
        """Checks that padding could be made of blocks that are absent."""
        for index in session.client_blocks.absent:
            asked = self._in_flight.get(index)
            if asked is None:
                raise Violation(f"block {index} is absent, and not in flight")
            part = slice(session.blocks[index].start, session.blocks[index].stop)
            last = session.rows.final_observation[0][part]
            if asked.kind == "step" and not np.array_equal(last, self._seen[part]):
                raise Violation(f"absent rows show {last}, which was not seen last")

    def _check_end(self, session: ClientSession) -> None:
        if self._in_flight:
            raise Violation(f"{self._in_flight} never ended")
        error = session.error
        is_fatal = isinstance(error, FATAL) and not isinstance(error, ProtocolError)
        if session.state is ClientState.LOST and not is_fatal:
            raise Violation(f"a session ended with {error!r}")
        if not session.attachment.num_leases and "from before" in str(error):
            raise Violation(f"an attempt to attach was ended by another: {error}")

    def check_ended(self) -> None:
        """Checks that it could use envs, and has closed."""
        if not self.is_done or self.session is not None:
            raise Violation(
                f"{self.session!r} does not get on: {self._in_flight}, rows to step "
                f"{self._rounds_left}"
            )


def _rows(block: Block) -> range:
    return range(block.start, block.stop)


def _is_usable(session: ClientSession) -> bool:
    return session.state is ClientState.READY or session.attachment.is_recovering
