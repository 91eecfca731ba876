"""The registered wrappers, their arguments, and the errors for invalid requests."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import ClipAction, vector

from envserve.envs.registry import make_env
from envserve.errors import EnvStartError, WrapperError
from envserve.spaces import codec
from envserve.wrappers import (
    Boolean,
    Choice,
    Integer,
    Integers,
    Keys,
    Number,
    register_wrapper,
)
from envserve.wrappers.apply import wrap
from envserve.wrappers.registry import WRAPPERS
from envserve.wrappers.specs import (
    MAX_WRAPPERS,
    WrapperSpec,
    check_wrappers,
    parse_wrappers,
    wrappers_from_plain,
    wrappers_to_plain,
)
from tests.envserve.scripted_env import Bounded

IMAGE = spaces.Box(0, 255, (256, 256, 3), np.uint8)


def of(name: str, **arguments: Any) -> tuple[WrapperSpec, ...]:
    return (WrapperSpec(name, arguments),)


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_registered_arguments_are_those_of_the_wrapper_class(name: str) -> None:
    known = WRAPPERS[name]
    assert isinstance(known.make, str)
    module, _, attribute = known.make.partition(":")
    _, *parameters = inspect.signature(
        getattr(importlib.import_module(module), attribute)
    ).parameters.values()
    required = {p.name for p in parameters if p.default is inspect.Parameter.empty}
    assert set(known.arguments) <= {p.name for p in parameters}
    assert {n for n, a in known.arguments.items() if a.required} == required
    if module.startswith("gymnasium"):
        assert attribute == name


def test_wrappers_are_parsed_in_their_order() -> None:
    specs = parse_wrappers(
        [{"name": "ActionRepeat", "amount": 4}, {"name": "ClipAction"}]
    )
    assert specs == (
        WrapperSpec("ActionRepeat", {"amount": 4}),
        WrapperSpec("ClipAction"),
    )
    assert str(specs[0]) == "ActionRepeat(amount=4)"
    assert wrappers_from_plain(wrappers_to_plain(specs)) == specs


def test_the_encoding_of_wrappers_does_not_depend_on_the_order_of_arguments() -> None:
    first = parse_wrappers([{"name": "X", "a": 1, "b": 2}])
    second = parse_wrappers([{"b": 2, "a": 1, "name": "X"}])
    assert [list(spec.arguments) for spec in first + second] == [["a", "b"]] * 2
    third = (WrapperSpec("X", {"b": 2, "a": 1}),)
    encoded = {codec.encode(wrappers_to_plain(s)) for s in (first, second, third)}
    assert len(encoded) == 1


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("ClipAction", r"wrappers: expected a list .*; got 'ClipAction'; put it into"),
        ({"name": "ClipAction"}, r"wrappers: expected a list .*; put it into a list"),
        (ClipAction, r"wrappers: expected a list .*; got ClipAction; put it into a li"),
        ([vector.ClipAction], r"expected a name, .*; got ClipAction; only workers of"),
        (3, r"wrappers: expected a list such as .*; got 3$"),
        ([3], r"wrappers\[0\]: expected a name, or a table.*got 3"),
        ([{"amount": 4}], r"wrappers\[0\]: expected a name, or a table"),
        ([{"name": 3}], r"wrappers\[0\]: expected a name, or a table"),
        ([{"name": "ClipAction"}] * 17, r"expected at most 16 wrappers; got 17"),
        (
            [{"name": "ClipAction"}, {"name": "ActionRepeat", "amount": "4"}],
            r"wrappers\[1\] \(ActionRepeat\): amount: expected an int from 1 to 1000; "
            r"got '4'",
        ),
        ([{"name": "ActionRepeat"}], r"missing argument 'amount'; expected an int"),
        ([{"name": "ActionRepeat", "amount": True}], r"amount: .*got True"),
        (
            [{"name": "ActionRepeat", "times": 4}],
            r"\(ActionRepeat\): unknown argument 'times'",
        ),
        ([{"name": "ClipAction", "low": 0}], "unknown argument .low.; expected none"),
        (
            [{"name": "ResizeObservation", "shape": [100_000, 100_000]}],
            r"shape: expected a list of 2 ints from 1 to 1024; got \[100000, 100000\]",
        ),
        ([{"name": "ResizeObservation", "shape": 84}], r"shape: expected a list of 2"),
        ([{"name": "FrameStackObservation", "stack_size": 10**6}], r"from 1 to 64"),
        ([{"name": "RandomStart", "max_steps": 10**9}], r"from 1 to 10000"),
        ([{"name": "FrameHistory", "past_indices": [10**9]}], r"from 0 to 63"),
        ([{"name": "ClipReward", "min_reward": float("nan")}], r"a number from.*nan"),
        ([{"name": "DtypeObservation", "dtype": "object"}], r"one of float32, float64"),
        ([{"name": "FlattenObservation", "x": np.zeros(3)}], "unknown argument 'x'"),
        (
            [{"name": "TimeAwareObservation", "flatten": np.zeros(3)}],
            r"flatten: expected true or false; got ndarray",
        ),
    ],
)
def test_errors_name_the_wrong_wrapper_and_argument(tables: Any, message: str) -> None:
    with pytest.raises(WrapperError, match=message):
        parse_wrappers(tables)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ActionRepaet", "did you mean ActionRepeat"),
        ("LimitDuration", "did you mean TimeLimit"),
        ("ConvertTo32Bit", "did you mean DtypeObservation"),
        ("AutoReset", "workers reset envs by themselves"),
        ("os:system", "known: ActionRepeat"),
    ],
)
def test_the_error_about_an_unknown_wrapper_suggests_names(
    name: str, hint: str
) -> None:
    parse_wrappers([{"name": name}])  # a server may have registered this name
    with pytest.raises(WrapperError, match=f"no wrapper named '{name}'.*{hint}"):
        check_wrappers(of(name))
    with pytest.raises(WrapperError, match=hint):
        make_env("CartPole-v1", {}, of(name))


@pytest.mark.parametrize(
    "value",
    [None, 3, {}, [[]], [["a", 1]], [[1, {}]], [["a", {1: 2}]]]
    + [[["a" * 201, {}]], [["a", {}]] * (MAX_WRAPPERS + 1), [np.zeros(2)], np.zeros(2)],
)
def test_malformed_pairs_raise_wrapper_error(value: Any) -> None:
    with pytest.raises(WrapperError):
        wrappers_from_plain(value)


@pytest.mark.parametrize(
    ("argument", "good", "bad"),
    [
        (Integer(0, 3), [0, 3], [-1, 4, 1.0, "1", None, True]),
        (Number(0, 1), [0, 0.5, 1], [-0.1, 2, "0", float("inf"), True, None]),
        (Boolean(), [True, False], [0, 1, "true", None]),
        (Choice(("a", "b")), ["a", "b"], ["c", 1, None, ["a"]]),
        (Keys(), [["a", 1], [0]], [[], [-1], [1.5], [None], [True], "a", ["b" * 201]]),
        (Integers(0, 3, 1, 2), [[0], (1, 3)], [[], [4], [1, 2, 3], 1, "1", [True]]),
    ],
)
def test_arguments_have_bounds(argument: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        converted = argument.convert(value)
        assert converted == (tuple(value) if isinstance(value, list) else value)
    for value in [*bad, np.zeros(1, np.int64)]:
        with pytest.raises(ValueError, match=r"Expected|Invalid"):
            argument.convert(value)


@pytest.mark.parametrize(
    ("space", "specs"),
    [
        (IMAGE, of("FrameStackObservation", stack_size=64)),
        (IMAGE, of("FrameHistory", past_indices=[63])),
        (IMAGE, of("DelayObservation", delay=64)),
        (
            spaces.Box(0, 255, (800, 800), np.uint8),
            of("DtypeObservation", dtype="float64"),
        ),
        (spaces.Discrete(2**62), of("FlattenObservation")),
        (spaces.Dict(image=IMAGE), of("FrameStackObservation", stack_size=30)),
    ],
)
def test_wrappers_cannot_enlarge_observations_above_the_limit(
    space: spaces.Space[Any], specs: tuple[WrapperSpec, ...]
) -> None:
    with pytest.raises(WrapperError, match=r"expected observations of at most 4 MiB"):
        wrap(Bounded(space), specs)


def test_observations_may_stay_as_large_as_the_envs_own() -> None:
    space = spaces.Box(0, 255, (1200, 1200, 3), np.uint8)  # 4.1 MiB
    limit = of("TimeLimit", max_episode_steps=9)
    assert wrap(Bounded(space), limit).observation_space == space
    with pytest.raises(WrapperError, match=r"of at most 4.12 MiB; got 8.24 MiB"):
        wrap(Bounded(space), limit + of("FrameStackObservation", stack_size=2))


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (of("ClipAction"), r"wrappers\[0\] \(ClipAction\): TypeError: .* Box action"),
        (of("FrameHistory", past_indices=[0]), r"a Box as observation space"),
        (of("FrameDelta"), r"a Box of floats, or of integers"),
        (of("RescaleAction", min_action=0, max_action=1), r"actions of floats"),
        (of("RangeNormalize"), r"a Box as observation space; .* observation = false"),
    ],
)
def test_the_error_about_an_unsuitable_env_names_the_wrapper(
    specs: tuple[WrapperSpec, ...], message: str
) -> None:
    with pytest.raises(EnvStartError, match=message):
        wrap(Bounded(spaces.Discrete(3)), specs)


@pytest.mark.parametrize(
    ("package", "wrappers"),
    [
        ("cv2", of("ResizeObservation", shape=[2, 2])),
        ("pygame", of("AddRenderObservation")),
    ],
)
def test_only_a_missing_opencv_is_that_of_the_extra_atari(
    package: str, wrappers: tuple[WrapperSpec, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    env: Any = Bounded(spaces.Box(0, 255, (4, 4, 3), np.uint8))
    if package == "pygame":
        env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    with pytest.raises(EnvStartError, match=f"{package}.* is not installed") as raised:
        wrap(env, wrappers)
    assert ("[atari]" in str(raised.value)) == (package == "cv2")


@patch.dict(WRAPPERS)
def test_user_wrappers_can_be_registered_with_arguments() -> None:
    def limited(env: Any, steps: int) -> Any:
        return gymnasium.wrappers.TimeLimit(env, steps)

    register_wrapper("Limited", limited, {"steps": Integer(1, 9, required=True)})
    register_wrapper("Limited", limited, {"steps": Integer(1, 9, required=True)})
    env = make_env("CartPole-v1", {}, of("Limited", steps=1))
    env.reset(seed=0)
    assert env.step(0)[3]
    with pytest.raises(WrapperError, match=r"steps: expected an int from 1 to 9"):
        parse_wrappers([{"name": "Limited", "steps": 10}])
    with pytest.raises(ValueError, match="wrapper 'TimeLimit' is already registered"):
        register_wrapper("TimeLimit", limited)
    with pytest.raises(ValueError, match="no argument can be called 'name'"):
        register_wrapper("Named", limited, {"name": Boolean()})


def test_documented_wrappers_and_arguments_are_the_registered_ones() -> None:
    """The tables of docs/wrappers.md list every name with every argument."""
    text = (Path(__file__).parents[2] / "docs" / "wrappers.md").read_text()
    rows = {
        line.split("|")[1].strip(" `"): line
        for line in text.splitlines()
        if line.startswith("| `")
    }
    assert set(rows) == set(WRAPPERS)
    for name, known in WRAPPERS.items():
        for argument in known.arguments:
            assert f"`{argument}`" in rows[name], (name, argument)
