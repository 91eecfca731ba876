"""The operator's policy: exposed attributes and allowed env arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest

from envserve.keys.grant import Grant
from envserve.session.server.permissions import (
    Rejection,
    check_call,
    check_kwargs,
    restrict,
)
from envserve.settings import HostSettings
from envserve.wire.constants import ErrorCode


def allowed_kinds(host: HostSettings, name: str) -> set[str]:
    """Return the allowed kinds of access to an attribute."""
    rejected = {}
    for kind in ("get", "set", "call"):
        try:
            check_call(host, kind, name, 0)
        except Rejection as rejection:
            rejected[kind] = rejection.body
    for kind, body in rejected.items():
        assert (body.code, body.env_index) == (ErrorCode.REFUSED, 0)
        assert f"--expose {kind}:NAME" in body.text
    return {"get", "set", "call"} - rejected.keys()


@pytest.mark.parametrize(
    ("exposed", "expected"),
    [
        ({"level"}, {"get", "call"}),
        ({"get:level"}, {"get"}),
        ({"set:level"}, {"set"}),
        ({"call:level", "set:level"}, {"call", "set"}),
        ({"levels"}, set()),
    ],
)
def test_an_attribute_is_exposed_to_the_listed_kinds_of_access(
    exposed: set[str], expected: set[str]
) -> None:
    assert allowed_kinds(HostSettings(exposed=frozenset(exposed)), "level") == expected


@pytest.mark.parametrize(
    ("key_exposed", "expected"),
    [
        (None, {"get", "call"}),
        ((), set()),
        (("get:level", "set:level"), {"get"}),
        (("level", "other"), {"get", "call"}),
    ],
)
def test_a_key_may_use_no_more_than_the_host_exposes(
    key_exposed: tuple[str, ...] | None, expected: set[str]
) -> None:
    host = HostSettings(exposed=frozenset({"level"}))
    grant = Grant(name="trainer-1", public=bytes(32), exposed=key_exposed)
    assert allowed_kinds(restrict(host, grant), "level") == expected


def test_a_key_has_at_most_as_many_workers_as_processes() -> None:
    host = HostSettings(num_workers=4)
    for most, expected in ((None, 4), (1, 1), (9, 4)):
        grant = Grant(name="trainer-1", public=bytes(32), max_processes=most)
        assert restrict(host, grant).num_workers == expected


NUMBERS = (0, -3, 0.5, True, math.inf)
WORDS = ("fast", "/etc/passwd", "")
OTHERS = (None, [1], {"a": 1}, b"1")


@pytest.mark.parametrize(
    ("rule", "good"),
    [
        ("x", NUMBERS),
        ("x:any", NUMBERS + WORDS + OTHERS),
        ("x:bool", (True,)),
        ("x:int", (0, -3)),
        ("x:int[0,10]", (0,)),
        ("x:float", (0, -3, 0.5, math.inf)),
        ("x:float[-3,0.5]", (0, -3, 0.5)),
        ("x:fast|slow", ("fast",)),
        ("x:0|/etc/passwd", (0, "/etc/passwd")),
        ("y:any", ()),
    ],
)
def test_an_argument_may_have_the_values_that_its_rule_allows(
    rule: str, good: tuple[Any, ...]
) -> None:
    assert rejected_values(rule, good) == []
    bad = [value for value in NUMBERS + WORDS + OTHERS if not contains(value, good)]
    assert rejected_values(rule, bad) == bad


def contains(value: Any, values: tuple[Any, ...]) -> bool:
    return any(value == one and type(value) is type(one) for one in values)


def rejected_values(rule: str, values: Any) -> list[Any]:
    """Return the values that a rule rejects for the argument x."""
    rejected, codes, texts = [], [], []
    for value in values:
        try:
            check_kwargs(frozenset({rule}), {"x": value})
        except Rejection as rejection:
            codes.append(rejection.body.code)
            texts.append(str(rejection))
            rejected.append(value)
    assert set(codes) <= {ErrorCode.REFUSED}
    assert all(f"; allowed: {rule}, and render_mode=" in text for text in texts)
    return rejected


def test_bounds_exclude_larger_and_smaller_values_and_nan() -> None:
    for value in (-1, 11, math.nan):
        assert rejected_values("x:float[0,10]", [value])
    assert rejected_values("x:int[0,10]", [11]) == [11]


def test_a_value_may_match_any_of_the_rules_for_its_name() -> None:
    rules = frozenset({"x:int[0,1]", "x:fast"})
    for value in (1, "fast"):
        check_kwargs(rules, {"x": value, "render_mode": "rgb_array"})
    with pytest.raises(Rejection, match="'render_mode' may not be 'human'"):
        check_kwargs(rules, {"render_mode": "human"})


@pytest.mark.parametrize(
    "rule", ["x:", "x:int[0", "x:int[,1]", "x:int[0.2,0.8]", "x:a b", "1x", "x:|"]
)
def test_malformed_argument_rules_are_rejected(rule: str) -> None:
    with pytest.raises(ValueError, match=r"allowed_kwargs\[0\]: expected NAME, "):
        HostSettings(allowed_kwargs=frozenset({rule}))


def test_empty_ranges_are_rejected() -> None:
    HostSettings(allowed_kwargs=frozenset({"x:int[5,5]", "y:float[-1,0.5]"}))
    for rule in ("x:int[5,0]", "x:float[-1,-1.5]"):
        with pytest.raises(
            ValueError, match=r"^allowed_kwargs: expected a range \[low,high\]"
        ):
            HostSettings(allowed_kwargs=frozenset({"x", rule}))


@pytest.mark.parametrize("name", ["_x", "Level", "maxSteps", "", "a.b", 65 * "a"])
def test_no_option_is_suggested_for_a_name_that_cannot_be_exposed(name: str) -> None:
    for kind in ("get", "set", "call"):
        with pytest.raises(ValueError, match=r"NAME has lower-case .* begins"):
            HostSettings(exposed=frozenset({f"{kind}:{name}"}))
        with pytest.raises(Rejection, match="; add an attribute with such a n") as got:
            check_call(HostSettings(), kind, name, 0)
        assert "--expose" not in str(got.value)


@pytest.mark.parametrize("rule", ["x:level", "get:", "Level", "get:a:b", "__class__"])
def test_malformed_exposure_rules_are_rejected(rule: str) -> None:
    with pytest.raises(ValueError, match=r"exposed\[0\]: expected NAME, get:NAME,"):
        HostSettings(exposed=frozenset({rule}))
