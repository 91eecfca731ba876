"""How rows are cut into blocks, and what a pool's configuration refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from envserve.lane import make_blocks
from envserve.settings import PoolSettings

SMALL = list(itertools.product(range(1, 14), range(1, 7), range(1, 5)))


def test_blocks_partition_the_rows_in_order() -> None:
    for num_envs, num_workers, num_splits in SMALL:
        blocks = make_blocks(num_envs, num_workers, num_splits)
        rows = [row for block in blocks for row in range(block.start, block.stop)]
        assert rows == list(range(num_envs)), (num_envs, num_workers, num_splits)
        assert [block.index for block in blocks] == list(range(len(blocks)))


def test_blocks_are_never_empty_and_differ_by_one_row_at_most() -> None:
    for case in SMALL:
        sizes = [block.stop - block.start for block in make_blocks(*case)]
        assert min(sizes) >= 1, case
        assert max(sizes) - min(sizes) <= 1, case


def test_each_worker_has_one_block_in_each_split() -> None:
    for num_envs, num_workers, num_splits in SMALL:
        blocks = make_blocks(num_envs, num_workers, num_splits)
        places = [(block.split, block.worker) for block in blocks]
        splits = 1 + max(split for split, _ in places)
        workers = 1 + max(worker for _, worker in places)
        assert sorted(places) == list(itertools.product(range(splits), range(workers)))
        assert splits <= num_splits
        assert workers <= num_workers


def test_blocks_of_a_split_are_neighbours() -> None:
    for case in SMALL:
        splits = [block.split for block in make_blocks(*case)]
        assert splits == sorted(splits), case


def test_all_splits_and_workers_are_used_when_there_are_envs_enough() -> None:
    for num_envs, num_workers, num_splits in SMALL:
        if num_envs >= num_workers * num_splits:
            blocks = make_blocks(num_envs, num_workers, num_splits)
            assert len(blocks) == num_workers * num_splits


def config(**changes: Any) -> PoolSettings:
    plain: dict[str, Any] = {"env_name": "CartPole-v1", "num_envs": 4, "num_workers": 2}
    return PoolSettings(**plain | {"seed": 0} | changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_envs", 0),
        ("num_workers", 0),
        ("num_splits", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("first_env_index", -1),
        ("autoreset", "same-step"),
        ("infos", "never"),
        ("step_timeout_seconds", 0.0),
        ("reset_timeout_seconds", float("nan")),
        ("max_restarts", -1),
    ],
)
def test_bad_setting_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        config(**{name: value})
    assert str(value) in str(caught.value)


def test_spare_envs_are_asked_for_by_a_bool() -> None:
    with pytest.raises(ValueError, match="spare_envs: expected a bool; got 2"):
        config(spare_envs=2)


def test_least_and_greatest_settings_are_accepted() -> None:
    config(num_envs=1, num_workers=1, seed=2**63 - 1, max_restarts=0)
