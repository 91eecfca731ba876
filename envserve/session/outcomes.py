"""What a report says of each block that a RESULT answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envserve.errors import EnvserveError, RemoteProtocolError
from envserve.lane import Fault, Outcome
from envserve.wire.greetings import exception_of
from envserve.wire.message import Message
from envserve.wire.report import Report

__all__ = ["outcomes_of"]


def outcomes_of(
    message: Message, block_of_row: Sequence[int], address: str
) -> dict[int, Outcome]:
    """Returns what the report of a RESULT says of each block that is answered.

    Raises:
      RemoteProtocolError: It is none, or says something of others.
    """
    report = Report.decode(message.report)
    infos: dict[int, dict[int, Any]] = {block: {} for block, _ in message.entries}
    faults: dict[int, list[Fault]] = {block: [] for block in infos}
    errors: dict[int, EnvserveError | None] = dict.fromkeys(infos)
    # One error may be that of thousands of blocks.
    known = {body: exception_of(body, address) for body in {*report.errors.values()}}
    errors.update({block: known[body] for block, body in report.errors.items()})
    try:
        for row, info in report.infos.items():
            infos[block_of_row[row]][row] = info
        for fault in report.faults:
            faults[block_of_row[fault.env_index]].append(fault)
    except LookupError:
        errors.clear()  # there is a row of another block, or of none
    if infos.keys() != errors.keys():
        raise RemoteProtocolError(
            "report: expected rows and blocks that are answered; got others"
        )
    outcomes = {b: Outcome(b, infos[b], faults[b], error=errors[b]) for b in infos}
    if report.notes:
        first = message.entries[0][0]
        outcomes[first] = outcomes[first]._replace(notes=report.notes)
    return outcomes
