"""A client that submits random operations to a session and verifies the outcomes.

It steps, resets and calls envs as a BatchEnv does, but without a BatchEnv.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

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
from envserve.spaces.info_columns import RowInfos
from envserve.wire.bodies import Attach, pack_options
from tests.oracle.journal import Array
from tests.oracle.ledger import Ledger
from tests.simulation.endpoint import Endpoint
from tests.simulation.journal import Violation, check_levels
from tests.simulation.pool import LENGTH, SPEC, results_of
from tests.simulation.profile import Profile, log_uniform

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

MAX_ENVS: Final = 4
_CLOSE_SECONDS: Final = 1.5
_BAD_ACTION: Final = -1
#: Block for `add_infos`. With a single lane, its rows have the batch's indices.
_BLOCK: Final = BatchBlock(0, cast("Lane", None), 0, 0, MAX_ENVS, 0, 0)
#: Errors that may end a session after a fault.
FATAL: Final = (ConnectError, EnvError, LeaseLost, ServerError)


@dataclass(slots=True)
class PendingOperation:
    """An operation in flight on one block.

    Attributes:
      kind: "step", "invalid step", a Reset, or a Call.
      actions: The actions of a step.
    """

    kind: str | Reset | Call
    actions: Array | None = None


class RandomClient(Endpoint):
    """Uses envs of one host after another.

    Attributes:
      has_finished: Whether the client will not attach again.
      ledgers: One ledger per session.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.has_finished = False
        self.ledgers: list[Ledger] = []
        self._in_flight: dict[int, PendingOperation] = {}
        self._has_scheduled_submit = False
        self._rows_to_validate: set[int] | None = None
        self._last_observations = np.zeros((0, 4), np.int64)
        self._unreset_rows: set[int] = set()
        self._abandoned_rows: set[int] = set()  # rows whose envs this client gave up
        self.schedule(simulation.clock.random.random(), self._attach)

    def stop_faults(self, profile: Profile) -> None:
        """Step all rows until each was valid once, and then close."""
        self._rows_to_validate = set(range(MAX_ENVS))
        super().stop_faults(profile)

    # Sessions.

    def _attach(self) -> None:
        if self.session is not None or self.has_finished:
            return
        source, simulation = self.clock.random, self.simulation
        num_envs = source.randint(1, min(MAX_ENVS, simulation.profile.total_envs))
        seed = next(simulation.unique_numbers)
        self.ledgers.append(Ledger(num_envs, seed, length=LENGTH))
        self._last_observations = np.zeros((num_envs, 4), np.int64)
        self._unreset_rows = set(range(num_envs))
        self._abandoned_rows = set()
        attach = Attach(
            env_name=SPEC.env_name,
            num_envs=num_envs,
            num_splits=source.randint(1, 2),
            seed=seed,
        )
        self.attach(source.choice(simulation.hosts), attach)

    def close(self) -> None:
        """Detach; forget the session after a moment, even if the message is lost."""
        if self.session is not None:
            self.session.begin_close(self.clock.now)
            self._abandon_operations()
            self.schedule(_CLOSE_SECONDS, self._end_session, self.session)
            self.update()

    def kill(self) -> None:
        self._end_session(self.session)

    def _end_session(self, session: ClientSession | None) -> None:
        if session is not None and session is self.session:
            self._abandon_operations()
            self.session = None
            if not self.has_finished:
                self.schedule(log_uniform(self.clock.random, 0.1, 2.0), self._attach)

    def _abandon_operations(self) -> None:
        for index, operation in self._in_flight.items():
            if operation.actions is not None and self.session is not None:
                rows = _rows(self.session.blocks[index])
                self.ledgers[-1].mark_unanswered(operation.actions, rows)
        self._in_flight.clear()

    def _after_event(self, session: ClientSession) -> None:
        if session.attachment.num_leases and session.client_blocks.is_ready(1):
            for outcome in session.collect():
                self._check_outcome(session, outcome)
            self._check_absent(session)
        if session.state.is_over:
            self._check_end(session)
            self._end_session(session)
        elif (
            not self._has_scheduled_submit
            and _is_usable(session)
            and len(self._in_flight) < len(session.blocks)
        ):
            self._has_scheduled_submit = True
            wait = self.simulation.profile.pace * self.clock.random.random() ** 2
            self.schedule(wait, self._submit)

    # Submitting operations.

    def _submit(self) -> None:
        self._has_scheduled_submit = False
        session = self.session
        if session is None or not _is_usable(session):
            return
        idle = [b for b in session.blocks if b.index not in self._in_flight]
        if self._rows_to_validate is not None:
            self._submit_final_steps(session, idle)
        elif idle:
            if self._in_flight and self.clock.random.random() < 0.02:
                self._submit_too_early(session)
            self._submit_random(session, idle)
        self.update()

    def _submit_final_steps(self, session: ClientSession, idle: list[Block]) -> None:
        rows = {
            r for r in self._rows_to_validate or () if r < len(self._last_observations)
        }
        if rows and idle:
            if not self._submit_missing_resets(session, idle):
                self._step(session, idle)
        elif not rows and not self._in_flight:
            self.has_finished = True
            self.close()

    def _submit_random(self, session: ClientSession, idle: list[Block]) -> None:
        source = self.clock.random
        if len(idle) > 1:
            idle = source.sample(idle, source.randint(1, len(idle)))
        if self._submit_missing_resets(session, idle):
            return
        draw = source.random()
        if draw < 0.85:
            self._step(session, idle)
        elif draw < 0.91:
            self._reset(session, idle)
        elif draw < 0.96:
            self._call(session, idle)
        elif draw < 0.98:
            self._step(session, idle, is_invalid=True)
        elif draw < 0.99:
            self._interrupt(session)

    def _on_move(self) -> None:
        self._abandoned_rows.update(range(len(self._last_observations)))

    def _interrupt(self, session: ClientSession) -> None:
        """Interrupt a call, which invalidates all envs."""
        session.invalidate("a call was interrupted", self.clock.now)
        self._abandon_operations()
        self._abandoned_rows.update(range(len(self._last_observations)))

    def _submit_missing_resets(
        self, session: ClientSession, idle: Sequence[Block]
    ) -> bool:
        """Reset blocks with rows that have no episode; return whether there are any."""
        unknown = [b for b in idle if not self._unreset_rows.isdisjoint(_rows(b))]
        if unknown:
            self._submit_resets(session, [Reset(block.index) for block in unknown])
        return bool(unknown)

    def _reset(self, session: ClientSession, idle: Sequence[Block]) -> None:
        source = self.clock.random
        resets, options = [], b""
        if source.random() < 0.5:
            options = pack_options({"level": self.simulation.journal.new_level()})
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
            self._in_flight[reset.block] = PendingOperation(reset)
        session.submit_reset(resets, self.clock.now)

    def _step(
        self, session: ClientSession, blocks: Sequence[Block], is_invalid: bool = False
    ) -> None:
        """Submit a step; with `is_invalid`, the actions are invalid."""
        source = self.clock.random
        for block in blocks:
            rows = _rows(block)
            if is_invalid:
                actions, kind = np.full(len(rows), _BAD_ACTION), "invalid step"
            else:
                drawn = [source.randrange(1000) for _ in rows]
                actions, kind = np.array(drawn), "step"
            session.rows.action[0][block.start : block.stop] = actions
            self._in_flight[block.index] = PendingOperation(kind, actions)
        indices = [block.index for block in blocks]
        session.submit_step(indices, self.clock.now)

    def _call(self, session: ClientSession, blocks: Sequence[Block]) -> None:
        source, calls = self.clock.random, []
        arguments = codec.encode([[self.simulation.journal.new_call()], {}])
        for block in blocks:
            rows = tuple(
                source.sample(_rows(block), source.randint(1, len(_rows(block))))
            )
            calls.append(Call(block.index, rows, "call", "render", arguments))
            self._in_flight[block.index] = PendingOperation(calls[-1])
        session.submit_call(calls, self.clock.now)

    def _submit_too_early(self, session: ClientSession) -> None:
        try:
            session.submit_step([next(iter(self._in_flight))], self.clock.now)
        except LocalProtocolError:
            return
        raise Violation("a block in flight accepted another step")

    # Outcomes.

    def _check_outcome(self, session: ClientSession, outcome: Outcome) -> None:
        operation = self._in_flight.pop(outcome.block, None)
        if operation is None:
            raise Violation(f"{outcome} belongs to no operation in flight")
        block = session.blocks[outcome.block]
        if outcome.error is not None:
            self._check_error(session, operation, outcome.error, _rows(block))
        elif operation.actions is not None:
            self._check_step(session, operation, outcome, block)
        elif isinstance(operation.kind, Reset) and session.give_up_error is not None:
            self._check_skipped_reset(session, outcome, block)
        elif isinstance(operation.kind, Reset):
            rows = list(operation.kind.env_indices or _rows(block))
            check_levels(outcome.infos, rows, operation.kind.options)
            observation = session.rows.observation[0][rows]
            self.ledgers[-1].reset(observation, rows, operation.kind.seeds)
            self._last_observations[rows] = observation
            self._unreset_rows.difference_update(rows)
            self._abandoned_rows.difference_update(rows)
            # A lost block will be reset again.
            if block.index in session.client_blocks.lost:
                self._abandoned_rows.update(rows)
        elif isinstance(operation.kind, Call):
            values = codec.decode(outcome.result)
            if values != results_of(operation.kind):
                raise Violation(f"{operation.kind} returned {values}")

    def _check_skipped_reset(
        self, session: ClientSession, outcome: Outcome, block: Block
    ) -> None:
        """Verify that a reset had no effect, because the session has given up."""
        check_levels(outcome.infos, [], b"")
        seen, last = session.rows.observation[0], self._last_observations
        for row in set(_rows(block)) - self._unreset_rows:
            if not np.array_equal(seen[row], last[row]):
                raise Violation(f"row {row} shows {seen[row]} instead of {last[row]}")

    def _check_step(
        self,
        session: ClientSession,
        operation: PendingOperation,
        outcome: Outcome,
        block: Block,
    ) -> None:
        infos = RowInfos()
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
            infos.simplified(),
        )
        if operation.kind == "invalid step" and result.valid.any():
            raise Violation("an invalid action was executed")
        self.ledgers[-1].step(operation.actions, result, _rows(block))
        for row, status in enumerate(rows.status.tolist(), block.start):
            if status:
                now = int(session.rows.observation[0][row, 0])
                self._check_loss(row, Status(status), now)
        self._last_observations[block.start : block.stop] = rows.observation[0]
        if result.valid.all() and self._rows_to_validate:
            self._rows_to_validate.difference_update(_rows(block))

    def _check_loss(self, row: int, status: Status, now: int) -> None:
        """Verify that the row's previous env is gone and that it has a new one."""
        pools = self.simulation.journal.pools
        before, after = pools[int(self._last_observations[row, 0])], pools[now]
        if status is not Status.SERVER_LOST:
            is_lost = before is after
        else:
            is_abandoned = row in self._abandoned_rows or self.never_gives_up
            is_lost = is_abandoned or (before.is_closing and before is not after)
        if not is_lost:
            raise Violation(
                f"row {row} is {status.name}, but {before} was not replaced by {after}"
            )
        self._abandoned_rows.discard(row)

    def _check_error(
        self,
        session: ClientSession,
        operation: PendingOperation,
        error: EnvserveError,
        rows: range,
    ) -> None:
        is_expected = (
            session.state is ClientState.LOST
            or (isinstance(error, ActionError) and operation.kind == "invalid step")
            or (isinstance(operation.kind, Call) and isinstance(error, CallError))
            # A server error, or the error of an env that is being rebuilt.
            or isinstance(error, (ServerError, EnvError))
        )
        if not is_expected or isinstance(error, ProtocolError):
            raise Violation(f"{operation} failed: {error!r}")
        if operation.kind == "step" and operation.actions is not None:
            self.ledgers[-1].mark_unanswered(operation.actions, rows)
        is_env = isinstance(error, EnvError) and not isinstance(operation.kind, Call)
        if operation.kind == "step" or isinstance(operation.kind, Reset) or is_env:
            self._unreset_rows.update(rows)

    # Invariants.

    def _check_absent(self, session: ClientSession) -> None:
        """Verify that absent blocks are in flight and show their last observations."""
        for index in session.client_blocks.absent:
            operation = self._in_flight.get(index)
            if operation is None:
                raise Violation(f"block {index} is absent but not in flight")
            part = slice(session.blocks[index].start, session.blocks[index].stop)
            last = session.rows.final_observation[0][part]
            if operation.kind == "step" and not np.array_equal(
                last, self._last_observations[part]
            ):
                raise Violation(f"absent rows show {last}, not the last observation")

    def _check_end(self, session: ClientSession) -> None:
        if self._in_flight:
            raise Violation(f"expected no operations in flight; got {self._in_flight}")
        error = session.error
        is_fatal = isinstance(error, FATAL) and not isinstance(error, ProtocolError)
        if session.state is ClientState.LOST and not is_fatal:
            raise Violation(f"a session ended with {error!r}")
        if not session.attachment.num_leases and "from before" in str(error):
            raise Violation(f"an attach failed because of an earlier one: {error}")

    def check_ended(self) -> None:
        """Verify that the client was able to use envs and has closed."""
        if not self.has_finished or self.session is not None:
            raise Violation(
                f"{self.session!r} did not finish: in flight {self._in_flight}, rows "
                f"left to step {self._rows_to_validate}"
            )


def _rows(block: Block) -> range:
    return range(block.start, block.stop)


def _is_usable(session: ClientSession) -> bool:
    return session.state is ClientState.READY or session.attachment.is_recovering
