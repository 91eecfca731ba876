"""Rows of texts, sequences, graphs and choices: limits, values, hostile rows."""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    GraphInstance,
    OneOf,
    Sequence,
    Text,
    Tuple,
)
from gymnasium.vector.utils import create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st

from envserve.errors import CodecError, RemoteProtocolError, SpaceError
from envserve.slab import Rows
from envserve.spaces import codec, leaves
from envserve.spaces.env_spec import EnvSpec, describe, restore
from envserve.spaces.leaves import Leaf, flatten, leaves_of
from envserve.spaces.variable_length import decode_observation, decode_row, encode_row

from .space_table import ENCODED, Space, with_max_bytes
from .stalls import fastest
from .test_space_table import assert_same

FLOATS = Box(-1.0, 1.0, (2,), np.float32)


def leaf_of(space: Space) -> Leaf:
    (leaf,) = leaves_of(space)
    return leaf


def row_of(leaf: Leaf, plain: Any) -> np.ndarray[Any, Any]:
    """Return a row with an arbitrary encoded value, which a peer may send."""
    data = codec.encode(plain)
    data = len(data).to_bytes(4, "little") + data
    return np.frombuffer(data.ljust(leaf.nbytes, b"\0"), np.uint8)


# Arbitrarily nested spaces.

fixed = st.sampled_from([Discrete(3), FLOATS, Discrete(3, start=-1, dtype=np.int8)])
any_spaces = st.recursive(
    fixed | st.sampled_from([Text(4), Text(3, charset="aß🙂", min_length=0)]),
    lambda inner: (
        st.builds(Sequence, inner, stack=st.booleans())
        | st.builds(Graph, inner, inner | st.none())
        | st.builds(OneOf, st.lists(inner, min_size=1, max_size=3))
        | st.builds(lambda a, b: Dict({"a": a, "b": b}), inner, inner)
    ),
    max_leaves=4,
)


@settings(max_examples=30)
@given(any_spaces, st.integers(0, 2**31))
def test_samples_of_any_nesting_are_encoded_and_decoded_or_too_long(
    space: Space, seed: int
) -> None:
    again = restore(codec.decode(codec.encode(describe(space))))
    assert describe(again) == describe(space)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium warns about masks
        space.seed(seed)
        sample = space.sample()
    spec = EnvSpec("A", Dict({"x": space}), again)
    for leaf, value in zip(leaves_of(space), flatten(space, sample), strict=True):
        if not leaf.is_encoded:
            continue
        if len(codec.encode(value)) > leaf.nbytes - 4:
            assert leaf.nbytes >= 4096, "values of a bounded length fit"
            with pytest.raises(SpaceError, match="a value of at most"):
                encode_row(leaf, value)
            continue
        row = encode_row(leaf, value, is_strict=True)
        assert row.shape == leaf.shape
        assert_same(decode_row(leaf, row), value)
    assert spec.differences(spec) == []


# Limits.


def test_rows_are_as_long_as_the_longest_value_needs() -> None:
    for space, longest in (
        (Text(1000), "x" * 1000),
        (Text(500, charset="aß🙂"), "🙂" * 500),
        (OneOf([Text(2), Box(0, 1, (40, 50), np.uint8)]), (1, np.ones((40, 50), "u1"))),
        (OneOf([Dict({"速度" * 50: Discrete(2)})]), (0, {"速度" * 50: np.int64(1)})),
    ):
        leaf = leaf_of(space)
        encode_row(leaf, longest)
        assert leaf.nbytes < 2200
    assert leaf_of(Sequence(Discrete(2))).nbytes == 4096
    assert leaf_of(Sequence(Box(0, 1, (100, 100), np.float32))).nbytes == 1 << 20
    assert leaf_of(Text(10**9)).nbytes == 1 << 20


def test_the_error_about_a_too_long_value_states_the_limit_and_a_remedy() -> None:
    words = (
        r"at most 4096 bytes; got 5\d{3}; .*shorter.*or increase max_bytes of its space"
    )
    with pytest.raises(SpaceError, match=words):
        encode_row(leaf_of(Sequence(Discrete(2))), (np.int64(1),) * 5000)
    own = leaf_of(with_max_bytes(Sequence(Discrete(2)), 1 << 14))
    assert len(decode_row(own, encode_row(own, (1,) * 5000))) == 5000
    with pytest.raises(SpaceError, match="at most 8192 values"):
        encode_row(own, (1,) * 9000)
    again = restore(describe(with_max_bytes(Sequence(Discrete(2)), 1 << 14)))
    assert leaf_of(again).nbytes == 1 << 14


def test_encoding_overwrites_the_previous_content_of_a_row() -> None:
    rows = np.ones((1, leaf_of(ENCODED["text"]).nbytes), np.uint8)
    for value in ("abcdefghi", "a"):
        rows[0] = encode_row(leaf_of(ENCODED["text"]), value)
    assert rows.tobytes() == b"\2\0\0\0" + b"\xa1a" + bytes(rows.shape[1] - 6)


# Values with another structure.

WRONG: list[tuple[str, Any]] = [
    ("text", 3),
    ("text", b"abc"),
    ("text", None),
    ("text", "\ud800"),
    ("sequence", 3),
    ("sequence", "ab"),
    ("sequence", {1, 2}),
    ("sequence", (1.5,)),
    ("sequence", (np.array([1, 2]),)),
    ("sequence_stacked", np.zeros((3, 3), np.float32)),
    ("sequence_stacked", np.array([["a", "b"]])),
    ("sequence_stacked", np.full((1, 2), 1e300)),
    ("sequence_of_dicts", ({"a": 1},)),
    ("sequence_of_dicts_stacked", {"a": np.array([1, 1]), "t": ("a",)}),
    ("sequence_of_scalars", (None,)),
    ("graph", None),
    ("graph", GraphInstance(None, None, None)),  # type: ignore[arg-type]
    ("graph", GraphInstance(np.zeros((2, 3)), np.array([1]), None)),
    ("graph", GraphInstance(np.zeros((2, 3)), np.array([1]), np.zeros((2, 2), int))),
    ("graph", GraphInstance(np.zeros((2, 3)), np.array([1]), np.zeros((1, 2)))),
    (
        "graph_without_edges",
        GraphInstance(np.array([1]), np.array([1]), np.zeros((1, 2), int)),
    ),
    ("one_of", np.int64(0)),
    ("one_of", (2, 1)),
    ("one_of", (-1, 1)),
    ("one_of", (0, np.zeros(3))),
    ("one_of", (0, 1, 2)),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_of_another_form_raises_space_error(name: str, value: Any) -> None:
    leaf = leaf_of(ENCODED[name])
    with pytest.raises(SpaceError, match=r"expected (a|one of) |cannot encode"):
        encode_row(leaf, value)


def test_values_of_the_same_kind_are_cast() -> None:
    leaf = leaf_of(ENCODED["sequence_stacked"])
    row = encode_row(leaf, np.full((2, 2), 0.5))
    assert_same(decode_row(leaf, row), np.full((2, 2), 0.5, np.float32))
    leaf = leaf_of(ENCODED["sequence"])
    assert_same(decode_row(leaf, encode_row(leaf, [1, 2])), (np.int64(1), np.int64(2)))


# Hostile rows.

HOSTILE: list[Any] = [None, 1, [], [[]], {}, {"a": 1}, "x", [-1, 0], [0], [2**63, 0]]
HOSTILE += [[None, None, None], [np.zeros((2**40, 0), np.int8)], [np.zeros(2), 1, 1]]
HOSTILE += [np.zeros((2**50, 0), np.float32), np.zeros((1, 2, 3)), [[], 1, np.zeros(1)]]


@pytest.mark.parametrize(
    "name", [n for n in ENCODED if len(leaves_of(ENCODED[n])) == 1]
)
def test_hostile_rows_are_decoded_or_raise_codec_error(name: str) -> None:
    leaf = leaf_of(ENCODED[name])
    began = time.thread_time()
    rows = [row_of(leaf, plain) for plain in HOSTILE]
    rows.append(np.full(leaf.nbytes, 255, np.uint8))
    cut = np.zeros(leaf.nbytes, np.uint8)
    cut[:6] = 5, 0, 0, 0, 0xD9, 0xFF
    for row in [*rows, cut]:
        with contextlib.suppress(CodecError):
            leaf.space.contains(decode_row(leaf, row[: leaf.nbytes]))
    assert time.thread_time() - began < 1.0


def test_the_error_about_an_invalid_row_names_the_env_and_its_server() -> None:
    spec = EnvSpec("A", ENCODED["dict_with_text"], Discrete(2))
    rows = Rows.allocate(spec, 2)
    observation = dict(zip(("image", "mission"), rows.observation, strict=True))
    observation["mission"][1, :5] = 1, 0, 0, 0, 7
    with pytest.raises(CodecError, match=r"Env 7 \(sim7\): .*'mission': .* got 7"):
        decode_observation(
            spec,
            [3, 7],
            observation,
            is_complete=np.ones(2, np.bool_),
            host_of=lambda env_index: f"sim{env_index}",
        )
    is_complete = np.array([True, False])  # row 1's worker was killed while writing
    seen = decode_observation(spec, [3, 7], observation, is_complete=is_complete)
    assert seen["mission"][1] == decode_row(spec.observation_leaves[1], np.zeros(4))


def test_the_number_of_values_in_all_rows_of_a_step_is_limited() -> None:
    spec = EnvSpec("A", Sequence(Discrete(2)), Discrete(2))
    (leaf,) = spec.observation_leaves
    rows = np.tile(row_of(leaf, [0] * 100), (40, 1))
    rows[:32, 4] = 255  # each incomplete row counts as 8192 values
    is_complete = np.arange(40) >= 32
    with pytest.raises(
        RemoteProtocolError, match=r"Env 32 \(local\): .* at most 262144"
    ):
        decode_observation(spec, range(40), rows, is_complete=is_complete)
    ended = np.arange(40) >= 31
    seen = decode_observation(
        spec, range(40), rows, is_complete=is_complete, ended=ended
    )
    assert [len(each) for each in seen] == [0] * 32 + [100] * 8


def test_an_empty_value_is_created_once_per_leaf() -> None:
    inner = Tuple([Discrete(2)] * 500)
    spec = EnvSpec("A", Sequence(inner, stack=True), Discrete(2))
    zeros = np.zeros((2, spec.observation_leaves[0].nbytes), np.uint8)
    with mock.patch.object(leaves, "create_empty_array", wraps=create_empty_array) as m:
        complete = np.ones(2, np.bool_)
        one, other = decode_observation(spec, range(2), zeros, is_complete=complete)
        one[0][:] = 1  # the other row must not change
        assert m.call_count == 1
    assert_same(
        other, decode_observation(spec, range(1), zeros[:1], is_complete=complete)[0]
    )
    assert 500 < spec.observation_leaves[0].empty_cost < 600


HOSTILE_SPACES: dict[str, Any] = {
    "text": {"max_length": "9"},
    "texts": {"character_list": [["ab"], 3]},
    "wide": {"character_list": "abc" * 10, "max_length": 2**70},
    "long": {"max_bytes": 1 << 40},
    "short": {"max_bytes": 1},
    "negative": {"min_length": -1},
    "endless": {"min_length": 10**9, "max_length": 10**9},
}


@pytest.mark.parametrize("name", HOSTILE_SPACES)
def test_hostile_descriptions_of_texts_raise_space_error(name: str) -> None:
    description = {**describe(Text(3)), **HOSTILE_SPACES[name]}
    if name == "wide":
        assert leaf_of(restore(description)).nbytes <= 1 << 20
        return
    with pytest.raises(SpaceError):
        restore(description)


def test_the_time_to_restore_nested_graphs_is_bounded() -> None:
    description = describe(Discrete(2))
    for _ in range(6):
        both = [description, description]
        description = {"kind": "graph", "max_bytes": 4096, "spaces": both}

    def attempt() -> float:
        began = time.thread_time()
        with pytest.raises(SpaceError, match="expected a space"):
            restore(description)
        with pytest.raises(SpaceError):
            restore({"kind": "tuple", "spaces": [describe(Discrete(2))] * 5000})
        return time.thread_time() - began

    assert fastest(attempt, 1.0) < 1.0
