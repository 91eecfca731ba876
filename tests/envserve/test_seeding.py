"""Env seeds are stable, and depend only on the root seed, row and incarnation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from envserve.envs.seeding import MAX_ROOT_SEED, draw_root_seed, env_seed, spare_seed

#: Env seeds by (root seed, row, incarnation). If a seed changes, earlier experiments
#: cannot be reproduced.
RECORDED = {
    (0, 0, 0): 4088532484,
    (0, 0, 1): 3581274545,
    (0, 1, 0): 3953331965,
    (0, 1, 1): 3613627650,
    (1, 0, 0): 3023998541,
    (1, 63, 0): 2805726577,
    (42, 7, 3): 2680017932,
    (2**32, 0, 0): 2654792692,
    (2**63 - 1, 1000, 10): 3091959222,
}


def test_seeds_equal_the_recorded_ones() -> None:
    assert {key: env_seed(*key) for key in RECORDED} == RECORDED
    spares = {0: 673228719, 1: 1454127163, 2**32 - 1: 908003510, 2**63 - 1: 634897576}
    assert {seed: spare_seed(seed) for seed in spares} == spares


def test_seeds_of_spare_envs_differ_from_each_other_and_from_all_env_seeds() -> None:
    seeds = [env_seed(7, index, 0) for index in range(1000)]
    assert len({*seeds, *map(spare_seed, seeds)}) == 2000


def test_seeds_are_those_of_numpys_spawned_sequences() -> None:
    children = np.random.SeedSequence(123).spawn(5)
    grandchild = children[4].spawn(3)[2]
    assert env_seed(123, 4, 2) == grandchild.generate_state(1)[0]


def test_seeds_differ_over_ten_thousand_envs_and_incarnations() -> None:
    pairs = itertools.product(range(1000), range(10))
    seeds = {env_seed(7, index, incarnation) for index, incarnation in pairs}
    assert len(seeds) == 10_000


def test_adjacent_root_seeds_have_no_env_seed_in_common() -> None:
    first = {env_seed(10, index, 0) for index in range(500)}
    second = {env_seed(11, index, 0) for index in range(500)}
    assert not first & second


@pytest.mark.parametrize("root_seed", [0, 1, 2**32, MAX_ROOT_SEED])
def test_every_root_seed_yields_a_valid_gymnasium_seed(root_seed: int) -> None:
    seed = env_seed(root_seed, 3, 1)
    assert type(seed) is int
    assert 0 <= seed < 2**32


def test_drawn_root_seeds_are_valid_and_differ() -> None:
    seeds = {draw_root_seed() for _ in range(20)}
    assert len(seeds) == 20
    assert all(type(seed) is int and 0 <= seed <= MAX_ROOT_SEED for seed in seeds)
