"""Encoded rows: every kind of space, ended episodes, exact lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envserve.errors import RemoteProtocolError
from envserve.slab import Rows
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import flatten
from envserve.wire.constants import MAX_INLINE_BYTES
from envserve.wire.rows import RowCodec, RowPart, merge_ranges, split_rows
from tests.oracle.probe_envs import SPACES

NUM_ENVS = 6
RANGES = [(0, 2), (4, 5)]


def make_rows(name: str, seed: int | None = None) -> tuple[EnvSpec, Rows]:
    """Return all-zero rows, or random rows with some ended episodes."""
    spec = EnvSpec("A-v0", SPACES[name], SPACES[name])
    rows = Rows.allocate(spec, NUM_ENVS)
    if seed is not None:
        random = np.random.default_rng(seed)
        spec.observation_space.seed(seed)
        for leaves in (rows.observation, rows.action, rows.final_observation):
            for row in range(NUM_ENVS):
                sample = flatten(
                    spec.observation_space, spec.observation_space.sample()
                )
                for array, value in zip(leaves, sample, strict=True):
                    array[row] = value
        rows.reward[:] = random.normal(size=NUM_ENVS)
        rows.terminated[:] = random.random(NUM_ENVS) < 0.3
        rows.truncated[:] = random.random(NUM_ENVS) < 0.3
        rows.status[:] = random.integers(0, 4, NUM_ENVS)
        is_fault = rows.status > 0
        rows.terminated[is_fault], rows.truncated[is_fault] = False, True
    return spec, rows


def part_of(rows: Rows, ranges: list[tuple[int, int]] = RANGES) -> RowPart:
    return RowPart(RowCodec(rows), ranges)


def pack_results(rows: Rows) -> bytes:
    return b"".join(part_of(rows).pack_results())


def pack_actions(rows: Rows) -> bytes:
    return b"".join(part_of(rows).pack_actions())


def all_arrays(rows: Rows) -> list[Any]:
    return [
        *(rows.reward, rows.terminated, rows.truncated, rows.status),
        *rows.observation,
    ]


@pytest.mark.parametrize("name", SPACES)
def test_unpacking_packed_results_restores_them(name: str, random_seed: int) -> None:
    for seed in range(random_seed, random_seed + 5):
        _, rows = make_rows(name, seed)
        _, target = make_rows(name)
        part_of(target).unpack_results(pack_results(rows))
        for sent, received in zip(all_arrays(rows), all_arrays(target), strict=True):
            for start, stop in RANGES:
                np.testing.assert_array_equal(sent[start:stop], received[start:stop])
            assert not received[2:4].any(), "rows that were not listed"
        is_ended = rows.terminated | rows.truncated
        listed = np.isin(np.arange(NUM_ENVS), [0, 1, 4])
        for sent, received in zip(
            rows.final_observation, target.final_observation, strict=True
        ):
            np.testing.assert_array_equal(
                sent[is_ended & listed], received[is_ended & listed]
            )
            assert not received[~(is_ended & listed)].any()


@pytest.mark.parametrize("name", SPACES)
def test_unpacking_packed_actions_restores_them(name: str, random_seed: int) -> None:
    _, rows = make_rows(name, random_seed)
    _, target = make_rows(name)
    part_of(target).unpack_actions(pack_actions(rows))
    for sent, received in zip(rows.action, target.action, strict=True):
        for start, stop in RANGES:
            np.testing.assert_array_equal(sent[start:stop], received[start:stop])
        assert not received[2:4].any()


def test_results_are_encoded_field_by_field() -> None:
    _, rows = make_rows("discrete")
    rows.reward[:] = np.arange(NUM_ENVS)
    rows.terminated[4] = True
    rows.observation[0][:] = np.arange(NUM_ENVS)
    rows.final_observation[0][:] = 9
    expected = (
        np.array([0, 1, 4], "<f8").tobytes()
        + bytes([0, 0, 1])  # terminated
        + bytes([0, 0, 0])  # truncated
        + bytes([0, 0, 0])  # status
        + np.array([0, 1, 4], "<i8").tobytes()  # observation
        + np.array([9], "<i8").tobytes()  # final observation of row 4
    )
    assert pack_results(rows) == expected


@pytest.mark.parametrize("change", [-1, 1, -8, 8, 100])
def test_a_wrong_length_raises_a_protocol_error_and_writes_nothing(change: int) -> None:
    _, rows = make_rows("dict", 3)
    _, target = make_rows("dict")
    payload = pack_results(rows)
    wrong = payload[:change] if change < 0 else payload + bytes(change)
    with pytest.raises(RemoteProtocolError, match="bytes of results"):
        part_of(target).unpack_results(wrong)
    with pytest.raises(RemoteProtocolError, match="bytes of results"):
        part_of(target).unpack_results(wrong[:50], wrong[50:])
    payload = pack_actions(rows)
    wrong = payload[:change] if change < 0 else payload + bytes(change)
    with pytest.raises(RemoteProtocolError, match="bytes of actions"):
        part_of(target).unpack_actions(wrong)
    assert not any(array.any() for array in (*all_arrays(target), *target.action))


@pytest.mark.parametrize(("offset", "value"), [(24, 2), (28, 255), (31, 4), (32, 77)])
def test_flags_and_status_out_of_range_raise_protocol_errors(
    offset: int, value: int
) -> None:
    _, rows = make_rows("discrete")
    payload = bytearray(pack_results(rows))
    payload[offset] = value
    text = f"the server sent .*{value}"
    with pytest.raises(RemoteProtocolError, match=text):
        part_of(rows).unpack_results(bytes(payload))


@pytest.mark.parametrize("status", [1, 2, 3])
@pytest.mark.parametrize("ends", [(0, 0), (1, 0), (1, 1)])
def test_a_fault_that_does_not_truncate_its_episode_is_a_protocol_error(
    status: int, ends: tuple[int, int]
) -> None:
    _, rows = make_rows("discrete")
    rows.truncated[0] = rows.truncated[4] = True
    rows.status[0] = rows.status[4] = status
    target = part_of(make_rows("discrete")[1])
    target.unpack_results(pack_results(rows))
    rows.terminated[4], rows.truncated[4] = ends
    text = "terminated {}, truncated {} and status {} in row 2"
    with pytest.raises(RemoteProtocolError, match=text.format(*ends, status)):
        target.unpack_results(pack_results(rows))


def test_rows_without_bytes_can_be_packed_and_unpacked() -> None:
    space = spaces.Box(0, 1, (0,), np.float32)
    rows = Rows.allocate(EnvSpec("A-v0", space, space), 2)
    rows.terminated[:] = True
    part = part_of(rows, [(0, 2)])
    part.unpack_actions(b"".join(part.pack_actions()))
    part.unpack_results(b"".join(part.pack_results()))


def cuts_of(buffers: Sequence[Any]) -> Iterator[int]:
    """Yield the offsets at which to cut, with only some of those inside long fields."""
    start = 0
    for nbytes in [memoryview(buffer).nbytes for buffer in buffers]:
        step = max(1, nbytes // 100)
        cuts = {*range(min(nbytes, 9)), *range(0, nbytes, step), max(0, nbytes - 1)}
        yield from (start + cut for cut in cuts)
        start += nbytes
    yield start


@pytest.mark.parametrize("name", SPACES)
def test_rows_can_be_cut_between_body_and_payload_anywhere(
    name: str, random_seed: int
) -> None:
    (_, rows), (_, target) = make_rows(name, random_seed), make_rows(name)
    part = part_of(target)
    payload, zeros = pack_results(rows), pack_results(target)
    for cut in cuts_of(part_of(rows).pack_results()):
        part.unpack_results(zeros)
        part.unpack_results(payload[:cut], payload[cut:])
        assert b"".join(part.pack_results()) == payload
    payload, zeros = pack_actions(rows), pack_actions(target)
    for cut in cuts_of(part_of(rows).pack_actions()):
        part.unpack_actions(zeros)
        part.unpack_actions(payload[:cut], payload[cut:])
        assert b"".join(part.pack_actions()) == payload


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([3, 4], (7, 0)),
        ([MAX_INLINE_BYTES - 1, 1], (MAX_INLINE_BYTES, 0)),
        ([3, MAX_INLINE_BYTES], (3, MAX_INLINE_BYTES)),
        ([MAX_INLINE_BYTES + 1], (0, MAX_INLINE_BYTES + 1)),
        ([MAX_INLINE_BYTES + 1, 5], (0, MAX_INLINE_BYTES + 6)),
        ([3, 1 << 20, 5], (3, (1 << 20) + 5)),
    ],
)
def test_short_rows_and_first_fields_go_into_the_body(
    sizes: list[int], expected: tuple[int, int]
) -> None:
    buffers = [bytes([index]) * size for index, size in enumerate(sizes)]
    body, payload = split_rows(buffers)
    assert (len(body), len(payload)) == expected
    assert body + bytes(payload) == b"".join(buffers)


def test_a_long_last_field_is_not_copied() -> None:
    field = memoryview(bytearray(MAX_INLINE_BYTES + 1))
    assert split_rows([b"123", field]) == (b"123", field)
    assert split_rows([b"123", field])[1] is field


def test_adjacent_ranges_are_merged() -> None:
    assert merge_ranges([(0, 2), (2, 5), (7, 8), (5, 7)]) == [(0, 5), (7, 8), (5, 7)]
    assert merge_ranges([]) == []
