"""Spaces survive a round trip; invalid descriptions raise SpaceError."""

from __future__ import annotations

import time
from operator import itemgetter
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from envserve.errors import SpaceError
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec, describe, restore, spaces_equal
from envserve.spaces.leaves import flatten, leaves_of, unflatten
from tests.oracle.probe_envs import SPACES

Space = gymnasium.Space[Any]

inf = np.inf
MORE_SPACES: dict[str, Space] = {
    "uneven_image": spaces.Box(
        np.arange(48, dtype=np.uint8).reshape(4, 4, 3), 255, (4, 4, 3), np.uint8
    ),
    "float16_unbounded": spaces.Box(-inf, inf, (2,), np.float16),
    "half_bounded": spaces.Box(np.array([0, -inf]), np.array([inf, 1]), dtype=float),
    "scalar_unbounded": spaces.Box(-inf, inf, (), np.float64),
    "widest_int64": spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
    "unbounded_int32": spaces.Box(-inf, inf, (2, 3), np.int32),
    "scalar_unbounded_int64": spaces.Box(-inf, inf, (), np.int64),
    "half_bounded_int32": spaces.Box(
        np.array([0, -inf]), np.array([inf, 1]), dtype=np.int32
    ),
    "widest_uint64": spaces.Box(0, 2**64 - 1, (2,), np.uint64),
    "bool_box": spaces.Box(0, 1, (3,), np.bool_),
    "empty_box": spaces.Box(0.0, 1.0, (0, 3), np.float32),
    "int8_discrete": spaces.Discrete(3, start=125, dtype=np.int8),
    "multi_binary_flat": spaces.MultiBinary(7),
    "multi_binary_list": spaces.MultiBinary([7]),
    "multi_discrete_start": spaces.MultiDiscrete([3, 4], start=[-1, 10]),
    "multi_discrete_grid_start": spaces.MultiDiscrete(
        np.array([[3, 4], [5, 6]]), start=np.array([[0, 1], [2, 3]])
    ),
    "multi_discrete_uint8": spaces.MultiDiscrete(
        [6, 6], dtype=np.uint8, start=[250, 0]
    ),
    "empty_dict": spaces.Dict({}),
    "dict_out_of_order": spaces.Dict(
        [("z", spaces.Discrete(2)), ("a", spaces.Discrete(3)), ("m", spaces.Dict({}))]
    ),
    "one_tuple": spaces.Tuple([spaces.Dict({"x": spaces.Tuple([])})]),
}
ALL_SPACES = {**SPACES, **MORE_SPACES}


def encode_and_restore(space: Space) -> Space:
    return restore(codec.decode(codec.encode(describe(space)), max_bytes=1 << 24))


def bounds(space: Space) -> list[tuple[bytes, ...]]:
    return [
        tuple(
            getattr(leaf.space, name).tobytes()
            for name in ("low", "high", "bounded_below", "bounded_above")
        )
        for leaf in leaves_of(space)
        if isinstance(leaf.space, spaces.Box)
    ]


def layout(space: Space) -> list[tuple[Any, ...]]:
    leaves = leaves_of(space)
    return [(leaf.path, leaf.shape, leaf.dtype, type(leaf.space)) for leaf in leaves]


@pytest.mark.parametrize("name", ALL_SPACES)
def test_restoring_a_described_space_returns_an_equal_space(name: str) -> None:
    space = ALL_SPACES[name]
    again = encode_and_restore(encode_and_restore(space))  # as a server does
    assert again == space
    assert spaces_equal(again, space)
    assert bounds(again) == bounds(space)
    assert layout(again) == layout(space)


def test_servers_of_older_releases_describe_the_same_spaces() -> None:
    space = spaces.Dict(
        a=spaces.MultiBinary([7]),
        b=spaces.MultiBinary(7),
        c=spaces.Box(-inf, inf, (2,), np.int8),
    )
    older = restore(describe(space, has_optional=False))
    assert older != space
    assert spaces_equal(older, space)


def test_dict_keys_keep_their_order() -> None:
    again = encode_and_restore(MORE_SPACES["dict_out_of_order"])
    assert isinstance(again, spaces.Dict)
    assert list(again.spaces) == ["z", "a", "m"]
    assert [leaf.path for leaf in leaves_of(again)] == ["z", "a"]


def test_uniform_image_bounds_are_sent_as_two_numbers() -> None:
    image = spaces.Box(0, 255, (210, 160, 3), np.uint8)
    assert len(codec.encode(describe(image))) < 100


def test_users_can_change_small_bounds() -> None:
    box = encode_and_restore(spaces.Box(-1, 1, (6,), np.float32))
    assert isinstance(box, spaces.Box)
    box.low[0], box.high[1:] = -2, 3
    assert box == spaces.Box(
        np.array([-2, *[-1] * 5], np.float32), np.array([1, *[3] * 5], np.float32)
    )


@pytest.mark.parametrize("name", ALL_SPACES)
def test_flattened_samples_are_within_the_leaf_bounds_and_can_be_unflattened(
    name: str,
) -> None:
    space = ALL_SPACES[name]
    space.seed(0)
    for _ in range(20):
        sample = space.sample()
        leaves = flatten(space, sample)
        for leaf, value in zip(leaves_of(space), leaves, strict=True):
            assert np.shape(value) == leaf.shape
            assert leaf.nbytes == np.asarray(value, leaf.dtype).nbytes
            for low, high in (leaf.bounds, leaf.limits):
                assert np.all(low <= value)
                assert np.all(value <= high)
            assert np.isfinite(leaf.limits).all()
        assert flatten(space, unflatten(space, leaves)) == leaves
        assert repr(unflatten(space, leaves)) == repr(sample)


def test_bounds_are_inclusive_and_include_the_start_of_the_space() -> None:
    for space, expected in (
        (spaces.Discrete(5, start=-2), [-2, 2]),
        (MORE_SPACES["int8_discrete"], [125, 127]),
        (MORE_SPACES["multi_discrete_uint8"], [[250, 0], [255, 5]]),
    ):
        (leaf,) = leaves_of(space)
        assert np.array(leaf.bounds).tolist() == expected


# Arbitrarily nested spaces.

leaf_spaces = (
    st.builds(spaces.Discrete, st.integers(1, 9), start=st.integers(-5, 5))
    | st.builds(spaces.MultiBinary, st.lists(st.integers(1, 3), min_size=2, max_size=3))
    | st.builds(
        lambda shape, dtype: spaces.Box(0, 3, shape, dtype),
        nps.array_shapes(min_dims=0, max_side=3),
        st.sampled_from([np.uint8, np.int64, np.float16, np.float32]),
    )
)
any_spaces = st.recursive(
    leaf_spaces,
    lambda inner: (
        st.lists(
            st.tuples(st.text(max_size=4), inner), max_size=3, unique_by=itemgetter(0)
        ).map(spaces.Dict)
        | st.lists(inner, max_size=3).map(spaces.Tuple)
    ),
    max_leaves=6,
).filter(lambda space: depth(space) <= 8)


def depth(space: Space) -> int:
    if isinstance(space, spaces.Dict):
        return 1 + max(map(depth, space.spaces.values()), default=0)
    if isinstance(space, spaces.Tuple):
        return 1 + max(map(depth, space.spaces), default=0)
    return 1


@given(any_spaces)
def test_spaces_of_any_nesting_can_be_described_and_restored(space: Space) -> None:
    assert encode_and_restore(space) == space
    sample = space.sample()
    leaves = flatten(space, sample)
    assert len(leaves) == len(leaves_of(space))
    assert repr(unflatten(space, leaves)) == repr(sample)


def nested(levels: int) -> Space:
    space: Space = spaces.Discrete(2)
    for level in range(levels):
        space = spaces.Dict({"k": space}) if level % 2 else spaces.Tuple([space])
    return space


def test_nesting_has_the_same_limit_on_both_sides() -> None:
    assert encode_and_restore(nested(7)) == nested(7)
    with pytest.raises(SpaceError, match="at most 8 levels deep"):
        describe(nested(8))
    description = {"kind": "tuple", "spaces": [describe(nested(7))]}
    with pytest.raises(SpaceError, match="at most 8 levels deep"):
        restore(description)


# Unsupported spaces and values.


def test_unsupported_dtypes_raise_space_error() -> None:
    with pytest.raises(SpaceError, match=r"float128|longdouble"):
        leaves_of(spaces.Box(0, 1, (2,), np.longdouble))


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ({"a": 1}, "a"),
        ({"a": 1, "b": 2, "c": 3}, "c"),
        ({"a": 1, 2: 3}, "2"),
        ([1, (2, 3)], "list"),
        (None, "NoneType"),
        ({"a": 1, "b": (2,)}, "tuple of 1"),
        ({"a": 1, "b": 2}, "int"),
    ],
)
def test_flattening_a_value_of_another_structure_raises_space_error(
    value: Any, got: str
) -> None:
    pair = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)])
    space = spaces.Dict({"a": spaces.Discrete(2), "b": pair})
    with pytest.raises(SpaceError, match=rf"expected a .* got .*{got}"):
        flatten(space, value)


def test_differences_name_the_space_that_differs() -> None:
    ours = EnvSpec("A-v0", spaces.Discrete(3), spaces.Discrete(2))
    theirs = EnvSpec("A-v0", spaces.Discrete(3), spaces.Discrete(2, start=1))
    assert ours.differences(ours) == []
    (line,) = ours.differences(theirs)
    assert line == "action space: expected Discrete(2), got Discrete(2, start=1)"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (spaces.Box(0, 1, (2,)), spaces.Box(0, 2, (2,))),
        (spaces.Box(0, 1, (2,)), spaces.Box(0, 1, (3,))),
        (spaces.Box(0, 1, (2,)), spaces.Box(0, 1, (2,), np.float64)),
        (spaces.Discrete(2), spaces.MultiBinary(1)),
        (SPACES["dict"], spaces.Dict({})),
        (
            spaces.Dict([("a", spaces.Discrete(2)), ("b", spaces.Discrete(3))]),
            spaces.Dict([("b", spaces.Discrete(3)), ("a", spaces.Discrete(2))]),
        ),
    ],
)
def test_spaces_with_different_rows_are_unequal(left: Space, right: Space) -> None:
    assert not spaces_equal(left, right)


# Hostile descriptions.


def box(dtype: int, low: Any, high: Any) -> dict[str, Any]:
    return {"kind": "box", "dtype": dtype, "low": low, "high": high}


def filled(shape: Any, fill: Any = 0) -> dict[str, Any]:
    return {"shape": shape, "fill": fill}


def deep_list() -> Any:
    value: Any = 0
    for _ in range(100_000):
        value = [value]
    return value


def around(kind: str, *inside: Any, **named: Any) -> dict[str, Any]:
    return {"kind": kind, "max_bytes": 64, "spaces": [*inside], **named}


film = box(5, filled([2**26]), filled([2**26]))
short = box(5, filled([2**20]), filled([2**20]))

HOSTILE: dict[str, Any] = {
    "none": None,
    "number": 3,
    "list": [1, 2],
    "empty": {},
    "unknown_kind": {"kind": "film"},
    "kind_list": {"kind": ["box"]},
    "kind_deep": {"kind": deep_list()},
    "kind_array": {"kind": np.array(["dict", "x"])},
    "no_dtype": {"kind": "box", "low": filled([2]), "high": filled([2])},
    "dtype_string": box("float32", filled([2]), filled([2])),  # type: ignore[arg-type]
    "dtype_unknown": box(99, filled([2]), filled([2])),
    "negative_size": box(1, filled([-2]), filled([-2])),
    "two_negative_sizes": box(1, filled([-(2**40), -(2**40)]), filled([1])),
    "size_not_a_number": box(1, filled(["x"]), filled(["x"])),
    "size_inf": box(1, filled([inf]), filled([inf])),
    "shape_not_a_list": box(1, filled(7), filled(7)),
    "fill_too_large": box(5, filled([2], 300), filled([2], 300)),
    "fill_nan": box(1, filled([2], np.nan), filled([2], 1)),
    "fill_text": box(9, filled([2], "x"), filled([2], 1)),
    "nan_array": box(10, np.array([np.nan], np.float32), np.ones(1, np.float32)),
    "nan_as_int": box(1, np.array([np.nan]), np.array([1.0])),
    "low_above_high": box(10, filled([2], 1.0), filled([2], 0.0)),
    "flags_differ": {
        **box(4, filled([2]), filled([2], 1)),
        "bounded_below": filled([3], 0),
    },
    "flags_are_numbers": {
        **box(4, filled([2]), filled([2], 1)),
        "bounded_above": np.zeros(2),
    },
    "flags_huge": {
        **box(4, filled([2]), filled([2], 1)),
        "bounded_above": filled([2**30], 0),
    },
    "shapes_differ": box(10, filled([2]), filled([3], 1.0)),
    "bounds_are_lists": box(10, [0.0], [1.0]),
    "many_dimensions": box(1, filled([1] * 100), filled([1] * 100)),
    "huge": box(11, filled([2**30]), filled([2**30], 1)),
    "huge_but_empty": box(11, filled([2**62, 0]), filled([2**62, 0])),
    "huger": box(1, filled([2**70]), filled([2**70])),
    "binary_huge": {"kind": "multi_binary", "dtype": 1, "shape": [2**40]},
    "binary_negative": {"kind": "multi_binary", "dtype": 1, "shape": [-1]},
    "binary_text": {"kind": "multi_binary", "dtype": 1, "shape": "ab"},
    "discrete_none": {"kind": "discrete", "dtype": 4, "n": 0, "start": 0},
    "discrete_huge": {"kind": "discrete", "dtype": 4, "n": 2**70, "start": 0},
    "discrete_text": {"kind": "discrete", "dtype": 4, "n": "3", "start": 0},
    "discrete_float": {"kind": "discrete", "dtype": 10, "n": 3, "start": 0},
    "discrete_no_start": {"kind": "discrete", "dtype": 4, "n": 3},
    "multi_none": {"kind": "multi_discrete", "dtype": 4, "nvec": None, "start": None},
    "dict_flat": {"kind": "dict", "spaces": ["a", "b"]},
    "dict_of_dict": {"kind": "dict", "spaces": {"a": 1}},
    "tuple_none": {"kind": "tuple", "spaces": None},
    "many_large": {
        "kind": "tuple",
        "spaces": [box(5, filled([2**25]), filled([2**25]))] * 1000,
    },
    "film_in_sequence": around("sequence", film, stack=False),
    "film_in_stack": around("sequence", film, stack=True),
    "film_in_graph": around("graph", film),
    "film_in_choice": around("one_of", film),
    "many_in_stack": around(
        "sequence", {"kind": "tuple", "spaces": [short] * 50}, stack=True
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_descriptions_raise_space_error_quickly(name: str) -> None:
    began = time.process_time()
    with pytest.raises(SpaceError) as caught:
        restore(HOSTILE[name])
    assert len(str(caught.value)) < 1000
    assert time.process_time() - began < 2.0


plain = st.recursive(
    st.none()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["box", "dict", "discrete", "multi_binary", "multi_discrete"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "kind dtype spaces low high n start shape fill".split()  # noqa: SIM905
            ),
            inner,
        )
    ),
)


@given(plain)
def test_restoring_any_plain_value_returns_a_space_or_raises_space_error(
    value: Any,
) -> None:
    check_restored_or_rejected(value)


def check_restored_or_rejected(description: Any) -> None:
    try:
        space = restore(description)
    except SpaceError:
        return
    assert spaces_equal(restore(describe(space)), space)


@given(st.sampled_from([s for s in ALL_SPACES.values() if leaves_of(s)]), st.data())
def test_restoring_a_mutated_description_returns_a_space_or_raises_space_error(
    space: Space, data: st.DataObject
) -> None:
    description = describe(space)
    target = description
    while data.draw(st.booleans()):
        inner = [v for v in target.values() if isinstance(v, dict)]
        inner += [v for v in target.get("spaces", []) if isinstance(v, dict)]
        if not inner:
            break
        target = data.draw(st.sampled_from(inner))
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(plain)
    check_restored_or_rejected(description)
