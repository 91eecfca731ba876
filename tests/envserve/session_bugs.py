"""Bugs to plant into both halves of a session, each one a guard that is gone.

Some guards stand behind each other: where one alone changes nothing, those that stand
behind it are taken away as well.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pytest

from envserve.chaos.sessions import Profile, caller, ledger_pool
from envserve.chaos.sessions.host import Host
from envserve.chaos.sessions.ledger_pool import LedgerPool
from envserve.lane import Block, Outcome
from envserve.session import (
    ClientSession,
    ServerSession,
    admission,
    attachment,
    lease,
    sender,
    server,
)
from envserve.session.away import Away
from envserve.session.lease import Lease, _Verdict
from envserve.session.operations import Operations
from envserve.session.pairing import Pairing
from envserve.session.parts import BlockParts
from envserve.session.recovery import Recovery
from envserve.session.requests import Pending, Requests
from envserve.session.stored_rows import StoredRows
from envserve.slab import Rows, Status, write_pending
from envserve.wire import Buffer, Message, MessageType, RowPart, decode

__all__ = ["BUGS", "Bug", "session_numbers_are_used_again"]

Patch = pytest.MonkeyPatch
#: Where these stand in a message.
_SESSION_OFFSET: Final = 8
_BOOT_OFFSET: Final = 16
_EPOCH_OFFSET: Final = 24


def _judge_as(patch: Patch, judged: _Verdict, verdict: _Verdict) -> None:
    judge = Lease._judge

    def judge_wrongly(self: Lease, entries: Any) -> _Verdict:
        found = judge(self, entries)
        return verdict if found is judged else found

    patch.setattr(Lease, "_judge", judge_wrongly)


def copies_are_executed(patch: Patch) -> None:
    _judge_as(patch, _Verdict.KNOWN, _Verdict.RUN)


def late_requests_are_executed(patch: Patch) -> None:
    _judge_as(patch, _Verdict.LATE, _Verdict.RUN)


def seqs_are_used_twice(patch: Patch) -> None:
    end = Operations._end
    patch.setattr(
        Operations,
        "_end",
        lambda self, pending, **_: end(self, pending, uses_seq=False),
    )


def refused_operations_use_up_a_seq(patch: Patch) -> None:
    end = Operations._end
    patch.setattr(Operations, "_end", lambda self, pending, **_: end(self, pending))


def late_replies_are_accepted(patch: Patch) -> None:
    get = Requests.get

    def get_any(self: Requests, request: int) -> Pending | None:
        return get(self, request) or next(iter(self), None)

    patch.setattr(Requests, "get", get_any)
    patch.setattr(Pairing, "_is_answer", lambda *_: True)


def _overwrite(
    frames: Sequence[Buffer], offset: int, number: int, form: str = "<Q"
) -> list[Buffer]:
    head = bytearray(frames[0])
    struct.pack_into(form, head, offset, number)
    return [bytes(head), *frames[1:]]


def answers_to_other_sessions_are_accepted(patch: Patch) -> None:
    receive = ClientSession.receive

    def receive_any(self: ClientSession, frames: list[Buffer], now: float) -> None:
        receive(self, _overwrite(frames, _SESSION_OFFSET, self._sender.session), now)

    patch.setattr(ClientSession, "receive", receive_any)


def session_numbers_are_used_again(patch: Patch) -> None:
    """Only then boots and epochs are all that tells leases apart."""
    begin = Recovery.begin

    def begin_silently(self: Recovery, *arguments: Any, **_: Any) -> None:
        # A late farewell to a lease would end the next one.
        begin(self, *arguments, is_restart=True)

    patch.setattr(sender, "next_session", lambda session: session)
    patch.setattr(caller, "ProtocolError", ())
    patch.setattr(Recovery, "begin", begin_silently)
    patch.setattr(Host, "_note_start", lambda *_: None)
    patch.setattr(admission.Recent, "note", lambda *_: None)


def starts_of_a_server_are_not_told_apart(patch: Patch) -> None:
    session_numbers_are_used_again(patch)
    on_client, on_server = ClientSession.receive, ServerSession.receive

    def receive_reply(self: ClientSession, frames: list[Buffer], now: float) -> None:
        if self._sender.boot:
            frames = _overwrite(frames, _BOOT_OFFSET, self._sender.boot)
        on_client(self, frames, now)

    def receive_request(
        self: ServerSession, route: bytes, frames: list[Buffer], now: float
    ) -> Any:
        if frames[0][5] != MessageType.HELLO:
            frames = _overwrite(frames, _BOOT_OFFSET, self.boot)
        return on_server(self, route, frames, now)

    patch.setattr(ClientSession, "receive", receive_reply)
    patch.setattr(ServerSession, "receive", receive_request)


def epochs_are_not_told_apart(patch: Patch) -> None:
    session_numbers_are_used_again(patch)
    on_client, on_server = ClientSession.receive, ServerSession.receive

    def receive_reply(self: ClientSession, frames: list[Buffer], now: float) -> None:
        epoch = self._sender.epoch
        on_client(self, _overwrite(frames, _EPOCH_OFFSET, epoch, "<I"), now)

    def receive_request(
        self: ServerSession, route: bytes, frames: list[Buffer], now: float
    ) -> Any:
        claim = self._claims.get(decode(frames).session)
        if claim is not None and claim.lease is not None:
            frames = _overwrite(frames, _EPOCH_OFFSET, claim.lease.epoch, "<I")
        return on_server(self, route, frames, now)

    patch.setattr(ClientSession, "receive", receive_reply)
    patch.setattr(ServerSession, "receive", receive_request)


class _SortedParts(BlockParts):
    def __missing__(self, indexes: tuple[int, ...]) -> RowPart:
        return super().__missing__(tuple(sorted(indexes)))


def blocks_are_answered_in_another_order(patch: Patch) -> None:
    patch.setattr(lease, "BlockParts", _SortedParts)


def requests_are_answered_before_all_blocks_are_done(patch: Patch) -> None:
    finish = Lease.finish

    def finish_early(self: Lease, finished: Any) -> Any:
        for item in finished:
            request = self._requests[item.block]
            if request is not None and item.block in request.waiting:
                request.waiting = {item.block}
        return finish(self, finished)

    patch.setattr(Lease, "finish", finish_early)


def requests_are_not_sent_again(patch: Patch) -> None:
    patch.setattr(Requests, "next_resend", lambda self: float("inf"))
    patch.setattr(Requests, "resend", lambda self, now: False)


def envs_are_not_freed(patch: Patch) -> None:
    def keep(self: ServerSession, session: int) -> Any:
        claim = self._claims[session]
        asked = Message(type=MessageType.ATTACH, session=session)
        return [self._answers.farewell(claim.route, asked, claim.ending)]

    patch.setattr(ServerSession, "pool_closed", keep)


def leases_never_expire(patch: Patch) -> None:
    patch.setattr(ServerSession, "next_deadline", lambda self: float("inf"))


def capacity_is_not_looked_at(patch: Patch) -> None:
    patch.setattr(server, "check_claim", lambda *_: None)


def ended_sessions_are_forgotten(patch: Patch) -> None:
    patch.setattr(admission.Recent, "note", lambda *_: None)


def silence_is_never_noticed(patch: Patch) -> None:
    patch.setattr(Recovery, "lost_at", float("inf"))


def a_lost_block_is_stepped_on(patch: Patch) -> None:
    mark_lost = LedgerPool._mark_lost

    def forget(self: LedgerPool, block: int, status: Status) -> None:
        mark_lost(self, block, status)
        self._lost.clear()

    patch.setattr(LedgerPool, "_mark_lost", forget)


def padding_passes_for_valid(patch: Patch) -> None:
    def write_valid(rows: Rows, part: slice) -> None:
        rows.status[part] = Status.OK

    patch.setattr(ledger_pool, "write_pending", write_valid)


def leases_use_the_same_seeds_again(patch: Patch) -> None:
    patch.setattr(attachment, "attach_again", lambda attach, num_leases: attach)


def seqs_go_on_with_a_new_lease(patch: Patch) -> None:
    patch.setattr(Operations, "begin_lease", lambda self: None)


def a_lost_lease_is_not_marked(patch: Patch) -> None:
    def write_valid(self: StoredRows, block: Block, but: Any) -> None:
        self.write_observations(block)
        self._target.status[block.start : block.stop] = Status.OK

    patch.setattr(StoredRows, "write_lost", write_valid)


def late_results_pass_for_valid(patch: Patch) -> None:
    write_late = StoredRows.write_late

    def write_valid(self: StoredRows, block: Block, but: Any) -> None:
        write_late(self, block, but)
        status = self._target.status[block.start : block.stop]
        status[status == Status.LATE] = Status.OK

    patch.setattr(StoredRows, "write_late", write_valid)


def overdue_steps_are_forgotten(patch: Patch) -> None:
    """And the next one is sent at once, as if there had been none."""

    def forget(self: Away, pending: Pending, now: float) -> None:
        for block, _ in pending.entries:
            place = self._operations.blocks[block]
            write_pending(self._operations.rows, slice(place.start, place.stop))
            finished = Outcome(block, pending.ticket, is_padding=True)
            self._operations.finish_block(finished)

    patch.setattr(Away, "give_up_waiting", forget)


def lost_episodes_go_on_after_a_restart(patch: Patch) -> None:
    """What was in flight is sent to the new lease as it is."""
    patch.setattr(Away, "lose", lambda *_: None)


def padding_is_executed(patch: Patch) -> None:
    def submit(
        self: Away, blocks: Sequence[int], now: float, ticket: int, is_alone: bool
    ) -> list[int]:
        for block in blocks:
            self._absences.pop(block, None)
        return list(blocks)

    patch.setattr(Away, "submit_step", submit)


#: Messages that come again, and minutes later, whatever has become of the connection.
_LINGERING: Final = Profile(
    num_callers=2, copies=0.5, max_delay=60.0, delay_power=8, is_sticky=True, pace=0.1
)


class Bug(NamedTuple):
    """A bug to plant.

    Attributes:
      plant: Plants it.
      profile: Where it shows, unless that is anywhere.
      shows: What it shows as, among other things; a regular expression.
    """

    plant: Callable[[Patch], None]
    profile: Profile | None = None
    shows: str = ""


def _with(kind: str, profile: Profile = _LINGERING, **changes: Any) -> Profile:
    return replace(profile, fault_rate=0.01, faults={kind: 1.0}, **changes)


_STALE: Final = r"action \d+ was (executed|meant)"

BUGS: Final = (
    Bug(copies_are_executed),
    Bug(late_requests_are_executed),
    Bug(seqs_are_used_twice),
    Bug(refused_operations_use_up_a_seq),
    Bug(late_replies_are_accepted),
    Bug(answers_to_other_sessions_are_accepted),
    Bug(starts_of_a_server_are_not_told_apart, _with("crash_host"), _STALE),
    Bug(epochs_are_not_told_apart, _with("break_pool"), _STALE),
    Bug(ended_sessions_are_forgotten, _with("close_caller")),
    Bug(blocks_are_answered_in_another_order),
    Bug(requests_are_answered_before_all_blocks_are_done),
    Bug(requests_are_not_sent_again, Profile(loss=0.1)),
    Bug(envs_are_not_freed),
    Bug(leases_never_expire, _with("kill_caller", Profile())),
    Bug(capacity_is_not_looked_at),
    Bug(silence_is_never_noticed, _with("cut_one_way", Profile(), max_outage=1000.0)),
    Bug(leases_use_the_same_seeds_again),
    Bug(seqs_go_on_with_a_new_lease),
    Bug(a_lost_lease_is_not_marked),
    Bug(late_results_pass_for_valid),
    Bug(overdue_steps_are_forgotten),
    Bug(lost_episodes_go_on_after_a_restart),
    Bug(padding_is_executed),
    Bug(a_lost_block_is_stepped_on),
    Bug(padding_passes_for_valid, _with("lose_worker", Profile())),
)
