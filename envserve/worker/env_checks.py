"""Check the values that envs return, and convert them to the types of their spaces.

Each function returns the converted value or raises `SpaceViolation`, whose message
names the expected value, the actual value and a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from gymnasium.spaces import Space

from envserve.errors import EnvStartError, SpaceError
from envserve.settings import EnvRequest, NonFinite
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.infos import copy_info
from envserve.spaces.leaves import Array, Leaf, flatten
from envserve.spaces.variable_length import encode_row
from envserve.text import message_of, with_article


class SpaceViolation(Exception):
    """An env returned a value that violates its spaces or Gymnasium's API.

    Attributes:
      is_masked: Whether to mark the row as lost instead of raising an error, as
        `nonfinite="mask"` requires.
      is_permanent: Whether a rebuilt env would violate its spaces in the same way.
    """

    def __init__(
        self, text: str, *, is_masked: bool = False, is_permanent: bool = True
    ) -> None:
        super().__init__(text)
        self.is_masked = is_masked
        self.is_permanent = is_permanent


@dataclass(frozen=True)
class EnvChecks:
    """Settings and warnings of a worker's checks.

    Attributes:
      nonfinite: See `settings.NonFinite`.
      strict_spaces: Whether the dtypes of observations must match the space's dtypes.
      warnings: Maps names of classes (of envs or spaces) to warnings; to "" after
        `take_warnings` has returned the warning.
    """

    nonfinite: NonFinite = "raise"
    strict_spaces: bool = False
    warnings: dict[str, str] = field(default_factory=dict)

    def take_warnings(self) -> list[str]:
        """Return the warnings that no earlier call returned."""
        if not self.warnings:
            return []
        new = [warning for warning in self.warnings.values() if warning]
        self.warnings.update(dict.fromkeys(self.warnings, ""))
        return new

    def check_finite(self, expectation: str, value: Any) -> None:
        """Raise SpaceViolation for NaN or infinity, unless `nonfinite` is "pass"."""
        array = np.asarray(value)
        if self.nonfinite == "pass" or array.dtype.kind != "f":
            return
        finite = np.isfinite(array)
        if not finite.all():
            raise SpaceViolation(
                f"expected {expectation}; got {array[~finite][0]}; fix the env, or end "
                f"the episode before it diverges",
                is_masked=self.nonfinite == "mask",
                is_permanent=False,
            )


def check_rebuilt(
    env_index: int, first: EnvSpec, rebuilt: EnvSpec, request: EnvRequest
) -> None:
    """Raise EnvStartError if a rebuilt env has different spaces.

    The rows in shared memory keep the layout of the first spaces.
    """
    if different := first.differences(rebuilt, request.observation_mode):
        raise EnvStartError(
            f"Env {env_index}: its spaces changed when it was rebuilt after a fault: "
            f"{'; '.join(different)}"
        )


def flatten_observation(space: Space[Any], observation: Any) -> list[Any]:
    """Return the unchecked values of the leaves of an observation."""
    try:
        return flatten(space, observation)
    except SpaceError as error:
        hint = "fix the env, or its observation space"
        raise SpaceViolation(f"observation: {error}; {hint}") from None


def leaf_label(leaf: Leaf) -> str:
    """Return the name of an observation leaf for messages."""
    return f"observation {leaf.path!r}" if leaf.path else "observation"


def convert_leaf(leaf: Leaf, value: Any, checks: EnvChecks, env_class: type) -> Array:
    """Convert a leaf's value to an array with the shape and dtype of the space.

    Gymnasium's vector envs copy values into arrays of the space's dtype.
    `SyncVectorEnv` casts what NumPy calls "same_kind" (float64 to float32, integers to
    floats). `AsyncVectorEnv` casts anything, so that 300 becomes 44 as uint8, and 0.9
    becomes 0. This function casts values of the same kind, and casts integers to any
    integer type that can represent them. It never casts floats to integers.

    Args:
      leaf: A leaf of the observation space.
      value: The value that the env returned. `strict_spaces` applies only to arrays,
        because lists and numbers have no dtype.
      checks: Settings of the checks; a warning about a cast is added to its `warnings`.
      env_class: Class of the env, for the warning.
    """
    if leaf.is_encoded:
        try:
            return encode_row(leaf, value)
        except SpaceError as error:
            raise SpaceViolation(f"{leaf_label(leaf)}: {error}") from None
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        array = np.asarray(None)
    dtype = array.dtype
    if array.shape != leaf.shape or dtype.kind not in "biuf":
        raise _leaf_mismatch(
            leaf, value, array, "fix the env, or its observation space"
        )
    if dtype == leaf.dtype:
        return array
    has_dtype = isinstance(value, np.ndarray) and bool(array.ndim)
    are_integers = dtype.kind in "iu" and leaf.dtype.kind in "iu"
    can_cast = are_integers or np.can_cast(dtype, leaf.dtype, "same_kind")
    if not can_cast or (checks.strict_spaces and has_dtype):
        hint = "cast it in the env, or declare that dtype in its observation space"
        raise _leaf_mismatch(leaf, value, array, hint)
    if are_integers and array.size:
        limits = np.iinfo(leaf.dtype)
        for extreme in (int(array.min()), int(array.max())):
            if not limits.min <= extreme <= limits.max:
                raise SpaceViolation(
                    f"expected {leaf_label(leaf)} {leaf}, from {limits.min} to "
                    f"{limits.max}; got {extreme}; declare a wider dtype in the space"
                )
    name = env_class.__name__
    if has_dtype and name not in checks.warnings:
        checks.warnings[name] = (
            f"{name} returns {leaf_label(leaf)} as {dtype}, but its space declares "
            f"{leaf.dtype}, so it is cast; cast it in the env, or declare {dtype} "
            f"(strict_spaces makes this an error)"
        )
    with np.errstate(all="ignore"):  # an overflow to infinity is detected later
        return array.astype(leaf.dtype)


def _leaf_mismatch(leaf: Leaf, value: Any, array: Array, hint: str) -> SpaceViolation:
    is_number = array.dtype.kind in "biufc"
    got = _describe(array if is_number else value)
    return SpaceViolation(f"expected {leaf_label(leaf)} {leaf}; got {got}; {hint}")


def convert_reward(value: Any) -> float:
    """Convert a reward to a float; `[1]` becomes 1.0."""
    number = _single_number(value)
    if number is None:
        is_too_large = isinstance(value, Real)
        got = "one that exceeds float64" if is_too_large else _describe(value)
        remedy = "fix the env, or return 0.0 if there is no reward"
        if isinstance(value, (list, tuple, dict, np.ndarray)):
            remedy = "combine the values into one number, in the env or in a wrapper"
        raise SpaceViolation(f"expected the reward to be a number; got {got}; {remedy}")
    return float(number)


def convert_flag(name: str, value: Any) -> bool:
    """Convert `terminated` or `truncated` to a bool; an empty value becomes False."""
    if type(value) is bool or (not isinstance(value, np.ndarray) and not value):
        return bool(value)
    number = _single_number(value)
    if number is None:
        raise SpaceViolation(
            f"expected {name} to be a bool; got {_describe(value)}; fix the env"
        )
    return bool(number)


def split_reset_result(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the observation and the info from the result of a reset."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    if len(parts) == 2 and isinstance(parts[1], Mapping):
        info = parts[1]  # its methods may raise, unless it is a dict
        return parts[0], info if type(info) is dict else copy_info(info)
    raise SpaceViolation(
        f"expected reset() to return an observation and an info dict; "
        f"got {' and '.join(map(_describe, parts))}; fix the env: if there is no "
        "info, return {} after the observation"
    )


def step_result_violation(error: Exception) -> SpaceViolation | None:
    """Return a violation if an error shows that step() returned invalid values.

    The error comes from a worker's block or from one of Gymnasium's wrappers, because
    both unpack the values. Return None for all other errors.
    """
    text, trace = message_of(error), error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace and trace.tb_frame.f_globals.get("__name__"))
    is_in_row = module == "envserve.worker.env_row"
    if is_in_row and text.startswith("The truth value of an array"):
        return SpaceViolation(
            "expected terminated and truncated to be bools; got an array; fix the env"
        )
    if not module.startswith(("envserve.worker.", "gymnasium.wrappers.")):
        return None
    kind = text.partition("cannot unpack non-iterable ")[2].removesuffix(" object")
    if "(expected 5" not in text and not kind:
        return None
    number = text.partition("got ")[2].rstrip(")")
    got = f"{number} values" if number else "more values"
    remedy = "fix the env"
    if number == "4":
        remedy += ": in Gym's old API, step() returned four values, and done is now "
        remedy += "terminated or truncated"
    elif kind == "coroutine":
        remedy += ": define step() without async"
    return SpaceViolation(
        "expected step() to return observation, reward, terminated, truncated and "
        f"info; got {f'a {kind}' if kind else got}; {remedy}"
    )


def _single_number(value: Any) -> Any:
    """Return the number in a value that contains exactly one; otherwise None."""
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        return None
    return array.item() if array.size == 1 and array.dtype.kind in "biuf" else None


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    size = f" of {len(value)}" if isinstance(value, (tuple, list, dict)) else ""
    return f"{with_article(type(value).__name__)}{size}"
