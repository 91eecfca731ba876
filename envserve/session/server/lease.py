"""Executes each operation of a granted lease at most once.

Each operation of a block has a sequence number, the seq, which the client counts. A
request runs if it has the next seq of each of its blocks, and none of these blocks is
busy. Otherwise:

* A copy of the latest request is not executed again. If the request is done, its reply
  is sent again.
* An older request is ignored.
* A request that skips a seq is answered with a GAP error.

A rejected request does not use up its seq.

A request is answered as a whole when all its blocks are done. If one of them becomes
absent, the client gets an ABSENT message, and from then on each block of the request is
answered separately. CALL requests are always answered block by block.

A reply is not stored. Instead, its rows are packed from the slab for each copy. The
rows are unchanged then, because the client sends the next seq only after it has
received the reply (see the decision "The slab is the reply cache"). Each attempt is
answered once (see "A copy of a request is answered once per attempt").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from envserve.errors import (
    ActionError,
    CallError,
    LocalProtocolError,
    RemoteProtocolError,
)
from envserve.lane import Block, Call, Outcome, Reset
from envserve.session.server.decisions import (
    Decision,
    Reply,
    ResendLimiter,
    RunCall,
    RunReset,
    RunStep,
    SessionId,
)
from envserve.session.server.permissions import Rejection, check_call
from envserve.session.server.reply_builder import ReplyBuilder
from envserve.session.states import BlockState
from envserve.settings import ActionMode, HostSettings
from envserve.slab import Rows
from envserve.spaces.action_checks import ActionBounds
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.info_columns import RowInfos
from envserve.wire.bodies import CallBody, Pong, ResetBody
from envserve.wire.constants import (
    MAX_ARGUMENT_BLOCKS,
    MAX_ARGUMENT_BYTES,
    MAX_OPTIONS_BYTES,
    RESET_BYTES,
    RESET_ROW_BYTES,
    ErrorCode,
    MessageType,
)
from envserve.wire.error_body import error_body_of
from envserve.wire.message import Message
from envserve.wire.result_report import ResultReport
from envserve.wire.rows import BlockParts, RowCodec

_BUSY: Final = frozenset({BlockState.RUNNING, BlockState.ABSENT})
_TUPLE_NEW: Final = tuple.__new__  # faster than the constructor of a NamedTuple

#: Number of separate replies that fit into the send queue of a client even if it does
#: not read. Each time the replies are sent again, they start this many blocks after the
#: previous start, so that the queue does not always drop the same replies.
_REPLIES_PER_ROUND: Final = 32


@dataclass(slots=True, eq=False)
class _BlockRequest:
    """A request that is running or done.

    Attributes:
      message: Header of the request, with the attempt and the peer of its latest copy.
      blocks: Indices of its blocks.
      started_at: Time at which the request first arrived, in monotonic seconds.
      resets: Resets of a RESET; empty for other requests.
      outcomes: Outcomes of its blocks that are done.
      has_separate_replies: Whether each of its blocks gets its own reply.
      limiter: Limits how often its reply is resent; None until the first resend.
      num_rounds: Number of times that its separate replies were sent.
    """

    message: Message
    blocks: tuple[int, ...]
    started_at: float
    resets: Sequence[Reset]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    has_separate_replies: bool = False
    limiter: ResendLimiter | None = None
    num_rounds: int = 0


class ResultCache:
    """Stores call results in case a reply is lost, up to a memory limit.

    Beyond the limit, the oldest results are replaced with errors. Results of steps and
    resets need no cache, because the slab contains them.

    Attributes:
      num_bytes: Total length of the results.
    """

    def __init__(self, max_bytes: int) -> None:
        """Create an empty cache, which keeps the latest result whatever its length."""
        self._max_bytes = max_bytes
        #: Outcomes of the request of each block that has a stored result; the oldest
        #: result comes first.
        self._outcomes: dict[int, MutableMapping[int, Outcome]] = {}
        self.num_bytes = 0

    def add(self, outcomes: MutableMapping[int, Outcome], block: int) -> None:
        """Add the result of a block; discard the oldest results beyond the limit.

        If the result is discarded later, an error replaces the block's outcome in
        `outcomes`, which are those of the block's request.
        """
        self._outcomes[block] = outcomes
        self.num_bytes += len(outcomes[block].result)
        while len(self._outcomes) > 1 and self.num_bytes > self._max_bytes:
            oldest = next(iter(self._outcomes))
            request_outcomes = self._outcomes[oldest]
            length = len(request_outcomes[oldest].result)
            self.drop(oldest)
            error = CallError(
                f"the call was executed, but its reply of {length} bytes was lost, "
                f"and the server no longer has the result"
            )
            request_outcomes[oldest] = Outcome(oldest, error=error)

    def drop(self, block: int) -> None:
        """Discard the result of a block, if there is one."""
        outcomes = self._outcomes.pop(block, None)
        if outcomes is not None:
            self.num_bytes -= len(outcomes[block].result)


class Lease:
    """Executes the operations of one client on its blocks.

    Attributes:
      result_cache: Results of calls.
      max_result_bytes: Length of the longest possible result in bytes.
      num_late_messages: Number of late copies that were ignored.
      answered_blocks: Indices of the blocks that the latest `finish` has answered.
    """

    def __init__(
        self,
        *,
        session: SessionId,
        spec: EnvSpec,
        blocks: Sequence[Block],
        rows: Rows,
        settings: HostSettings,
        reply_builder: ReplyBuilder,
        actions: ActionMode,
    ) -> None:
        self.num_late_messages = 0
        self.answered_blocks: list[int] = []
        self._session = session
        self._blocks = tuple(blocks)
        self._rows = rows
        codec = RowCodec(rows)
        self.max_result_bytes = codec.max_result_bytes
        self._parts = BlockParts(codec, self._blocks)
        self._bounds = ActionBounds(spec, rows.action, actions)
        self._settings = settings
        self._reply_builder = reply_builder
        self._last_seq = [0] * len(self._blocks)
        self._states = [BlockState.IDLE] * len(self._blocks)
        self._requests: list[_BlockRequest | None] = [None] * len(self._blocks)
        self.result_cache = ResultCache(settings.max_buffered_mib << 20)

    # Requests of the client.

    def handle(self, message: Message, now: float) -> list[Decision]:
        """Handle a STEP, RESET or CALL.

        Raises:
          Rejection: The request is not allowed. No state has changed; the caller must
            reply with the rejection's body.
          RemoteProtocolError: The request is malformed. No state has changed.
        """
        last_seq, states = self._last_seq, self._states
        indices = []
        is_next = True
        for block, seq in message.entries:
            if block >= len(states):
                raise RemoteProtocolError(
                    f"expected a block index below {len(states)}; got {block}"
                )
            if seq != last_seq[block] + 1 or states[block] in _BUSY:
                is_next = False
            indices.append(block)
        if not indices or len(set(indices)) < len(indices):
            raise RemoteProtocolError(
                "expected at least one block, and no block more than once"
            )
        if not is_next:
            return self._handle_out_of_sequence(message, now)
        blocks = tuple(indices)
        resets: Sequence[Reset] = ()
        decision: Decision
        if message.type is MessageType.STEP:
            part = self._parts[blocks]
            part.unpack_actions(message.body, message.payload)
            try:
                for start, stop in part.ranges:
                    self._bounds.check(start, stop)
            except ActionError as error:
                raise Rejection(ErrorCode.INVALID_ACTION, str(error)) from None
            decision = _TUPLE_NEW(RunStep, (self._session, blocks))
        elif message.type is MessageType.RESET:
            resets = read_resets(message, self._blocks)
            decision = RunReset(self._session, resets)
        else:
            calls = read_calls(message, self._blocks)
            first = calls[0]
            check_call(self._settings, first.kind, first.name, first.env_indices[0])
            decision = RunCall(self._session, calls)
        message.body = message.payload = message.report = b""  # to save memory
        request = _BlockRequest(message, blocks, now, resets)
        request.has_separate_replies = message.type is MessageType.CALL
        for block, seq in message.entries:
            last_seq[block] = seq
            self._requests[block] = request
            states[block] = BlockState.RUNNING  # was IDLE or DONE
        if self.result_cache.num_bytes:
            for block in blocks:
                self.result_cache.drop(block)
        return [decision]

    def _handle_out_of_sequence(self, message: Message, now: float) -> list[Decision]:
        """Handle a request that is a copy, is late, or skips a seq."""
        request = self._find_request(message)
        if request is None:
            if all(seq > self._last_seq[block] for block, seq in message.entries):
                raise self._gap_rejection(message)
            # This is a late copy of an answered request, or of a rejected request
            # whose seq was used again.
            self.num_late_messages += 1
            return []
        if message.attempt <= request.message.attempt:
            # A copy with this attempt, or a later copy, was already handled. Without
            # this check, replaying one short request could fill the send queue with
            # long replies.
            self.num_late_messages += 1
            return []
        request.message.peer = message.peer
        request.message.attempt = message.attempt
        is_complete = len(request.outcomes) == len(request.blocks)
        if not is_complete and not request.has_separate_replies:
            return []
        if request.outcomes:
            request.limiter = request.limiter or ResendLimiter()
            if not request.limiter.allow(now):
                self.num_late_messages += 1
                return []
        replies = (
            self._separate_replies(request)
            if request.has_separate_replies
            else [self._result_reply(request, request.blocks)]
        )
        last = (reply._replace(limiter=request.limiter) for reply in replies[-1:])
        return [*replies[:-1], *last]

    def _find_request(self, message: Message) -> _BlockRequest | None:
        """Return the request that the message is a copy of; None if there is none.

        Ignore a request that was answered with one reply if one of its blocks has a
        later request: the client has this reply, and the later request changes the
        rows.
        """
        candidates = dict.fromkeys(
            self._requests[block] for block, _ in message.entries
        )
        # Each candidate is compared only once, because comparing entries is slow.
        for request in candidates:
            if (
                request is not None
                and request.message.request == message.request
                and request.message.entries == message.entries
                and (len(candidates) == 1 or request.has_separate_replies)
            ):
                return request
        return None

    def _gap_rejection(self, message: Message) -> Rejection:
        where = ", ".join(
            f"block {block}: expected a copy of seq {self._last_seq[block]}, or the "
            f"next seq after its reply; got {seq}"
            for block, seq in message.entries[:4]
        )
        return Rejection(ErrorCode.GAP, where)

    # Events of the pool.

    def finish(
        self, outcomes: Sequence[Outcome], absent: Collection[int]
    ) -> list[Decision]:
        """Return the replies for operations that have ended or become absent.

        `absent` contains the indices of all blocks in flight whose envs are absent.
        """
        replies: list[Decision] = []
        states, answered = self._states, self.answered_blocks
        answered.clear()
        for outcome in outcomes:
            block = outcome.block
            request, state = self._requests[block], states[block]
            if request is None or state not in _BUSY:
                raise LocalProtocolError(
                    f"block {block}: DONE cannot follow {state.name}"
                )
            states[block] = BlockState.DONE
            request.outcomes[block] = outcome
            if outcome.result:
                self.result_cache.add(request.outcomes, block)
            if request.has_separate_replies:
                replies.append(self._result_reply(request, (block,)))
                answered.append(block)
            elif len(request.outcomes) == len(request.blocks):
                replies.append(self._result_reply(request, request.blocks))
                answered += request.blocks
        if absent:
            replies += self._notify_absent(absent)
        return replies

    def _notify_absent(self, absent: Collection[int]) -> list[Decision]:
        """Notify the client of absent blocks that have not been reported."""
        running = BlockState.RUNNING
        new = [block for block in absent if self._states[block] is running]
        replies: list[Decision] = []
        for block in new:
            self._states[block] = BlockState.ABSENT
        for request in dict.fromkeys(self._requests[block] for block in new):
            assert request is not None, "only a request makes a block busy"
            if request.has_separate_replies:
                blocks = [block for block in new if self._requests[block] is request]
                replies.append(self._absent_reply(request, blocks))
            else:
                request.has_separate_replies = True
                replies += self._separate_replies(request)
                self.answered_blocks += request.outcomes
        return replies

    def ended_rows(self, index: int) -> Sequence[int]:
        """Return the rows of a block whose episodes ended in its latest operation."""
        request = self._requests[index]
        assert request is not None, "only a block with a request has an outcome"
        if request.outcomes[index].error or request.message.type is MessageType.CALL:
            return ()
        rows = self._blocks[index].rows
        if request.message.type is MessageType.RESET:
            (reset,) = [r for r in request.resets if r.block == index]
            return rows if reset.env_indices is None else reset.env_indices
        terminated, truncated = self._rows.terminated, self._rows.truncated
        return [row for row in rows if terminated[row] or truncated[row]]

    def pong(self, now: float) -> Pong:
        """Return a PONG with the running time of each busy block."""
        return Pong(
            running={
                block: int(1000 * (now - request.started_at))
                for block, request in enumerate(self._requests)
                if request is not None and self._states[block] in _BUSY
            }
        )

    # Replies.

    def _separate_replies(self, request: _BlockRequest) -> list[Reply]:
        """Return one reply per finished block, and an ABSENT for all absent blocks.

        Blocks that have a later request are omitted.
        """
        live = [block for block in request.blocks if self._requests[block] is request]
        absent = [block for block in live if self._states[block] is BlockState.ABSENT]
        done = [block for block in live if self._states[block] is BlockState.DONE]
        # If there are many replies, the last ones may be dropped, so each round starts
        # at a different block.
        first = _REPLIES_PER_ROUND * request.num_rounds % max(1, len(done))
        request.num_rounds += 1
        done = done[first:] + done[:first]
        replies = [self._result_reply(request, (block,)) for block in done]
        return [self._absent_reply(request, absent), *replies] if absent else replies

    def _result_reply(self, request: _BlockRequest, blocks: tuple[int, ...]) -> Reply:
        """Return one reply for the given blocks of a request, which have finished."""
        report = b""
        for block in blocks:
            outcome = request.outcomes[block]
            if outcome.infos or outcome.faults or outcome.warnings or outcome.error:
                report = self._pack_report([request.outcomes[b] for b in blocks])
                break
        kind = MessageType.RESULT
        if request.message.type is not MessageType.CALL:
            body, payload = self._parts[blocks].pack_results()
        else:  # calls are answered block by block
            kind = MessageType.CALL_RESULT
            body, payload = b"", request.outcomes[blocks[0]].result
        return self._reply_builder.reply(
            request.message,
            kind,
            body,
            entries=None if blocks is request.blocks else self._entries_of(blocks),
            payload=payload,
            report=report,
        )

    def _pack_report(self, outcomes: Collection[Outcome]) -> bytes:
        """Return the report frame of a RESULT."""
        redacted = self._reply_builder.redacted
        packed = (outcome.packed_infos.items() for outcome in outcomes)
        infos = RowInfos()
        for outcome in outcomes:
            infos.add(outcome.infos)
        return ResultReport(
            packed_infos=dict(chain.from_iterable(packed)),
            infos=infos,
            faults=[
                fault._replace(text=redacted(fault.text))
                for outcome in outcomes
                for fault in outcome.faults
            ],
            errors={
                outcome.block: self._reply_builder.redacted_error(
                    error_body_of(outcome.error)
                )
                for outcome in outcomes
                if outcome.error is not None
            },
            notes=[note for outcome in outcomes for note in outcome.warnings],
        ).encode()

    def _absent_reply(self, request: _BlockRequest, blocks: Collection[int]) -> Reply:
        return self._reply_builder.reply(
            request.message, MessageType.ABSENT, entries=self._entries_of(blocks)
        )

    def _entries_of(self, blocks: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Return the entries of these blocks in their latest requests."""
        return tuple([(block, self._last_seq[block]) for block in blocks])


def read_resets(message: Message, blocks: Sequence[Block]) -> list[Reset]:
    """Return the resets of a RESET; raise RemoteProtocolError if it is malformed."""
    reset_blocks = [blocks[index] for index, _ in message.entries]
    num_rows = sum(len(block.rows) for block in reset_blocks)
    limit = RESET_BYTES + RESET_ROW_BYTES * num_rows
    body = ResetBody(resets=())
    if len(message.body) <= limit + MAX_OPTIONS_BYTES:
        body = ResetBody.decode(message.body)
    num_bytes = len(message.body) - len(body.options)
    if num_bytes > limit:
        raise RemoteProtocolError(
            f"expected at most {limit} bytes for {num_rows} rows, excluding the "
            f"options; got {num_bytes}"
        )
    if body.options and len(reset_blocks) > MAX_ARGUMENT_BLOCKS:
        raise RemoteProtocolError(
            f"expected at most {MAX_ARGUMENT_BLOCKS} blocks in a RESET with options; "
            f"got {len(reset_blocks)}"
        )
    if len(body.resets) != len(message.entries):
        raise RemoteProtocolError(
            f"expected a reset for each of {len(message.entries)} blocks; "
            f"got {len(body.resets)}"
        )
    resets = []
    for block, (rows, seeds) in zip(reset_blocks, body.resets, strict=True):
        resets.append(Reset(block.index, rows, seeds, body.options))
        try:
            resets[-1].check(block)
        except LocalProtocolError as error:
            raise RemoteProtocolError(str(error)) from None
    return resets


def read_calls(message: Message, blocks: Sequence[Block]) -> list[Call]:
    """Return the calls of a CALL; raise RemoteProtocolError if it is malformed."""
    body = CallBody.decode(message.body)
    if len(body.calls) != len(message.entries):
        raise RemoteProtocolError(
            f"expected a call for each of {len(message.entries)} blocks; "
            f"got {len(body.calls)}"
        )
    calls: list[Call] = []
    num_bytes = 0
    for (index, _), (rows, raw) in zip(message.entries, body.calls, strict=True):
        allowed = blocks[index].rows
        if not rows or len({*rows}) < len(rows) or not {*rows} <= {*allowed}:
            raise RemoteProtocolError(f"expected distinct rows in {allowed}")
        arguments = bytes(raw)
        if arguments == b"\xc0" and calls:  # nil means: as for the previous block
            arguments = calls[-1].arguments
        num_bytes += len(arguments)
        if num_bytes > MAX_ARGUMENT_BYTES:
            raise RemoteProtocolError(
                f"expected at most {MAX_ARGUMENT_BYTES} bytes of arguments in total; "
                "arguments that several blocks share count once per block"
            )
        calls.append(Call(index, rows, body.kind, body.name, arguments))
    return calls
