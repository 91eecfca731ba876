"""A client's blocks: their operations, seqs and results.

Rows are written only by the caller's thread, in `step`, `collect` and `refresh_absent`.
Replies may arrive at any time, even while the caller reads the rows, because a lane's
background thread also receives. Therefore `accept_result` only stores the message.

Losses: `mark_lost` marks all blocks when their lease is lost. The first operation on a
lost block sends a RESET. If the caller requested a step, the block's rows then contain
the first observation of the new episode, the last observation of the old episode as the
final observation, and status SERVER_LOST. With autoreset "next_step":

* If any episode of the block was running, the rows contain the last observation of the
  old episode. The next step sends no request, and returns the first observation of the
  new episode. Rows that the caller resets before that step are padding in it, because
  the server steps whole blocks.
* If all episodes of the block had ended, the step would have reset the envs anyway. The
  rows therefore contain the first observation, and nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from envserve.errors import EnvserveError, LocalProtocolError, RemoteProtocolError
from envserve.lane import Block, Call, Fault, Outcome, Reset
from envserve.session.client.liveness import Liveness
from envserve.session.client.requests import Request, pack_calls
from envserve.settings import Autoreset
from envserve.slab import (
    Array,
    Rows,
    Status,
    copy_final_to_observation,
    copy_observation_to_final,
    write_lost,
    write_pending,
)
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.bodies import ResetBody
from envserve.wire.constants import MAX_ARGUMENT_BLOCKS, MessageType
from envserve.wire.message import Buffer, Message
from envserve.wire.result_report import ResultReport
from envserve.wire.rows import BlockParts, RowCodec

_LOGGER: Final = logging.getLogger(__name__)
#: Maximum number of different warnings from a server that are logged. Each warning is
#: logged once.
_MAX_WARNED: Final = 16

#: Outcomes of a reply; the request that it replies to, or None if the reply contains no
#: rows; and its body and payload.
_Reply = tuple[list[Outcome], Request | None, Buffer, Buffer]


class ClientBlocks:
    """Tracks the operations on a client's blocks, at most one per block at a time.

    Attributes:
      spec: Spaces of every env.
      blocks: The blocks.
      rows: Arrays that actions are read from and results are written to.
      max_result_bytes: Maximum length of a result for all blocks.
      num_pieces: Number of blocks, plus number of 64 KiB chunks in the longest result.
      in_flight: Requests that have no reply yet, by block index.
      uncollected: Indices of blocks whose results the caller has not collected yet.
      lost: Reasons for losses, by block index; a lost block must be reset before it is
        used.
      absent: Indices of blocks in flight whose envs were absent at the last
        `refresh_absent`.
      absent_is_stale: Whether `absent` may be outdated.
      protocol_error: Protocol violation in a collected result of the current lease;
        None if there was none.
    """

    def __init__(
        self,
        address: str,
        spec: EnvSpec,
        blocks: tuple[Block, ...],
        liveness: Liveness,
        autoreset: Autoreset = "same_step",
    ) -> None:
        """Start with all blocks idle; the server uses the given autoreset mode."""
        self.spec = spec
        self.blocks = blocks
        self.rows = Rows.allocate(spec, blocks[-1].stop)
        codec = RowCodec(self.rows)
        self.max_result_bytes = codec.max_result_bytes
        self.num_pieces = len(blocks) + (self.max_result_bytes >> 16)
        self.in_flight: dict[int, Request] = {}
        self.uncollected: set[int] = set()
        self.lost: dict[int, str] = {}
        self.absent: frozenset[int] = frozenset()
        self.absent_is_stale = False
        self.protocol_error: RemoteProtocolError | None = None
        self.address, self._liveness = address, liveness
        self._parts = BlockParts(codec, blocks)
        self._plain_outcomes = [Outcome(block.index) for block in blocks]
        self._seqs = [0] * len(blocks)  # seq of each block's last operation
        self._block_of_row = [block.index for block in blocks for _ in block.rows]
        self._replies: list[_Reply] = []
        #: Indices of blocks whose observations were already copied to their final
        #: observations for the current operation.
        self._finals_written: set[int] = set()
        #: Indices of blocks that an ABSENT from the server has listed.
        self._reported_absent: set[int] = set()
        self._warned: set[str] = set()
        self._is_next_step = autoreset == "next_step"
        #: First observations and infos of resets that the next step returns, by block
        #: index and row. Used after a loss, and only in autoreset mode "next_step".
        self._first_observations: dict[
            int, dict[int, tuple[list[Array], Mapping[str, Any]]]
        ] = {}
        #: Indices of blocks that were lost when all their episodes had just ended, so
        #: that no episode was lost. Used only in autoreset mode "next_step".
        self._lost_at_end: set[int] = set()
        #: Whether `discard_all` has discarded results since the last `mark_lost`. The
        #: caller may not have received them.
        self._has_discarded = False

    # Submitting. A method that raises has changed nothing.

    def step(self, blocks: Sequence[int]) -> list[Request]:
        """Return the requests for a step with the actions now in `rows.action`."""
        self._check_idle(blocks)
        in_flight, lost = self.in_flight, self.lost
        requests: list[Request] = []
        if self._first_observations:
            answered = [block for block in blocks if block in self._first_observations]
            for block in answered:
                self._begin_episode(block)
            blocks = [block for block in blocks if block not in answered]
            if not blocks:
                return requests
        if lost:
            resets = [Reset(block) for block in blocks if block in lost]
            requests = [self._reset((reset,), is_step=True) for reset in resets]
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

    def _begin_episode(self, index: int) -> None:
        """Reply to a step without a request: the previous step has reset the envs."""
        write_pending(self.rows, self.blocks[index].row_slice)
        infos = dict[int, Mapping[str, Any]]()
        for row, (observation, info) in self._first_observations.pop(index).items():
            for leaf, first in zip(self.rows.observation, observation, strict=True):
                leaf[row] = first
            self.rows.status[row] = Status.OK
            if info:
                infos[row] = info
        self._replies.append(([Outcome(index, infos)], None, b"", b""))
        self.uncollected.add(index)

    def reset(self, resets: Sequence[Reset]) -> list[Request]:
        """Return the requests for resets of distinct blocks."""
        self._check_idle([reset.block for reset in resets])
        for reset in resets:
            deferred = self._first_observations.pop(reset.block, {})
            rows = deferred if reset.env_indices is None else reset.env_indices
            if remaining := {row: deferred[row] for row in deferred.keys() - {*rows}}:
                self._first_observations[reset.block] = remaining
            self._lost_at_end.discard(reset.block)
        requests = [self._reset((r,)) for r in resets if r.block in self.lost]
        others = tuple([reset for reset in resets if reset.block not in self.lost])
        has_options = any(r.options for r in resets)
        size = MAX_ARGUMENT_BLOCKS if has_options else len(self.blocks)
        starts = range(0, len(others), size)
        return requests + [
            self._reset(others[start : start + size]) for start in starts
        ]

    def call(self, calls: Sequence[Call]) -> list[Request]:
        """Return the requests for calls; raise CallError if arguments are too long."""
        self._check_idle([call.block for call in calls])
        requests = []
        for chunk, body in pack_calls(calls, self.address):
            entries = tuple([(c.block, self._seqs[c.block] + 1) for c in chunk])
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
            self.absent_is_stale = True
        return request

    def _check_idle(self, blocks: Sequence[int]) -> None:
        """Raise LocalProtocolError unless blocks exist, are distinct and are idle."""
        in_flight, count = self.in_flight, len(self.blocks)
        if (
            (*blocks,) in self._parts  # implies that they exist and are distinct
            and in_flight.keys().isdisjoint(blocks)
            and self.uncollected.isdisjoint(blocks)
        ):
            return
        if len({*blocks}) < len(blocks):
            raise LocalProtocolError(
                f"{self.address}: expected each block once; got {list(blocks)}"
            )
        for block in blocks:
            if not 0 <= block < count:
                raise LocalProtocolError(
                    f"{self.address}: expected a block index below {count}; got {block}"
                )
            if block in in_flight or block in self.uncollected:
                raise LocalProtocolError(
                    f"{self.address}: block {block} is in flight; collect its "
                    f"result before you submit another operation"
                )

    # Results.

    def accept_usual_reply(self, request: Request, frame: Buffer) -> bool:
        """Store the frame that `Requests.step_answered_by` has recognised.

        This is faster than `accept_result`. Return False, and change nothing, if the
        envs of any block are lost or absent.
        """
        if self.lost or self.absent or self._reported_absent:
            return False
        outcomes = []
        for block, seq in request.entries:
            self._seqs[block] = seq
            del self.in_flight[block]
            self.uncollected.add(block)
            outcomes.append(self._plain_outcomes[block])
        body = frame[len(request.reply_head) :]
        self._replies.append((outcomes, request, body, b""))
        return True

    def accept_result(self, request: Request, message: Message) -> None:
        """Store a RESULT or CALL_RESULT, for all blocks of a request or one of them.

        Raises:
          RemoteProtocolError: The report is malformed, or refers to other rows. Nothing
            has been changed.
        """
        reported: Mapping[int, Outcome] = {}
        if message.report:
            report = ResultReport.decode(message.report)
            reported = report.outcomes(
                message.entries, self._block_of_row, self.address
            )
            warnings = [w for outcome in reported.values() for w in outcome.warnings]
            for warning in warnings:
                if len(self._warned) < _MAX_WARNED and warning not in self._warned:
                    self._warned.add(warning)
                    _LOGGER.warning("%s: %s", self.address, warning)
        outcomes = []
        for block, seq in message.entries:
            self._seqs[block] = seq
            del self.in_flight[block]
            self.uncollected.add(block)
            if not reported and not self.lost and request.part is not None:
                outcome = self._plain_outcomes[block]  # the usual case
            else:
                outcome = self._outcome(block, request, message, reported.get(block))
            outcomes.append(outcome)
        answered = None if request.part is None else request
        self._replies.append((outcomes, answered, message.body, message.payload))
        if self.absent or self._reported_absent:
            self.absent_is_stale = True
            self._reported_absent.difference_update(
                [block for block, _ in message.entries]
            )

    def _outcome(
        self, index: int, request: Request, message: Message, reported: Outcome | None
    ) -> Outcome:
        """Return the outcome of a block; clear its loss if all its envs were reset.

        `reported` is the block's outcome in the message's report, or None.
        """
        if reported is not None and reported.error is not None:
            return Outcome(index, error=reported.error)
        if request.type is MessageType.CALL:
            outcome = reported or Outcome(index)
            return outcome._replace(result=bytes(message.payload))
        block = self.blocks[index]
        is_reset = request.type is MessageType.RESET
        if index in self.lost and is_reset and not _rows_not_reset(request, block):
            text, has_ended = self.lost.pop(index), index in self._lost_at_end
            self._lost_at_end.discard(index)
            lost_nothing = has_ended and not (reported and reported.faults)
            if request.is_step and not lost_nothing:
                faults = [Fault(row, Status.SERVER_LOST, text) for row in block.rows]
                # With "next_step", the next step returns the infos of the reset.
                infos = reported.infos if reported and self._is_next_step else {}
                return Outcome(index, infos, faults)
        return reported or Outcome(index)

    def fail(
        self, request: Request, error: EnvserveError, *, uses_seq: bool = True
    ) -> None:
        """End a request with an error for all its blocks that have no reply yet.

        With `uses_seq`, the request has used up the seqs of its blocks.
        """
        for block, seq in request.entries:
            if block not in request.answered_blocks:
                if uses_seq:
                    self._seqs[block] = seq
                self._fail_block(block, error)

    def fail_all(self, error: EnvserveError) -> None:
        """End all operations in flight with an error."""
        for block in sorted(self.in_flight):
            self._fail_block(block, error)

    def give_up(self, error: EnvserveError) -> None:
        """End resets without an effect, and calls with an error; keep the steps."""
        for block, request in sorted(self.in_flight.items()):
            if request.type is MessageType.CALL:
                self._fail_block(block, error)
            elif not request.is_step:
                self._fail_block(block)

    def _fail_block(self, block: int, error: EnvserveError | None = None) -> None:
        del self.in_flight[block]
        self._replies.append(([Outcome(block, error=error)], None, b"", b""))
        self.uncollected.add(block)
        self._reported_absent.discard(block)
        self.absent_is_stale = True

    def mark_absent(self, request: Request, message: Message) -> None:
        """Handle an ABSENT, which lists blocks whose envs are absent."""
        for block, _ in message.entries:
            if self.in_flight.get(block) is request:
                self._reported_absent.add(block)
                self.absent_is_stale = True

    def mark_lost(self, error: EnvserveError) -> None:
        """Mark all envs as lost, and replace the requests that are in flight.

        Steps and resets become RESET requests for the next lease. Calls that were sent
        fail with the error, because the envs may have executed them. The infos of lost
        rows show the error's text.
        """
        self._seqs = [0] * len(self.blocks)  # the next lease counts from 1
        self._reported_absent.clear()
        self._first_observations.clear()
        for block in range(len(self.blocks)):
            if block not in self.lost and self._is_at_end(block):
                self._lost_at_end.add(block)
            self.lost.setdefault(block, str(error))
        self._has_discarded = False
        for block, request in sorted(self.in_flight.items()):
            if request.type is MessageType.CALL:
                if request.id:  # the call was sent
                    self._fail_block(block, error)
            elif request.is_step:
                self._reset((Reset(block),), is_step=True)
            else:
                resets = tuple([r for r in request.resets if r.block == block])
                self._reset(resets)
        self.absent_is_stale = True

    def _is_at_end(self, index: int) -> bool:
        """Return whether the running or next step of a block only resets its envs."""
        request, rows = self.in_flight.get(index), self.rows
        # In other autoreset modes, no step only resets envs. If the last result was
        # discarded, or was not collected yet, the rows do not show whether episodes
        # have ended.
        if not self._is_next_step or self._has_discarded or index in self.uncollected:
            return False
        part = self.blocks[index].row_slice
        has_ended = (rows.terminated[part] | rows.truncated[part]).all()
        return bool(has_ended) and (request is None or request.is_step)

    def discard_all(self) -> None:
        """Discard all operations in flight, and all results not yet collected."""
        self.in_flight.clear()
        self._replies.clear()
        self._reported_absent.clear()
        self._finals_written.clear()
        self._lost_at_end.clear()
        self._has_discarded = True
        self.uncollected.clear()
        self.absent = frozenset()

    # Collecting, in the caller's thread.

    def collect(self) -> list[Outcome]:
        """Write the rows of new results; return the outcomes since the last call.

        If a result violates the protocol, the outcomes of its blocks contain the error,
        which is also stored in `protocol_error`.
        """
        replies, self._replies = self._replies, []
        self.uncollected.clear()
        collected: list[Outcome] = []
        for outcomes, request, body, payload in replies:
            if request is not None:
                try:
                    self._write(outcomes, request, body, payload)
                    if (
                        self._is_next_step
                        and request.type is MessageType.RESET
                        and request.is_step
                        and outcomes[0].faults
                    ):
                        outcomes = [self._defer_reset(outcomes[0])]
                except RemoteProtocolError as violation:
                    error = RemoteProtocolError(f"{self.address}: {violation}")
                    # The server of a lost lease may be a different one.
                    if self.lost.keys().isdisjoint(o.block for o in outcomes):
                        self.protocol_error = error
                    outcomes = [o._replace(error=error) for o in outcomes]
            collected += outcomes
        if self._finals_written:
            blocks = [outcome.block for outcome in collected]
            self._finals_written.difference_update(blocks)
        return collected

    def _write(
        self,
        outcomes: Sequence[Outcome],
        request: Request,
        body: Buffer,
        payload: Buffer,
    ) -> None:
        """Write the rows of a reply; raise RemoteProtocolError if they do not fit."""
        part, first = request.part, outcomes[0]
        if part is None or len(outcomes) < len(request.entries):
            part = self._parts[tuple([outcome.block for outcome in outcomes])]
        if request.type is MessageType.STEP:
            part.unpack_results(body, payload)
        elif request.is_step and (first.faults or first.error):
            # A lost block was reset instead of stepped. After an error, the rows of the
            # reply have no meaning.
            if first.error is None:
                self._write_final(first.block)
                part.unpack_results(body, payload)
                row_slice = self.blocks[first.block].row_slice
                write_lost(self.rows, row_slice, Status.SERVER_LOST)
        else:
            # If only some rows of a lost block are reset, the other rows keep their
            # last observation. The reply contains no observation for them or, with
            # "next_step", one of an episode that has not begun for the caller.
            others = [
                row
                for outcome in outcomes
                if outcome.block in self.lost
                or outcome.block in self._first_observations
                for row in _rows_not_reset(request, self.blocks[outcome.block])
            ]
            last = [leaf[others] for leaf in self.rows.observation]
            part.unpack_results(body, payload)
            for leaf, values in zip(self.rows.observation, last, strict=True):
                leaf[others] = values

    def _write_final(self, index: int) -> None:
        """Copy a block's observations to its final observations, once per operation."""
        if index not in self._finals_written:
            self._finals_written.add(index)
            copy_observation_to_final(self.rows, self.blocks[index].row_slice)

    def _defer_reset(self, outcome: Outcome) -> Outcome:
        """Let the step after a lost step return the first observations and infos.

        Until then, the rows contain the last observations of the lost episodes.
        """
        block, leaves = self.blocks[outcome.block], self.rows.observation
        self._first_observations[outcome.block] = {
            row: ([leaf[row].copy() for leaf in leaves], outcome.infos.get(row, {}))
            for row in block.rows
        }
        copy_final_to_observation(self.rows, block.row_slice)
        return Outcome(outcome.block, faults=outcome.faults)

    def is_ready(self, min_finished: int) -> bool:
        """Return whether the caller should collect now.

        This is the case if a block has become absent, if at least `min_finished` blocks
        have finished, or if no block is in flight.
        """
        if self.absent_is_stale and self.refresh_absent():
            return True
        return len(self.uncollected) >= min_finished or not self.in_flight

    def refresh_absent(self) -> bool:
        """Update `absent`; return whether a block was added.

        If an added block is being stepped, its observations are copied to its final
        observations, because its episodes end there if the block is lost.
        """
        self.absent_is_stale = False
        previous, lost, reported = self.absent, self.lost, self._reported_absent
        is_unreachable = self._liveness.is_unreachable
        absent = [
            b
            for b, request in self.in_flight.items()
            if is_unreachable or b in lost or b in reported or request.is_ignored
        ]
        self.absent = frozenset(absent)
        for index in self.absent - previous:
            if self.in_flight[index].is_step:
                self._write_final(index)
        return not self.absent <= previous


def _rows_not_reset(request: Request, block: Block) -> list[int]:
    """Return the rows of a block that a RESET does not reset."""
    (reset_rows,) = [r.env_indices for r in request.resets if r.block == block.index]
    if reset_rows is None:
        return []
    return [row for row in block.rows if row not in reset_rows]
