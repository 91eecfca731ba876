"""Every space that people have runs, or is refused in a sentence that fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector.utils import (
    batch_space,
    concatenate,
    create_empty_array,
    iterate,
)

from envserve.client import BatchEnv
from envserve.crashes.action_ring import RowRecord
from envserve.errors import SpaceError
from envserve.settings import EnvRequest
from envserve.slab import Rows, Status, private_heartbeat, write_lost
from envserve.spaces.action_checks import check_action_rows, check_actions
from envserve.spaces.env_spec import EnvSpec, describe, restore
from envserve.spaces.leaves import unflatten
from envserve.spaces.variable_length import action_values, decode_observation
from envserve.wire.rows import RowCodec, RowPart
from envserve.worker.env_row import EnvRow
from envserve.worker.worker_report import encode_spaces, read_spaces

from .conftest import servers_in
from .space_table import ALL_SPACES, ENCODED, REFUSED, Space
from .space_table import __name__ as MODULE

NUM_ENVS = 2


def assert_same(left: Any, right: Any) -> None:
    assert data_equivalence(left, right, exact=True), f"{left!r} is not {right!r}"


def batched(space: Space, values: list[Any]) -> Any:
    """Values as Gymnasium batches them."""
    empty: Any = create_empty_array(space, len(values))
    return concatenate(space, values, empty)


class Both:
    """A worker's rows, and a client's of the same envs; what is between is bytes."""

    def __init__(self, name: str) -> None:
        kwargs = {"space": name}
        request = EnvRequest(
            env_name="Table-v0", env_kwargs=kwargs, num_envs=NUM_ENVS, seed=3
        )
        self.envs = [EnvRow(request, row) for row in range(NUM_ENVS)]
        self.there, _ = (env.build() for env in self.envs)
        self.here = read_spaces(encode_spaces(self.there), "Table-v0")
        self.rows = Rows.allocate(self.there, NUM_ENVS)
        self.seen = Rows.allocate(self.here, NUM_ENVS)
        everything = [(0, NUM_ENVS)]
        self.part = RowPart(RowCodec(self.rows), everything)
        self.seen_part = RowPart(RowCodec(self.seen), everything)
        for env in self.envs:
            heartbeat = private_heartbeat()
            env.attach(self.rows, heartbeat, RowRecord.private())

    def reset(self) -> Any:
        for env in self.envs:
            env.reset(None)
        return self.receive()

    def receive(self, *, final: bool = False) -> Any:
        """Brings the rows over, and returns the observation."""
        self.seen_part.unpack_results(*self.part.pack_results())
        leaves = self.seen.final_observation if final else self.seen.observation
        observation = unflatten(self.here.observation_space, leaves)
        is_whole = np.ones(NUM_ENVS, np.bool_)
        return decode_observation(
            self.here, range(NUM_ENVS), observation, is_whole=is_whole
        )

    def step(self, actions: Any) -> list[Any]:
        """Brings actions over, steps, and returns them as the envs got them."""
        arrays = check_actions(self.here, actions, None, NUM_ENVS)
        for target, array in zip(self.seen.action, arrays, strict=True):
            target[...] = array
        self.part.unpack_actions(*self.seen_part.pack_actions())
        check_action_rows(self.here, self.rows.action, 0, NUM_ENVS)
        values = action_values(self.there, [array.copy() for array in self.rows.action])
        for env, value in zip(self.envs, values, strict=True):
            _, terminated, _, _ = env.step(value)
            self.rows.terminated[env.row] = terminated
        return values


@pytest.mark.parametrize("name", ALL_SPACES)
def test_values_of_every_space_go_there_and_back(name: str) -> None:
    space = ALL_SPACES[name]
    both = Both(name)
    first = both.reset()
    samples = []
    for env in both.envs:
        space.seed(env.seed)
        samples.append(space.sample())
    assert_same(first, batched(space, samples))
    batch = batch_space(both.here.observation_space, NUM_ENVS)
    assert batch.contains(first)
    if name in ENCODED:
        assert_same([*iterate(batch, first)], samples)
    for number in range(3):
        sent = [space.sample() for _ in range(NUM_ENVS)]
        got = both.step(batched(space, sent))
        assert_same(got, sent)
        seen = both.receive(final=number == 2)
        assert_same(seen, batched(space, sent))


@pytest.mark.parametrize("name", ALL_SPACES)
def test_a_description_says_all_that_rows_need(name: str) -> None:
    space = ALL_SPACES[name]
    again = restore(describe(space))
    assert describe(again) == describe(again)
    ours, theirs = EnvSpec("A", space, space), EnvSpec("A", again, again)
    assert ours.differences(theirs) == []
    assert list(map(str, ours.observation_leaves)) == [
        *map(str, theirs.observation_leaves)
    ]
    if "own" not in name and "mission" not in name:
        assert again == space
        space.seed(5)
        again.seed(5)
        assert_same(space.sample(), again.sample())


@pytest.mark.parametrize("name", ENCODED)
def test_a_row_that_nobody_has_written_is_of_gymnasiums_empty_array(name: str) -> None:
    both = Both(name)
    write_lost(both.rows, slice(0, NUM_ENVS), Status.WORKER_DIED)
    empty = create_empty_array(both.here.observation_space, NUM_ENVS)
    assert_same(both.receive(), empty)
    assert_same(both.receive(final=True), empty)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_is_refused_in_a_sentence(name: str) -> None:
    space, words = REFUSED[name]
    with pytest.raises(SpaceError, match=words):
        describe(space)


# A few of them with real processes: mixed ones, and what is lost or refused.

REAL = ("dict_of_all", "text", "sequence_of_dicts_stacked", "dict_empty", "own_box")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers_in(tmp_path_factory.mktemp("spaces")) as start:
        yield start("tcp://127.0.0.1:0", "--import", MODULE)


@pytest.mark.parametrize("name", REAL)
def test_batches_of_a_host_and_of_a_server_are_the_same(
    name: str, address: str
) -> None:
    space = ALL_SPACES[name]
    options: dict[str, Any] = {"seed": 3, "env_kwargs": {"space": name}}
    seen: list[list[Any]] = []
    for addresses in (None, [address]):
        with make_batch(addresses, **options) as batch:
            space.seed(0)
            seen.append([batch.reset()])
            for _ in range(4):
                actions = batched(space, [space.sample() for _ in range(2)])
                result = batch.step(actions)
                assert result.valid.all(), result.infos
                seen[-1] += [result.observation, result.final_observation]
    here, there = seen
    assert_same(here, there)


def make_batch(
    addresses: list[str] | None, num_workers: int = 1, **options: Any
) -> BatchEnv:
    if addresses is None:
        options["import_modules"] = [MODULE]
        return BatchEnv.local("Table-v0", 2, num_workers, **options)
    return BatchEnv.connect("Table-v0", addresses, 2, **options)
