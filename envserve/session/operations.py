"""A client's blocks: what may be asked of them, their seqs, and what has come of it.

An answer uses up its operation's seq; an operation that was not executed leaves it to
the next one. What becomes of blocks whose envs are away is up to `away`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from envserve import codec
from envserve.errors import CallError, EnvserveError, LocalProtocolError
from envserve.lane import Block, Call, Outcome, Reset
from envserve.session.parts import BlockParts
from envserve.session.requests import Draft, Pending
from envserve.session.translation import exception_of
from envserve.slab import Rows, Status
from envserve.spec import EnvSpec
from envserve.wire import (
    CallBody,
    ErrorBody,
    Executed,
    Flag,
    Message,
    MessageType,
    Report,
    ResetBody,
    RowCodec,
    split_rows,
)
from envserve.wire.constants import MAX_BODY_BYTES

__all__ = ["Operations"]

_LOGGER: Final = logging.getLogger(__name__)
# As plain numbers: flags are slow to combine.
_INFOS_DROPPED: Final = int(Flag.INFOS_DROPPED)
_ALONE: Final = int(Flag.ALONE)
_PADDED: Final = int(Flag.PADDED)
_PENDING: Final = int(Status.PENDING)


class Operations:
    """The operations on a lease's blocks, at most one on each at a time.

    Attributes:
      spec: Spaces of every env.
      blocks: The blocks.
      rows: Where actions are read from and results are written to.
      busy: Blocks in flight, each with the ticket of its operation.
    """

    def __init__(self, address: str, spec: EnvSpec, blocks: tuple[Block, ...]) -> None:
        """Starts with all blocks idle; `address` is for messages."""
        self.spec = spec
        self.blocks = blocks
        self.rows = Rows.allocate(spec, blocks[-1].stop)
        self.busy: dict[int, int] = {}
        self._finished: list[Outcome] = []
        self._address = address
        self._parts = BlockParts(RowCodec(self.rows), blocks)
        self._seq = {block.index: 0 for block in blocks}  # of its last operation

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` has something."""
        return bool(self._finished)

    def take_finished(self) -> list[Outcome]:
        """Returns the operations that have ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def begin_lease(self) -> None:
        """Counts seqs anew, since the envs are those of another lease."""
        self._seq = dict.fromkeys(self._seq, 0)

    # What is asked.

    def check_idle(self, blocks: Collection[int]) -> None:
        """Raises LocalProtocolError unless these are blocks, each once, and idle."""
        if len(set(blocks)) < len(blocks):
            raise LocalProtocolError(
                f"{self._address}: expected each block once; got {list(blocks)}"
            )
        for block in blocks:
            if not 0 <= block < len(self.blocks):
                raise LocalProtocolError(
                    f"{self._address}: expected a block below {len(self.blocks)}; "
                    f"got {block}"
                )
            if block in self.busy:
                raise LocalProtocolError(
                    f"{self._address}: block {block} is in flight; collect its "
                    f"result before you submit anew"
                )

    def step(
        self, blocks: Sequence[int], ticket: int = 0, is_alone: bool = False
    ) -> Draft:
        """Drafts a step with the actions now in `rows.action`."""
        entries = self._begin(blocks, ticket)
        part = self._parts[tuple(blocks)]
        body, payload = split_rows(part.action_buffers())
        return Draft(
            type=MessageType.STEP,
            entries=entries,
            flags=_ALONE if is_alone else 0,
            part=part,
            body=body,
            payload=bytes(payload),  # what is sent again must be the same
            ticket=ticket,
            is_alone=is_alone,
        )

    def reset(self, resets: Sequence[Reset], ticket: int = 0) -> Draft:
        """Drafts resets, each of another block."""
        self._begin([reset.block for reset in resets], ticket)
        return self.draft_reset(resets, ticket)

    def call(self, call: Call, ticket: int = 0) -> Draft:
        """Drafts attribute access; raises CallError for arguments of no plain form."""
        body = self.encode_call(call)
        block = self.block_of(call)
        self._begin([block], ticket)
        return self.draft_call(block, body, ticket)

    def draft_reset(self, resets: Sequence[Reset], ticket: int = 0) -> Draft:
        """Drafts resets of blocks that are busy with it, or that nobody waits for."""
        blocks = [reset.block for reset in resets]
        body = ResetBody(resets=tuple((r.env_indices, r.seeds) for r in resets))
        return Draft(
            type=MessageType.RESET,
            entries=self._entries(blocks),
            part=self._parts[tuple(blocks)],
            body=body.encode(),
            ticket=ticket,
            resets=tuple(resets),
        )

    def draft_call(self, block: int, body: bytes, ticket: int) -> Draft:
        """Drafts attribute access on a block that is busy with it."""
        entries = self._entries([block])
        return Draft(type=MessageType.CALL, entries=entries, body=body, ticket=ticket)

    def block_of(self, call: Call) -> int:
        """Returns the block of a call; raises LocalProtocolError if there is none."""
        num_envs = self.blocks[-1].stop
        if not 0 <= call.env_index < num_envs:
            raise LocalProtocolError(
                f"{self._address}: expected an env_index below {num_envs}; "
                f"got {call.env_index}"
            )
        return next(b.index for b in self.blocks if call.env_index < b.stop)

    def encode_call(self, call: Call) -> bytes:
        """Encodes attribute access; raises CallError as `call` does."""
        self.block_of(call)
        body = CallBody(
            env_index=call.env_index,
            kind=call.kind,
            name=call.name,
            arguments=call.arguments,
        )
        try:
            encoded = body.encode()
            if len(encoded) > MAX_BODY_BYTES:
                raise codec.CodecError(
                    f"expected arguments of at most {MAX_BODY_BYTES} bytes; "
                    f"got {len(encoded)}"
                )
        except codec.CodecError as error:
            raise CallError(
                f"{self._address}: Env {call.env_index}: {call.name}: {error}",
                env_index=call.env_index,
            ) from None
        return encoded

    def _begin(self, blocks: Sequence[int], ticket: int) -> tuple[tuple[int, int], ...]:
        """Marks blocks busy; returns the entries of their next operation."""
        self.check_idle(blocks)
        self.busy.update(dict.fromkeys(blocks, ticket))
        return self._entries(blocks)

    def _entries(self, blocks: Iterable[int]) -> tuple[tuple[int, int], ...]:
        return tuple([(block, self._seq[block] + 1) for block in blocks])

    # What comes of it.

    def finish(self, pending: Pending, message: Message) -> None:
        """Takes a RESULT or CALL_RESULT.

        Raises:
          RemoteProtocolError: It is not what the operation can have for a result.
        """
        if self.has_ended(pending):
            return  # an interrupt came between its end and its removal
        if pending.part is None:  # a call
            result = bytes(message.payload)
            self._end(pending)
            block = pending.entries[0][0]
            self._finished.append(Outcome(block, pending.ticket, result=result))
            return
        pending.part.unpack_results(message.body, message.payload)
        finished = self.outcomes(pending, message, self.rows)
        self._end(pending)
        self._finished += finished

    def outcomes(self, pending: Pending, message: Message, rows: Rows) -> list[Outcome]:
        """Returns what a RESULT says besides rows, which were written to `rows`."""
        if message.flags & _INFOS_DROPPED:
            _LOGGER.warning(
                "%s: infos were too long for a message, and are dropped", self._address
            )
        if not message.report:  # the usual case
            finished = [Outcome(block, pending.ticket) for block, _ in pending.entries]
        else:
            report = Report.decode(message.report)
            finished = [
                self._outcome(self.blocks[index], pending.ticket, report)
                for index, _ in pending.entries
            ]
        if message.flags & _PADDED:
            finished = [
                item._replace(is_padding=self._is_pending(item.block, rows))
                for item in finished
            ]
        return finished

    def _is_pending(self, index: int, rows: Rows) -> bool:
        block = self.blocks[index]
        return bool((rows.status[block.start : block.stop] == _PENDING).all())

    def _outcome(self, block: Block, ticket: int, report: Report) -> Outcome:
        """Picks what concerns a block."""
        rows = range(block.start, block.stop)
        error = report.errors.get(block.index)
        return Outcome(
            block.index,
            ticket,
            infos={row: info for row, info in report.infos.items() if row in rows},
            faults=[fault for fault in report.faults if fault.env_index in rows],
            error=None if error is None else exception_of(error, self._address),
        )

    def fail(self, pending: Pending, body: ErrorBody) -> None:
        """Takes an ERROR: the operation has failed on all its blocks."""
        self._end(pending, uses_seq=body.executed is not Executed.NO)
        error = exception_of(body, self._address)
        self._finished += [
            Outcome(block, pending.ticket, error=error) for block, _ in pending.entries
        ]

    def finish_block(self, finished: Outcome) -> None:
        """Ends the operation of one block, whatever has come of it."""
        self.busy.pop(finished.block, None)
        self._finished.append(finished)

    def use_seqs(self, pending: Pending) -> None:
        """Notes that a request was executed."""
        self._seq.update(pending.entries)

    def lose(self, error: EnvserveError) -> None:
        """Ends everything that is in flight, since the lease is lost."""
        self._finished += [
            Outcome(block, ticket, error=error)
            for block, ticket in sorted(self.busy.items())
        ]
        self.busy.clear()

    def settle(
        self, pending: Iterable[Pending], waiting: Collection[tuple[int, int]] = ()
    ) -> None:
        """Forgets blocks whose submission was interrupted before it was a request.

        Args:
          pending: Requests.
          waiting: Blocks, with tickets, that wait for something else.
        """
        asked = {
            (block, p.ticket) for p in pending if not p.asked for block, _ in p.entries
        }
        asked.update(waiting)
        self.busy = {b: t for b, t in self.busy.items() if (b, t) in asked}

    def has_ended(self, pending: Pending) -> bool:
        """Tells whether a request was answered, if only in part, and not removed."""
        if pending.asked is not None:
            return pending.asked.outcomes is not None
        for block, _ in pending.entries:
            if self.busy.get(block) != pending.ticket:
                return True
        return False

    def abandon(self) -> None:
        """Forgets everything, since the lease is given back."""
        self._finished.clear()
        self.busy.clear()

    def _end(self, pending: Pending, *, uses_seq: bool = True) -> None:
        # First, and in one go: if an interrupt cuts this short, the blocks' next
        # operations must not be taken for copies of this one.
        if uses_seq:
            self._seq.update(pending.entries)
        for block, _ in pending.entries:
            self.busy.pop(block, None)
