"""Convert attributes that are not plain: spaces, random generators, specs, methods.

Such a value is sent in a plain form. From this form, a client creates only objects of
known classes. The spec of an env is looked up by its name, and gets the time limit of
the env.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Space

from envserve.errors import CodecError
from envserve.spaces.env_spec import describe, restore

#: Key of a plain form that names the kind of the original value; other dicts are
#: unlikely to contain this key.
_KIND: Final = "envserve.kind"
#: Sentinel that `from_plain` returns for a method. Methods cannot be sent, so clients
#: call them by name.
METHOD: Final = object()
_BIT_GENERATORS: Final = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def to_plain(value: Any) -> Any:
    """Return the plain form of a space, random generator, spec or method.

    Other values are returned unchanged.
    """
    if isinstance(value, Space):
        return {_KIND: "space", "space": describe(value)}
    if isinstance(value, np.random.Generator):
        # Send the state as JSON, because some states contain ints of 128 bits.
        state = json.dumps(value.bit_generator.state, default=np.ndarray.tolist)
        return {_KIND: "generator", "state": state}
    if isinstance(value, EnvSpec):
        limit = value.max_episode_steps
        return {_KIND: "spec", "id": value.id, "max_episode_steps": limit}
    return {_KIND: "method"} if inspect.isroutine(value) else value


def from_plain(value: Any) -> Any:
    """Return the original value of a plain form; return other values unchanged.

    The form may come from an untrusted peer. A spec that is not registered becomes
    None.

    Raises:
      CodecError: The value is not valid.
    """
    if not isinstance(value, Mapping) or _KIND not in value:
        return value
    try:
        if value[_KIND] == "method":
            return METHOD
        if value[_KIND] == "spec":
            return _spec_of(value)
        if value[_KIND] == "generator":
            return _generator_of(value["state"])
        return restore(value["space"])
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CodecError(f"not a valid attribute: {error!s:.200}") from None


def _spec_of(value: Mapping[str, Any]) -> EnvSpec | None:
    spec = copy.copy(gymnasium.registry.get(value["id"]))
    if spec is not None and "max_episode_steps" in value:  # older servers omit it
        limit = value["max_episode_steps"]
        if type(limit) not in (int, type(None)):
            raise TypeError(f"expected an int or None; got {limit!r:.99}")
        spec.max_episode_steps = limit
    return spec


def _generator_of(text: str) -> np.random.Generator:
    state = json.loads(text)
    if (name := state["bit_generator"]) not in _BIT_GENERATORS:
        raise ValueError(f"unknown bit generator {name!r:.99}")
    bit_generator = getattr(np.random, name)()
    bit_generator.state = state
    return np.random.Generator(bit_generator)
