"""Servers with one defect each, and the `envserve check` rule that finds it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from envserve.envs.seeding import draw_root_seed
from envserve.spaces import codec
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Welcome
from envserve.wire.message import Message
from tests.envserve.checked_server import Envs, Server

DEFECTS: Final[dict[type[Server], str]] = {}
Kind = MessageType


def found_by(rule: str) -> Callable[[type[Any]], type[Any]]:
    """Register a broken server, or broken envs, with the rule that finds the defect."""

    def register(broken: type[Any]) -> type[Any]:
        attributes = {} if issubclass(broken, Server) else {"envs": broken}
        server = type(broken.__name__, (Server,), attributes) if attributes else broken
        DEFECTS[server] = rule
        return broken

    return register


def changed(message: Message, **fields: Any) -> Message:
    return dataclasses.replace(message, **fields)


# Contents of replies.


@found_by("welcome")
class ReportsTooManyFreeEnvs(Server):
    def change_reply(self, message: Message) -> Message:
        if message.type is Kind.WELCOME:
            fields = vars_of(Welcome.decode(message.body))
            message.body = Welcome(**{**fields, "free_envs": 999}).encode()
        return message


def vars_of(body: Any) -> dict[str, Any]:
    return {name: getattr(body, name) for name in body.__struct_fields__}


@found_by("welcome")
class OmitsTheAttempt(Server):
    def change_reply(self, message: Message) -> Message:
        return changed(message, attempt=0)


@found_by("welcome")
class OmitsTheSessionOfCopies(Server):
    def change_reply(self, message: Message) -> Message:
        return changed(message, session=message.session * (message.attempt == 0))


@found_by("welcome")
class ChangesItsBootId(Server):
    num_welcomes = 0

    def change_reply(self, message: Message) -> Message:
        self.num_welcomes += message.type is Kind.WELCOME
        return changed(message, boot=message.boot + self.num_welcomes)


@found_by("versions")
class AcceptsEveryVersion(Server):
    def change_request(self, message: Message) -> Message:
        is_hello = message.type is Kind.HELLO
        return changed(message, body=codec.encode({})) if is_hello else message


@found_by("versions")
class SendsErrorsInAnotherVersion(Server):
    def change_reply(self, message: Message) -> Message:
        return changed(message, version=2)


@found_by("versions")
class OmitsTheErrorCode(Server):
    def change_reply(self, message: Message) -> Message:
        if message.type is Kind.ERROR:
            message.body = codec.encode({"text": "it is broken"})
        return message


@found_by("types")
class IgnoresUnknownTypes(Server):
    def change_request(self, message: Message) -> Message | None:
        return message if isinstance(message.type, Kind) else None


@found_by("types")
class RepliesToReplies(Server):
    def change_request(self, message: Message) -> Message:
        return changed(message, type=100) if message.type >= 128 else message


@found_by("encodings")
class StopsAfterABadEncoding(Server):
    is_dead = False

    def change_request(self, message: Message) -> Message | None:
        self.is_dead |= message.body == b"\xc1"
        return None if self.is_dead else message


@found_by("lengths")
class IgnoresLongBodies(Server):
    def receive_frames(self, route: bytes, frames: Any) -> None:
        if len(frames[0]) < 5000:
            super().receive_frames(route, frames)


@found_by("granted")
class GrantsRowsTwice(Server):
    def change_reply(self, message: Message) -> Message:
        if message.type is Kind.GRANTED:
            fields = codec.decode(message.body)
            fields["blocks"][-1][0] -= 1
            message.body = codec.encode(fields)
        return message


@found_by("granted")
class DividesRowsUnequally(Server):
    def change_reply(self, message: Message) -> Message:
        if message.type is Kind.GRANTED:
            fields = codec.decode(message.body)
            for first, second in itertools.pairwise(fields["blocks"]):
                first[1] = second[0] = first[1] - 1
            message.body = codec.encode(fields)
        return message


@found_by("granted")
class DescribesAnUnknownSpace(Server):
    def change_reply(self, message: Message) -> Message:
        message.body = message.body.replace(b"discrete", b"discreet")
        return message


@found_by("bad_attach")
class SendsOnlyInternalErrors(Server):
    def change_reply(self, message: Message) -> Message:
        if message.type is Kind.ERROR:
            fields = vars_of(ErrorBody.decode(message.body))
            message.body = ErrorBody(**fields | {"code": ErrorCode.INTERNAL}).encode()
        return message


# Sessions and leases.


@found_by("fenced")
class IgnoresBootIds(Server):
    def change_request(self, message: Message) -> Message:
        is_other = message.type in (Kind.PING, Kind.STEP) and message.boot
        return changed(message, boot=self.boot) if is_other else message


@found_by("fenced")
class IgnoresEpochs(Server):
    def change_request(self, message: Message) -> Message:
        record = self.protocol.leases.get(("", message.session))
        return changed(message, epoch=record.number) if record else message


@found_by("attached_again")
class IgnoresAChangedAttach(Server):
    def change_request(self, message: Message) -> Message:
        record = self.protocol.leases.get(("", message.session))
        is_again = record is not None and message.type is Kind.ATTACH
        return changed(message, body=record.attach_body) if is_again else message  # type: ignore[union-attr]


@found_by("detached")
class RevivesEndedSessions(Server):
    def change_request(self, message: Message) -> Message:
        self.protocol.leases.ended_sessions.clear()
        return message


@found_by("detached")
class IgnoresDetach(Server):
    def change_request(self, message: Message) -> Message:
        return (
            changed(message, type=Kind.PING) if message.type is Kind.DETACH else message
        )


@found_by("silence")
class NeverExpiresLeases(Server):
    def poll(self, now: float) -> None:
        pass


@found_by("separate_sessions")
class MixesSessions(Server):
    def change_request(self, message: Message) -> Message:
        pools = list(self.pools.values())
        seeds = {pool.config.seed for pool in pools}
        if message.type is Kind.STEP and len(seeds) > 1:
            pools[0].draws, pools[-1].draws = pools[-1].draws, pools[0].draws  # type: ignore[attr-defined]
        return message


# Requests must be executed at most once.


@found_by("copies")
class StepsForCopies(Server):
    def change_request(self, message: Message) -> Message:
        if message.type is Kind.STEP and message.attempt:
            for pool in self.pools.values():
                for row in range(pool.config.num_envs):
                    pool._step(row)
        return message


@found_by("copies")
class IgnoresCopies(Server):
    def change_request(self, message: Message) -> Message | None:
        is_copy = message.type is Kind.STEP and message.attempt
        return None if is_copy else message


@found_by("copies")
class RepliesToAnAttemptTwice(Server):
    num_welcomes = 0

    def receive_frames(self, route: bytes, frames: Any) -> None:
        super().receive_frames(route, frames)
        self.sent = getattr(self, "sent", {})
        if bytes(frames[0]) in self.sent:
            self.links[route].append(self.sent[bytes(frames[0])])
        elif self.links[route] and frames[0][5] == Kind.STEP:
            self.sent[bytes(frames[0])] = self.links[route][-1]


@found_by("second_connection")
class RepliesToTheFirstRoute(Server):
    def receive(self, peer: Any, frames: Any, now: float) -> None:
        self.routes = getattr(self, "routes", {})
        first = self.routes.setdefault(bytes(frames[0][8:16]), peer)
        super().receive(first, frames, now)


@found_by("seqs")
class AcceptsGaps(Server):
    def change_request(self, message: Message) -> Message:
        lease = self.lease_of(message)
        if message.type is Kind.STEP and lease:
            for block, seq in message.entries:
                if lease._last_seq[block : block + 1] == [seq - 2]:
                    lease._last_seq[block] += 1
        return message


@found_by("seqs")
class AcceptsOldSteps(Server):
    def change_request(self, message: Message) -> Message:
        lease = self.lease_of(message)
        if message.type is Kind.STEP and not message.attempt and lease:
            for block, seq in message.entries:
                if lease._last_seq[block : block + 1] == [seq]:
                    lease._last_seq[block] -= 1
        return message


@found_by("bad_steps")
class CountsRejectedSteps(Server):
    def change_reply(self, message: Message) -> Message:
        lease = self.lease_of(message)
        if message.type is Kind.ERROR and message.entries and lease:
            lease._last_seq[:] = [seq + 1 for seq in lease._last_seq]
        return message


@found_by("bad_steps")
class PadsShortActions(Server):
    def change_request(self, message: Message) -> Message:
        short = message.type is Kind.STEP and len(message.body) % 8 == 7
        return changed(message, body=message.body + b"\0") if short else message


@found_by("bad_actions")
class ClipsActions(Server):
    def change_request(self, message: Message) -> Message:
        if message.type is Kind.STEP and len(message.body) % 8 == 0:
            actions = np.frombuffer(message.body, np.int64)
            message.body = actions.clip(0, 2).tobytes()
        return message


# Rows.


class Results(Server):
    """Corrupts results: four rewards, flags and statuses, then observations."""

    def corrupt(self, rows: bytes) -> bytes:
        raise NotImplementedError

    def change_reply(self, message: Message) -> Message:
        if message.type is Kind.RESULT:
            message.body = self.corrupt(message.body)
        return message


@found_by("granted")
class SendsShortRows(Results):
    def corrupt(self, rows: bytes) -> bytes:
        return rows[:-1]


@found_by("granted")
class SendsAnUnknownStatus(Results):
    def corrupt(self, rows: bytes) -> bytes:
        return rows[:40] + b"\7" + rows[41:]


@found_by("granted")
class ReportsAFaultWithoutText(Results):
    def corrupt(self, rows: bytes) -> bytes:
        return rows[:40] + b"\1" + rows[41:]


@found_by("equal_seeds")
class IgnoresAllSeeds(Envs):
    def _reset(self, row: int, seed: Any = None, options: bytes = b"") -> Any:
        return super()._reset(row, draw_root_seed())


@found_by("first_seeds")
class DerivesSeedsDifferently(Envs):
    def seed_of(self, row: int) -> int:
        return self.config.seed + self.config.first_env_index + row


@found_by("given_seeds")
class ResetsAllRows(Envs):
    def _finish_reset(self, reset: Any) -> Any:
        if reset.env_indices is not None:
            for row in range(self.config.num_envs):
                self._reset(row, 1)
        return super()._finish_reset(reset)


@found_by("given_seeds")
class IgnoresGivenSeeds(Envs):
    def _reset(self, row: int, seed: Any = None, options: bytes = b"") -> Any:
        return super()._reset(row)


@found_by("next_step")
class AlwaysResetsInTheSameStep(Envs):
    def end_episode(self, row: int) -> None:
        super().end_episode(row)
        if self.config.autoreset != "same_step":
            self._reset(row)


@found_by("next_step")
class SendsWrongFinalObservations(Envs):
    def end_episode(self, row: int) -> None:
        super().end_episode(row)
        self.rows.final_observation[0][row] = self.rows.observation[0][row]
        if self.config.autoreset != "same_step":
            self.rows.final_observation[0][row] += 1


@found_by("next_step")
class AddsRewardAfterTheEnd(Envs):
    def _step(self, row: int) -> Any:
        had_ended = self.has_ended[row]
        super()._step(row)
        self.rows.reward[row] += had_ended


@found_by("disabled")
class ResetsWithoutARequest(Envs):
    def end_episode(self, row: int) -> None:
        super().end_episode(row)
        if self.config.autoreset == "disabled":
            self._reset(row)


@found_by("pings")
class ReportsBlocksAsRunning(Server):
    def change_reply(self, message: Message) -> Message:
        if message.type is Kind.PONG:
            message.body = codec.encode({"running": {0: 5}})
        return message


@found_by("running")
class ListsNoRunningBlock(Server):
    def change_reply(self, message: Message) -> Message:
        if message.type is Kind.PONG:
            message.body = codec.encode({"running": {}})
        return message


@found_by("granted")
class IgnoresResets(Server):
    def change_request(self, message: Message) -> Message | None:
        return None if message.type is Kind.RESET else message


@found_by("granted")
class NeverFinishes(Server):
    def finish_all(self, now: float) -> None:
        pass


@found_by("calls")
class CallsHiddenAttributes(Server):
    def change_request(self, message: Message) -> Message:
        if message.type is Kind.CALL:
            fields = codec.decode(message.body)
            message.body = codec.encode({**fields, "name": "metadata"})
        return message
