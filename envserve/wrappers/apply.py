"""Apply wrappers to an env, in the process that builds the env.

The size of observations is limited, because a client of the server may choose the
wrappers.
"""

from __future__ import annotations

import math
import pkgutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

from envserve.errors import EnvStartError, WrapperError
from envserve.text import install_command, message_of
from envserve.wrappers.additional import check_float
from envserve.wrappers.registry import WRAPPERS
from envserve.wrappers.specs import WrapperSpec, check_wrappers, convert_arguments

Env = gymnasium.Env[Any, Any]

#: Maximum size of a wrapped observation (594 Atari frames of 84 x 84 pixels), unless
#: the env's own observation is larger. Each env needs several times as much memory, for
#: the bounds of its spaces and for stacks of frames.
_MAX_OBSERVATION_BYTES: Final = 4 << 20


def wrap(env: Env, specs: Sequence[WrapperSpec]) -> Env:
    """Return the wrapped env; the first wrapper is the innermost.

    Raises:
      WrapperError: A wrapper is not registered, an argument is wrong, or observations
        would become too large.
      EnvStartError: A wrapper does not accept this env.
    """
    if not specs:
        return env
    check_wrappers(specs)
    limit = max(_nbytes(env.observation_space), _MAX_OBSERVATION_BYTES)
    for position, spec in enumerate(specs):
        where = f"wrappers[{position}] ({spec.name})"
        arguments = convert_arguments(spec, position)
        try:
            size = _observation_bytes(env.observation_space, spec.name, arguments)
            _check_size(size, limit, where)
            env = _apply(env, spec.name, arguments)
            if not WRAPPERS[spec.name].is_limited:
                limit = max(_nbytes(env.observation_space), limit)
            _check_size(_nbytes(env.observation_space), limit, where)
        except WrapperError:
            raise
        except Exception as error:
            text = f"{where}: {type(error).__name__}: {message_of(error)}"
            is_missing = isinstance(error, gymnasium.error.DependencyNotInstalled)
            if is_missing and "opencv" in text:
                text += f"; {install_command('atari')} on the host that runs the envs"
            raise EnvStartError(text) from error
    return env


def _apply(env: Env, name: str, arguments: dict[str, Any]) -> Env:
    if name == "RescaleObservation":
        check_float("observation", env.observation_space)
    elif name == "RescaleAction":
        check_float("action", env.action_space)
    elif name == "DtypeObservation":
        # Gymnasium 1.2 calls the dtype as a function, so pass the class, not the name.
        arguments = {"dtype": np.sctypeDict[arguments["dtype"]]}
    registered = WRAPPERS[name].make
    make: Callable[..., Env] = (
        pkgutil.resolve_name(registered) if isinstance(registered, str) else registered
    )
    with warnings.catch_warnings():
        # The user has requested this cast by adding the wrapper.
        warnings.filterwarnings("ignore", ".*precision lowered by casting")
        return make(env, **arguments)


def _observation_bytes(
    space: spaces.Space[Any], name: str, arguments: dict[str, Any]
) -> int:
    """Return the size in bytes of a wrapper's observations, before it is applied.

    Return 0 for wrappers that do not enlarge observations much.
    """
    if name == "FrameStackObservation":
        return int(arguments["stack_size"] * _nbytes(space))
    if name == "DelayObservation":
        return int((1 + arguments["delay"]) * _nbytes(space))
    if name == "FrameHistory":
        past = arguments["past_indices"]
        return int(max(1 + max(past), len(past)) * _nbytes(space))
    if name == "FlattenObservation" or (
        name == "TimeAwareObservation" and arguments.get("flatten", True)
    ):
        return 8 * int(spaces.flatdim(space))
    return 0


def _nbytes(space: spaces.Space[Any]) -> int:
    if isinstance(space, spaces.Dict):
        return sum(map(_nbytes, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return sum(map(_nbytes, space.spaces))
    if space.shape is None or space.dtype is None:
        return 0  # not an array space; a later wrapper may convert it
    return int(math.prod(space.shape) * space.dtype.itemsize)


def _check_size(num_bytes: int, limit: int, where: str) -> None:
    if num_bytes > limit:
        raise WrapperError(
            f"{where}: expected observations of at most {limit / 2**20:.3g} MiB; "
            f"got {num_bytes / 2**20:.3g} MiB; use fewer or smaller frames"
        )
