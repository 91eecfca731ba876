"""Servers with one defect each, and the rule of `envserve check` that finds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from envserve.envs.seeding import draw_root_seed
from envserve.spaces import codec
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.handshake import ErrorBody, Welcome
from envserve.wire.message import Message
from tests.envserve.checked_server import Envs, Server

DEFECTS: Final[dict[type[Server], str]] = {}
Kind = MessageType


def found_by(rule: str) -> Callable[[type[Any]], type[Any]]:
    """Notes a server, or envs for one."""

    def note(broken: type[Any]) -> type[Any]:
        own = {} if issubclass(broken, Server) else {"envs": broken}
        DEFECTS[type(broken.__name__, (Server,), own) if own else broken] = rule
        return broken

    return note


def changed(message: Message, **fields: Any) -> Message:
    return dataclasses.replace(message, **fields)


# What it says.


@found_by("welcome")
class SaysMoreIsFreeThanThereIs(Server):
    def says(self, message: Message) -> Message:
        if message.type is Kind.WELCOME:
            told = vars_of(Welcome.decode(message.body))
            message.body = Welcome(**{**told, "free_envs": 999}).encode()
        return message


def vars_of(body: Any) -> dict[str, Any]:
    return {name: getattr(body, name) for name in body.__struct_fields__}


@found_by("welcome")
class ForgetsTheAttempt(Server):
    def says(self, message: Message) -> Message:
        return changed(message, attempt=0)


@found_by("welcome")
class ForgetsTheSession(Server):
    def says(self, message: Message) -> Message:
        return changed(message, session=message.session * (message.attempt == 0))


@found_by("welcome")
class HasAnotherBootIdEachTime(Server):
    num_said = 0

    def says(self, message: Message) -> Message:
        self.num_said += message.type is Kind.WELCOME
        return changed(message, boot=message.boot + self.num_said)


@found_by("versions")
class WelcomesEveryVersion(Server):
    def hears(self, message: Message) -> Message:
        is_hello = message.type is Kind.HELLO
        return changed(message, body=codec.encode({})) if is_hello else message


@found_by("versions")
class SaysErrorsInItsOwnVersion(Server):
    def says(self, message: Message) -> Message:
        return changed(message, version=2)


@found_by("versions")
class SaysNoCode(Server):
    def says(self, message: Message) -> Message:
        if message.type is Kind.ERROR:
            message.body = codec.encode({"text": "it is broken"})
        return message


@found_by("types")
class IsSilentAboutUnknownTypes(Server):
    def hears(self, message: Message) -> Message | None:
        return message if isinstance(message.type, Kind) else None


@found_by("types")
class AnswersAnswers(Server):
    def hears(self, message: Message) -> Message:
        return changed(message, type=100) if message.type >= 128 else message


@found_by("encodings")
class FallsSilentAtABadEncoding(Server):
    is_dead = False

    def hears(self, message: Message) -> Message | None:
        self.is_dead |= message.body == b"\xc1"
        return None if self.is_dead else message


@found_by("lengths")
class PassesOverTooLongABody(Server):
    def listen(self, route: bytes, frames: Any) -> None:
        if len(frames[0]) < 5000:
            super().listen(route, frames)


@found_by("granted")
class GrantsRowsTwice(Server):
    def says(self, message: Message) -> Message:
        if message.type is Kind.GRANTED:
            told = codec.decode(message.body)
            told["blocks"][-1][0] -= 1
            message.body = codec.encode(told)
        return message


@found_by("granted")
class DescribesASpaceThatNobodyKnows(Server):
    def says(self, message: Message) -> Message:
        message.body = message.body.replace(b"discrete", b"discreet")
        return message


@found_by("bad_attach")
class SaysOnlyThatItFailed(Server):
    def says(self, message: Message) -> Message:
        if message.type is Kind.ERROR:
            told = vars_of(ErrorBody.decode(message.body))
            message.body = ErrorBody(**told | {"code": ErrorCode.INTERNAL}).encode()
        return message


# Whose it is.


@found_by("fenced")
class AnswersForItsPredecessor(Server):
    def hears(self, message: Message) -> Message:
        is_other = message.type in (Kind.PING, Kind.STEP) and message.boot
        return changed(message, boot=self.boot) if is_other else message


@found_by("fenced")
class LooksAtNoEpoch(Server):
    def hears(self, message: Message) -> Message:
        lease = self.lease_of(message)
        return changed(message, epoch=lease.epoch) if lease else message


@found_by("attached_again")
class IgnoresWhatAnotherAttachAsks(Server):
    def hears(self, message: Message) -> Message:
        record = self.session.leases.get(("", message.session))
        is_again = record is not None and message.type is Kind.ATTACH
        return changed(message, body=record.attach_body) if is_again else message  # type: ignore[union-attr]


@found_by("detached")
class RevivesASession(Server):
    def hears(self, message: Message) -> Message:
        self.session.leases.ended_sessions.clear()
        return message


@found_by("detached")
class KeepsWhatIsGivenBack(Server):
    def hears(self, message: Message) -> Message:
        return (
            changed(message, type=Kind.PING) if message.type is Kind.DETACH else message
        )


@found_by("silence")
class WaitsForEver(Server):
    def poll(self, now: float) -> None:
        pass


@found_by("separate_sessions")
class MixesSessionsUp(Server):
    def hears(self, message: Message) -> Message:
        pools = list(self.pools.values())
        seeds = {pool.config.seed for pool in pools}
        if message.type is Kind.STEP and len(seeds) > 1:
            pools[0].draws, pools[-1].draws = pools[-1].draws, pools[0].draws  # type: ignore[attr-defined]
        return message


# At most once.


@found_by("copies")
class CarriesCopiesOut(Server):
    def hears(self, message: Message) -> Message:
        if message.type is Kind.STEP and message.attempt:
            for pool in self.pools.values():
                for row in range(pool.config.num_envs):
                    pool._step(row)
        return message


@found_by("copies")
class IgnoresCopies(Server):
    def hears(self, message: Message) -> Message | None:
        is_copy = message.type is Kind.STEP and message.attempt
        return None if is_copy else message


@found_by("copies")
class AnswersAnAttemptTwice(Server):
    num_said = 0

    def listen(self, route: bytes, frames: Any) -> None:
        super().listen(route, frames)
        self.said = getattr(self, "said", {})
        if bytes(frames[0]) in self.said:
            self.links[route].append(self.said[bytes(frames[0])])
        elif self.links[route] and frames[0][5] == Kind.STEP:
            self.said[bytes(frames[0])] = self.links[route][-1]


@found_by("second_connection")
class AnswersWhereItWasAskedFirst(Server):
    def receive(self, peer: Any, frames: Any, now: float) -> None:
        self.routes = getattr(self, "routes", {})
        first = self.routes.setdefault(bytes(frames[0][8:16]), peer)
        super().receive(first, frames, now)


@found_by("seqs")
class StepsAcrossAGap(Server):
    def hears(self, message: Message) -> Message:
        lease = self.lease_of(message)
        if message.type is Kind.STEP and lease:
            for block, seq in message.entries:
                if lease._last_seq[block : block + 1] == [seq - 2]:
                    lease._last_seq[block] += 1
        return message


@found_by("seqs")
class StepsWhatIsOld(Server):
    def hears(self, message: Message) -> Message:
        lease = self.lease_of(message)
        if message.type is Kind.STEP and not message.attempt and lease:
            for block, seq in message.entries:
                if lease._last_seq[block : block + 1] == [seq]:
                    lease._last_seq[block] -= 1
        return message


@found_by("bad_steps")
class UsesUpTheSeqOfWhatItRefuses(Server):
    def says(self, message: Message) -> Message:
        lease = self.lease_of(message)
        if message.type is Kind.ERROR and message.entries and lease:
            lease._last_seq[:] = [seq + 1 for seq in lease._last_seq]
        return message


@found_by("bad_steps")
class FillsUpWhatIsTooShort(Server):
    def hears(self, message: Message) -> Message:
        short = message.type is Kind.STEP and len(message.body) % 8 == 7
        return changed(message, body=message.body + b"\0") if short else message


@found_by("bad_actions")
class ClipsActions(Server):
    def hears(self, message: Message) -> Message:
        if message.type is Kind.STEP and len(message.body) % 8 == 0:
            actions = np.frombuffer(message.body, np.int64)
            message.body = actions.clip(0, 2).tobytes()
        return message


# Rows.


class Results(Server):
    """Spoils its results: four rewards, flags and statuses, then observations."""

    def spoil(self, rows: bytes) -> bytes:
        raise NotImplementedError

    def says(self, message: Message) -> Message:
        if message.type is Kind.RESULT:
            message.body = self.spoil(message.body)
        return message


@found_by("granted")
class LosesAByte(Results):
    def spoil(self, rows: bytes) -> bytes:
        return rows[:-1]


@found_by("granted")
class HasAStatusOfItsOwn(Results):
    def spoil(self, rows: bytes) -> bytes:
        return rows[:40] + b"\7" + rows[41:]


@found_by("granted")
class SaysWithoutAWordThatAnEnvFailed(Results):
    def spoil(self, rows: bytes) -> bytes:
        return rows[:40] + b"\1" + rows[41:]


@found_by("equal_seeds")
class LooksAtNoSeed(Envs):
    def _reset(self, row: int, seed: Any = None, options: bytes = b"") -> Any:
        return super()._reset(row, draw_root_seed())


@found_by("first_seeds")
class SeedsRowsInItsOwnWay(Envs):
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
class PassesOverSeeds(Envs):
    def _reset(self, row: int, seed: Any = None, options: bytes = b"") -> Any:
        return super()._reset(row)


@found_by("next_step")
class AlwaysResetsAtOnce(Envs):
    def end_episode(self, row: int) -> None:
        super().end_episode(row)
        if self.config.autoreset != "same_step":
            self._reset(row)


@found_by("next_step")
class ShowsTheNextEpisodeAsTheLast(Envs):
    def end_episode(self, row: int) -> None:
        super().end_episode(row)
        self.rows.final_observation[0][row] = self.rows.observation[0][row]
        if self.config.autoreset != "same_step":
            self.rows.final_observation[0][row] += 1


@found_by("next_step")
class StepsWhatHasEnded(Envs):
    def _step(self, row: int) -> Any:
        had_ended = self.has_ended[row]
        super()._step(row)
        self.rows.reward[row] += had_ended


@found_by("disabled")
class ResetsOfItsOwnAccord(Envs):
    def end_episode(self, row: int) -> None:
        super().end_episode(row)
        if self.config.autoreset == "disabled":
            self._reset(row)


@found_by("pings")
class SaysThatAllBlocksRun(Server):
    def says(self, message: Message) -> Message:
        if message.type is Kind.PONG:
            message.body = codec.encode({"running": {0: 5}})
        return message


@found_by("calls")
class GivesAwayWhatIsHidden(Server):
    def hears(self, message: Message) -> Message:
        if message.type is Kind.CALL:
            told = codec.decode(message.body)
            message.body = codec.encode({**told, "name": "metadata"})
        return message
