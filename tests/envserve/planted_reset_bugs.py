"""Adds bugs that are planted where resets and calls pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from envserve.client.lane_group import LaneGroup
from envserve.session.client.client_session import ClientSession
from envserve.session.server import lease
from envserve.session.server.decisions import RunReset
from envserve.session.server.server_session import ServerSession
from envserve.wire.constants import MessageType
from tests.envserve.planted_bugs import (
    BUGS,
    Bug,
    Patch,
    alter_messages,
    around,
    bug,
)
from tests.simulation.profile import BATCHES

__all__ = ["BUGS", "Bug"]


@bug()
def a_reset_gets_the_options_of_the_one_before(patch: Patch) -> None:
    last: dict[int, Any] = {}

    def read(real: Any, message: Any, blocks: Any) -> Any:
        resets = real(message, blocks)
        before = last.get(message.session, b"")
        last[message.session] = resets[0].options
        return [dataclasses.replace(reset, options=before) for reset in resets]

    around(patch, lease, "read_resets", read)


@bug()
def a_reset_that_runs_is_begun_again(patch: Patch) -> None:
    def begin_twice(real: Any, self: Any, *arguments: Any) -> Any:
        decisions = real(self, *arguments)
        return [*decisions, *(d for d in decisions if isinstance(d, RunReset))]

    around(patch, ServerSession, "receive", begin_twice)


@bug(BATCHES)
def a_reset_of_a_row_resets_its_block(patch: Patch) -> None:
    def reset(real: Any, self: Any, rows: Any, seeds: Any, options: Any) -> Any:
        if seeds is None:
            blocks = {self.blocks.block_of(int(row)) for row in rows}
            rows = np.array([row for b in blocks for row in range(b.start, b.stop)])
        return real(self, rows, seeds, options)

    around(patch, LaneGroup, "start_reset", reset)


@bug(BATCHES)
def seeds_go_to_the_neighbour(patch: Patch) -> None:
    def reset(real: Any, self: Any, rows: Any, seeds: Any, options: Any) -> Any:
        return real(self, rows, seeds and [*seeds[1:], seeds[0]], options)

    around(patch, LaneGroup, "start_reset", reset)


@bug(BATCHES)
def infos_of_a_reset_are_those_of_other_rows(patch: Patch) -> None:
    def reset(real: Any, self: Any, *arguments: Any) -> Any:
        infos = real(self, *arguments)
        return {row + 1: info for row, info in infos.items()}

    around(patch, LaneGroup, "finish_reset", reset)


# Calls.


@bug()
def a_call_gets_the_values_of_the_one_before(patch: Patch) -> None:
    last: dict[Any, Any] = {}

    def mend(self: Any, answer: Any) -> Any:
        if answer.type is MessageType.CALL_RESULT:
            own = answer.payload
            answer.payload = last.get(self, own)
            last[self] = own
        return answer

    alter_messages(patch, ClientSession, mend)


@bug(BATCHES)
def what_was_called_is_called_again_with_the_rest(patch: Patch) -> None:
    def call(real: Any, self: Any, calls: Any) -> Any:
        last = vars(self).setdefault("_calls_before", {})
        first = {
            at: last.setdefault((at, each.arguments), each)
            for at, each in calls.items()
        }
        return real(self, first)

    around(patch, LaneGroup, "call", call)
