"""Bugs that would be easy to make, on either side of the wire.

Each takes something real away, or puts something wrong in its place.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from envserve.client import batch_env, lane_group, step_result
from envserve.client.lane_group import Gathered, LaneGroup
from envserve.client.row_set import Piece, RowSet, RowSets
from envserve.lane import Reset
from envserve.session import ClientSession, ServerSession, client
from envserve.session.lease import Lease, _Verdict
from envserve.session.operations import Operations
from envserve.session.requests import Requests
from envserve.wire import MessageType, RowPart, decode, encode

__all__ = ["BUGS", "QUICK_WORLD", "WORLD_OF"]

Array = np.ndarray[Any, Any]
Patch = pytest.MonkeyPatch

BUGS: dict[str, Callable[[Patch], None]] = {}
#: A network without surprises but for lost replies.
QUICK_WORLD: dict[str, Any] = {
    "request_loss": 0.0,
    "reply_loss": 0.3,
    "copies": 0.0,
    "max_delay": 0.2,
    "max_work": 0.2,
}
#: Where a bug shows only in a world of its own.
WORLD_OF: dict[str, dict[str, Any]] = {"a resend has a new seq": QUICK_WORLD}


def bug(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS[plant.__name__.replace("_", " ")] = plant
    return plant


# The server's half.


def judging(
    patch: Patch, judge_anew: Callable[[Lease, _Verdict, Any], _Verdict]
) -> None:
    judge = Lease._judge
    patch.setattr(
        Lease,
        "_judge",
        lambda self, entries: judge_anew(self, judge(self, entries), entries),
    )


def is_running(self: Lease, entries: Sequence[tuple[int, int]]) -> bool:
    requests = [self._requests[block] for block, _ in entries]
    return any(request is not None and request.waiting for request in requests)


@bug
def a_copy_of_a_running_request_is_executed(patch: Patch) -> None:
    def judge(self: Lease, verdict: _Verdict, entries: Any) -> _Verdict:
        is_copy = verdict is _Verdict.KNOWN and is_running(self, entries)
        return _Verdict.RUN if is_copy else verdict

    judging(patch, judge)


@bug
def a_copy_of_an_answered_request_is_executed(patch: Patch) -> None:
    def judge(self: Lease, verdict: _Verdict, entries: Any) -> _Verdict:
        is_copy = verdict is _Verdict.KNOWN and not is_running(self, entries)
        return _Verdict.RUN if is_copy else verdict

    judging(patch, judge)


@bug
def a_late_copy_of_an_older_request_is_executed(patch: Patch) -> None:
    def judge(self: Lease, verdict: _Verdict, entries: Any) -> _Verdict:
        is_old = verdict is _Verdict.LATE and not is_running(self, entries)
        return _Verdict.RUN if is_old else verdict

    handle = Lease.handle

    def keep_last(self: Lease, *arguments: Any) -> Any:
        last = list(self._last_seq)
        decisions = handle(self, *arguments)
        self._last_seq = [max(pair) for pair in zip(last, self._last_seq, strict=True)]
        return decisions

    judging(patch, judge)
    patch.setattr(Lease, "handle", keep_last)


@bug
def a_seq_beyond_the_next_is_accepted(patch: Patch) -> None:
    def judge(self: Lease, verdict: _Verdict, entries: Any) -> _Verdict:
        is_gap = verdict is _Verdict.GAP and not is_running(self, entries)
        return _Verdict.RUN if is_gap else verdict

    judging(patch, judge)


@bug
def a_stale_epoch_is_accepted(patch: Patch) -> None:
    dispatch = ServerSession._dispatch

    def ignore_epoch(self: ServerSession, message: Any, *others: Any) -> Any:
        claim = self._claims.get(message.session)
        if claim is not None and claim.lease is not None:
            message = dataclasses.replace(message, epoch=claim.lease.epoch)
        return dispatch(self, message, *others)

    patch.setattr(ServerSession, "_dispatch", ignore_epoch)


@bug
def a_stale_boot_is_accepted(patch: Patch) -> None:
    dispatch = ServerSession._dispatch

    def ignore_boot(self: ServerSession, message: Any, *others: Any) -> Any:
        message = dataclasses.replace(message, boot=self.boot)
        return dispatch(self, message, *others)

    patch.setattr(ServerSession, "_dispatch", ignore_boot)


@bug
def a_request_is_answered_before_it_is_done(patch: Patch) -> None:
    handle = Lease.handle

    def answer_at_once(self: Lease, message: Any, *others: Any) -> Any:
        decisions = handle(self, message, *others)
        request = self._requests[message.entries[0][0]]
        if decisions and request is not None and request.waiting:
            decisions.append(self._answer(request))
        return decisions

    patch.setattr(Lease, "handle", answer_at_once)


@bug
def blocks_are_answered_in_another_order(patch: Patch) -> None:
    answer = Lease._answer

    def answer_reversed(self: Lease, request: Any) -> Any:
        turned = dataclasses.replace(request, blocks=request.blocks[::-1])
        return answer(self, turned)

    patch.setattr(Lease, "_answer", answer_reversed)


@bug
def an_action_is_dropped_and_the_last_one_applied_again(patch: Patch) -> None:
    unpack, count = RowPart.unpack_actions, itertools.count(1)

    def unpack_some(self: RowPart, *buffers: Any) -> None:
        if next(count) % 20:
            unpack(self, *buffers)

    patch.setattr(RowPart, "unpack_actions", unpack_some)


@bug
def two_clients_share_their_rows(patch: Patch) -> None:
    begin = Lease.__init__
    rows_of: dict[int, Any] = {}

    def begin_with_others_rows(self: Lease, **options: Any) -> None:
        rows = rows_of.setdefault(options["boot"], options["rows"])
        begin(self, **{**options, "rows": rows})

    patch.setattr(Lease, "__init__", begin_with_others_rows)


# The client's half.


@bug
def a_seq_lags_by_one(patch: Patch) -> None:
    begin = Operations._begin

    def begin_late(self: Operations, *arguments: Any) -> Any:
        entries = begin(self, *arguments)
        return tuple((block, max(1, seq - 1)) for block, seq in entries)

    patch.setattr(Operations, "_begin", begin_late)


@bug
def a_resend_has_a_new_seq(patch: Patch) -> None:
    resend = Requests.resend

    def resend_as_new(self: Requests, now: float) -> bool:
        due = [p for p in self if now >= p.resend_at and p.entries]
        is_any = resend(self, now)
        for pending in due:
            message = decode(pending.frames)
            self.remove(pending.id)
            message.request += 500_000
            message.entries = tuple((block, seq + 1) for block, seq in message.entries)
            pending.id, pending.entries = message.request, message.entries
            pending.frames = encode(message)
            self._pending[pending.id] = pending
            self._outbox.put(pending.id, pending.frames)
        return is_any

    patch.setattr(Requests, "resend", resend_as_new)


@bug
def a_resend_is_the_same_attempt(patch: Patch) -> None:
    patch.setattr("envserve.session.requests.set_attempt", lambda frame, _: frame)


@bug
def a_late_reply_answers_a_new_request(patch: Patch) -> None:
    def take_any(self: ClientSession, message: Any, now: float) -> None:
        blocks = {block for block, _ in message.entries}
        for pending in list(self._requests):
            if {block for block, _ in pending.entries} == blocks:
                self._granted.finish(pending, message)
                self._requests.remove(pending.id)

    patch.setitem(client._HANDLERS, MessageType.RESULT, take_any)


@bug
def a_reply_is_written_to_another_block(patch: Patch) -> None:
    finish = Operations.finish

    def finish_elsewhere(self: Operations, pending: Any, message: Any) -> None:
        if pending.part is not None and len(pending.entries) == 1:
            block = pending.entries[0][0]
            pending.part = self._parts[((block + 1) % len(self.blocks),)]
        finish(self, pending, message)

    patch.setattr(Operations, "finish", finish_elsewhere)


# What a batch makes of its lanes.


@bug
def rows_of_two_lanes_are_swapped(patch: Patch) -> None:
    begin = RowSet.__init__

    def swap(self: RowSet, blocks: Any) -> None:
        begin(self, blocks)
        if len(self.pieces) == 2 and len({p.set_rows.stop for p in self.pieces}) == 2:
            first, second = self.pieces
            if 2 * first.set_rows.stop == second.set_rows.stop:
                first.set_rows, second.set_rows = second.set_rows, first.set_rows

    patch.setattr(RowSet, "__init__", swap)


@bug
def an_action_goes_to_the_neighbour(patch: Patch) -> None:
    write = Piece.write_actions

    def write_shifted(self: Piece, actions: Sequence[Array]) -> None:
        write(self, [np.roll(array, 1, axis=0) for array in actions])

    patch.setattr(Piece, "write_actions", write_shifted)


@bug
def actions_are_written_once_the_step_was_submitted(patch: Patch) -> None:
    def step(self: LaneGroup, actions: Sequence[Array]) -> Gathered:
        ticket = self._begin()
        for piece in self.everything.pieces:
            piece.lane.submit_step(piece.blocks, ticket)
        self.everything.write_actions(actions)
        gathered = Gathered()
        for piece in self.everything.pieces:
            self._collect_all(piece.lane, ticket, piece.blocks, gathered, [])
        self._end([])
        return gathered

    patch.setattr(LaneGroup, "step", step)


@bug
def a_send_ignores_the_order_of_its_rows(patch: Patch) -> None:
    of_rows = RowSets.of_rows
    patch.setattr(RowSets, "of_rows", lambda self, rows: (of_rows(self, rows)[0], None))


@bug
def a_received_block_is_read_from_the_rows_of_another(patch: Patch) -> None:
    read = Piece.read

    def read_elsewhere(self: Piece) -> Any:
        if len(self.blocks) > 1:
            return read(self)
        other = self.lane.blocks[(self.blocks[0] + 1) % len(self.lane.blocks)]
        return self.lane.rows.at(slice(other.start, other.stop))

    patch.setattr(Piece, "read", read_elsewhere)


@bug
def a_step_waits_for_its_first_lane_only(patch: Patch) -> None:
    collect = LaneGroup._collect_all

    def collect_first(self: LaneGroup, lane: Any, *others: Any) -> Any:
        return collect(self, lane, *others) if lane is self._lanes[0] else []

    patch.setattr(LaneGroup, "_collect_all", collect_first)


@bug
def the_result_of_an_interrupted_call_answers_the_next(patch: Patch) -> None:
    def begin(self: LaneGroup) -> int:
        self._is_settled = False
        return 0

    submit = ClientSession.submit_step

    def submit_idle(self: ClientSession, blocks: Any, *others: Any) -> None:
        idle = [block for block in blocks if block not in self._granted.busy]
        submit(self, idle, *others)

    patch.setattr(LaneGroup, "_begin", begin)
    patch.setattr(ClientSession, "submit_step", submit_idle)


@bug
def a_reset_of_a_row_resets_its_block(patch: Patch) -> None:
    patch.setattr(lane_group, "Reset", lambda block, *_: Reset(block, None, None))


def gathering(patch: Patch, change: Callable[[Any], Any]) -> None:
    gather = step_result.gather_result
    patch.setattr(
        batch_env, "gather_result", lambda *arguments: change(gather(*arguments))
    )


@bug
def the_reward_is_that_of_the_step_before(patch: Patch) -> None:
    last: dict[int, Array] = {}

    def keep(result: Any) -> Any:
        reward = last.get(len(result.reward), np.zeros_like(result.reward))
        last[len(reward)] = result.reward
        return result._replace(reward=reward)

    gathering(patch, keep)


@bug
def a_lost_row_is_valid(patch: Patch) -> None:
    gathering(patch, lambda result: result._replace(valid=np.ones_like(result.valid)))


@bug
def final_observations_are_the_next_first_ones(patch: Patch) -> None:
    write = step_result._write_final

    def write_next(rows: Any, targets: Any) -> None:
        write(dataclasses.replace(rows, final_observation=rows.observation), targets)

    patch.setattr(step_result, "_write_final", write_next)


@bug
def final_observations_of_truncated_rows_are_forgotten(patch: Patch) -> None:
    patch.setattr(step_result, "_has_ended", lambda rows: rows.terminated.any())


@bug
def a_result_is_read_from_the_rows_of_the_step_before(patch: Patch) -> None:
    read = Piece.read
    last: dict[Piece, Any] = {}

    def read_last(self: Piece) -> Any:
        rows = read(self).at(np.arange(self.set_rows.stop - self.set_rows.start))
        before = last.get(self, rows)
        last[self] = rows
        return before

    patch.setattr(Piece, "read", read_last)
