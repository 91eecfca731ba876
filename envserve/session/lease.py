"""At most once: which operations of a granted lease run, wait, or are answered again.

A request with a block's next seq runs, unless the last one is RUNNING; a copy of the
last one joins it while RUNNING, and is answered again once DONE; an older copy is
ignored; a later seq is a gap, an ERROR. A request that is refused uses up no seq.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from envserve.actions import check_action_rows
from envserve.errors import ActionError, RemoteProtocolError
from envserve.lane import Block, Call, Outcome, Reset
from envserve.session.bounds import ActionBounds
from envserve.session.decisions import (
    Decision,
    Reply,
    RunCall,
    RunReset,
    RunStep,
)
from envserve.session.parts import BlockParts
from envserve.session.policy import Policy, Refusal
from envserve.session.translation import body_of
from envserve.slab import Rows
from envserve.spec import EnvSpec
from envserve.wire import (
    Buffer,
    CallBody,
    ErrorBody,
    ErrorCode,
    Executed,
    Flag,
    Message,
    MessageType,
    Pong,
    Report,
    ResetBody,
    RowCodec,
    encode,
    split_rows,
)

__all__ = ["Lease"]

Array = np.ndarray[Any, Any]

# As plain numbers: flags are slow to combine.
_INFOS_DROPPED: Final = int(Flag.INFOS_DROPPED)
_ALONE: Final = int(Flag.ALONE)
_PADDED: Final = int(Flag.PADDED)


class _Verdict(enum.IntEnum):
    """What to do with a request; of several, the greatest holds."""

    RUN = 0
    KNOWN = 1
    GAP = 2
    LATE = 3


@dataclass(slots=True)
class _Request:
    """A request that runs or has run, and where its answer goes.

    A block of it is RUNNING while it is in `waiting`, and then DONE: its rows are the
    answer, and stay so until the next seq. A block that has no request is IDLE.
    """

    id: int
    type: MessageType | int
    entries: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]
    attempt: int
    route: bytes
    started_at: float
    waiting: set[int]
    resets: Sequence[Reset] = ()
    finished: dict[int, Outcome] = field(default_factory=dict)


class Lease:
    """The operations of one client on its blocks.

    The blocks' rows are the cached answer: they are packed anew for each copy of a
    request, and no request may change them before the client has moved on.

    Attributes:
      epoch: Number of the lease.
      late_messages: How many late copies were ignored.
    """

    def __init__(
        self,
        *,
        session: int,
        boot: int,
        epoch: int,
        spec: EnvSpec,
        blocks: Sequence[Block],
        rows: Rows,
        policy: Policy,
    ) -> None:
        """Starts with all blocks IDLE at seq 0."""
        self.epoch = epoch
        self.late_messages = 0
        self._session = session
        self._boot = boot
        self._spec = spec
        self._blocks = tuple(blocks)
        self._rows = rows
        self._codec = RowCodec(rows)
        self._parts = BlockParts(self._codec, self._blocks)
        self._bounds = ActionBounds(spec, rows)
        self._policy = policy
        self._last_seq = [0] * len(self._blocks)
        self._requests: list[_Request | None] = [None] * len(self._blocks)
        self._unended: Array | None = None  # while draining: bool per row

    @property
    def max_result_bytes(self) -> int:
        """Bytes of the longest result that can come."""
        return self._codec.max_result_bytes

    def handle(self, message: Message, route: bytes, now: float) -> list[Decision]:
        """Takes a STEP, RESET or CALL.

        Raises:
          Refusal: Nothing was changed; the request must be answered with its body.
          RemoteProtocolError: The same, for a request that is malformed.
        """
        blocks = tuple([block for block, _ in message.entries])
        waiting = set(blocks)
        if not blocks or len(waiting) < len(blocks):
            raise RemoteProtocolError("expected at least one block, and each once")
        verdict = self._judge(message.entries)
        if verdict is _Verdict.LATE:
            self.late_messages += 1
            return []
        if verdict is _Verdict.GAP:
            raise self._gap(message)
        if verdict is _Verdict.KNOWN:
            return self._repeat(message, route)
        decision = self._prepare(message, blocks)
        request = _Request(
            message.request,
            message.type,
            message.entries,
            blocks,
            message.attempt,
            route,
            now,
            waiting,
            decision.resets if isinstance(decision, RunReset) else (),
        )
        for block, seq in message.entries:
            self._last_seq[block] = seq
            self._requests[block] = request
        return [decision]

    def finish(self, finished: Iterable[Outcome]) -> list[Decision]:
        """Takes what the pool has finished; answers requests that are complete."""
        replies: list[Decision] = []
        for item in finished:
            request = self._requests[item.block]
            if request is None or item.block not in request.waiting:
                continue
            request.waiting.remove(item.block)
            request.finished[item.block] = item
            if self._unended is not None:
                self._note_ends(self._unended, request, item)
            if not request.waiting:
                replies.append(self._answer(request))
        return replies

    def begin_drain(self) -> None:
        """Begins to watch for the end of each row's episode."""
        self._unended = np.ones(len(self._rows.reward), bool)

    @property
    def has_drained(self) -> bool:
        """Whether each row has ended an episode since `begin_drain`."""
        return self._unended is not None and not self._unended.any()

    def pong(self, now: float) -> Pong:
        """Returns how long each RUNNING block has been running."""
        return Pong(
            running={
                block: int(1000 * (now - request.started_at))
                for block, request in enumerate(self._requests)
                if request is not None and block in request.waiting
            }
        )

    def _note_ends(self, unended: Array, request: _Request, item: Outcome) -> None:
        """Notes which episodes have ended by a step, or were given up by a reset."""
        if item.error is not None or request.type is MessageType.CALL:
            return
        block = self._blocks[item.block]
        part = slice(block.start, block.stop)
        if request.type is MessageType.RESET:
            (reset,) = [r for r in request.resets if r.block == item.block]
            chosen = reset.env_indices
            unended[part if chosen is None else list(chosen)] = False
        else:
            rows = self._rows
            unended[part] &= ~(rows.terminated[part] | rows.truncated[part])

    def _judge(self, entries: Iterable[tuple[int, int]]) -> _Verdict:
        """Judges a request as a whole: of its blocks, the one that fits least counts.

        Raises:
          RemoteProtocolError: There is no such block.
        """
        verdict = _Verdict.RUN
        for block, seq in entries:
            if block >= len(self._blocks):
                raise RemoteProtocolError(
                    f"expected a block below {len(self._blocks)}; got {block}"
                )
            last = self._last_seq[block]
            request = self._requests[block]
            if seq == last + 1 and (request is None or block not in request.waiting):
                continue
            if seq > last:
                verdict = max(verdict, _Verdict.GAP)
            elif seq == last and seq:
                verdict = max(verdict, _Verdict.KNOWN)
            else:
                verdict = _Verdict.LATE
        return verdict

    def _gap(self, message: Message) -> Refusal:
        where = ", ".join(
            f"block {block}: expected seq {self._last_seq[block]} or, after its "
            f"answer, the next; got {seq}"
            for block, seq in message.entries[:4]
        )
        return Refusal(ErrorCode.GAP, where)

    def _repeat(self, message: Message, route: bytes) -> list[Decision]:
        """Handles a copy of a request that runs, or has run."""
        request = self._requests[message.entries[0][0]]
        if (
            request is None
            or request.id != message.request
            or request.entries != message.entries
        ):
            # A copy of a request that was refused, whose seq another has used since.
            self.late_messages += 1
            return []
        if message.attempt <= request.attempt:
            # The same copy once more. Who resends counts up; without this, one short
            # request could be made to fill the send queue with large answers.
            self.late_messages += 1
            return []
        request.route = route
        request.attempt = message.attempt
        return [] if request.waiting else [self._answer(request)]

    def _prepare(self, message: Message, blocks: tuple[int, ...]) -> Decision:
        """Checks a new request, and puts actions where the pool finds them."""
        if message.type is MessageType.STEP:
            part = self._parts[blocks]
            part.unpack_actions(message.body, message.payload)
            for start, stop in part.ranges:
                if not self._bounds.hold(start, stop):
                    self._refuse_actions(start, stop)
            return RunStep(self._session, blocks, bool(message.flags & _ALONE))
        if message.type is MessageType.RESET:
            return RunReset(self._session, self._read_resets(message))
        return RunCall(self._session, self._read_call(message))

    def _refuse_actions(self, start: int, stop: int) -> None:
        """Looks closely at actions that seem to be out of bounds."""
        try:
            check_action_rows(self._spec, self._rows, start, stop, "")
        except ActionError as error:
            raise Refusal(ErrorCode.INVALID_ACTION, str(error)) from None

    def _read_resets(self, message: Message) -> list[Reset]:
        body = ResetBody.decode(message.body)
        if len(body.resets) != len(message.entries):
            raise RemoteProtocolError(
                f"expected a reset for each of {len(message.entries)} blocks; "
                f"got {len(body.resets)}"
            )
        resets = []
        for (index, _), (rows, seeds) in zip(message.entries, body.resets, strict=True):
            block = self._blocks[index]
            allowed = range(block.start, block.stop)
            if rows is not None and (
                len(set(rows)) < len(rows) or not all(row in allowed for row in rows)
            ):
                raise RemoteProtocolError(f"expected distinct rows in {allowed}")
            count = len(allowed) if rows is None else len(rows)
            if seeds is not None and len(seeds) != count:
                raise RemoteProtocolError(
                    f"expected {count} seeds for block {index}; got {len(seeds)}"
                )
            resets.append(Reset(index, rows, seeds))
        return resets

    def _read_call(self, message: Message) -> Call:
        body = CallBody.decode(message.body)
        (index, _), *others = message.entries
        block = self._blocks[index]
        if others or not block.start <= body.env_index < block.stop:
            raise RemoteProtocolError(
                f"expected one block, and an env in rows {block.start} to "
                f"{block.stop - 1}; got env {body.env_index}"
            )
        if body.kind == "set" and len(body.arguments) != 1:
            raise RemoteProtocolError("expected one argument to set")
        self._policy.check_call(body.kind, body.name, body.env_index)
        return Call(body.env_index, body.kind, body.name, body.arguments)

    def _answer(self, request: _Request) -> Reply:
        if request.type is MessageType.CALL:
            (finished,) = request.finished.values()
            if finished.error is not None:
                error = body_of(finished.error, Executed.YES)
                return self._reply(request, MessageType.ERROR, body=error.encode())
            result = finished.result
            return self._reply(request, MessageType.CALL_RESULT, payload=result)
        report, infos_dropped = self._report(request.finished.values())
        flags = _INFOS_DROPPED if infos_dropped else 0
        for finished in request.finished.values():
            if finished.is_padding:
                flags |= _PADDED
        body, payload = split_rows(self._parts[request.blocks].result_buffers())
        return self._reply(
            request,
            MessageType.RESULT,
            flags=flags,
            body=body,
            payload=payload,
            report=report,
        )

    def _report(self, outcomes: Collection[Outcome]) -> tuple[bytes, bool]:
        for outcome in outcomes:
            if outcome.infos or outcome.faults or outcome.error is not None:
                break
        else:
            return b"", False  # the usual case
        errors: dict[int, ErrorBody] = {
            outcome.block: body_of(outcome.error, Executed.UNKNOWN)
            for outcome in outcomes
            if outcome.error is not None
        }
        infos = {row: info for out in outcomes for row, info in out.infos.items()}
        faults = [fault for outcome in outcomes for fault in outcome.faults]
        return Report(infos=infos, faults=faults, errors=errors).encode()

    def _reply(
        self,
        request: _Request,
        type_: MessageType,
        *,
        flags: int = 0,
        body: bytes = b"",
        payload: Buffer = b"",
        report: bytes = b"",
    ) -> Reply:
        answer = Message(
            type=type_,
            flags=flags,
            session=self._session,
            boot=self._boot,
            epoch=self.epoch,
            request=request.id,
            attempt=request.attempt,
            entries=request.entries,
            body=body,
            payload=payload,
            report=report,
        )
        return Reply(request.route, encode(answer))
