"""What envs return, checked and brought to the types of their spaces.

Each of these either returns what is meant or raises `SpaceViolation`, which says what
was expected, what came, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.spaces import Space

from envserve.errors import SpaceError
from envserve.settings import NonFinite
from envserve.spaces.leaves import Leaf, flatten
from envserve.spaces.variable_length import encode_row

__all__ = [
    "EnvChecks",
    "SpaceViolation",
    "flag_of",
    "label_of",
    "leaf_array",
    "leaf_values",
    "reset_values",
    "reward_of",
    "violation_of",
]

Array = np.ndarray[Any, Any]


class SpaceViolation(Exception):
    """The env returned what its own spaces, or Gymnasium, do not allow.

    Attributes:
      is_masked: Whether it only costs the row, as was asked for.
      is_lasting: Whether a reset that ends so will not end otherwise.
    """

    def __init__(
        self, text: str, *, is_masked: bool = False, is_lasting: bool = True
    ) -> None:
        super().__init__(text)
        self.is_masked = is_masked
        self.is_lasting = is_lasting


@dataclass(frozen=True)
class EnvChecks:
    """How an env's values are taken.

    Attributes:
      nonfinite: See `settings.NonFinite`.
      strict_spaces: Whether observations must have the very dtypes of their space.
      notes: What is to be said once of a class of envs, by its name.
    """

    nonfinite: NonFinite = "raise"
    strict_spaces: bool = False
    notes: dict[str, str] = field(default_factory=dict)

    def take_notes(self) -> list[str]:
        """Return the notes that are new, each of them once."""
        if not self.notes:
            return []
        notes = [note for note in self.notes.values() if note]
        self.notes.update(dict.fromkeys(self.notes, ""))
        return notes

    def check_finite(self, wanted: str, value: Any) -> None:
        """Raises SpaceViolation for NaN or infinity, unless they may pass."""
        array = np.asarray(value)
        if self.nonfinite == "pass" or array.dtype.kind != "f":
            return
        finite = np.isfinite(array)
        if not finite.all():
            raise SpaceViolation(
                f"expected {wanted}; got {array[~finite][0]}; mend the env, or end "
                f"the episode before it diverges",
                is_masked=self.nonfinite == "mask",
                is_lasting=False,
            )


def leaf_values(space: Space[Any], observation: Any) -> list[Any]:
    """Returns the values of an observation's leaves, yet to be looked at."""
    try:
        return flatten(space, observation)
    except SpaceError as error:
        raise SpaceViolation(f"observation: {error}") from None


def label_of(leaf: Leaf) -> str:
    """Returns what to call a leaf of an observation."""
    return f"observation {leaf.path!r}" if leaf.path else "observation"


def leaf_array(leaf: Leaf, value: Any, checks: EnvChecks, env_class: type) -> Array:
    """Brings a leaf's value to an array that can be written to its rows.

    Gymnasium's vector envs copy into arrays of the space's dtype: `SyncVectorEnv` what
    NumPy calls "same_kind" (float64 to float32, integers to floats), `AsyncVectorEnv`
    anything, so that 300 is 44 as uint8, and 0.9 is 0. Here, what is of the same kind
    is cast, and any integer to an integer that can hold it; a float is no integer.

    Args:
      leaf: What the space says.
      value: What the env gave. Lists and numbers have no dtype of their own.
      checks: Whether an array may be cast; takes the note that it is.
      env_class: Whose it is.
    """
    if leaf.is_encoded:
        try:
            return encode_row(leaf, value)
        except SpaceError as error:
            raise SpaceViolation(f"{label_of(leaf)}: {error}") from None
    try:
        array = np.asarray(value)
    except ValueError:  # a list that is no array
        array = np.asarray(None)
    dtype = array.dtype
    if array.shape != leaf.shape or dtype.kind not in "biuf":
        raise _unlike(leaf, value, array, "mend the env, or its observation space")
    if dtype == leaf.dtype:
        return array
    has_dtype = isinstance(value, np.ndarray) and bool(array.ndim)
    are_integers = dtype.kind in "iu" and leaf.dtype.kind in "iu"
    can_cast = are_integers or np.can_cast(dtype, leaf.dtype, "same_kind")
    if not can_cast or (checks.strict_spaces and has_dtype):
        hint = "cast it in the env, or declare that in its observation space"
        raise _unlike(leaf, value, array, hint)
    if are_integers and array.size:
        limits = np.iinfo(leaf.dtype)
        for odd in (int(array.min()), int(array.max())):
            if not limits.min <= odd <= limits.max:
                raise SpaceViolation(
                    f"expected {label_of(leaf)} {leaf}, from {limits.min} to "
                    f"{limits.max}; got {odd}; declare a wider dtype in the space"
                )
    name = env_class.__name__
    if has_dtype and name not in checks.notes:
        checks.notes[name] = (
            f"{name} gives {label_of(leaf)} as {dtype}, and its space says "
            f"{leaf.dtype}: it is cast; do so in the env, or declare {dtype} "
            f"(strict_spaces makes it an error)"
        )
    with np.errstate(over="ignore"):  # it is infinite then, which is looked for
        return array.astype(leaf.dtype)


def _unlike(leaf: Leaf, value: Any, array: Array, hint: str) -> SpaceViolation:
    is_number = array.dtype.kind in "biufc"
    got = _shown(array if is_number else value)
    return SpaceViolation(f"expected {label_of(leaf)} {leaf}; got {got}; {hint}")


def reward_of(value: Any) -> float:
    """Returns a reward that is no float by itself; `[1]` is 1."""
    number = _number_of(value)
    if number is None:
        raise SpaceViolation(
            f"expected the reward to be a number; got {_shown(value)}; "
            "mend the env, or return 0.0 where there is none"
        )
    return float(number)


def flag_of(name: str, value: Any) -> bool:
    """Returns terminated or truncated; None, which is no end, is False."""
    if type(value) is bool or value is None:
        return bool(value)
    number = _number_of(value)
    if number is None:
        raise SpaceViolation(
            f"expected {name} to be a bool; got {_shown(value)}; mend the env"
        )
    return bool(number)


def reset_values(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns what a reset gave: an observation and an info."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    if len(parts) == 2 and isinstance(parts[1], Mapping):
        return parts[0], parts[1]
    raise SpaceViolation(
        f"expected reset() to return an observation and a dict of infos; "
        f"got {' and '.join(map(_shown, parts))}; mend the env: where there is no "
        "info, return {} beside the observation"
    )


def violation_of(error: Exception) -> SpaceViolation | None:
    """Returns what to raise if a step gave no five values; None for other errors.

    Wrappers of Gymnasium's meet that before us.
    """
    text, trace = str(error), error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raiser = trace and str(trace.tb_frame.f_globals.get("__name__"))
    is_ours = raiser == "envserve.worker.env_row"
    if is_ours and text.startswith("The truth value of an array"):
        return SpaceViolation(
            "expected terminated and truncated to be bools; got an array; mend the env"
        )
    if not raiser or not (is_ours or raiser.startswith("gymnasium.wrappers.")):
        return None
    if "(expected 5" not in text and not text.startswith("cannot unpack non-iterable"):
        return None
    got = text.partition("got ")[2].rstrip(")") or text
    return SpaceViolation(
        "expected step() to return observation, reward, terminated, truncated and "
        f"info; got {got}{' values' * got.isdigit()}; mend the env: four are of Gym's "
        "old API, whose done is terminated or truncated"
    )


def _number_of(value: Any) -> Any:
    """Returns the only number of a value; None if there is none, or more."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists within lists, of several lengths
        return None
    return array.item() if array.size == 1 and array.dtype.kind in "biuf" else None


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    size = f" of {len(value)}" if isinstance(value, (tuple, list, dict)) else ""
    return f"a {type(value).__name__}{size}"
