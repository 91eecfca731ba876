"""Infos within bounds: what is left out, and that all else stays."""

from __future__ import annotations

import time
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from envserve.lane import Block
from envserve.spaces import codec
from envserve.spaces.infos import InfoBudget, PackedInfo, encode_infos, join_infos
from envserve.wire.result_report import ResultReport
from envserve.worker.worker_report import encode_report, max_infos, read_report
from tests.envserve.stalls import soonest

ROW = InfoBudget(64 << 10, 16 << 10)
ALL = InfoBudget(1 << 20, 20 << 10)


def fitted(
    infos: Mapping[int, Any], row: InfoBudget = ROW, budget: InfoBudget = ALL
) -> Any:
    """What arrives; it takes no more than there is."""
    encoded = encode_infos(infos, row, budget)
    assert budget.holds(encoded)
    return codec.decode(encoded, max_bytes=1 << 26)


def test_infos_with_room_arrive_whole() -> None:
    infos = {row: {"frame": bytes(12_000), "k": row} for row in range(64)}
    assert fitted(infos) == infos
    assert fitted({}) == {}


def test_the_largest_keys_of_a_row_are_left_out_and_the_other_rows_are_whole() -> None:
    small = {"k": 1, "map": bytes(30_000)}
    infos = {0: {"film": bytes(200_000), "image": bytes(50_000), **small}, 1: small}
    found = fitted(infos)
    assert found == {0: {**small, "omitted": ["film", "image"]}, 1: small}


def test_values_count_as_well_as_bytes() -> None:
    found = fitted({0: {"numbers": [0] * 20_000, "image": bytes(40_000)}})
    assert found == {0: {"image": bytes(40_000), "omitted": ["numbers"]}}


def test_rows_together_lose_their_largest_keys_first() -> None:
    infos = {row: {"image": bytes(60_000), "k": row} for row in range(20)}
    found = fitted(infos)
    assert [info["k"] for info in found.values()] == [*range(20)]
    assert sum("image" in info for info in found.values()) == 17
    assert found[0] == {"k": 0, "omitted": ["image"]}


def test_what_has_no_plain_form_is_named() -> None:
    class Odd:
        pass

    infos = {0: {"odd": Odd(), 3: {4}, (5,): 6, "k": 7, "\udcff": 8}, 1: {}}
    assert fitted(infos) == {
        0: {"k": 7, "omitted": ["odd", "3", "tuple", "\\udcff"]},
        1: {},
    }
    assert fitted({0: types.MappingProxyType({"k": 1})}) == {0: {"k": 1}}


def test_names_have_a_bound_and_so_have_rows_of_nothing_but_names() -> None:
    infos = {0: {f"{number:0100}": bytes(9000) for number in range(100)}}
    (info,) = fitted(infos).values()
    assert len(info["omitted"]) == 17
    assert info["omitted"][-1] == "..."
    assert len(info) == 1 + 7
    many = {row: {f"{row:0100}": object()} for row in range(5000)}
    assert fitted(many, budget=InfoBudget(100_000, 1 << 20)) == {}


@pytest.mark.parametrize("info", [{"k": np.array(True)}, {"k": []}, {1: 2}])
def test_what_fits_can_be_read_by_the_pool(info: dict[Any, Any]) -> None:
    """However little each value is."""
    infos: dict[int, Mapping[str, Any]] = dict.fromkeys(range(200), info)
    payload = encode_report(200, 64, infos=infos)
    found = read_report(payload, Block(0, 0, 200, 0, 0), 64)[0].infos
    assert found.keys() == infos.keys()
    assert all(each.keys() == info.keys() for each in found.values())


def test_a_block_has_room_for_16_rows_that_take_all_they_may() -> None:
    rows = [max_infos(num_rows, 64)[1].num_bytes >> 16 for num_rows in (1, 16, 1000)]
    assert rows == [1, 16, 16]


def joined(infos: Mapping[int, Any], budget: InfoBudget = ALL) -> Any:
    """What arrives of infos that workers have encoded."""
    packed = {}
    for row, info in infos.items():
        encoded = codec.encode(info)
        packed[row] = PackedInfo(encoded, codec.check(encoded, 1 << 20))
    encoded = join_infos(packed, infos, budget)
    assert budget.holds(encoded)
    return codec.decode(encoded, max_bytes=1 << 26)


def test_infos_that_are_encoded_already_are_joined() -> None:
    infos = {row: {"frame": bytes(12_000), "k": row} for row in range(64)}
    assert joined(infos) == infos
    large = {row: {"image": bytes(60_000), "k": row} for row in range(20)}
    assert joined(large) == fitted(large)


def test_where_pairs_are_many_rows_go_the_largest_first() -> None:
    small, large = dict.fromkeys(range(20), 7), dict.fromkeys(range(200), 7)
    found = joined({row: large if row % 2 else small for row in range(200)})
    gone = [row for row, info in found.items() if info == {"omitted": ["..."]}]
    assert gone
    assert {row % 2 for row in gone} == {1}
    assert all(found[row] == small for row in range(0, 200, 2))
    assert joined(dict.fromkeys(range(9000), small), InfoBudget(1 << 20, 20_000)) == {}


def test_an_answer_with_many_infos_is_made_soon() -> None:
    """It took more than a second, in which nobody else was served."""
    info = {f"k{number}": number for number in range(150)}
    infos: dict[int, Mapping[str, Any]] = dict.fromkeys(range(64), info)
    block = Block(0, 0, 64, 0, 0)
    report, _ = read_report(encode_report(64, 64, infos=infos), block, 64)
    rows = range(64 * 16)
    many = ResultReport(
        infos={row: report.infos[row % 64] for row in rows},
        packed_infos={row: report.packed_infos[row % 64] for row in rows},
    )

    def attempt() -> float:
        start = time.thread_time()
        many.encode()
        return time.thread_time() - start

    assert soonest(attempt, 0.1) < 0.1
    assert ResultReport.decode(many.encode()).infos.keys() == {*rows}


FAULT = [0, 2, "it fell", False]
EMPTY: dict[str, Any] = {"faults": [], "rebuilt": [], "infos": {}, "notes": []}


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"faults": [FAULT, FAULT]}, "at most one fault of a row"),
        ({"faults": [FAULT] * 700}, "at most one fault of a row"),
        ({"faults": [[0, 2, 5, False]]}, "Expected `str`"),
        ({"faults": [[0, 2, "it fell", "no"]]}, "Expected `bool`"),
        ({"faults": [[0, 99, "it fell", False]]}, "Invalid enum value 99"),
        ({"faults": [[2, 2, "it fell", False]]}, "not of block 0"),
        ({"rebuilt": [0] * 5}, "5 envs of 2 rows were rebuilt"),
        ({"infos": {0: [1]}}, "expected a dict"),
        ({"infos": {0: {"k": [0] * 60_000}}}, "expected at most .* values"),
        ({"notes": [1]}, "Expected `str`"),
        ({"notes": ["long" * 50_000]}, "bytes are too many for 2 rows"),
    ],
)
def test_a_report_that_is_none_is_a_value_error(
    told: dict[str, Any], text: str
) -> None:
    """So it costs its worker, and nobody else."""
    block = Block(0, 0, 2, 0, 0)
    read_report(codec.encode({**EMPTY, "faults": [FAULT]}), block, 64)
    with pytest.raises(ValueError, match=text):
        read_report(codec.encode({**EMPTY, **told}), block, 64)
