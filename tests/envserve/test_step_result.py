"""Batch step results, gathered from rows that the test has filled."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, GraphInstance, Space

from envserve.client.row_set import BatchBlock, RowSet, RowSetCache
from envserve.client.step_result import StepResult, check_out, gather_result
from envserve.lane import Lane
from envserve.slab import Rows, Status
from envserve.spaces.env_spec import EnvSpec


@dataclass(eq=False)
class _Lane:
    rows: Rows


def two_rows(spec: EnvSpec, num_lanes: int) -> RowSet:
    """Two rows on one lane, or one row on each of two lanes."""
    size = 2 // num_lanes
    lanes: list[Any] = [_Lane(rows=Rows.allocate(spec, size)) for _ in range(num_lanes)]
    return RowSet(
        [
            BatchBlock(at, cast(Lane, lane), 0, at * size, (at + 1) * size, at, 0)
            for at, lane in enumerate(lanes)
        ]
    )


def test_rows_that_were_received_are_sent_without_preparing_a_new_set() -> None:
    spec = EnvSpec("Any-v0", Box(0, 255, (3,), np.uint8), Discrete(2))
    cache = RowSetCache(two_rows(spec, num_lanes=2).blocks)
    received = cache.for_blocks([1])
    found, order = cache.for_rows(received.env_indices)
    assert found is received
    assert order is None
    found, _ = cache.for_rows(np.array([0]))
    assert found.positions == {0}


@pytest.mark.parametrize("num_lanes", [1, 2])
@pytest.mark.parametrize("shape", [(3,), (84, 84, 4)], ids=["small", "large"])
def test_final_observation_is_zero_where_no_episode_has_ended(
    shape: tuple[int, ...], num_lanes: int
) -> None:
    spec = EnvSpec("Any-v0", Box(0, 255, shape, np.uint8), Discrete(2))
    row_set = two_rows(spec, num_lanes)
    for part, _ in row_set.lane_parts:
        part.read().final_observation[0][:] = 7
    kept = gather_result(spec, row_set, {}).final_observation
    assert kept.shape == (2, *shape)
    assert not kept.any()
    kept[:] = 9  # the result is a copy

    row_set.lane_parts[-1][0].read().terminated[-1] = True
    final = gather_result(spec, row_set, {}).final_observation
    assert not final[0].any()
    assert (final[1] == 7).all()
    assert (kept == 9).all()


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_out_arrays_get_the_rows_of_all_lanes_in_their_dtypes(num_lanes: int) -> None:
    spec = EnvSpec("Any-v0", Box(0, 255, (3,), np.uint8), Discrete(2))
    row_set = two_rows(spec, num_lanes)
    for part, at in row_set.lane_parts:
        rows = part.read()
        rows.observation[0][:] = rows.final_observation[0][:] = 1 + at.start
        rows.reward[:], rows.status[:] = 0.5 + at.start, Status.OK
    row_set.lane_parts[-1][0].read().truncated[-1] = True
    new = gather_result(spec, row_set, {})
    out = new._replace(
        observation=np.zeros((2, 3), np.float32),
        reward=np.zeros(2, np.float32),
        terminated=np.full(2, True),
        truncated=np.zeros(2, np.bool_),
        valid=np.zeros(2, np.bool_),
        status=np.full(2, 9, np.uint8),
        final_observation=np.full((2, 3), 9, np.uint8),
    )
    written = gather_result(spec, row_set, {}, out)
    for name in ("observation", "reward", "terminated", "truncated", "valid", "status"):
        np.testing.assert_array_equal(getattr(written, name), getattr(new, name), name)
    assert written.reward is out.reward
    assert written.valid.all()
    assert not written.terminated.any()
    assert (written.final_observation[0] == 9).all()  # the episode has not ended
    assert (written.final_observation[1] == new.final_observation[1]).all()


@pytest.mark.parametrize("is_nested", [False, True])
def test_out_arrays_of_other_shapes_are_rejected(is_nested: bool) -> None:
    box: Space[Any] = Box(0, 255, (3,), np.uint8)
    spec = EnvSpec("Any-v0", Dict(box=box) if is_nested else box, Discrete(2))
    out = gather_result(spec, two_rows(spec, 1), {})
    check_out(spec, out, 2)
    with pytest.raises(ValueError, match="expected arrays of 3 rows; got 2"):
        check_out(spec, out, 3)
    one: Any = np.zeros((2, 1), np.uint8)
    for name in ("observation", "final_observation"):
        value: Any = {"box": one} if is_nested else one
        wrong = StepResult(**out._asdict() | {name: value})
        with pytest.raises(ValueError, match=r"shape \[2, 3\]; got \[2, 1\]"):
            check_out(spec, wrong, 2)
    for name in ("reward", "terminated", "truncated", "valid", "status"):
        wrong = StepResult(**out._asdict() | {name: np.zeros((2, 1))})
        with pytest.raises(ValueError, match=r"shape \[2\]; got \[2, 1\]"):
            check_out(spec, wrong, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists mappings")
def test_results_that_are_kept_do_not_use_a_memory_mapping_each() -> None:
    spec = EnvSpec("Any-v0", Box(0, 255, (84, 84, 4), np.uint8), Discrete(2))
    row_set = two_rows(spec, 1)
    mappings = Path("/proc/self/maps")
    before = len(mappings.read_text().splitlines())
    kept = [gather_result(spec, row_set, {}) for _ in range(300)]
    after = len(mappings.read_text().splitlines())
    assert len(kept) == 300
    assert after - before < 150


def test_the_repr_of_a_result_contains_shapes_but_no_arrays() -> None:
    image, texts = np.zeros((4, 8, 8, 3), np.uint8), np.array(["a"] * 4, object)
    flags = np.array([True, False, False, True])
    graph = GraphInstance(np.zeros((2, 3)), None, None)
    encoded = {"words": ("one", "two"), "graphs": (graph,), "numbers": ((), (1, 2))}
    observation = {"image": image, "more": (flags, texts), **encoded}
    step = StepResult(
        observation=observation,
        reward=np.zeros(4),
        terminated=flags,
        truncated=~flags,
        valid=flags,
        final_observation=observation,
        status=np.zeros(4, np.uint8),
        infos={1: {}},
    )
    assert repr(step) == (
        "<StepResult: 4 rows, 2 valid, 2 terminated, 2 truncated, 1 with infos; "
        "observation {image: uint8[4, 8, 8, 3], more: (bool[4], 4 values), "
        "words: 2 values, graphs: (3 values), numbers: ((), 2 values)}>"
    )
