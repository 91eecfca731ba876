"""A client's blocks: what may be asked of them, their seqs, and what has come of it.

Answers are kept as messages until they are collected: only then, in the thread that
collects, are rows written. A block whose envs were lost with their lease is reset when
it is used next. Instead of a step its caller gets the lost row then.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from typing import Final

from envserve.errors import EnvserveError, LocalProtocolError, RemoteProtocolError
from envserve.lane import Block, Call, Fault, Outcome, Reset
from envserve.session.client.liveness import Liveness
from envserve.session.client.requests import Request, pack_calls
from envserve.slab import Rows, Status, copy_observation_to_final, write_lost
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.bodies import ResetBody
from envserve.wire.constants import MAX_ARGUMENT_BLOCKS, MessageType
from envserve.wire.message import Message
from envserve.wire.result_report import ResultReport
from envserve.wire.rows import BlockParts, RowCodec, RowPart

_LOGGER: Final = logging.getLogger(__name__)
#: Notes of a server that are told, each once.
_MAX_WARNED: Final = 16

#: Outcomes of what was answered; with the request and the answer if there are rows.
_Answer = tuple[list[Outcome], Request | None, Message | None]


class _RowWriter:
    """Writes what has come to the rows of a caller, in the caller's thread.

    Attributes:
      rows: The rows.
      parts: Pieces of them, by the indexes of their blocks.
      max_result_bytes: How long the answer for all of them may be.
      kept: Blocks whose last observations are final ones already.
    """

    def __init__(self, spec: EnvSpec, blocks: tuple[Block, ...]) -> None:
        self.rows = Rows.allocate(spec, blocks[-1].stop)
        codec = RowCodec(self.rows)
        self.parts = BlockParts(codec, blocks)
        self.max_result_bytes = codec.max_result_bytes
        self._blocks = blocks
        self.kept: set[int] = set()

    def write(
        self,
        outcomes: Sequence[Outcome],
        request: Request,
        message: Message,
        lost: Container[int],
    ) -> None:
        """Writes the rows of blocks that were stepped or reset.

        Raises:
          RemoteProtocolError: The message is not what such blocks can have.
        """
        part = request.part
        if part is None or len(outcomes) < len(request.entries):
            part = self.parts[tuple([outcome.block for outcome in outcomes])]
        if request.type is MessageType.STEP:
            part.unpack_results(message.body, message.payload)
        elif request.is_step:
            self._write_lost(outcomes[0], part, message)
        else:
            # Rows of a lost block that are not reset show what was seen last.
            blocks = [self._blocks[o.block] for o in outcomes if o.block in lost]
            left = [row for block in blocks for row in _rows_left(request, block)]
            kept = [leaf[left] for leaf in self.rows.observation]
            part.unpack_results(message.body, message.payload)
            for leaf, values in zip(self.rows.observation, kept, strict=True):
                leaf[left] = values

    def _write_lost(self, outcome: Outcome, part: RowPart, message: Message) -> None:
        """Writes the lost row of each env of a block that was reset."""
        if outcome.error is None:
            self.keep_last_observation(outcome.block)
            part.unpack_results(message.body, message.payload)
            block = self._blocks[outcome.block]
            write_lost(self.rows, slice(block.start, block.stop), Status.SERVER_LOST)

    def keep_last_observation(self, index: int) -> None:
        """Keeps what was seen last as final, once per operation."""
        if index not in self.kept:
            self.kept.add(index)
            block = self._blocks[index]
            copy_observation_to_final(self.rows, slice(block.start, block.stop))


class ClientBlocks:
    """The operations on a client's blocks, at most one on each at a time.

    Attributes:
      spec: Spaces of every env.
      blocks: The blocks.
      rows: Where actions are read from and results are written to.
      max_result_bytes: How long the answer for all of them may be.
      num_pieces: In how many pieces that may come, each of one block or 64 KiB.
      in_flight: Blocks whose operation is not answered, each with its request.
      ended: Blocks that were answered, and not collected.
      lost: Blocks whose episodes have ended by a fault, each with what has happened.
      absent: Blocks in flight whose envs were not there at the last `refresh_absent`.
      is_stale: Whether that may have changed.
      is_vacant: Whether there were no envs yet, so that there is nothing to reset.
      violation: How a result that was collected has broken the protocol, if one has.
    """

    def __init__(
        self, address: str, spec: EnvSpec, blocks: tuple[Block, ...], liveness: Liveness
    ) -> None:
        """Starts with all blocks idle; `silence` knows if a server is unreachable."""
        self.spec = spec
        self.blocks = blocks
        self._writer = _RowWriter(spec, blocks)
        self.rows = self._writer.rows
        self.max_result_bytes = self._writer.max_result_bytes
        self.num_pieces = len(blocks) + (self.max_result_bytes >> 16)
        self.in_flight: dict[int, Request] = {}
        self.ended: set[int] = set()
        self.lost: dict[int, str] = {}
        self.absent: frozenset[int] = frozenset()
        self.is_stale = self.is_vacant = False
        self.violation: RemoteProtocolError | None = None
        self.address, self._liveness = address, liveness
        self._parts = self._writer.parts
        self._plain_outcomes = [Outcome(block.index) for block in blocks]
        self._seqs = [0] * len(blocks)  # of each block's last operation
        self._block_of_row = [b.index for b in blocks for _ in range(b.start, b.stop)]
        self._answers: list[_Answer] = []
        self._reported_absent: set[int] = set()  # absent, as the server says
        self._warned: set[str] = set()

    # What is asked. Nothing is changed by what is refused.

    def step(self, blocks: Sequence[int]) -> list[Request]:
        """Drafts a step with the actions now in `rows.action`."""
        self._check_idle(blocks)
        in_flight, lost = self.in_flight, self.lost
        requests = []
        if lost:
            for block in blocks:
                if block in lost:
                    requests.append(self._reset((Reset(block),), is_step=True))
            blocks = [block for block in blocks if block not in lost]
            if not blocks:
                return requests
        part = self._parts[tuple(blocks)]
        body, payload = part.pack_actions()
        seqs, entries = self._seqs, []
        for block in blocks:
            entries.append((block, seqs[block] + 1))
        request = Request(
            MessageType.STEP, tuple(entries), body, payload, part, is_step=True
        )
        for block in blocks:
            in_flight[block] = request
        requests.append(request)
        return requests

    def reset(self, resets: Sequence[Reset]) -> list[Request]:
        """Drafts resets, each of another block."""
        self._check_idle([reset.block for reset in resets])
        if self.is_vacant:
            self._answers.append(([Outcome(r.block) for r in resets], None, None))
            self.ended.update([reset.block for reset in resets])
            return []
        requests = [self._reset((r,)) for r in resets if r.block in self.lost]
        alive = tuple([reset for reset in resets if reset.block not in self.lost])
        size = (
            MAX_ARGUMENT_BLOCKS if any(r.options for r in resets) else len(self.blocks)
        )
        starts = range(0, len(alive), size)
        return requests + [self._reset(alive[at : at + size]) for at in starts]

    def call(self, calls: Sequence[Call]) -> list[Request]:
        """Drafts attribute access; raises CallError for arguments that are too long."""
        self._check_idle([call.block for call in calls])
        requests = []
        for asked, body in pack_calls(calls, self.address):
            entries = tuple([(c.block, self._seqs[c.block] + 1) for c in asked])
            requests.append(self._begin(Request(MessageType.CALL, entries, body)))
        return requests

    def _reset(self, resets: tuple[Reset, ...], *, is_step: bool = False) -> Request:
        blocks = tuple([reset.block for reset in resets])
        rows = tuple([(r.env_indices, r.seeds) for r in resets])
        body = ResetBody(resets=rows, options=resets[0].options)
        request = Request(
            MessageType.RESET,
            tuple([(block, self._seqs[block] + 1) for block in blocks]),
            body.encode(),
            part=self._parts[blocks],
            resets=resets,
            is_step=is_step,
        )
        return self._begin(request)

    def _begin(self, request: Request) -> Request:
        for block, _ in request.entries:
            self.in_flight[block] = request
        if self.lost:
            self.is_stale = True
        return request

    def _check_idle(self, blocks: Sequence[int]) -> None:
        """Raises LocalProtocolError unless these are blocks, each once, and idle."""
        if len({*blocks}) < len(blocks):
            raise LocalProtocolError(
                f"{self.address}: expected each block once; got {list(blocks)}"
            )
        in_flight, count = self.in_flight, len(self.blocks)
        for block in blocks:
            if not 0 <= block < count:
                raise LocalProtocolError(
                    f"{self.address}: expected a block below {count}; got {block}"
                )
            if block in in_flight or block in self.ended:
                raise LocalProtocolError(
                    f"{self.address}: block {block} is in flight; collect its "
                    f"result before you submit anew"
                )

    # What comes of it.

    def end(self, request: Request, message: Message) -> None:
        """Keeps a RESULT or CALL_RESULT, of all blocks of a request or of one.

        Raises:
          RemoteProtocolError: Its report is none, or of other rows; then nothing is
            changed.
        """
        reported: Mapping[int, Outcome] = {}
        if message.report:
            report = ResultReport.decode(message.report)
            reported = report.outcomes(
                message.entries, self._block_of_row, self.address
            )
            for note in [n for each in reported.values() for n in each.warnings]:
                if len(self._warned) < _MAX_WARNED and note not in self._warned:
                    self._warned.add(note)
                    _LOGGER.warning("%s: %s", self.address, note)
        outcomes = []
        for block, seq in message.entries:
            self._seqs[block] = seq
            del self.in_flight[block]
            self.ended.add(block)
            if not reported and not self.lost and request.part is not None:
                outcomes.append(self._plain_outcomes[block])  # the usual case
            else:
                outcomes.append(
                    self._outcome(block, request, message, reported.get(block))
                )
        has_rows = request.part is not None
        self._answers.append((outcomes, request if has_rows else None, message))
        if self.absent or self._reported_absent:
            self.is_stale = True
            self._reported_absent.difference_update(
                [block for block, _ in message.entries]
            )

    def _outcome(
        self, index: int, request: Request, message: Message, reported: Outcome | None
    ) -> Outcome:
        """Says what came of a block, and notes that its envs are back."""
        if reported is not None and reported.error is not None:
            return Outcome(index, error=reported.error)
        if request.type is MessageType.CALL:
            outcome = reported or Outcome(index)
            return outcome._replace(result=bytes(message.payload))
        block = self.blocks[index]
        rows = range(block.start, block.stop)
        is_reset = request.type is MessageType.RESET
        if index in self.lost and is_reset and not _rows_left(request, block):
            text = self.lost.pop(index)
            if request.is_step:
                status = Status.SERVER_LOST
                faults = [Fault(row, status, text) for row in rows]
                return Outcome(index, faults=faults)
        return reported or Outcome(index)

    def fail(
        self, request: Request, error: EnvserveError, *, uses_seq: bool = True
    ) -> None:
        """Ends a request with an error, on all its blocks that have no answer yet."""
        for block, seq in request.entries:
            if block not in request.answered:
                if uses_seq:
                    self._seqs[block] = seq
                self._fail_block(block, error)

    def fail_all(self, error: EnvserveError) -> None:
        """Ends everything that is in flight."""
        for block in sorted(self.in_flight):
            self._fail_block(block, error)

    def _fail_block(self, block: int, error: EnvserveError) -> None:
        del self.in_flight[block]
        self._answers.append(([Outcome(block, error=error)], None, None))
        self.ended.add(block)
        self._reported_absent.discard(block)
        self.is_stale = True

    def mark_absent(self, request: Request, message: Message) -> None:
        """Takes an ABSENT: the server says which blocks have no envs now."""
        for block, _ in message.entries:
            if self.in_flight.get(block) is request:
                self._reported_absent.add(block)
                self.is_stale = True

    def mark_lost(self, text: str, error: EnvserveError) -> None:
        """Takes all envs for lost; drafts anew what is in flight, as far as it may be.

        Args:
          text: What has happened, for the rows that this costs.
          error: The same for calls, which may have been carried out.
        """
        self._seqs = [0] * len(self.blocks)  # those of the next lease
        self._reported_absent.clear()
        for block in range(len(self.blocks)):
            self.lost.setdefault(block, text)
        for block, request in sorted(self.in_flight.items()):
            if request.type is MessageType.CALL:
                if request.id:  # else it was not sent
                    self._fail_block(block, error)
            elif request.is_step:
                self._reset((Reset(block),), is_step=True)
            else:
                resets = tuple([r for r in request.resets if r.block == block])
                self._reset(resets)
        self.is_stale = True

    def forget(self) -> None:
        """Forgets what is in flight, and what has come of it."""
        self.in_flight.clear()
        self._answers.clear()
        self._reported_absent.clear()
        self._writer.kept.clear()
        self.ended.clear()
        self.absent = frozenset()

    # What is collected, in the thread of who reads the rows.

    def take_outcomes(self) -> list[Outcome]:
        """Writes rows; returns the outcomes that have come since the last call.

        What a result has that it may not have is an error of its blocks, and stays as
        `violation`.
        """
        answers, self._answers = self._answers, []
        self.ended.clear()
        taken: list[Outcome] = []
        for outcomes, request, message in answers:
            if request is not None and message is not None:
                try:
                    self._writer.write(outcomes, request, message, self.lost)
                except RemoteProtocolError as error:
                    self.violation = error
                    outcomes = [o._replace(error=error) for o in outcomes]
            taken += outcomes
        if self._writer.kept:
            self._writer.kept.difference_update([outcome.block for outcome in taken])
        return taken

    def is_ready(self, min_ended: int) -> bool:
        """Tells whether to wait no longer: so many blocks have ended, or all.

        Or a block has become absent.
        """
        if self.is_stale and self.refresh_absent():
            return True
        return len(self.ended) >= min_ended or not self.in_flight

    def refresh_absent(self) -> bool:
        """Brings `absent` up to date; tells whether a block has become so.

        The last observations of its rows are kept then, if it is being stepped.
        """
        self.is_stale = False
        before, lost, reported = self.absent, self.lost, self._reported_absent
        is_unreachable = self._liveness.is_unreachable
        gone = [
            b for b in self.in_flight if is_unreachable or b in lost or b in reported
        ]
        self.absent = frozenset(gone)
        for index in self.absent - before:
            if self.in_flight[index].is_step:
                self._writer.keep_last_observation(index)
        return not self.absent <= before


def _rows_left(request: Request, block: Block) -> list[int]:
    """Returns the rows of a block that a RESET does not reset."""
    (chosen,) = [r.env_indices for r in request.resets if r.block == block.index]
    if chosen is None:
        return []
    return [row for row in range(block.start, block.stop) if row not in chosen]
