"""Values of attributes that are not plain: spaces, generators, specs and methods.

They are sent as plain values. A client only builds objects of known classes from them,
and looks up a spec by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Space

from envserve.errors import CodecError, SpaceError
from envserve.spaces.env_spec import describe, restore
from envserve.spaces.leaves import children_of, kind_of

#: Key of the kind of a value, which no other value is likely to have.
_KIND: Final = "envserve.kind"
#: Replaces a method, which the client calls by its name.
METHOD: Final = object()
_BIT_GENERATORS: Final = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def to_plain(value: Any) -> Any:
    """Return a plain value for `from_plain`; other values are returned unchanged."""
    if isinstance(value, Space):
        states = [_state_of(each._np_random) for each in _with_children(value)]
        return {_KIND: "space", "space": describe(value), "states": states}
    if isinstance(value, np.random.Generator):
        return {_KIND: "generator", "state": _state_of(value)}
    if isinstance(value, EnvSpec):
        return {_KIND: "spec", "id": value.id}
    return {_KIND: "method"} if inspect.isroutine(value) else value


def from_plain(value: Any) -> Any:
    """Return the value for a result of `to_plain`, which may come from any peer.

    Raises:
      CodecError: The value is not valid.
    """
    if not isinstance(value, Mapping) or _KIND not in value:
        return value
    try:
        if value[_KIND] == "method":
            return METHOD
        if value[_KIND] == "spec":
            return gymnasium.registry.get(value["id"])
        if value[_KIND] == "generator":
            return _generator_of(value["state"])
        space = restore(value["space"])
        for each, state in zip(_with_children(space), value["states"], strict=True):
            each._np_random = state and _generator_of(state)
    except (LookupError, SpaceError, TypeError, ValueError) as error:
        raise CodecError(f"not a valid attribute: {error!s:.200}") from None
    return space


def _with_children(space: Space[Any]) -> Iterator[Space[Any]]:
    yield space
    for child in children_of(space, kind_of(space)):
        yield from _with_children(child)


def _state_of(generator: np.random.Generator | None) -> Any:
    return generator and _to_text(generator.bit_generator.state)


def _to_text(state: Any) -> Any:
    """Convert the ints of a state, which may have 128 bits, to str."""
    if isinstance(state, Mapping):
        return {key: _to_text(value) for key, value in state.items()}
    return str(state) if isinstance(state, int) else state


def _generator_of(state: Any) -> np.random.Generator:
    name = state["bit_generator"]
    if name not in _BIT_GENERATORS:
        raise ValueError(f"unknown bit generator {name!r:.99}")
    bit_generator = getattr(np.random, name)()
    bit_generator.state = {**_from_text(state), "bit_generator": name}
    return np.random.Generator(bit_generator)


def _from_text(state: Any) -> Any:
    if isinstance(state, Mapping):
        pairs = ((k, v) for k, v in state.items() if k != "bit_generator")
        return {key: _from_text(value) for key, value in pairs}
    return int(state) if isinstance(state, str) else state
