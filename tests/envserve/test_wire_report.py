"""Reports: round trips, the size limit, and malformed input."""

from __future__ import annotations

import pytest

from envserve.errors import RemoteProtocolError
from envserve.lane import Fault
from envserve.slab import Status
from envserve.spaces import codec
from envserve.wire.constants import MAX_REPORT_BYTES, ErrorCode
from envserve.wire.error_body import ErrorBody
from envserve.wire.result_report import ResultReport

REPORT = ResultReport(
    infos={0: {"x": 1.5}, 7: {}},
    faults=(
        Fault(1, Status.TIMEOUT, "hung"),
        Fault(2, Status.TIMEOUT, "hung"),
        Fault(5, Status.ENV_ERROR, "nan", is_violation=True),
    ),
    errors={3: ErrorBody(code=ErrorCode.ENV_FAILED, text="gave up")},
)


def test_decoding_an_encoded_report_returns_it() -> None:
    frame = REPORT.encode()
    assert ResultReport.decode(frame) == REPORT
    assert frame.count(b"hung") == 1


def test_an_empty_report_is_encoded_as_no_bytes() -> None:
    assert ResultReport().encode() == b""
    assert ResultReport.decode(b"") == ResultReport()


def test_a_too_long_report_loses_only_its_largest_infos() -> None:
    faults = (Fault(1, Status.TIMEOUT, "hung"),)
    frames = {row: {"frame": bytes(20_000), "k": row} for row in range(63)}
    report = ResultReport(
        infos={**frames, 63: {"x": bytes(MAX_REPORT_BYTES), "k": 63}}, faults=faults
    )
    frame = report.encode()
    assert len(frame) <= MAX_REPORT_BYTES
    again = ResultReport.decode(frame)
    assert again.faults == faults
    assert again.infos[63] == {"k": 63, "omitted": ["x"]}
    assert [info["k"] for info in again.infos.values()] == [*range(64)]
    whole = [info for info in again.infos.values() if "frame" in info]
    assert len(whole) == (MAX_REPORT_BYTES - 8192) // 20_000


def test_infos_with_too_many_values_are_left_out() -> None:
    infos = {row: {"list": [0] * 60_000, "k": row} for row in range(3)}
    again = ResultReport.decode(ResultReport(infos=infos).encode())
    assert sum("list" in info for info in again.infos.values()) == 2
    assert [info["k"] for info in again.infos.values()] == [0, 1, 2]


def test_long_fault_texts_are_cut_until_the_report_fits() -> None:
    faults = [
        Fault(row, Status.ENV_ERROR, "é" * 9000 + f" {row}") for row in range(500)
    ]
    frame = ResultReport(faults=faults).encode()
    again = ResultReport.decode(frame)
    assert len(frame) <= MAX_REPORT_BYTES
    assert [fault.env_index for fault in again.faults] == list(range(500))
    assert again.faults[499].text.endswith("é 499"), "where a traceback has its cause"


@pytest.mark.parametrize("num_rows", [1, 300, 5000, 1 << 16])
def test_reports_never_exceed_their_limit(num_rows: int) -> None:
    """Every row and block is listed, even if most texts are dropped."""
    kinds = [(status, flag) for status in Status for flag in (False, True)]
    faults = [
        Fault(row, kinds[row % 7][0], f"{row} " + "é" * 300, kinds[row % 7][1])
        for row in range(num_rows)
    ]
    errors = {
        block: ErrorBody(
            code=ErrorCode.ENV_FAILED,
            text=f"{block} gave up",
            traceback="x" * 400,
            env_index=block,
        )
        for block in range(min(num_rows, 4096))
    }
    infos = {row: {"x": bytes(10)} for row in range(num_rows)}
    frame = ResultReport(infos=infos, faults=faults, errors=errors).encode()
    assert len(frame) <= MAX_REPORT_BYTES
    again = ResultReport.decode(frame)
    assert (again.infos == infos) == (num_rows <= 300)
    assert {(f.env_index, f.status) for f in again.faults} == {
        (f.env_index, f.status) for f in faults
    }
    assert again.errors.keys() == errors.keys()
    assert "gave up" in again.errors[0].text


def test_an_error_shared_by_many_blocks_is_sent_once() -> None:
    error = ErrorBody(code=ErrorCode.ENV_FAILED, text="gave up", traceback="t" * 9000)
    errors = dict.fromkeys(range(4096), error)
    frame = ResultReport(errors=errors).encode()
    assert len(frame) < 6000
    texts = {again.text for again in ResultReport.decode(frame).errors.values()}
    assert texts == {"gave up"}


@pytest.mark.parametrize(
    "rows",
    [-1, None, "x", [1 << 16], [-1], [True], [1.0], bytes((1 << 13) + 1)],
    ids=repr,
)
def test_invalid_rows_raise_protocol_errors(rows: object) -> None:
    fault = [1, False, "text", rows]
    frame = codec.encode({"infos": {}, "faults": [fault], "errors": []})
    with pytest.raises(RemoteProtocolError, match="faults"):
        ResultReport.decode(frame)


@pytest.mark.parametrize(
    "rows", [[3, 3], b"\xff" * (1 << 13)], ids=["in one set", "in each"]
)
def test_a_repeated_row_or_block_raises_a_protocol_error(rows: object) -> None:
    faults = [[1, False, "text", rows]] * 7
    frame = codec.encode({"infos": {}, "faults": faults, "errors": []})
    with pytest.raises(RemoteProtocolError, match="faults: expected each index once"):
        ResultReport.decode(frame)
    errors = [[[3], {"code": 13, "text": ""}], [[3], {"code": 13, "text": ""}]]
    frame = codec.encode({"infos": {}, "faults": [], "errors": errors})
    with pytest.raises(RemoteProtocolError, match="errors: expected each index once"):
        ResultReport.decode(frame)
