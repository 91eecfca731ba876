"""The division of rows into blocks, and invalid pool settings."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from envserve.lane import make_blocks
from envserve.settings import PoolSettings
from tests.envserve.server_process import make_config

SMALL = list(itertools.product(range(1, 14), range(1, 7), range(1, 5)))


def test_blocks_partition_the_rows_evenly_over_splits_and_their_workers() -> None:
    for num_envs, num_workers, num_splits in SMALL:
        case = (num_envs, num_workers, num_splits)
        blocks = make_blocks(*case)
        rows = [row for block in blocks for row in range(block.start, block.stop)]
        assert rows == list(range(num_envs)), case
        assert [block.index for block in blocks] == list(range(len(blocks)))
        sizes = [block.stop - block.start for block in blocks]
        assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1, case
        # Blocks are ordered by split, with one block per worker in each split.
        places = [(block.split, block.worker) for block in blocks]
        splits = 1 + max(split for split, _ in places)
        workers = 1 + max(worker for _, worker in places)
        assert places == list(itertools.product(range(splits), range(workers))), case
        assert splits <= num_splits
        assert workers <= num_workers
        if num_envs >= num_workers * num_splits:
            assert len(blocks) == num_workers * num_splits


def test_blocks_are_the_same_for_any_number_of_workers() -> None:
    for num_envs, num_workers, num_splits in SMALL:
        blocks = make_blocks(num_envs, num_workers, num_splits)
        each = sum(block.split == 0 for block in blocks)
        for others in range(1, 7):
            case = (num_envs, num_workers, num_splits, others)
            again = make_blocks(num_envs, others, num_splits, each)
            assert [replace(block, worker=0) for block in again] == [
                replace(block, worker=0) for block in blocks
            ], case
            workers = {block.worker for block in again}
            assert workers == set(range(min(others, each))), case


def config(**changes: Any) -> PoolSettings:
    return make_config("CartPole-v1", **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_envs", 0),
        ("num_workers", 0),
        ("num_splits", -1),
        ("blocks_per_split", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("first_env_index", -1),
        ("autoreset", "same-step"),
        ("infos", "never"),
        ("nonfinite", "ignore"),
        ("step_timeout_seconds", 0.0),
        ("reset_timeout_seconds", float("nan")),
        ("max_restarts", -1),
        ("spare_envs", 2),
    ],
)
def test_bad_setting_is_rejected_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        config(**{name: value})
    assert str(value) in str(caught.value)


def test_least_and_greatest_settings_are_accepted() -> None:
    config(num_envs=1, num_workers=1, seed=2**63 - 1, max_restarts=0)
