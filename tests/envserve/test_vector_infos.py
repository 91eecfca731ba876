"""Infos are batched in the same way as in Gymnasium."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import VectorEnv

from envserve.client import vector_infos
from envserve.client.vector_infos import batch_infos

NUM_ENVS = 3


def gymnasium_infos(infos: dict[int, dict[str, Any]]) -> dict[str, Any]:
    env: VectorEnv[Any, Any, Any] = VectorEnv()
    env.num_envs = NUM_ENVS
    batched: dict[str, Any] = {}
    for row in sorted(infos):
        batched = env._add_info(batched, infos[row], row)
    return batched


@pytest.mark.parametrize(
    "infos",
    [
        {},
        {0: {"a": 1}, 1: {"a": 2}, 2: {"a": 3}},
        {2: {"a": 3}, 0: {"a": 1}, 1: {"a": 2}},
        {1: {"a": 1.5, "b": True, "c": np.float32(2), "d": np.int8(3)}},
        {0: {"a": 1, "b": 2}, 2: {"b": 4, "a": 3}},
        {0: {"a": 1}, 1: {}, 2: {"b": 2.5, "a": 7}},
        {0: {"a": np.arange(2)}, 2: {"a": np.arange(2, 4)}},
        {0: {"a": np.zeros((2, 3), np.uint8)}},
        {0: {"a": "text", "b": None, "c": [1, 2], "d": np.bool_(True)}, 1: {"a": "x"}},
        {0: {"a": {"b": 1, "c": {"d": 2}}}, 2: {"a": {"c": {"d": 3, "e": "f"}}}},
        {1: {"a": {}}, 2: {"a": {}}},
        {0: {"a": 1}, 1: {"a": 2.75}},
        {0: {"a": np.ones(2)}, 1: {"a": 2.0}, 2: {"a": 3.0}},
        {0: {"a": np.ones(2)}, 2: {"a": np.ones(1)}},
        {0: {"a": 1, "_a": 5, "b": "text"}, 2: {"a": 2, "_a": 6}},
        {0: {"final_obs": np.ones(2)}, 2: {"final_obs": np.zeros(2)}},
        {row: {"final_obs": row} for row in range(3)},
        {0: {"a": {"final_obs": 1.5}}, 2: {"final_obs": {"b": 1}}},
    ],
    ids=repr,
)
def test_infos_equal_those_of_gymnasium(infos: dict[int, dict[str, Any]]) -> None:
    ours, theirs = batch_infos(infos, NUM_ENVS), gymnasium_infos(infos)
    assert data_equivalence(ours, theirs, exact=True), (ours, theirs)


def test_a_large_info_of_one_row_allocates_no_memory_for_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = {"a": np.zeros(1 << 20, np.uint8), "b": 1}
    batched = batch_infos({0: large}, 1 << 16)
    assert batched["a"].dtype == object
    assert batched["a"][0] is large["a"]
    assert batched["b"].dtype == int
    monkeypatch.setattr(vector_infos, "_MAX_UNFILLED_BYTES", 9 * 1023 * 21)
    many = {f"{i:x}": {"in": 2} for i in range(100)}
    batched = batch_infos({0: {"all": many}}, 1024)["all"]
    assert list(batched)[-4:] == ["9", "_9", "omitted", "_omitted"]
    assert batched["omitted"][0].startswith("a, b, ")
    every = batch_infos(dict.fromkeys(range(64), large), 64)
    assert every["a"].shape == (64, 1 << 20)


@pytest.mark.parametrize(
    "values",
    [(1, None), (2.5, "text"), (np.zeros(2), np.zeros(3)), ({"a": 1}, 2), (1, 1 << 70)],
    ids=repr,
)
def test_values_of_different_shapes_or_types_are_objects(
    values: tuple[Any, Any],
) -> None:
    batched = batch_infos({0: {"a": values[0]}, 2: {"a": values[1]}}, NUM_ENVS)
    assert batched["a"].dtype == object
    assert [batched["a"][row] for row in range(NUM_ENVS)] == [
        values[0],
        None,
        values[1],
    ]
    assert batched["_a"].tolist() == [True, False, True]
