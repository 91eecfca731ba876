"""Values of attributes that are not plain are described, and checked when restored."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envserve.errors import CodecError
from envserve.spaces import codec
from envserve.spaces.attribute_values import METHOD, from_plain, to_plain

GENERATORS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


def sent(value: Any) -> Any:
    return from_plain(codec.decode(codec.encode(to_plain(value))))


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_continues_where_the_original_is(name: str) -> None:
    ours = np.random.Generator(getattr(np.random, name)(5))
    ours.integers(5, size=3)
    theirs = sent(ours)
    assert theirs.integers(1 << 40, size=700).tolist() == (
        ours.integers(1 << 40, size=700).tolist()
    )


def test_a_space_is_equal() -> None:
    inner = spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.Text(4)])
    space = spaces.Dict(a=spaces.Discrete(99), b=inner)
    assert sent(space) == space


def test_specs_and_methods_are_named() -> None:
    spec = gymnasium.spec("CartPole-v1")
    assert sent(spec) == spec
    limited = sent(dataclasses.replace(spec, max_episode_steps=7))
    assert (limited.max_episode_steps, spec.max_episode_steps) == (7, 500)
    old_server = {"envserve.kind": "spec", "id": "CartPole-v1"}
    assert from_plain(old_server) == spec
    assert sent(gymnasium.envs.registration.EnvSpec("No-v0", "os:system")) is None
    assert sent(print) is METHOD
    assert sent({"a": [1]}) == {"a": [1]}


SPACE = to_plain(spaces.Discrete(2))


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"envserve.kind": "space"},
        {"envserve.kind": "spec", "id": [1]},
        {"envserve.kind": "spec", "id": "CartPole-v1", "max_episode_steps": "a"},
        {**SPACE, "space": {"kind": "box"}},
        {"envserve.kind": "generator", "state": 5},
        {"envserve.kind": "generator", "state": "[" * 100_000},
        {"envserve.kind": "generator", "state": '{"bit_generator": "os"}'},
        {"envserve.kind": "generator", "state": '{"bit_generator": "MT19937"}'},
        {
            "envserve.kind": "generator",
            "state": '{"bit_generator": "PCG64", "has_uint32": 0, "uinteger": 0, '
            '"state": {"state": -1, "inc": "a"}}',
        },
    ],
    ids=range(10),
)
def test_invalid_descriptions_are_errors(value: dict[str, Any]) -> None:
    with pytest.raises(CodecError, match=r"^not a valid attribute: "):
        from_plain({"envserve.kind": "none", **value})
