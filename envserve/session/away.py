"""Blocks whose envs are away: overdue at a silent server, or lost with their lease.

What a caller wants of such a block is a wish. A step is never sent: it finishes as
padding, or waits, until what was asked before has an outcome, which it then gets. A
reset or a call is sent as soon as the block has no other request in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from envserve.errors import EnvserveError
from envserve.lane import Block, Call, Fault, Outcome, Reset
from envserve.session.operations import Operations
from envserve.session.requests import Asked, Pending
from envserve.session.sender import Sender
from envserve.session.stored_rows import StoredRows
from envserve.slab import Rows, Status, write_pending
from envserve.wire import Message, MessageType

__all__ = ["Away"]

Array = np.ndarray[Any, Any]

#: How long a step waits for envs that are lost, the first time.
_GRACE_SECONDS: Final = 0.1


@dataclass(slots=True)
class _Wish:
    """What a caller waits for, on one block.

    Attributes:
      type: STEP, RESET or CALL.
      ticket: What the caller knows it by.
      pad_at: When a STEP finishes as padding.
      reset: Of a RESET.
      body: Of a CALL.
    """

    type: MessageType | int
    ticket: int
    pad_at: float = math.inf
    reset: Reset | None = None
    body: bytes = b""


@dataclass(slots=True)
class _Absence:
    """A block that is away.

    Attributes:
      loss: Why its envs are lost; empty if they are only overdue.
      asked: The request that nobody waits for, until its outcome was delivered.
      wish: What the caller waits for.
      sent: Number of the request that fulfils the wish; 0 if it was not sent.
      kept: Observations of the block's rows while they are being written, or a reset
        of some of them runs; what is cut short is undone with it.
      reset_rows: Rows that were reset since `asked` was answered.
      has_padded: Whether the caller has had padding, and knows.
    """

    loss: str = ""
    asked: Asked | None = None
    wish: _Wish | None = None
    sent: int = 0
    kept: list[Array] | None = None
    reset_rows: set[int] = field(default_factory=set)
    has_padded: bool = False


class Away:
    """The blocks that are away.

    Attributes:
      num_padded: How many steps of blocks have finished as padding.
      num_late: How many late results were delivered.
    """

    def __init__(
        self,
        operations: Operations,
        sender: Sender,
    ) -> None:
        """Starts without any.

        Args:
          operations: What the blocks are otherwise up to.
          sender: Sends requests, and has those in flight.
        """
        self.num_padded = 0
        self.num_late = 0
        self._operations = operations
        self._sender = sender
        self._requests = sender.requests
        self._absences: dict[int, _Absence] = {}
        self._stored_rows: StoredRows | None = None

    def __len__(self) -> int:
        return len(self._absences)

    def waiting(self) -> Iterator[tuple[int, int]]:
        """Yields the blocks that wait, with the tickets of what they wait for."""
        for block, absence in self._absences.items():
            if absence.wish is not None:
                yield block, absence.wish.ticket

    # What the caller wants.

    def submit_step(
        self, blocks: Sequence[int], now: float, ticket: int, is_alone: bool
    ) -> list[int]:
        """Takes steps of blocks that are away; returns the other blocks."""
        self._operations.check_idle(blocks)
        for block in blocks:
            absence = self._absences.get(block)
            if absence is not None:
                pad_at = math.inf if is_alone else self._pad_at(absence, now)
                self._wish(block, _Wish(MessageType.STEP, ticket, pad_at))
        return [block for block in blocks if block not in self._absences]

    def submit_reset(self, resets: Sequence[Reset], ticket: int) -> list[Reset]:
        """Takes resets of blocks that are away; returns the other ones."""
        self._operations.check_idle([reset.block for reset in resets])
        for reset in resets:
            if reset.block in self._absences:
                wish = _Wish(MessageType.RESET, ticket, reset=reset)
                self._wish(reset.block, wish)
        return [reset for reset in resets if reset.block not in self._absences]

    def submit_call(self, call: Call, ticket: int) -> bool:
        """Takes a call if its block is away; tells whether it is."""
        block = self._operations.block_of(call)
        if block not in self._absences:
            return False
        body = self._operations.encode_call(call)
        self._operations.check_idle([block])
        self._wish(block, _Wish(MessageType.CALL, ticket, body=body))
        return True

    def _wish(self, block: int, wish: _Wish) -> None:
        absence = self._absences[block]
        absence.sent = 0
        absence.wish = wish  # first: what is busy without it is forgotten
        self._operations.busy[block] = wish.ticket

    def _pad_at(self, absence: _Absence, now: float) -> float:
        is_known = absence.has_padded or not absence.loss
        return now if is_known else now + _GRACE_SECONDS

    # How blocks come to be away.

    def give_up_waiting(self, pending: Pending, now: float) -> None:
        """Makes a step overdue: its caller gets padding, and its result later."""
        asked = Asked(pending.id, is_recovery=False)
        for block, _ in pending.entries:
            wish = _Wish(MessageType.STEP, pending.ticket, now)
            self._absences[block] = _Absence(asked=asked, wish=wish)
        pending.asked = asked

    def lose(self, cause: str, error: EnvserveError, now: float) -> None:
        """Takes all blocks for lost, and requests back; may be called once more.

        Args:
          cause: For the rows that this costs.
          error: For calls in flight, which may have been executed.
          now: When.
        """
        for pending in self._requests:
            for index, (block, _) in enumerate(pending.entries):
                if self._operations.busy.get(block) == pending.ticket:
                    self._take_back(pending, index, block, error, cause, now)
        for place in self._operations.blocks:
            absence = self._absences.setdefault(place.index, _Absence())
            absence.loss = cause
            absence.asked, absence.sent = None, 0
            absence.reset_rows.clear()

    def _take_back(
        self,
        pending: Pending,
        index: int,
        block: int,
        error: EnvserveError,
        cause: str,
        now: float,
    ) -> None:
        """Makes an operation in flight a wish, or fails it."""
        absence = self._absences.setdefault(block, _Absence(loss=cause))
        if pending.asked is not None:
            return  # what the block is busy with is a wish, if anything
        if pending.type is MessageType.CALL:
            finished = Outcome(block, pending.ticket, error=error)
            self._end_wish(absence, finished)
            return
        if absence.wish is not None:
            return
        wish = _Wish(pending.type, pending.ticket)
        if pending.type is MessageType.RESET:
            wish.reset = pending.resets[index]
        elif not pending.is_alone:
            wish.pad_at = self._pad_at(absence, now)
        absence.wish = wish

    # What comes of it.

    def take(self, pending: Pending, message: Message) -> None:
        """Takes the RESULT of a request that nobody waits for.

        Raises:
          RemoteProtocolError: It is not what the request can have for a result.
        """
        blocks = tuple([block for block, _ in pending.entries])
        self._stored.unpack(blocks, message.body, message.payload)
        outcomes: dict[int, Outcome | None] = {}
        for item in self._operations.outcomes(pending, message, self._stored.rows):
            outcomes[item.block] = item
            if item.is_padding and pending.type is MessageType.STEP:
                outcomes[item.block] = None
        self._end_asked(pending, outcomes, uses_seq=True)

    def fail(self, pending: Pending, error: EnvserveError, *, uses_seq: bool) -> None:
        """Takes an ERROR instead."""
        outcomes = {b: Outcome(b, error=error) for b, _ in pending.entries}
        self._end_asked(pending, outcomes, uses_seq=uses_seq)

    def _end_asked(
        self,
        pending: Pending,
        outcomes: Mapping[int, Outcome | None],
        *,
        uses_seq: bool,
    ) -> None:
        if pending.asked is None or pending.asked.outcomes is not None:
            return  # an interrupt came between its end and its removal
        if uses_seq:  # first: then an interrupt costs no more than another answer
            self._operations.use_seqs(pending)
        pending.asked.outcomes = outcomes

    @property
    def _stored(self) -> StoredRows:
        if self._stored_rows is None:
            operations = self._operations
            stored = Rows.allocate(operations.spec, operations.blocks[-1].stop)
            self._stored_rows = StoredRows(operations.rows, stored, operations.blocks)
        return self._stored_rows

    def note_ended(self, pending: Pending, *, has_failed: bool) -> None:
        """Notes that requests of callers have ended, maybe on blocks that are away."""
        for index, (block, _) in enumerate(pending.entries):
            absence = self._absences.get(block)
            if absence is None or absence.sent != pending.id:
                continue
            absence.wish, absence.sent = None, 0
            if pending.type is MessageType.RESET and not has_failed:
                self._note_reset(
                    self._operations.blocks[block], absence, pending, index
                )

    def _note_reset(
        self, block: Block, absence: _Absence, pending: Pending, index: int
    ) -> None:
        reset = pending.resets[index]
        if _is_whole(reset, block):
            del self._absences[block.index]
            return
        rows = reset.env_indices or ()
        absence.reset_rows.update(rows)
        others = [row for row in range(block.start, block.stop) if row not in rows]
        if absence.kept is not None:  # the caller has not seen newer ones
            for leaf, kept in zip(
                self._operations.rows.observation, absence.kept, strict=True
            ):
                leaf[others] = kept[np.subtract(others, block.start)]
            absence.kept = None

    # What to do next.

    def attend(self, now: float, *, is_granted: bool) -> None:
        """Does for each block what can be done now; harmless when repeated."""
        busy = self._operations.busy
        for block, absence in list(self._absences.items()):
            if absence.sent in self._requests:
                continue
            absence.sent = 0
            self._undo(absence, self._operations.blocks[block])
            if absence.wish is not None and busy.get(block) != absence.wish.ticket:
                absence.wish = None  # of a call that was interrupted
            asked = absence.asked
            if asked is None or (
                asked.outcomes is None and asked.id not in self._requests
            ):
                absence.asked = None
                self._ask(block, absence, now, is_granted)
            elif asked.outcomes is not None:
                self._use(block, absence, asked, asked.outcomes.get(block), now)
            self._pad_if_due(block, absence, now)

    def next_deadline(self) -> float:
        """When `attend` has to be called next."""
        return min(
            (a.wish.pad_at for a in self._absences.values() if a.wish is not None),
            default=math.inf,
        )

    def fail_waiting(self, error: EnvserveError) -> None:
        """Fails what would wait for ever."""
        for block, absence in self._absences.items():
            wish = absence.wish
            if wish is not None and wish.pad_at == math.inf:
                self._end_wish(absence, Outcome(block, wish.ticket, error=error))

    def clear(self) -> None:
        """Forgets all, since the session is over."""
        self._absences.clear()

    def _ask(self, block: int, absence: _Absence, now: float, is_granted: bool) -> None:
        """Sends what a block needs first that has nothing in flight."""
        if not is_granted:
            return
        wish = absence.wish
        if not absence.loss:  # it is back; as by an interrupt that came in between
            if wish is None:
                del self._absences[block]
            elif wish.type is MessageType.STEP:
                wish.pad_at = now
            else:
                self._send_wish(block, absence, wish, now)
            return
        whole = self._operations.blocks[block]
        if wish is not None and wish.reset and _is_whole(wish.reset, whole):
            self._send_wish(block, absence, wish, now)
            return
        draft = self._operations.draft_reset([Reset(block)])
        asked = Asked(self._sender.reserve(), is_recovery=True)
        draft.asked = absence.asked = asked
        self._sender.request(draft, now, asked.id)

    def _use(
        self,
        block: int,
        absence: _Absence,
        asked: Asked,
        outcome: Outcome | None,
        now: float,
    ) -> None:
        """Lets a wish have the outcome of what was asked before."""
        wish = absence.wish
        if wish is None:
            if outcome is None:
                del self._absences[block]
        elif wish.type is MessageType.STEP:
            if outcome is None:
                self._pad(block, absence, wish)
                del self._absences[block]
            else:
                self._deliver(block, absence, wish, asked, outcome)
        elif (
            wish.reset
            and asked.is_recovery
            and outcome is not None
            and outcome.error is None
            and wish.reset.env_indices is None
            and wish.reset.seeds is None
            and not absence.reset_rows
        ):
            place = self._operations.blocks[block]
            self._keep(absence, place)
            self._stored.write_observations(place)
            del self._absences[block]
            self._end_wish(absence, outcome._replace(ticket=wish.ticket))
        else:
            self._send_wish(block, absence, wish, now)

    def _send_wish(
        self, block: int, absence: _Absence, wish: _Wish, now: float
    ) -> None:
        if wish.reset is not None:
            draft = self._operations.draft_reset([wish.reset], wish.ticket)
            self._keep(absence, self._operations.blocks[block])
        else:
            draft = self._operations.draft_call(block, wish.body, wish.ticket)
        absence.sent = self._sender.reserve()
        self._sender.request(draft, now, absence.sent)

    def _keep(self, absence: _Absence, block: Block) -> None:
        absence.kept = [
            leaf[block.start : block.stop].copy()
            for leaf in self._operations.rows.observation
        ]

    def _undo(self, absence: _Absence, block: Block) -> None:
        """Writes back what the caller has seen last, if that was overwritten."""
        if absence.kept is None:
            return
        for leaf, kept in zip(
            self._operations.rows.observation, absence.kept, strict=True
        ):
            leaf[block.start : block.stop] = kept
        absence.kept = None

    def _pad_if_due(self, block: int, absence: _Absence, now: float) -> None:
        wish = absence.wish
        if wish is not None and now >= wish.pad_at:
            self._pad(block, absence, wish)

    def _pad(self, block: int, absence: _Absence, wish: _Wish) -> None:
        place = self._operations.blocks[block]
        write_pending(self._operations.rows, slice(place.start, place.stop))
        absence.has_padded = True
        self.num_padded += 1
        self._end_wish(absence, Outcome(block, wish.ticket, is_padding=True))

    def _end_wish(self, absence: _Absence, finished: Outcome) -> None:
        absence.wish, absence.sent = None, 0
        self._operations.finish_block(finished)

    # Delivering.

    def _deliver(
        self,
        index: int,
        absence: _Absence,
        wish: _Wish,
        asked: Asked,
        outcome: Outcome,
    ) -> None:
        """Finishes a step with the outcome of what was asked before."""
        block = self._operations.blocks[index]
        if outcome.error is not None:
            absence.asked = None  # what is lost is asked for anew
            self._end_wish(absence, outcome._replace(ticket=wish.ticket))
            if not absence.loss:
                del self._absences[index]
            return
        rows = [
            r for r in range(block.start, block.stop) if r not in absence.reset_rows
        ]
        self._keep(absence, block)
        if asked.is_recovery:
            self._stored.write_lost(block, absence.reset_rows)
            status = Status.SERVER_LOST
            faults = [Fault(row, status, absence.loss) for row in rows]
            finished = Outcome(index, wish.ticket, faults=faults)
        else:
            self._stored.write_late(block, absence.reset_rows)
            self.num_late += 1
            finished = outcome._replace(
                ticket=wish.ticket,
                infos={row: info for row, info in outcome.infos.items() if row in rows},
                faults=[fault for fault in outcome.faults if fault.env_index in rows],
            )
        # First: an interrupt in between may cost the call its result, as ever; the
        # other way round a later one would have it again.
        del self._absences[index]
        self._end_wish(absence, finished)


def _is_whole(reset: Reset, block: Block) -> bool:
    rows = reset.env_indices
    return rows is None or len(rows) == block.stop - block.start
