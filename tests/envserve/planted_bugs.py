"""Bugs that are easily introduced, planted at module boundaries.

They drop, duplicate, alter or swap a message, decision, outcome or row. The few bugs
that depend on internals are at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

from envserve.client import batch_env
from envserve.client.absence import Absence
from envserve.client.lane_group import LaneGroup
from envserve.client.row_set import RowSetCache
from envserve.lane import Outcome, Reset
from envserve.session.client import attachment, client_blocks
from envserve.session.client.client_session import ClientSession
from envserve.session.server import lease, lease_table
from envserve.session.server.decisions import EndPool, RunReset, RunStep, SessionId
from envserve.session.server.server_protocol import ServerProtocol
from envserve.slab import Status
from envserve.wire.constants import MessageType
from envserve.wire.message import decode, encode
from envserve.wire.rows import BlockParts, RowPart
from tests.simulation.hijacker import OWNER
from tests.simulation.profile import BATCHES, LINGERING, Profile

Patch = pytest.MonkeyPatch


def faulty(kind: str, profile: Profile = LINGERING, **changes: Any) -> Profile:
    return dataclasses.replace(profile, fault_rate=0.01, faults={kind: 1.0}, **changes)


class Bug(NamedTuple):
    """A function that plants a bug, and the profile that reveals it; None for any."""

    plant: Callable[[Patch], None]
    profile: Profile | None = None


BUGS: Final[list[Bug]] = []


def bug(profile: Profile | None = None) -> Callable[[Callable[[Patch], None]], None]:
    return lambda plant: BUGS.append(Bug(plant, profile))


def around(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function with `change(real, ...)`."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **options: change(real, *args, **options))


# Messages.


def alter_messages(patch: Patch, half: type[Any], alter: Callable[..., Any]) -> None:
    """Alter the messages that one side receives; None drops a message."""

    def receive(real: Any, self: Any, *peer_frames_now: Any) -> Any:
        *peer, frames, now = peer_frames_now
        message = alter(self, decode(frames))
        return [] if message is None else real(self, *peer, encode(message), now)

    around(patch, half, "receive", receive)


@bug(Profile(loss=0.1))
def requests_are_not_sent_again(patch: Patch) -> None:
    alter_messages(patch, ServerProtocol, lambda _, m: None if m.attempt else m)


@bug(faulty("send_stray"))
def a_stale_epoch_is_accepted(patch: Patch) -> None:
    def alter(self: Any, asked: Any) -> Any:
        record = self.leases.get((OWNER, asked.session))
        if record is not None and record.lease is not None:
            asked.epoch = record.number
        return asked

    alter_messages(patch, ServerProtocol, alter)


@bug(faulty("send_stray"))
def a_stale_boot_is_accepted(patch: Patch) -> None:
    def alter(self: Any, asked: Any) -> Any:
        asked.boot = asked.boot and self.boot
        return asked

    alter_messages(patch, ServerProtocol, alter)


@bug()
def replies_to_other_sessions_are_accepted(patch: Patch) -> None:
    def alter(self: Any, reply: Any) -> Any:
        reply.session = self.requests.session
        return reply

    alter_messages(patch, ClientSession, alter)


@bug()
def a_late_reply_is_matched_to_a_new_request(patch: Patch) -> None:
    def alter(self: Any, reply: Any) -> Any:
        in_flight = self.requests.unanswered
        blocks = [block for block, _ in reply.entries]
        for request in () if reply.request in in_flight else in_flight.values():
            if blocks and blocks == [block for block, _ in request.entries]:
                reply.request, reply.entries = request.id, request.entries
        return reply

    alter_messages(patch, ClientSession, alter)


@bug()
def a_user_can_access_sessions_of_others(patch: Patch) -> None:
    def drop(real: Any, self: Any, peer: Any, *frames_now: Any) -> Any:
        return real(self, (*peer[:-1], OWNER), *frames_now)

    around(patch, ServerProtocol, "receive", drop)


@bug()
def a_user_can_detach_sessions_of_others(patch: Patch) -> None:
    def drop(real: Any, self: Any, peer: Any, frames: Any, now: float) -> Any:
        if decode(frames).type is MessageType.DETACH:
            peer = (*peer[:-1], OWNER)
        return real(self, peer, frames, now)

    around(patch, ServerProtocol, "receive", drop)


# Decisions.


@bug()
def envs_are_not_freed(patch: Patch) -> None:
    def keep(real: Any, *arguments: Any) -> Any:
        return [d for d in real(*arguments) if not isinstance(d, EndPool)]

    for name in ("receive", "expire_leases", "stop", "pool_failed", "pool_finished"):
        around(patch, ServerProtocol, name, keep)


@bug()
def a_step_is_answered_before_it_finishes(patch: Patch) -> None:
    finish = ServerProtocol.pool_finished
    answered: set[tuple[SessionId, int]] = set()

    def finish_immediately(real: Any, self: Any, *arguments: Any) -> Any:
        decisions = real(self, *arguments)
        for step in [d for d in decisions if isinstance(d, RunStep)]:
            answered.update((step.session, block) for block in step.blocks)
            decisions += finish(self, step.session, [Outcome(b) for b in step.blocks])
        return decisions

    def finish_others(real: Any, self: Any, session: Any, ended: Any, _: Any) -> Any:
        return real(
            self, session, [o for o in ended if (session, o.block) not in answered]
        )

    around(patch, ServerProtocol, "receive", finish_immediately)
    around(patch, ServerProtocol, "pool_finished", finish_others)


@bug(faulty("kill_client", Profile()))
def leases_never_expire(patch: Patch) -> None:
    patch.setattr(ServerProtocol, "next_deadline", lambda self: math.inf)


@bug()
def capacity_is_ignored(patch: Patch) -> None:
    patch.setattr(lease_table.LeaseTable, "num_free_envs", 1 << 20)


@bug(faulty("cut_one_way", Profile(), max_outage=1000.0))
def silence_is_never_detected(patch: Patch) -> None:
    patch.setattr(attachment.Attachment, "give_up_at", math.inf)


@bug()
def leases_reuse_seeds(patch: Patch) -> None:
    patch.setattr(
        attachment.Attachment, "next_attach", property(lambda self: self.attach)
    )


# Outcomes and block states.


@bug()
def rejected_operations_use_up_a_seq(patch: Patch) -> None:
    around(
        patch,
        client_blocks.ClientBlocks,
        "fail",
        lambda real, *args, uses_seq=True: real(*args),
    )


@bug()
def a_lost_block_continues_its_episode(patch: Patch) -> None:
    def drop(real: Any, self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        self.lost.clear()

    around(patch, client_blocks.ClientBlocks, "mark_lost", drop)


@bug()
def a_lost_lease_is_not_marked(patch: Patch) -> None:
    def alter(real: Any, self: Any) -> Any:
        outcomes = real(self)
        self.rows.truncated[self.rows.status == Status.SERVER_LOST] = False
        self.rows.status[:] = Status.OK
        return outcomes

    around(patch, ClientSession, "collect", alter)


@bug(BATCHES)
def the_last_observation_is_not_kept(patch: Patch) -> None:
    patch.setattr(client_blocks, "copy_observation_to_final", lambda rows, index: None)


@bug(BATCHES)
def a_late_result_is_returned_for_the_next_action(patch: Patch) -> None:
    def drop(real: Any, self: Any, positions: Any) -> Any:
        others = real(self, positions)
        self.awaited_late_steps.clear()
        return others

    around(patch, Absence, "await_late_steps", drop)


@bug(BATCHES)
def a_reset_drops_late_results_of_other_rows(patch: Patch) -> None:
    def give_up(real: Any, self: Any, *arguments: Any) -> Any:
        infos = real(self, *arguments)
        for position in self.absence.late_steps & self.queue.outcomes.keys():
            self.absence.late_steps.remove(position)
            del self.queue.outcomes[position]
        return infos

    around(patch, LaneGroup, "finish_reset", give_up)


def mark_as_valid(patch: Patch, status: Status) -> None:
    def show(real: Any, self: Any, spec: Any, row_set: Any, result: Any) -> None:
        real(self, spec, row_set, result)
        chosen = result.status == status
        result.valid[chosen], result.status[chosen] = True, Status.OK

    around(patch, Absence, "mark_rows", show)


@bug(BATCHES)
def padding_is_marked_valid(patch: Patch) -> None:
    mark_as_valid(patch, Status.PENDING)


@bug(BATCHES)
def late_results_are_marked_valid(patch: Patch) -> None:
    mark_as_valid(patch, Status.LATE)


# Batch rows.


@bug()
def a_dropped_action_repeats_the_previous_one(patch: Patch) -> None:
    count = itertools.count(1)

    def unpack(real: Any, *part_and_buffers: Any) -> None:
        if next(count) % 20:
            real(*part_and_buffers)

    around(patch, RowPart, "unpack_actions", unpack)


def alter_actions(patch: Patch, alter: Callable[..., Any]) -> None:
    def send(real: Any, self: Any, row_set: Any, actions: Any, **how: Any) -> None:
        real(self, row_set, alter(row_set, actions), **how)

    around(patch, LaneGroup, "send", send)


@bug(BATCHES)
def actions_are_shifted_by_one_row(patch: Patch) -> None:
    alter_actions(patch, lambda _, actions: [np.roll(a, 1, axis=0) for a in actions])


@bug(BATCHES)
def actions_are_written_after_the_step_was_submitted(patch: Patch) -> None:
    last: dict[Any, Any] = {}

    def delay(row_set: Any, actions: Any) -> Any:
        before = last.get(row_set, actions)
        last[row_set] = actions
        return before

    alter_actions(patch, delay)


@bug(BATCHES)
def a_send_ignores_the_order_of_its_rows(patch: Patch) -> None:
    around(patch, RowSetCache, "for_rows", lambda real, *args: (real(*args)[0], None))


@bug(BATCHES)
def a_step_waits_for_its_first_block_only(patch: Patch) -> None:
    def wait(real: Any, self: Any, positions: Any, _: Any, deadline: float) -> Any:
        real(self, positions, 1, deadline)
        return positions

    around(patch, LaneGroup, "wait", wait)


def alter_results(patch: Patch, alter: Callable[[Any], Any]) -> None:
    around(patch, batch_env, "gather_result", lambda real, *args: alter(real(*args)))


@bug(BATCHES)
def the_reward_belongs_to_the_previous_step(patch: Patch) -> None:
    last: dict[int, Any] = {}

    def keep(result: Any) -> Any:
        before = last.get(len(result.reward), np.zeros_like(result.reward))
        last[len(before)] = result.reward
        return result._replace(reward=before)

    alter_results(patch, keep)


@bug(BATCHES)
def final_observations_belong_to_the_next_episode(patch: Patch) -> None:
    alter_results(patch, lambda r: r._replace(final_observation=r.observation))


# Resets.


@bug()
def a_reset_gets_the_options_of_the_previous_one(patch: Patch) -> None:
    last: dict[int, Any] = {}

    def read(real: Any, message: Any, blocks: Any) -> Any:
        resets = real(message, blocks)
        before = last.get(message.session, b"")
        last[message.session] = resets[0].options
        return [dataclasses.replace(reset, options=before) for reset in resets]

    around(patch, lease, "read_resets", read)


@bug()
def a_reset_runs_twice(patch: Patch) -> None:
    def begin_twice(real: Any, self: Any, *arguments: Any) -> Any:
        decisions = real(self, *arguments)
        return [*decisions, *(d for d in decisions if isinstance(d, RunReset))]

    around(patch, ServerProtocol, "receive", begin_twice)


@bug(BATCHES)
def a_reset_of_a_row_resets_its_block(patch: Patch) -> None:
    def reset(real: Any, self: Any, rows: Any, seeds: Any, options: Any) -> Any:
        if seeds is None:
            blocks = {self.blocks.block_of(int(row)) for row in rows}
            rows = np.array([row for b in blocks for row in range(b.start, b.stop)])
        return real(self, rows, seeds, options)

    around(patch, LaneGroup, "start_reset", reset)


@bug(BATCHES)
def seeds_are_shifted_by_one_row(patch: Patch) -> None:
    def reset(real: Any, self: Any, rows: Any, seeds: Any, options: Any) -> Any:
        return real(self, rows, seeds and [*seeds[1:], seeds[0]], options)

    around(patch, LaneGroup, "start_reset", reset)


@bug(BATCHES)
def infos_of_a_reset_are_shifted_by_one_row(patch: Patch) -> None:
    def reset(real: Any, self: Any, *arguments: Any) -> Any:
        infos = real(self, *arguments)
        return {row + 1: info for row, info in infos.items()}

    around(patch, LaneGroup, "finish_reset", reset)


# Calls.


@bug()
def a_call_returns_the_results_of_the_previous_one(patch: Patch) -> None:
    last: dict[Any, Any] = {}

    def alter(self: Any, reply: Any) -> Any:
        if reply.type is MessageType.CALL_RESULT:
            own = reply.payload
            reply.payload = last.get(self, own)
            last[self] = own
        return reply

    alter_messages(patch, ClientSession, alter)


@bug(BATCHES)
def a_call_of_remaining_rows_repeats_all_rows(patch: Patch) -> None:
    def call(real: Any, self: Any, calls: Any) -> Any:
        if any(isinstance(each, Reset) for each in calls.values()):
            return real(self, calls)
        last = vars(self).setdefault("_calls_before", {})
        first = {
            at: last.setdefault((at, each.arguments), each)
            for at, each in calls.items()
        }
        return real(self, first)

    around(patch, LaneGroup, "start", call)


# Internals: a lease executes a request out of order, and does not record it.


def execute_as_next(patch: Patch, is_executed: Callable[[int], bool]) -> None:
    def handle(real: Any, self: Any, message: Any, *others: Any) -> Any:
        last = list(self._last_seq)
        ahead = max(seq - last[block] for block, seq in message.entries)
        is_idle = not any(self._states[b] in lease._BUSY for b, _ in message.entries)
        if not (is_idle and is_executed(ahead)):
            return real(self, message, *others)
        message.entries = tuple(
            [(block, last[block] + 1) for block, _ in message.entries]
        )
        decisions = real(self, message, *others)
        self._last_seq = last
        return decisions

    around(patch, lease.Lease, "handle", handle)


@bug()
def a_copy_of_an_answered_request_is_executed(patch: Patch) -> None:
    execute_as_next(patch, lambda ahead: ahead == 0)


@bug()
def a_late_copy_of_an_older_request_is_executed(patch: Patch) -> None:
    execute_as_next(patch, lambda ahead: ahead < 0)


@bug(faulty("send_stray"))
def a_seq_beyond_the_next_is_accepted(patch: Patch) -> None:
    execute_as_next(patch, lambda ahead: ahead > 1)


@bug()
def rows_of_a_reply_are_in_another_order(patch: Patch) -> None:
    class Sorted(BlockParts):
        def __missing__(self, indexes: tuple[int, ...]) -> RowPart:
            return super().__missing__(tuple(sorted(indexes)))

    patch.setattr(lease, "BlockParts", Sorted)


@bug(faulty("close_client"))
def ended_sessions_are_forgotten(patch: Patch) -> None:
    patch.setattr(lease_table._RecentSessions, "add", lambda *_: None)
