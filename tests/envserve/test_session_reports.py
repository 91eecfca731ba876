"""A server's reports: contents, limits and processing time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pytest

from envserve.errors import RemoteProtocolError
from envserve.lane import Block, Fault, Outcome
from envserve.session.client import client_blocks
from envserve.session.client.liveness import Liveness
from envserve.slab import Status
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.message import Message
from envserve.wire.result_report import ResultReport
from tests.envserve.session_fakes import ADDRESS, SPEC

NUM_BLOCKS = 4096
ERROR = ErrorBody(code=ErrorCode.ENV_FAILED, text="t" * 4000, traceback="x" * 16_000)


def fault_of(row: int, text: str = "it failed") -> Fault:
    return Fault(row, Status.ENV_ERROR, text)


class StepInFlight:
    """A step request for blocks with the same number of rows."""

    def __init__(self, num_blocks: int = 4, rows_per_block: int = 2) -> None:
        edges = range(0, num_blocks * rows_per_block, rows_per_block)
        blocks = [Block(i, at, at + rows_per_block, 0, 0) for i, at in enumerate(edges)]
        liveness = Liveness(0.0)
        self.client_blocks = client_blocks.ClientBlocks(
            ADDRESS, SPEC, tuple(blocks), liveness
        )
        (self.request,) = self.client_blocks.step(range(num_blocks))

    def end(self, report: bytes, blocks: Sequence[int] | None = None) -> list[Outcome]:
        """Receive a RESULT for some blocks (default: all); return the outcomes."""
        entries = self.request.entries
        if blocks is not None:
            entries = tuple(entries[block] for block in blocks)
        message = Message(type=MessageType.RESULT, entries=entries, report=report)
        self.client_blocks.accept_result(self.request, message)
        return [
            outcome for reply in self.client_blocks._replies for outcome in reply[0]
        ]


def test_a_report_is_split_by_block() -> None:
    infos = {row: {"row": row} for row in (7, 0)}
    faults = [fault_of(5), fault_of(2, "another"), fault_of(4)]
    report = ResultReport(infos=infos, faults=faults, errors={1: ERROR})
    outcomes = StepInFlight().end(report.encode())
    assert [outcome.infos for outcome in outcomes] == [
        *({0: {"row": 0}}, {}, {}, {7: {"row": 7}})
    ]
    assert [list(outcome.faults) for outcome in outcomes] == [
        *([], [], [fault_of(5), fault_of(4)], [])
    ]
    assert [outcome.error is None for outcome in outcomes] == [True, False, True, True]


def test_a_limited_number_of_warnings_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = StepInFlight()
    for number in range(100):
        step.end(ResultReport(notes=["always", f"note {number}"]).encode())
        step.client_blocks.uncollected.clear()
        (step.request,) = step.client_blocks.step(range(4))
    notes = [f"note {number}" for number in range(15)]
    assert caplog.messages == [f"{ADDRESS}: {each}" for each in ["always", *notes]]


@pytest.mark.parametrize(
    "report",
    [
        ResultReport(faults=[fault_of(4)]),
        ResultReport(faults=[fault_of(60_000)]),
        ResultReport(infos={7: {}}),
        ResultReport(errors={2: ERROR}),
        ResultReport(errors={4000: ERROR}),
    ],
    ids=["row of another block", "no row", "infos", "another block", "no block"],
)
def test_a_report_about_rows_or_blocks_outside_the_result_is_rejected(
    report: ResultReport,
) -> None:
    step = StepInFlight()
    with pytest.raises(RemoteProtocolError, match="only rows and blocks of the RESULT"):
        step.end(report.encode(), blocks=[0, 1])
    assert len(step.client_blocks.in_flight) == 4


@pytest.mark.parametrize(
    "contents",
    [
        {"faults": [fault_of(row, str(row % 50)) for row in range(4 * NUM_BLOCKS)]},
        {"infos": {row: {} for row in range(4 * NUM_BLOCKS - 1)}},
        {"errors": dict.fromkeys(range(NUM_BLOCKS), ERROR)},
    ],
    ids=["faults", "infos", "errors"],
)
def test_every_report_is_handled_quickly(contents: Mapping[str, object]) -> None:
    frame = ResultReport(**contents).encode()  # type: ignore[arg-type]
    costs = []
    for _ in range(5):  # the minimum is not affected by interruptions
        step = StepInFlight(NUM_BLOCKS, 4)
        started = time.thread_time()
        step.end(frame)
        costs.append(time.thread_time() - started)
    assert min(costs) < 0.2  # 15 ms on an idle machine
