"""Wraps an env as it was asked for; used where envs are built.

What an observation may grow to is bounded, since it may be a stranger who asks.
"""

from __future__ import annotations

import math
import pkgutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import gymnasium
from gymnasium import spaces

from envserve.errors import EnvStartError, WrapperError
from envserve.wrappers.own import check_float
from envserve.wrappers.specs import WrapperSpec, check_wrappers, converted_arguments
from envserve.wrappers.table import find

__all__ = ["wrap"]

Env = gymnasium.Env[Any, Any]

#: What observations may grow to: 594 frames of Atari's usual 84 x 84. Bounds of spaces
#: and stacks of frames take several times as much, for each env.
_MAX_GROWN_BYTES: Final = 4 << 20


def wrap(env: Env, specs: Sequence[WrapperSpec]) -> Env:
    """Returns the env in its wrappers, the first of them innermost.

    Raises:
      WrapperError: A wrapper is not known, an argument is wrong, or observations would
        become too large.
      EnvStartError: A wrapper does not take this env.
    """
    check_wrappers(specs)
    limit = max(_nbytes(env.observation_space), _MAX_GROWN_BYTES)
    for position, spec in enumerate(specs):
        where = f"wrappers[{position}] ({spec.name})"
        arguments = converted_arguments(spec, position)
        try:
            size = _bytes_after(env.observation_space, spec.name, arguments)
            _check_size(size, limit, where)
            env = _wrap_once(env, spec.name, arguments, where)
            _check_size(_nbytes(env.observation_space), limit, where)
        except WrapperError:
            raise
        except gymnasium.error.DependencyNotInstalled as error:
            raise EnvStartError(
                f"{where}: {error}; pip install 'envserve[atari]' where the envs run"
            ) from error
        except Exception as error:
            raise EnvStartError(f"{where}: {type(error).__name__}: {error}") from error
    return env


def _wrap_once(env: Env, name: str, arguments: dict[str, Any], where: str) -> Env:
    if name == "RescaleObservation":
        check_float("observation", env.observation_space)
    elif name == "RescaleAction":
        check_float("action", env.action_space)
    known = find(name, where).make
    make: Callable[..., Env] = (
        pkgutil.resolve_name(known) if isinstance(known, str) else known
    )
    with warnings.catch_warnings():
        # A cast is what was asked for.
        warnings.filterwarnings("ignore", ".*precision lowered by casting")
        return make(env, **arguments)


def _bytes_after(space: spaces.Space[Any], name: str, arguments: dict[str, Any]) -> int:
    """Returns what a wrapper makes of an observation's size, before it allocates it."""
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
        return 0  # not of arrays: a later wrapper has to change that
    return int(math.prod(space.shape) * space.dtype.itemsize)


def _check_size(num_bytes: int, limit: int, where: str) -> None:
    if num_bytes > limit:
        raise WrapperError(
            f"{where}: expected observations of at most {limit / 2**20:.3g} MiB; "
            f"got {num_bytes / 2**20:.3g} MiB; ask for fewer or smaller frames"
        )
