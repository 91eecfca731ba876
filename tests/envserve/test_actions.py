"""Actions are checked when they are passed in, and every error names the env."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from envserve.errors import ActionError
from envserve.slab import Rows
from envserve.spaces.action_checks import ActionBounds, check_actions
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import flatten
from tests.oracle.probe_envs import SPACES

inf, nan = np.inf, np.nan
NESTED = spaces.Dict(
    [
        ("push", spaces.Box(-1.0, 1.0, (2,), np.float32)),
        ("press", spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiBinary(2)])),
    ]
)


def spec_of(space: Any) -> EnvSpec:
    return EnvSpec("A-v0", spaces.Discrete(2), space)


def check(space: Any, actions: Any, num_envs: int = 3) -> list[np.ndarray[Any, Any]]:
    return check_actions(spec_of(space), actions, None, num_envs)


def error_text(space: Any, actions: Any, num_envs: int = 3) -> str:
    with pytest.raises(ActionError) as caught:
        check(space, actions, num_envs)
    return str(caught.value)


@pytest.mark.parametrize("name", SPACES)
def test_valid_actions_are_returned_without_a_copy(name: str) -> None:
    batched = batch_space(SPACES[name], 3)
    batched.seed(0)
    sample = batched.sample()
    given = flatten(SPACES[name], sample)
    checked = check(SPACES[name], sample)
    assert len(checked) == len(given)
    for ours, theirs in zip(checked, given, strict=True):
        assert ours is theirs


def test_actions_at_the_bounds_are_valid() -> None:
    box = spaces.Box(-0.1, 0.1, (2,), np.float32)
    check(box, np.stack([box.low, box.high, box.low]))
    check(spaces.Discrete(5, start=-2), np.array([-2, 0, 2]))
    check(spaces.Box(0, 2**64 - 1, (1,), np.uint64), np.full((3, 1), 2**64 - 1, "u8"))


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (spaces.Discrete(2), [0, 1, 1]),
        (spaces.Discrete(2), np.array([0.0, 1.0, 1.0])),
        (spaces.MultiBinary(1), np.array([[0.0], [1.0], [1.0]], np.float16)),
        (spaces.Discrete(2), np.array([True, False, True])),
        (spaces.Discrete(2), np.array([0, 1, 1], np.uint8)),
        (spaces.MultiBinary(1), np.array([[True], [False], [True]])),
        (spaces.Box(-1, 1, (1,), np.float32), np.array([[0.5], [1], [-1]], np.float64)),
        (spaces.Box(-1, 1, (1,), np.float32), [[1], [0], [-1]]),
        (spaces.Box(0, 9, (1,), np.uint8), np.array([[0], [9], [5]], np.int64)),
    ],
)
def test_values_of_a_compatible_dtype_are_valid(space: Any, actions: Any) -> None:
    (checked,) = check(space, actions)
    np.testing.assert_array_equal(checked, actions)


def test_tiny_actions_are_valid_if_numpy_raises_errors() -> None:
    with np.errstate(all="raise"):
        (checked,) = check(spaces.Box(-1, 1, (), np.float32), np.full(3, 1e-300))
    assert not checked.any()


def test_texts_may_be_an_array_of_strings() -> None:
    texts = ["a", "bc", "d"]
    (checked,), (expected,) = (
        check(spaces.Text(4), each) for each in (np.array(texts), texts)
    )
    assert checked.tolist() == expected.tolist()


def test_a_column_of_scalars_and_additional_keys_are_accepted() -> None:
    (checked,) = check(spaces.Discrete(2), np.array([[0], [1], [1]]))
    assert checked.tolist() == [0, 1, 1]
    (checked,) = check(spaces.Dict({"a": spaces.Discrete(2)}), {"a": [0, 1, 1], "b": 5})
    assert checked.tolist() == [0, 1, 1]
    text = error_text(spaces.Box(-1, 1, (1,)), np.zeros(3))
    assert text.endswith("got [3]; write actions.reshape(3, 1)")


@pytest.mark.parametrize(
    ("space", "good", "bad", "interval"),
    [
        (spaces.Discrete(3), 2, 3, "[0, 2]"),
        (spaces.Discrete(3), 2, -1, "[0, 2]"),
        (spaces.Discrete(3, start=-1), -1, -2, "[-1, 1]"),
        (spaces.Discrete(3, start=-1), 1, 2, "[-1, 1]"),
        (spaces.Box(-1, 1, (), np.float32), 1.0, 1.0001, "[-1.0, 1.0]"),
        (spaces.Box(-1, 1, (), np.float64), -1.0, -1.0001, "[-1.0, 1.0]"),
        (spaces.Box(0, inf, (), np.float64), 0.0, -0.5, "[0.0, inf]"),
        (spaces.Box(0, 9, (), np.uint8), 9, 10, "[0, 9]"),
        (spaces.Box(0, 255, (), np.uint8), 255, 256, "[0, 255]"),
        (spaces.Box(0, 255, (), np.uint8), 0, -1, "[0, 255]"),
        (spaces.Box(-5, 5, (), np.int64), -5, 2**62, "[-5, 5]"),
    ],
)
def test_the_error_about_an_action_out_of_bounds_names_env_interval_and_value(
    space: Any, good: Any, bad: Any, interval: str
) -> None:
    check(space, np.array([good, good, good]))
    text = error_text(space, np.array([good, bad, bad]))
    assert text.startswith(f"Env 1: expected action in {interval}; got ")
    shown = text.split("; got ")[1].split(";")[0]
    np.testing.assert_allclose(float(shown), float(bad), rtol=1e-3)
    assert text.endswith(
        "choose an action that the space contains"
        if space.dtype.kind in "iu"
        else "clip actions before the step, or make the batch with actions='clip'"
    )


def test_a_float64_action_that_overflows_float32_raises_action_error() -> None:
    space = spaces.Box(-inf, inf, (1,), np.float32)
    text = error_text(space, np.array([[0.0], [1e300], [0.0]]))
    assert text.startswith("Env 1: expected finite actions; got inf in action[0];")
    assert text.endswith("not finite in float32")


def test_the_error_names_the_position_within_the_action() -> None:
    actions = np.zeros((3, 2, 3), np.float32)
    actions[2, 1, 0] = 10
    text = error_text(SPACES["box_float32"], actions)
    assert text.startswith("Env 2: expected action[1][0] in [0.0, 9.0]; got 10.0;")


def test_the_error_shows_the_bounds_of_the_invalid_element() -> None:
    space = spaces.MultiDiscrete([3, 4], start=[0, 10])
    text = error_text(space, np.array([[0, 10], [2, 13], [2, 14]]))
    assert text.startswith("Env 2: expected action[1] in [10, 13]; got 14;")


def test_the_error_names_the_leaf_of_a_nested_action() -> None:
    actions = {
        "push": np.zeros((3, 2), np.float32),
        "press": (np.array([1, 3, 4]), np.zeros((3, 2), np.int8)),
    }
    text = error_text(NESTED, actions)
    assert text.startswith("Env 2: expected action 'press/0' in [1, 3]; got 4;")


def test_the_error_names_the_env_by_its_row_in_the_batch() -> None:
    spec = spec_of(spaces.Discrete(2))
    with pytest.raises(ActionError, match=r"^Env 40: "):
        check_actions(spec, np.array([0, 2]), np.array([17, 40]), 2)


@pytest.mark.parametrize(
    ("space", "actions", "expected", "got"),
    [
        (spaces.Discrete(2), np.array([0, 1]), "[3]", "[2]"),
        (spaces.Discrete(2), np.zeros((3, 2), int), "[3]", "[3, 2]"),
        (spaces.Discrete(2), 1, "[3]", "[]"),
        (spaces.Discrete(2), None, "[3]", "None"),
        (spaces.Discrete(2), {"a": 1}, "[3]", "{'a': 1}"),
        (spaces.Box(0, 1, (2,)), np.zeros((2, 3), np.float32), "[3, 2]", "[2, 3]"),
        (spaces.MultiBinary((2, 2)), np.zeros((3, 4), np.int8), "[3, 2, 2]", "[3, 4]"),
    ],
)
def test_the_error_about_a_wrong_shape_states_expected_and_found_shape(
    space: Any, actions: Any, expected: str, got: str
) -> None:
    text = error_text(space, actions)
    assert f"expected shape {expected}, one row per env; got {got}" in text


def test_ragged_rows_raise_action_error() -> None:
    text = error_text(spaces.Box(0, 1, (2,)), [[0, 1], [0], [1]])
    assert "expected shape [3, 2], one row per env; setting an array element" in text


@pytest.mark.parametrize(
    ("space", "dtype"),
    [
        (spaces.Discrete(2), "float64"),
        (spaces.MultiDiscrete([2]), "float32"),
        (spaces.MultiBinary(1), "float16"),
        (spaces.Box(0, 1, (1,), np.float32), "complex128"),
        (spaces.Box(0, 1, (1,), np.float32), "object"),
        (spaces.Box(0, 1, (1,), np.float32), "U1"),
        (spaces.Box(0, 9, (1,), np.uint8), "float32"),
    ],
)
def test_the_error_about_a_wrong_dtype_states_how_to_cast(
    space: Any, dtype: str
) -> None:
    actions = np.full((3, *space.shape), 0.5).astype(dtype)
    text = error_text(space, actions)
    assert f"expected {space.dtype}; got {actions.dtype}" in text
    assert f".astype('{space.dtype}')" in text


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        (np.zeros(3), "expected a dict with the keys ['push', 'press']; got ndarray"),
        ({"push": 0}, "expected a dict with the keys ['push', 'press']; got ['push']"),
        (
            {"push": 0, "press": [1], "more": 2},
            "expected a tuple of 2 values; got list of 1",
        ),
        ({"push": 0, 1: 2}, "got ['push', 1]"),
    ],
)
def test_the_error_about_a_wrong_structure_states_the_expected_one(
    actions: Any, expected: str
) -> None:
    assert expected in error_text(NESTED, actions)


# Rows written by another host.


def rows_with(action: Any) -> tuple[EnvSpec, Rows]:
    spec = spec_of(NESTED)
    rows = Rows.allocate(spec, 4)
    for array, value in zip(rows.action, flatten(NESTED, action), strict=True):
        array[:] = value
    return spec, rows


def test_valid_rows_raise_nothing() -> None:
    spec, rows = rows_with({"push": 1.0, "press": (3, 1)})
    ActionBounds(spec, rows.action).check(0, 4)


@pytest.mark.parametrize(
    ("row", "leaf", "value", "text"),
    [
        (2, 0, nan, r"Env 2: expected finite actions; got nan in action 'push'\[0\]"),
        (3, 1, 0, r"Env 3: expected action 'press/0' in \[1, 3\]; got 0"),
        (2, 2, 2, r"Env 2: expected action 'press/1'\[0\] in \[0, 1\]"),
    ],
)
def test_the_error_about_a_row_names_its_index_in_the_slab(
    row: int, leaf: int, value: Any, text: str
) -> None:
    spec, rows = rows_with({"push": 0.0, "press": (1, 0)})
    rows.action[leaf][row] = value
    bounds = ActionBounds(spec, rows.action)
    with pytest.raises(ActionError, match=text):
        bounds.check(2, 4)
    bounds.check(0, 2)


# Actions outside the action space.


BOUNDS = np.array([[-inf, -1e3, -0.2], [inf, 0.1, 0.9]], np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_errors_are_clipped(dtype: Any) -> None:
    box = spaces.Box(*BOUNDS)
    above = np.array([1e9, np.nextafter(BOUNDS[1, 1], np.float32(1)), 0.9000001])
    (checked,) = check(box, above[None].astype(dtype), 1)
    np.testing.assert_array_equal(checked, np.array([[1e9, 0.1, 0.9]], np.float32))
    for column, value in ((1, -1000.001), (1, 0.11), (2, -inf), (0, nan)):
        wrong = np.zeros((1, 3), dtype)
        wrong[0, column] = value
        error_text(box, wrong, 1)


def test_rounding_errors_at_the_only_finite_bound_are_clipped() -> None:
    box = spaces.Box(np.float32(-1), np.float32(inf), (2,))
    actions = np.array([[np.nextafter(np.float32(-1), np.float32(-2)), 1e9]])
    (checked,) = check(box, actions.astype(np.float32), 1)
    np.testing.assert_array_equal(checked, np.array([[-1, 1e9]], np.float32))
    error_text(box, np.full((1, 2), -1.001, np.float32), 1)


def test_rounding_errors_of_nested_actions_are_clipped() -> None:
    space = spaces.Dict({"a": spaces.Box(-0.7, 0.3, (1,), np.float64)})
    (checked,) = check(space, {"a": np.full((3, 1), np.float32(0.3))})
    assert checked.tolist() == [[0.3]] * 3


def test_actions_outside_their_space_are_passed_with_one_warning() -> None:
    box = spaces.Box(-1, 1, (2,), np.float32)
    spec = EnvSpec("PassTwice-v0", box, box)
    actions = np.array([[0, 0], [0, 5]], np.float32)
    text = r"Env 1: expected action\[1\] in \[-1.0, 1.0\]; got 5.0.*actions='clip'"
    with pytest.warns(UserWarning, match=text):
        (checked,) = check_actions(spec, actions, None, 2, "pass")
    assert checked is actions
    assert check_actions(spec, actions, None, 2, "pass") == [actions]
    discrete = EnvSpec("PassTwice-v0", box, spaces.Discrete(4))
    assert check_actions(discrete, [4, -1], None, 2, "pass")[0].tolist() == [4, -1]


@pytest.mark.parametrize("mode", ["pass", "clip", "check"])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_actions_must_be_finite_in_every_mode(mode: Any, value: float) -> None:
    box, unbounded = spaces.Box(-1, 1, (), np.float32), spaces.Box(-inf, inf, ())
    for space in (box, unbounded, spaces.Discrete(2)):
        with pytest.raises(ActionError, match="the output of the policy is not finite"):
            check_actions(spec_of(space), np.array([0, value]), None, 2, mode)


@pytest.mark.parametrize("mode", ["pass", "clip", "check"])
def test_integers_that_the_dtype_cannot_hold_are_errors(mode: Any) -> None:
    spec = spec_of(spaces.Box(0, 200, (), np.uint8))
    with pytest.raises(ActionError, match=r"Env 1: .* in \[0, 200\]; got 256"):
        check_actions(spec, np.array([0, 256]), None, 2, mode)


def test_actions_are_clipped_to_the_bounds_of_a_box() -> None:
    spec = spec_of(spaces.Box(*BOUNDS))
    actions = np.array([[1e30, -1e6, 5.0]])
    (clipped,) = check_actions(spec, actions, None, 1, "clip")
    np.testing.assert_array_equal(clipped, np.array([[1e30, -1e3, 0.9]], np.float32))
    whole = spec_of(spaces.Box(-5, 5, (), np.int64))
    (clipped,) = check_actions(whole, np.array([9], np.uint8), None, 1, "clip")
    assert clipped.tolist() == [5]
    with pytest.raises(ActionError):
        check_actions(spec_of(spaces.Discrete(3)), [3], None, 1, "clip")


# The action of a single env.


@pytest.mark.parametrize(
    ("space", "action", "row"),
    [
        (spaces.Discrete(3), 2, 2),
        (spaces.Discrete(3), np.array([2]), 2),
        (spaces.Discrete(3), 2.0, 2),
        (spaces.Box(-1, 1, (2,)), [0.5, 1], [0.5, 1.0]),
        (spaces.Text(3), "ab", None),
    ],
)
def test_a_single_action_becomes_one_row(space: Any, action: Any, row: Any) -> None:
    (checked,) = check(space, action, 0)
    assert len(checked) == 1
    assert row is None or checked[0].tolist() == row


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ([0, 0, 0], "action: expected shape [2]; got [3]"),
        (np.zeros((0, 2), np.float32), "action: expected shape [2]; got [0, 2]"),
        ([0.0, 3.0], "expected action[1] in [-1.0, 1.0]; got 3.0;"),
        ([0.0, nan], "expected finite actions; got nan in action[1];"),
    ],
)
def test_errors_about_a_single_action_name_no_row(action: Any, text: str) -> None:
    assert error_text(spaces.Box(-1, 1, (2,)), action, 0).startswith(text)


class Tensor:
    """A value like a PyTorch tensor that has no NumPy dtype."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Got unsupported ScalarType BFloat16")

    def detach(self) -> Any:
        raise AssertionError


@pytest.mark.parametrize("actions", [Tensor(), [Tensor(), Tensor(), Tensor()]])
def test_the_error_about_a_tensor_names_the_conversion(actions: Any) -> None:
    text = error_text(spaces.Box(-1, 1, (2,)), actions)
    assert "BFloat16; write actions.detach().float().cpu().numpy()" in text
