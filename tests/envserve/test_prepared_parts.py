"""Action bounds and row parts, prepared once per lease or set of blocks."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envserve.errors import ActionError
from envserve.lane import make_blocks
from envserve.session.client.client_blocks import ClientBlocks
from envserve.session.client.liveness import Liveness
from envserve.slab import Rows
from envserve.spaces.action_checks import ActionBounds
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.rows import BlockParts, RowCodec
from tests.oracle.probe_envs import SPACES

NUM_ENVS = 4
SPECIAL: dict[str, list[float]] = {
    "f": [np.nan, np.inf, -np.inf, 1e30],
    "i": [-(2**62), 2**62],
}


def are_within(spec: EnvSpec, rows: Rows, start: int, stop: int) -> bool:
    """Compare each action with the limits of its leaf."""
    for leaf, array in zip(spec.action_leaves, rows.action, strict=True):
        part, (low, high) = array[start:stop], leaf.limits
        if not ((part >= low) & (part <= high)).all():
            return False
    return True


def corrupt(array: np.ndarray[Any, Any], random: np.random.Generator) -> None:
    """Write a value that may be out of bounds to a random element."""
    if not array.size or array.dtype.kind == "b":
        return
    kind = array.dtype.kind
    values = [-1, 0, 3, 6, 9, 10, 200, *SPECIAL.get(kind, [])]
    value = np.array(values[random.integers(len(values))])
    with np.errstate(all="ignore"):
        array.flat[random.integers(array.size)] = value.astype(array.dtype)


@pytest.mark.parametrize("name", SPACES)
def test_exactly_the_actions_within_the_limits_are_valid(
    name: str, random_seed: int
) -> None:
    random = np.random.default_rng(random_seed)
    spec = EnvSpec("A-v0", SPACES[name], SPACES[name])
    rows = Rows.allocate(spec, NUM_ENVS)
    bounds = ActionBounds(spec, rows.action)
    drawn = [[leaf.space.sample() for _ in range(40)] for leaf in spec.action_leaves]
    verdicts = set()
    for _ in range(200):
        for array, samples in zip(rows.action, drawn, strict=True):
            array[:] = [samples[i] for i in random.integers(40, size=NUM_ENVS)]
            if random.random() < 0.7:
                corrupt(array, random)
        for start, stop in ((0, NUM_ENVS), (1, 3)):
            verdicts.add(verdict := are_within(spec, rows, start, stop))
            invalid = pytest.raises(ActionError, match=f"Env [{start}-{stop - 1}]: ")
            with contextlib.nullcontext() if verdict else invalid:
                bounds.check(start, stop)
    assert True in verdicts


def test_an_action_without_elements_is_valid() -> None:
    space = spaces.Box(0, 1, (0,), np.float32)
    spec = EnvSpec("A-v0", space, space)
    ActionBounds(spec, Rows.allocate(spec, 2).action).check(0, 2)


def test_parts_are_cached_up_to_a_limit() -> None:
    spec = EnvSpec("A-v0", spaces.Discrete(2), spaces.Discrete(2))
    blocks = make_blocks(9, 9, 1)
    parts = BlockParts(RowCodec(Rows.allocate(spec, 9)), blocks)
    part, single = parts[0, 1, 3], parts[3,]
    assert part.ranges == [(0, 2), (3, 4)]
    assert parts[0, 1, 3] is part
    for first in range(9):
        for second in range(9):
            assert parts[first, second].ranges[0][0] == first
            assert len(parts) <= 65
    assert parts[0, 1, 3].ranges == [(0, 2), (3, 4)]
    assert parts[3,] is single  # servers may have hundreds of blocks


@pytest.mark.parametrize("name", ["image", "discrete"])
def test_a_request_keeps_its_actions_when_the_rows_change(name: str) -> None:
    spec = EnvSpec("A-v0", SPACES[name], SPACES[name])
    client_blocks = ClientBlocks(
        "tcp://fake:1", spec, make_blocks(8, 2, 1), Liveness(0.0)
    )
    rows = client_blocks.rows.action[0]
    rows[:] = 3
    sent = rows.tobytes()
    (request,) = client_blocks.step([0, 1])
    rows[:] = 4
    assert request.body + bytes(request.payload) == sent
