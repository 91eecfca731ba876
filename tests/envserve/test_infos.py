"""The info budget: which values are dropped, and which are kept."""

from __future__ import annotations

import copy
import pickle
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from envserve.client.vector_infos import batch_infos
from envserve.errors import RemoteProtocolError
from envserve.lane import Block
from envserve.spaces import codec
from envserve.spaces.info_columns import RowInfos, split_columns
from envserve.spaces.infos import (
    InfoBudget,
    PackedInfo,
    copy_info,
    encode_infos,
    join_infos,
)
from envserve.wire.result_report import ResultReport
from envserve.worker.worker_report import decode_report, encode_report, info_budgets
from tests.envserve.stalls import fastest
from tests.oracle.identical import assert_identical
from tests.oracle.random_envs import KINDS

ROW = InfoBudget(64 << 10, 16 << 10)
ALL = InfoBudget(1 << 20, 20 << 10)


def encode_and_decode(
    infos: Mapping[int, Any], row: InfoBudget = ROW, budget: InfoBudget = ALL
) -> Any:
    """Encode infos within the budgets, and decode the result."""
    encoded = encode_infos(infos, row, budget)
    assert budget.fits(encoded)
    return codec.decode(encoded, max_bytes=1 << 26)


def test_infos_within_the_budget_are_complete() -> None:
    infos = {row: {"frame": bytes(12_000), "k": row} for row in range(64)}
    assert encode_and_decode(infos) == infos
    assert encode_and_decode({}) == {}


def test_only_the_largest_values_of_a_row_above_its_budget_are_left_out() -> None:
    small = {"k": 1, "map": bytes(30_000)}
    infos = {0: {"film": bytes(200_000), "image": bytes(50_000), **small}, 1: small}
    found = encode_and_decode(infos)
    assert found == {0: {**small, "omitted": ["film", "image"]}, 1: small}


def test_the_number_of_values_is_limited_too() -> None:
    found = encode_and_decode({0: {"numbers": [0] * 20_000, "image": bytes(40_000)}})
    assert found == {0: {"image": bytes(40_000), "omitted": ["numbers"]}}


def test_the_largest_values_of_all_rows_are_left_out_first() -> None:
    infos = {row: {"image": bytes(60_000), "k": row} for row in range(20)}
    found = encode_and_decode(infos)
    assert [info["k"] for info in found.values()] == [*range(20)]
    assert sum("image" in info for info in found.values()) == 17
    assert found[0] == {"k": 0, "omitted": ["image"]}


def test_keys_of_unsupported_values_are_listed() -> None:
    class Odd:
        pass

    infos = {0: {"odd": Odd(), 3: {4}, (5,): 6, "k": 7, "\udcff": 8}, 1: {}}
    assert encode_and_decode(infos) == {
        0: {"k": 7, "omitted": ["odd", "3", "tuple", "\\udcff"]},
        1: {},
    }
    assert encode_and_decode({0: types.MappingProxyType({"k": 1})}) == {0: {"k": 1}}


def test_values_of_dicts_in_infos_are_left_out_one_by_one() -> None:
    inner = {"odd": object(), "mask": (1, 0), "image": bytes(70_000), "lap": 7}
    kept = {"mask": (1, 0), "lap": 7, "omitted": ["odd", "image"]}
    infos = {row: {"k": row, "reset_info": inner} for row in range(3)}
    found = encode_and_decode(infos)
    assert found == {row: {"k": row, "reset_info": kept} for row in range(3)}
    deep: Any = {"k": 1, "inner": {"deeper": {"odd": object()}, "l": 2}, "\udcff": {}}
    expected = {"k": 1, "inner": {"l": 2, "omitted": ["deeper"]}}
    assert encode_and_decode({0: deep}) == {0: {**expected, "omitted": ["\\udcff"]}}


def test_the_list_of_omitted_keys_is_limited() -> None:
    infos = {0: {f"{number:0100}": bytes(9000) for number in range(100)}}
    (info,) = encode_and_decode(infos).values()
    assert len(info["omitted"]) == 17
    assert info["omitted"][-1] == "..."
    assert len(info) == 1 + 7
    many = {row: {f"{row:0100}": object()} for row in range(5000)}
    assert encode_and_decode(many, budget=InfoBudget(100_000, 1 << 20)) == {}


@pytest.mark.parametrize("info", [{"k": np.array(True)}, {"k": []}, {1: 2}])
def test_infos_within_the_budget_are_accepted_by_the_pool(info: dict[Any, Any]) -> None:
    """These include the infos of many rows with very small values."""
    infos: dict[int, Mapping[str, Any]] = dict.fromkeys(range(200), info)
    payload = encode_report(200, 64, infos=infos)
    found = decode_report(payload, Block(0, 0, 200, 0, 0), 64)[0].infos
    assert found.keys() == infos.keys()
    assert all(each.keys() == info.keys() for each in found.values())


def test_the_budget_of_a_block_suffices_for_16_full_rows() -> None:
    rows = [info_budgets(num_rows, 64)[1].num_bytes >> 16 for num_rows in (1, 16, 1000)]
    assert rows == [1, 16, 16]


def report_twice(infos: Mapping[int, Any], num_rows: int) -> Any:
    """Report infos twice, because their keys become columns when they recur."""
    block = Block(0, 0, num_rows, 0, 0)
    for _ in range(2):
        payload = encode_report(num_rows, 64, infos=infos)
    return decode_report(payload, block, 64)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_infos_in_columns_equal_those_in_dicts(kind: str) -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        infos = {row: KINDS[kind][0](draw, row) for row in range(5)}
        found = report_twice(infos, 5).infos
        assert_identical({row: {**found[row]} for row in found}, infos)
        assert_identical(batch_infos(found, 6), batch_infos(infos, 6))
        sent = ResultReport.decode(ResultReport(infos=found).encode())
        assert_identical({row: {**sent.infos[row]} for row in sent.infos}, infos)


def test_numbers_of_every_row_are_columns() -> None:
    info = {"x": 0.5, "n": np.int8(3), "mask": np.zeros(4, bool), "word": "text"}
    outcome = report_twice(dict.fromkeys(range(6), info), 6)
    ((columns,), others) = outcome.infos.columns, outcome.infos.others
    assert (columns.start, columns.stop) == (0, 6)
    assert columns.layout.keys == ("x", "n", "mask")
    assert others == {row: {"word": "text"} for row in range(6)}
    assert outcome.packed_infos.keys() == {*range(6)}
    copied = pickle.loads(pickle.dumps(outcome.infos))
    assert_identical(copied, copy.deepcopy(outcome.infos))
    assert_identical(copied[5], info)


def test_rows_with_other_keys_and_numbers_beyond_64_bits_are_not_in_columns() -> None:
    infos: dict[int, Any] = {row: {"n": row, "x": 0.5} for row in range(6)}
    infos[2] = {"n": 2**63, "x": 0.5}
    infos[4] = {"n": 4, "end": (1,)}
    report_twice({0: infos[4]}, 1)
    found = report_twice(infos, 6).infos
    assert [(each.start, each.stop) for each in found.columns] == [
        *((0, 2), (3, 4), (4, 5), (5, 6))
    ]
    assert found.others == {2: infos[2], 4: {"end": (1,)}}
    assert found == infos


def test_numbers_that_exceed_the_budget_are_not_in_columns() -> None:
    large = {"array": np.zeros(65), "x": 1.0}
    assert report_twice({0: large}, 1).infos.columns[0].layout.keys == ("x",)
    many = {row: {f"k{number}": 0.5 for number in range(60)} for row in range(1000)}
    found = report_twice(many, 1000).infos
    assert type(found) is dict
    few = {row: {"x": 0.5} for row in range(1000)}
    assert len(report_twice(few, 1000).infos.columns) == 1


def test_the_columns_of_adjacent_blocks_are_joined_in_a_result() -> None:
    infos = RowInfos()
    for start in (4, 0, 2):
        infos.add(report_twice({0: {"x": start}, 1: {"x": 1 + start}}, 2).infos, start)
    report = ResultReport.decode(ResultReport(infos=infos).encode())
    ((columns,), others) = split_columns(report.infos)
    assert (columns.start, columns.stop, others) == (0, 6, {})
    outcomes = report.outcomes([(1, 1), (0, 1)], [0] * 4 + [1] * 2, "")
    assert outcomes[0].infos == {row: {"x": row} for row in range(4)}
    assert outcomes[1].infos == {row: {"x": row} for row in range(4, 6)}
    with pytest.raises(RemoteProtocolError, match="others"):
        report.outcomes([(0, 1)], [0] * 4 + [1] * 2, "")
    with pytest.raises(RemoteProtocolError, match="others"):
        report.outcomes([(0, 1)], [0] * 5, "")


X: Any = {"x": 0.0}


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ([[0, X, bytes(7)]], "whole records"),
        ([[0, X, b""]], "whole records"),
        ([[0, X, bytes(24)]], "columns contain rows that are not"),
        ([[-1, X, bytes(8)]], "order of their rows|>= 0"),
        ([[1, X, bytes(8)]] * 2, "order of their rows"),
        ([[0, {"x": 0.0, "y": "text"}, bytes(8)]], "numbers and arrays"),
        ([[0, {"x": [0]}, bytes(8)]], "numbers and arrays"),
        ([[0, {"x": np.array(0.0)}, bytes(8)]], "numbers and arrays"),
        ([[0, {"x": np.zeros((2, 0))}, bytes(8)]], "numbers and arrays"),
        ([[0, {"x": np.zeros(65)}, bytes(520)]], "at most 512 bytes"),
        ([[0, {f"{n}": 0.0 for n in range(65)}, bytes(520)]], "at most 512 bytes"),
        ([[0, {5: 0.0}, bytes(8)]], "dict with a value for each column"),
        ([[0, {}, bytes(8)]], "dict with a value for each column"),
        ([[0, 5, bytes(8)]], "dict with a value for each column"),
        ([[0, {"x" * 9000: 0}, bytes(8)]], "at most 8192 bytes"),
    ],
)
def test_invalid_columns_raise_errors(columns: list[Any], text: str) -> None:
    sent = [[start, codec.encode(layout), data] for start, layout, data in columns]
    payload = codec.encode({**EMPTY, "columns": sent})
    with pytest.raises(ValueError, match=text):
        decode_report(payload, Block(0, 0, 2, 0, 0), 64)
    if text == "columns contain rows that are not":
        return
    fields = {"infos": {}, "faults": [], "errors": [], "columns": sent}
    with pytest.raises(RemoteProtocolError, match=text):
        ResultReport.decode(codec.encode(fields))


def test_the_values_in_columns_are_limited() -> None:
    """Small columns would otherwise take much memory as dicts."""
    layout = codec.encode({f"{number}": False for number in range(400)})
    sent = [[0, layout, bytes(400 * 2000)]]
    payload = codec.encode({**EMPTY, "columns": sent})
    with pytest.raises(ValueError, match="contain too many values"):
        decode_report(payload, Block(0, 0, 2000, 0, 0), 64)
    fields = {"infos": {}, "faults": [], "errors": [], "columns": sent}
    with pytest.raises(RemoteProtocolError, match="values"):
        ResultReport.decode(codec.encode(fields))


def join_and_decode(infos: Mapping[int, Any], budget: InfoBudget = ALL) -> Any:
    """Join infos that workers have encoded, and decode the result."""
    packed = {}
    for row, info in infos.items():
        encoded = codec.encode(info)
        packed[row] = PackedInfo(encoded, codec.check(encoded, 1 << 20))
    encoded = join_infos(packed, infos, budget)
    assert budget.fits(encoded)
    return codec.decode(encoded, max_bytes=1 << 26)


def test_encoded_infos_are_joined() -> None:
    infos = {row: {"frame": bytes(12_000), "k": row} for row in range(64)}
    assert join_and_decode(infos) == infos
    large = {row: {"image": bytes(60_000), "k": row} for row in range(20)}
    assert join_and_decode(large) == encode_and_decode(large)


def test_with_many_pairs_whole_infos_are_left_out_the_largest_first() -> None:
    small, large = dict.fromkeys(range(20), 7), dict.fromkeys(range(200), 7)
    found = join_and_decode({row: large if row % 2 else small for row in range(200)})
    gone = [row for row, info in found.items() if info == {"omitted": ["..."]}]
    assert gone
    assert {row % 2 for row in gone} == {1}
    assert all(found[row] == small for row in range(0, 200, 2))
    assert (
        join_and_decode(dict.fromkeys(range(9000), small), InfoBudget(1 << 20, 20_000))
        == {}
    )


def test_a_result_with_many_infos_is_encoded_quickly() -> None:
    """Check for a regression: encoding once blocked the server for over a second."""
    info = {f"k{number}": number for number in range(150)}
    infos: dict[int, Mapping[str, Any]] = dict.fromkeys(range(64), info)
    block = Block(0, 0, 64, 0, 0)
    report, _ = decode_report(encode_report(64, 64, infos=infos), block, 64)
    rows = range(64 * 16)
    many = ResultReport(
        infos={row: report.infos[row % 64] for row in rows},
        packed_infos={row: report.packed_infos[row % 64] for row in rows},
    )

    def attempt() -> float:
        start = time.thread_time()
        many.encode()
        return time.thread_time() - start

    assert fastest(attempt, 0.1) < 0.1
    assert ResultReport.decode(many.encode()).infos.keys() == {*rows}


FAULT = [0, 2, "it fell", False]
EMPTY: dict[str, Any] = {
    **{"faults": [], "rebuilt": [], "infos": {}, "warnings": []},
    "columns": [],
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"faults": [FAULT, FAULT]}, "at most one fault per row"),
        ({"faults": [FAULT] * 700}, "at most one fault per row"),
        ({"faults": [[0, 2, 5, False]]}, "Expected `str`"),
        ({"faults": [[0, 2, "it fell", "no"]]}, "Expected `bool`"),
        ({"faults": [[0, 99, "it fell", False]]}, "Invalid enum value 99"),
        ({"faults": [[2, 2, "it fell", False]]}, "not in block 0"),
        ({"rebuilt": [0] * 5}, "of 2 rows; got 5 in total"),
        ({"infos": {0: [1]}}, "expected a dict"),
        ({"infos": {0: {"k": [0] * 60_000}}}, "expected at most .* values"),
        ({"warnings": [1]}, "Expected `str`"),
        ({"warnings": ["long" * 50_000]}, "too many bytes for 2 rows"),
    ],
)
def test_an_invalid_worker_report_raises_value_error(
    changes: dict[str, Any], text: str
) -> None:
    """The pool replaces only the worker that sent the report."""
    block = Block(0, 0, 2, 0, 0)
    decode_report(codec.encode({**EMPTY, "faults": [FAULT]}), block, 64)
    with pytest.raises(ValueError, match=text):
        decode_report(codec.encode({**EMPTY, **changes}), block, 64)


class Unbound:
    """A proxy without a target, which raises whenever it is used."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class Unreadable(Mapping[str, Any]):
    """A mapping with a value that cannot be read."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError(f"no {key}")

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


def test_values_that_raise_are_omitted() -> None:
    infos = {0: {"a": Unbound(), "b": 1}, 1: {"a": Unreadable(), "b": 2}}
    copies = {row: copy_info(info) for row, info in infos.items()}
    budget = InfoBudget(1000, 1000)
    decoded = codec.decode(encode_infos(copies, budget, budget))
    assert decoded == {0: {"b": 1, "omitted": ["a"]}, 1: {"b": 2, "omitted": ["a"]}}
    assert copy_info(Unreadable()) == {}
