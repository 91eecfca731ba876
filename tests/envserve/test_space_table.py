"""Every space in the table is supported, or rejected with a helpful error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from envserve.client import BatchEnv
from envserve.crashes.action_ring import RowRecord
from envserve.errors import SpaceError
from envserve.settings import EnvRequest
from envserve.slab import Rows, Status, private_heartbeat, write_lost
from envserve.spaces.action_checks import ActionBounds, check_actions
from envserve.spaces.env_spec import EnvSpec, describe, restore
from envserve.spaces.leaves import unflatten
from envserve.spaces.variable_length import decode_actions, decode_observation
from envserve.wire.rows import RowCodec, RowPart
from envserve.worker.env_row import EnvRow
from envserve.worker.worker_report import decode_spaces, encode_spaces

from .conftest import servers_in
from .space_table import ALL_SPACES, ENCODED, UNSUPPORTED, Space
from .space_table import __name__ as MODULE

NUM_ENVS = 2


def assert_same(left: Any, right: Any) -> None:
    assert data_equivalence(left, right, exact=True), f"{left!r} is not {right!r}"


def batch_values(space: Space, values: list[Any]) -> Any:
    """Batch values in the same way as Gymnasium."""
    empty: Any = create_empty_array(space, len(values))
    return concatenate(space, values, empty)


class WorkerAndClient:
    """A worker's and a client's rows of the same envs, connected only by bytes."""

    def __init__(self, name: str) -> None:
        kwargs = {"space": name}
        request = EnvRequest(
            env_name="Table-v0", env_kwargs=kwargs, num_envs=NUM_ENVS, seed=3
        )
        self.envs = [EnvRow(request, row) for row in range(NUM_ENVS)]
        self.worker_spec, _ = (env.build() for env in self.envs)
        self.client_spec = decode_spaces(encode_spaces(self.worker_spec), "Table-v0")
        self.worker_rows = Rows.allocate(self.worker_spec, NUM_ENVS)
        self.client_rows = Rows.allocate(self.client_spec, NUM_ENVS)
        everything = [(0, NUM_ENVS)]
        self.worker_part = RowPart(RowCodec(self.worker_rows), everything)
        self.client_part = RowPart(RowCodec(self.client_rows), everything)
        for env in self.envs:
            heartbeat = private_heartbeat()
            env.attach(self.worker_rows, heartbeat, RowRecord.private())

    def reset(self) -> Any:
        for env in self.envs:
            env.reset(None)
        return self.receive()

    def receive(self, *, final: bool = False) -> Any:
        """Send the worker's rows to the client; return the client's observation."""
        self.client_part.unpack_results(*self.worker_part.pack_results())
        leaves = (
            self.client_rows.final_observation
            if final
            else self.client_rows.observation
        )
        observation = unflatten(self.client_spec.observation_space, leaves)
        is_complete = np.ones(NUM_ENVS, np.bool_)
        return decode_observation(
            self.client_spec, range(NUM_ENVS), observation, is_complete=is_complete
        )

    def step(self, actions: Any) -> list[Any]:
        """Send actions to the worker and step; return the actions that the envs got."""
        arrays = check_actions(self.client_spec, actions, None, NUM_ENVS)
        for target, array in zip(self.client_rows.action, arrays, strict=True):
            target[...] = array
        self.worker_part.unpack_actions(*self.client_part.pack_actions())
        ActionBounds(self.client_spec, self.worker_rows.action).check(0, NUM_ENVS)
        values = decode_actions(
            self.worker_spec, [array.copy() for array in self.worker_rows.action]
        )
        for env, value in zip(self.envs, values, strict=True):
            _, terminated, _, _ = env.step(value)
            self.worker_rows.terminated[env.row] = terminated
        return values


@pytest.mark.parametrize("name", ALL_SPACES)
def test_values_of_every_space_are_transferred_in_both_directions(name: str) -> None:
    space = ALL_SPACES[name]
    both = WorkerAndClient(name)
    first = both.reset()
    samples = []
    for env in both.envs:
        space.seed(env.default_seed)
        samples.append(space.sample())
    assert_same(first, batch_values(space, samples))
    batch = batch_space(both.client_spec.observation_space, NUM_ENVS)
    assert batch.contains(first)
    if name in ENCODED:
        assert_same([*iterate(batch, first)], samples)
    for number in range(3):
        sent = [space.sample() for _ in range(NUM_ENVS)]
        got = both.step(batch_values(space, sent))
        # As in Gymnasium's vector envs, the action of a scalar Box is a NumPy scalar.
        assert_same(got, [each[()] if name == "scalar" else each for each in sent])
        seen = both.receive(final=number == 2)
        assert_same(seen, batch_values(space, sent))


@pytest.mark.parametrize("name", ALL_SPACES)
def test_a_restored_space_has_the_same_rows(name: str) -> None:
    space = ALL_SPACES[name]
    again = restore(describe(space))
    assert_same(describe(again), describe(space))
    ours, theirs = EnvSpec("A", space, space), EnvSpec("A", again, again)
    assert ours.differences(theirs) == []
    assert list(map(str, ours.observation_leaves)) == [
        *map(str, theirs.observation_leaves)
    ]
    if "user" not in name and "mission" not in name:
        assert again == space
        space.seed(5)
        again.seed(5)
        assert_same(space.sample(), again.sample())


@pytest.mark.parametrize("name", ENCODED)
def test_an_unwritten_row_decodes_to_gymnasiums_empty_array(name: str) -> None:
    both = WorkerAndClient(name)
    write_lost(both.worker_rows, slice(0, NUM_ENVS), Status.WORKER_DIED)
    empty = create_empty_array(both.client_spec.observation_space, NUM_ENVS)
    assert_same(both.receive(), empty)
    assert_same(both.receive(final=True), empty)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_spaces_raise_space_error_with_a_remedy(name: str) -> None:
    space, words = UNSUPPORTED[name]
    with pytest.raises(SpaceError, match=words):
        describe(space)


# Some of the spaces, with real worker processes and servers.

WITH_PROCESSES = (
    "dict_of_all",
    "text",
    "sequence_of_dicts_stacked",
    "dict_empty",
    "user_box",
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers_in(tmp_path_factory.mktemp("spaces")) as start:
        yield start("tcp://127.0.0.1:0", "--import", MODULE)


@pytest.mark.parametrize("name", WITH_PROCESSES)
def test_local_and_remote_batches_return_the_same_values(
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
                actions = batch_values(space, [space.sample() for _ in range(2)])
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
