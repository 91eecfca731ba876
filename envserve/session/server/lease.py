"""At most once: which operations of a granted lease run, wait, or are answered again.

A client numbers what it asks of a block: its seq. A request with the next seq of each
of its blocks runs, unless one is busy. A copy of it joins it while it runs, and is
answered again once it is done; what is older is ignored; what is newer is a gap, an
ERROR. A request that is refused uses up no seq.

A request is answered as a whole when all its blocks are done. If one becomes absent,
the client is told, and each block is answered for itself from then on.

The rows are the cached answer: they are packed anew for each copy, and no request may
change them before the client has moved on (docs/decisions.md: "The slab is the reply
cache"). Each attempt is answered once ("A copy of a request is answered once per
attempt").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import numpy as np

from envserve.errors import ActionError, LocalProtocolError, RemoteProtocolError
from envserve.lane import Block, Outcome, Reset
from envserve.session.server.decisions import (
    Decision,
    Repeats,
    Reply,
    RunCall,
    RunReset,
    RunStep,
    SessionId,
    read_calls,
    read_resets,
)
from envserve.session.server.policy import Refusal, check_call
from envserve.session.server.replies import Answers
from envserve.session.server.result_cache import KeptResults
from envserve.session.states import BLOCK_MOVES, BlockState
from envserve.settings import HostSettings
from envserve.slab import Rows
from envserve.spaces.action_checks import ActionBounds, check_action_rows
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.bodies import Pong
from envserve.wire.constants import ErrorCode, Executed, MessageType
from envserve.wire.handshake import error_body_of
from envserve.wire.message import Message
from envserve.wire.result_report import ResultReport
from envserve.wire.rows import BlockParts, RowCodec

__all__ = ["Lease"]

Array = np.ndarray[Any, Any]

_block_of: Final = attrgetter("block")
_BUSY: Final = frozenset({BlockState.RUNNING, BlockState.ABSENT})

#: Less than what is sent at once to a client that does not read yet.
_ROUND: Final = 32


@dataclass(slots=True, eq=False)
class _Request:
    """A request that runs or has run, and where its answer goes.

    Attributes:
      message: Its numbers and entries, with the latest attempt, and where from.
      blocks: Its blocks.
      started_at: When it came first.
      resets: What a RESET resets.
      outcomes: What came of those of its blocks that are done.
      is_split: Whether its blocks are answered one by one.
      repeats: How often its rows were sent again.
      num_rounds: How often its blocks were answered one by one.
    """

    message: Message
    blocks: tuple[int, ...]
    started_at: float
    resets: Sequence[Reset]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    is_split: bool = False
    repeats: Repeats | None = None
    num_rounds: int = 0


class Lease:
    """The operations of one client on its blocks.

    Attributes:
      epoch: Number of the lease.
      kept: What calls have given.
      late_messages: How many late copies were ignored.
    """

    def __init__(
        self,
        *,
        session: SessionId,
        epoch: int,
        spec: EnvSpec,
        blocks: Sequence[Block],
        rows: Rows,
        policy: HostSettings,
        answers: Answers,
    ) -> None:
        self.epoch = epoch
        self.late_messages = 0
        self._session = session
        self._spec = spec
        self._blocks = tuple(blocks)
        self._rows = rows
        self._codec = RowCodec(rows)
        self._parts = BlockParts(self._codec, self._blocks)
        self._bounds = ActionBounds(spec, rows.action)
        self._policy = policy
        self._answers = answers
        self._last_seq = [0] * len(self._blocks)
        self._states = [BlockState.IDLE] * len(self._blocks)
        self._requests: list[_Request | None] = [None] * len(self._blocks)
        self.kept = KeptResults(policy.max_buffered_mib << 20)
        self._unended: Array | None = None  # while draining: bool per row

    @property
    def max_result_bytes(self) -> int:
        """Bytes of the longest result that can come."""
        return self._codec.max_result_bytes

    # What the client asks.

    def handle(self, message: Message, now: float) -> list[Decision]:
        """Takes a STEP, RESET or CALL.

        Raises:
          Refusal: Nothing was changed; the request must be answered with its body.
          RemoteProtocolError: The same, for a request that is malformed.
        """
        last_seq, states = self._last_seq, self._states
        listed = []
        is_next = True  # the usual case, which needs no closer look
        for block, seq in message.entries:
            if block >= len(states):
                raise RemoteProtocolError(
                    f"expected a block below {len(states)}; got {block}"
                )
            if seq != last_seq[block] + 1 or states[block] in _BUSY:
                is_next = False
            listed.append(block)
        if not listed or len(set(listed)) < len(listed):
            raise RemoteProtocolError("expected at least one block, and each once")
        if not is_next:
            return self._repeat(message, now)
        blocks = tuple(listed)
        resets: Sequence[Reset] = ()
        decision: Decision
        if message.type is MessageType.STEP:
            part = self._parts[blocks]
            part.unpack_actions(message.body, message.payload)
            for start, stop in part.ranges:
                if not self._bounds.all_within(start, stop):
                    self._refuse_actions(start, stop)
            decision = RunStep(self._session, blocks)
        elif message.type is MessageType.RESET:
            resets = read_resets(message, self._blocks)
            decision = RunReset(self._session, resets)
        else:
            calls = read_calls(message, self._blocks)
            first = calls[0]
            check_call(self._policy, first.kind, first.name, first.env_indices[0])
            decision = RunCall(self._session, calls)
        message.body = message.payload = message.report = b""  # they are used up
        request = _Request(message, blocks, now, resets)
        request.is_split = message.type is MessageType.CALL
        for block, seq in message.entries:
            last_seq[block] = seq
            self._requests[block] = request
            self.kept.drop(block)
        self._move(blocks, BlockState.RUNNING)
        return [decision]

    def _repeat(self, message: Message, now: float) -> list[Decision]:
        """Handles a request that is not simply the next one of its blocks."""
        request = self._find(message)
        if request is None:
            if all(seq > self._last_seq[block] for block, seq in message.entries):
                raise self._gap(message)
            # It is late; or was refused, and another one has used its seq since.
            self.late_messages += 1
            return []
        if message.attempt <= request.message.attempt:
            # The same copy once more. Who resends counts up; without this, one short
            # request could be made to fill the send queue with large answers.
            self.late_messages += 1
            return []
        request.message.peer = message.peer
        request.message.attempt = message.attempt
        if not request.is_split and len(request.outcomes) < len(request.blocks):
            return []
        if request.outcomes:
            request.repeats = request.repeats or Repeats()
            if not request.repeats.allow(now):
                self.late_messages += 1
                return []
        replies = (
            self._answer_split(request)
            if request.is_split
            else [self._answer(request, request.blocks)]
        )
        last = (reply._replace(repeats=request.repeats) for reply in replies[-1:])
        return [*replies[:-1], *last]

    def _find(self, message: Message) -> _Request | None:
        """Returns the request that this is a copy of, if any block still has it."""
        listed = dict.fromkeys(self._requests[block] for block, _ in message.entries)
        for request in listed:  # each once: to compare entries takes long
            if (
                request is not None
                and request.message.request == message.request
                and request.message.entries == message.entries
            ):
                return request
        return None

    def _gap(self, message: Message) -> Refusal:
        where = ", ".join(
            f"block {block}: expected seq {self._last_seq[block]} or, after its "
            f"answer, the next; got {seq}"
            for block, seq in message.entries[:4]
        )
        return Refusal(ErrorCode.GAP, where)

    def _refuse_actions(self, start: int, stop: int) -> None:
        """Looks closely at actions that seem to be out of bounds."""
        try:
            check_action_rows(self._spec, self._rows.action, start, stop)
        except ActionError as error:
            raise Refusal(ErrorCode.INVALID_ACTION, str(error)) from None

    # What the pool has done.

    def finish(
        self, outcomes: Sequence[Outcome], absent: Collection[int]
    ) -> list[Decision]:
        """Takes what has ended, and what has no envs now; returns the answers.

        Args:
          outcomes: What came of operations that have ended.
          absent: Blocks in flight whose envs are not there now.
        """
        replies: list[Decision] = []
        self._move(map(_block_of, outcomes), BlockState.DONE)
        for outcome in outcomes:
            request = self._requests[outcome.block]
            assert request is not None, "only a request makes a block busy"
            request.outcomes[outcome.block] = outcome
            if outcome.result:
                self.kept.add(request.outcomes, outcome.block)
            if self._unended is not None:
                self._note_ends(self._unended, request, outcome)
            if request.is_split:
                replies.append(self._answer(request, (outcome.block,)))
            elif len(request.outcomes) == len(request.blocks):
                replies.append(self._answer(request, request.blocks))
        if absent:
            replies += self._tell_absent(absent)
        return replies

    def _tell_absent(self, absent: Collection[int]) -> list[Decision]:
        """Tells who has asked for them which blocks have become absent."""
        running = BlockState.RUNNING
        new = [block for block in absent if self._states[block] is running]
        self._move(new, BlockState.ABSENT)
        replies: list[Decision] = []
        for request in dict.fromkeys(self._requests[block] for block in new):
            assert request is not None, "only a request makes a block busy"
            if request.is_split:
                told = [block for block in new if self._requests[block] is request]
                replies.append(self._say_absent(request, told))
            else:
                request.is_split = True
                replies += self._answer_split(request)
        return replies

    def _move(self, blocks: Iterable[int], to: BlockState) -> None:
        """Changes the state of blocks; nothing else does."""
        for block in blocks:
            if to not in BLOCK_MOVES[self._states[block]]:
                raise LocalProtocolError(
                    f"block {block}: {to.name} cannot follow {self._states[block].name}"
                )
            self._states[block] = to

    def begin_drain(self) -> None:
        """Begins to watch for the end of each row's episode."""
        self._unended = np.ones(len(self._rows.reward), bool)

    @property
    def has_drained(self) -> bool:
        """Whether each row has ended an episode since `begin_drain`."""
        return self._unended is not None and not self._unended.any()

    def _note_ends(self, unended: Array, request: _Request, item: Outcome) -> None:
        """Notes which episodes have ended by a step, or were given up by a reset."""
        if item.error is not None or request.message.type is MessageType.CALL:
            return
        block = self._blocks[item.block]
        part = slice(block.start, block.stop)
        if request.message.type is MessageType.RESET:
            (reset,) = [r for r in request.resets if r.block == item.block]
            chosen = reset.env_indices
            unended[part if chosen is None else list(chosen)] = False
        else:
            rows = self._rows
            unended[part] &= ~(rows.terminated[part] | rows.truncated[part])

    def pong(self, now: float) -> Pong:
        """Returns how long each busy block has been running."""
        return Pong(
            running={
                block: int(1000 * (now - request.started_at))
                for block, request in enumerate(self._requests)
                if request is not None and self._states[block] in _BUSY
            }
        )

    # Answers.

    def _answer_split(self, request: _Request) -> list[Reply]:
        """Says where each block of a request is, unless it has a later request."""
        held = [block for block in request.blocks if self._requests[block] is request]
        absent = [block for block in held if self._states[block] is BlockState.ABSENT]
        done = [block for block in held if self._states[block] is BlockState.DONE]
        # Of many answers the last may not get through: another time they are first.
        first = _ROUND * request.num_rounds % max(1, len(done))
        request.num_rounds += 1
        done = done[first:] + done[:first]
        replies = [self._answer(request, (block,)) for block in done]
        return [self._say_absent(request, absent), *replies] if absent else replies

    def _answer(self, request: _Request, blocks: tuple[int, ...]) -> Reply:
        """Answers a request as to some of its blocks, which are done."""
        report = b""
        for block in blocks:
            outcome = request.outcomes[block]
            if outcome.infos or outcome.faults or outcome.notes or outcome.error:
                report = self._report([request.outcomes[b] for b in blocks])
                break
        kind = MessageType.RESULT
        if request.message.type is not MessageType.CALL:
            body, payload = self._parts[blocks].pack_results()
        else:  # each block for itself
            kind = MessageType.CALL_RESULT
            body, payload = b"", request.outcomes[blocks[0]].result
        return self._answers.reply(
            request.message,
            kind,
            body,
            entries=None if blocks is request.blocks else _entries(request, blocks),
            payload=payload,
            report=report,
        )

    def _report(self, outcomes: Collection[Outcome]) -> bytes:
        """Returns frame 2 of a RESULT."""
        shown = self._answers.shown
        packed = (out.packed_infos.items() for out in outcomes)
        return ResultReport(
            packed_infos=dict(chain.from_iterable(packed)),
            infos={row: info for out in outcomes for row, info in out.infos.items()},
            faults=[
                fault._replace(text=shown(fault.text))
                for outcome in outcomes
                for fault in outcome.faults
            ],
            errors={
                outcome.block: self._answers.shown_error(
                    error_body_of(outcome.error, Executed.UNKNOWN)
                )
                for outcome in outcomes
                if outcome.error is not None
            },
            notes=[note for outcome in outcomes for note in outcome.notes],
        ).encode()

    def _say_absent(self, request: _Request, blocks: Collection[int]) -> Reply:
        entries = _entries(request, blocks)
        return self._answers.reply(request.message, MessageType.ABSENT, entries=entries)


def _entries(request: _Request, blocks: Collection[int]) -> tuple[tuple[int, int], ...]:
    return tuple(entry for entry in request.message.entries if entry[0] in blocks)
