"""Checks actions where they enter: structure, shape, dtype, bounds, finiteness.

Every error names the first env that it concerns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from gymnasium.spaces import Box, Space

from envserve.errors import ActionError, SpaceError
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import Leaf, flatten
from envserve.spaces.variable_length import encode_row

__all__ = ["ActionBounds", "check_action_rows", "check_actions", "clip_roundings"]

Array = np.ndarray[Any, Any]

_smallest: Final = np.minimum.reduce
_greatest: Final = np.maximum.reduce


class ActionBounds:
    """Bounds of the actions in some rows: two looks per leaf tell whether they hold.

    Which action breaks them, and how, is for `check_action_rows` to find out.
    """

    def __init__(self, spec: EnvSpec, actions: Sequence[Array]) -> None:
        """Takes the arrays that hold the actions, and finite bounds for each."""
        self._leaves = [
            (array, *leaf.limits)
            for leaf, array in zip(spec.action_leaves, actions, strict=True)
            if array.size
        ]

    def hold(self, start: int, stop: int) -> bool:
        """Tells whether all actions of rows `start` to `stop` are within bounds."""
        for array, low, high in self._leaves:
            part = array[start:stop]
            # Over the rows, if bounds differ by element; NaN comes through both.
            axis = 0 if isinstance(low, np.ndarray) else None
            is_good = (_smallest(part, axis) >= low) & (_greatest(part, axis) <= high)
            if not (is_good if axis is None else is_good.all()):
                return False
        return True


def check_actions(
    spec: EnvSpec,
    actions: Any,
    env_indices: Sequence[int] | Array | None,
    num_envs: int,
) -> list[Array]:
    """Returns the actions of some envs as one array per leaf.

    Args:
      spec: Spec of the envs.
      actions: Arrays `[num_envs, ...]`, nested as the action space.
      env_indices: Batch rows that the actions are for; None for rows 0 to num_envs.
      num_envs: Expected length of each array.

    Raises:
      ActionError: With the env, the leaf, and what was expected.
    """
    leaf = spec.action_leaves[0]
    # The usual case, at a third of the time that the rest takes: caches are cold here.
    if (
        leaf.space is spec.action_space
        and type(actions) is np.ndarray
        and not leaf.is_encoded
        and actions.dtype == leaf.dtype
        and actions.shape == (num_envs, *leaf.shape)
    ):
        low, high = leaf.limits
        if (
            type(low) is not np.ndarray
            # NaN comes through both.
            and _smallest(actions, None) >= low
            and _greatest(actions, None) <= high
        ):
            return [actions]
    try:
        values = flatten(spec.action_space, actions)
    except SpaceError as error:
        raise ActionError(f"actions: {error}") from None
    if not values:  # there is nothing in an action
        return [np.zeros((num_envs, *leaf.shape), leaf.dtype)]
    arrays = []
    for leaf, value in zip(spec.action_leaves, values, strict=True):
        if leaf.is_encoded:
            arrays.append(_encode(leaf, value, env_indices, num_envs))
            continue
        array = _as_array(leaf, value, num_envs)
        _check_values(leaf, array, env_indices)
        arrays.append(array)
    return arrays


def check_action_rows(
    spec: EnvSpec, actions: Sequence[Array], start: int, stop: int
) -> None:
    """Checks the actions that stand in rows `start` to `stop`, of a server or pool.

    Their shapes and dtypes are right by construction. Those that are encoded are for
    the worker to read, which is all that they can end.

    Raises:
      ActionError: With the env, the leaf, and what was expected.
    """
    for leaf, array in zip(spec.action_leaves, actions, strict=True):
        _check_values(leaf, array[start:stop], np.arange(start, stop))


def clip_roundings(space: Space[Any], actions: Any) -> Any:
    """Puts on a Box's bounds what only a rounding has put beyond, as of low + range."""
    if not isinstance(space, Box) or not isinstance(actions, np.ndarray):
        return actions
    if actions.dtype.kind != "f" or actions.shape[1:] != space.shape:
        return actions
    coarser = min(space.dtype, actions.dtype, key=lambda dtype: dtype.itemsize)
    with np.errstate(all="ignore"):  # infinite bounds, NaN
        clipped = np.clip(actions, space.low, space.high)
        greatest = np.maximum(np.abs(space.low), np.abs(space.high)).astype(coarser)
        is_near = np.abs(actions - clipped) <= 4 * np.spacing(greatest)
    return np.where(is_near, clipped, actions)


def _as_array(leaf: Leaf, value: Any, num_envs: int) -> Array:
    try:
        array = np.asarray(value)
    except ValueError as error:  # ragged nested lists
        raise ActionError(f"{_label(leaf)}: {error}") from None
    shape = (num_envs, *leaf.shape)
    if array.shape != shape:
        raise ActionError(
            f"{_label(leaf)}: expected shape {list(shape)}, one row per env; "
            f"got {list(array.shape)}"
        )
    if array.dtype == leaf.dtype:
        return array
    if not np.can_cast(array.dtype, leaf.dtype, "same_kind") and not (
        leaf.dtype.kind in "ui" and array.dtype.kind in "uib"
    ):
        raise ActionError(
            f"{_label(leaf)}: expected {leaf.dtype}; got {array.dtype}; "
            f"cast it with .astype({str(leaf.dtype)!r}) if that is meant"
        )
    if leaf.dtype.kind == "f":
        # What is finite as float64 need not be as float32: check what will be stored.
        with np.errstate(over="ignore"):
            return array.astype(leaf.dtype, copy=False)
    return array


def _encode(
    leaf: Leaf, values: Any, env_indices: Sequence[int] | Array | None, num_envs: int
) -> Array:
    if not isinstance(values, (tuple, list)) or len(values) != num_envs:
        raise ActionError(
            f"{_label(leaf)}: expected a tuple of {num_envs} values, one per env; "
            f"got {values!r:.200}"
        )
    rows = np.zeros((num_envs, *leaf.shape), leaf.dtype)
    for row, value in enumerate(values):
        try:
            rows[row] = encode_row(leaf, value, is_strict=True)
        except SpaceError as error:
            env_index = row if env_indices is None else int(np.ravel(env_indices)[row])
            raise ActionError(f"Env {env_index}: {_label(leaf)}: {error}") from None
    return rows


def _check_values(
    leaf: Leaf, array: Array, env_indices: Sequence[int] | Array | None
) -> None:
    low, high = leaf.limits
    is_good = (array >= low) & (array <= high)  # NaN is neither
    if is_good.all():
        return
    low, high = leaf.bounds
    row, *inner = (int(i) for i in np.argwhere(~is_good)[0])
    env_index = row if env_indices is None else int(np.ravel(env_indices)[row])
    position = "".join(f"[{i}]" for i in inner)
    least = np.broadcast_to(low, leaf.shape)[tuple(inner)]
    most = np.broadcast_to(high, leaf.shape)[tuple(inner)]
    raise ActionError(
        f"Env {env_index}: expected {_label(leaf)}{position} in [{least}, {most}]; "
        f"got {array[(row, *inner)]}; "
        + (
            "clip actions to the action space before the step"
            if leaf.dtype.kind == "f"
            else "choose an action that the space contains"
        )
    )


def _label(leaf: Leaf) -> str:
    return f"action {leaf.path!r}" if leaf.path else "action"
