"""Rows as bytes: every kind of space, ended rows and others, exact lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from envserve.errors import RemoteProtocolError
from envserve.slab import Rows
from envserve.spec import EnvSpec, flatten
from envserve.testing import SPACES
from envserve.wire import RowCodec, merge_ranges

NUM_ENVS = 6
RANGES = [(0, 2), (4, 5)]


def make_rows(name: str, seed: int | None = None) -> tuple[EnvSpec, Rows]:
    """Rows of zeros, or of random values with some ended episodes."""
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
    return spec, rows


def all_arrays(rows: Rows) -> list[Any]:
    return [
        *(rows.reward, rows.terminated, rows.truncated, rows.status),
        *rows.observation,
    ]


@pytest.mark.parametrize("name", SPACES)
def test_results_make_the_round_trip(name: str, random_seed: int) -> None:
    for seed in range(random_seed, random_seed + 5):
        _, rows = make_rows(name, seed)
        _, target = make_rows(name)
        payload = RowCodec(rows).pack_results(RANGES)
        RowCodec(target).unpack_results(RANGES, payload)
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
def test_actions_make_the_round_trip(name: str, random_seed: int) -> None:
    _, rows = make_rows(name, random_seed)
    _, target = make_rows(name)
    RowCodec(target).unpack_actions(RANGES, RowCodec(rows).pack_actions(RANGES))
    for sent, received in zip(rows.action, target.action, strict=True):
        for start, stop in RANGES:
            np.testing.assert_array_equal(sent[start:stop], received[start:stop])
        assert not received[2:4].any()


def test_the_layout_is_field_by_field() -> None:
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
    assert RowCodec(rows).pack_results(RANGES) == expected


@pytest.mark.parametrize("change", [-1, 1, -8, 8, 100])
def test_a_wrong_length_is_a_protocol_error_and_writes_nothing(change: int) -> None:
    _, rows = make_rows("dict", 3)
    _, target = make_rows("dict")
    payload = RowCodec(rows).pack_results(RANGES)
    wrong = payload[:change] if change < 0 else payload + bytes(change)
    with pytest.raises(RemoteProtocolError, match="bytes of results"):
        RowCodec(target).unpack_results(RANGES, wrong)
    actions = RowCodec(rows).pack_actions(RANGES)
    wrong = actions[:change] if change < 0 else actions + bytes(change)
    with pytest.raises(RemoteProtocolError, match="bytes of actions"):
        RowCodec(target).unpack_actions(RANGES, wrong)
    assert not any(array.any() for array in (*all_arrays(target), *target.action))


@pytest.mark.parametrize(("offset", "value"), [(24, 2), (28, 255), (31, 4), (32, 77)])
def test_flags_and_status_out_of_range_are_protocol_errors(
    offset: int, value: int
) -> None:
    _, rows = make_rows("discrete")
    payload = bytearray(RowCodec(rows).pack_results(RANGES))
    payload[offset] = value
    with pytest.raises(RemoteProtocolError, match="status"):
        RowCodec(rows).unpack_results(RANGES, bytes(payload))


@given(st.binary(max_size=120))
def test_random_payloads_raise_nothing_but_protocol_errors(payload: bytes) -> None:
    _, rows = make_rows("discrete")
    codec = RowCodec(rows)
    try:
        codec.unpack_results(RANGES, payload)
    except RemoteProtocolError as error:
        assert "expected" in str(error)  # noqa: PT017
    else:
        assert codec.pack_results(RANGES) == payload


def test_a_space_of_no_bytes_is_carried() -> None:
    space = spaces.Box(0, 1, (0,), np.float32)
    rows = Rows.allocate(EnvSpec("A-v0", space, space), 2)
    rows.terminated[:] = True
    codec = RowCodec(rows)
    codec.unpack_actions([(0, 2)], codec.pack_actions([(0, 2)]))
    codec.unpack_results([(0, 2)], codec.pack_results([(0, 2)]))


def test_ranges_that_follow_each_other_are_joined() -> None:
    assert merge_ranges([(0, 2), (2, 5), (7, 8), (5, 7)]) == [(0, 5), (7, 8), (5, 7)]
    assert merge_ranges([]) == []
