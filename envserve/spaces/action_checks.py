"""Check actions: structure, shape, dtype, finiteness and bounds.

Actions are checked when they enter a batch, and again when they enter a server. NaN and
infinity are always errors. `settings.ActionMode` determines what happens to finite
actions outside their space. Every error names the first env whose action is invalid.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from gymnasium.spaces import Box

from envserve.errors import ActionError, SpaceError
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import EMPTY_LEAF, Array, Leaf, flatten
from envserve.spaces.variable_length import encode_row

#: Function that returns the start of an error message, given the index of the action.
_Prefix = Callable[[int], str]

#: Maximum number of row ranges whose views are cached. Usually, each range is one split
#: of the batch, so there are few.
_MAX_PARTS: Final = 64
#: Names of envs for which the warning about actions outside the space was issued.
_warned: Final[set[str]] = set()


class ActionBounds:
    """Checks the bounds of the actions in a server's rows.

    Shapes and dtypes are correct by construction. Encoded actions are not decoded: the
    worker does that, and an invalid action fails only the block of the client that sent
    it.
    """

    def __init__(
        self, spec: EnvSpec, actions: Sequence[Array], mode: str = "check"
    ) -> None:
        """Prepare the check.

        Args:
          spec: Spec of the envs.
          actions: Arrays `[num_envs, ...]` that will contain the actions, one per
            action leaf.
          mode: With "pass", any finite value is within bounds.
        """
        self._leaves = [
            (leaf, array, leaf.dtype_limits if mode == "pass" else leaf.limits)
            for leaf, array in zip(spec.action_leaves, actions, strict=True)
            if array.size
        ]
        #: Caches the array views and limits of each range of rows, because the same
        #: ranges are checked in every step.
        self._parts: dict[tuple[int, int], list[tuple[Leaf, Array, Any]]] = {}

    def check(self, start: int, stop: int) -> None:
        """Check the actions in rows `start` to `stop` (exclusive).

        Raises:
          ActionError: An action is out of bounds or not finite. The message names the
            env, the leaf, and the bounds.
        """
        part = self._parts.get((start, stop))
        if part is None:
            part = [(leaf, array[start:stop], bs) for leaf, array, bs in self._leaves]
            if len(self._parts) == _MAX_PARTS:
                self._parts.clear()
            self._parts[start, stop] = part
        for leaf, array, limits in part:
            if not _all_within(array, limits):
                prefix = partial(_prefix, range(start, stop), stop - start)
                _check_finite(leaf, array, prefix)
                is_valid = _is_within(array, limits)
                raise ActionError(_out_of_bounds(leaf, array, is_valid, prefix))


def check_actions(
    spec: EnvSpec,
    actions: Any,
    env_indices: Sequence[int] | Array | None,
    num_envs: int,
    mode: str = "check",
) -> list[Array]:
    """Validate a batch of actions and return one array per action leaf.

    Args:
      spec: Spec of the envs.
      actions: Arrays `[num_envs, ...]`, nested like the action space. Dicts may have
        additional keys, which are ignored, as in Gymnasium.
      env_indices: Row in the batch of each action, for error messages; None for rows 0
        to `num_envs - 1`.
      num_envs: Expected length of each array; 0 for the action of a single env, without
        the first dimension.
      mode: See `settings.ActionMode`.

    Returns:
      Arrays `[num_envs, ...]` in the order of `spec.action_leaves`, copied only if
      necessary.

    Raises:
      ActionError: An action is invalid. The message names the env, the leaf, and the
        expected value.
    """
    single = spec.single_action
    if (  # the usual case
        single is not None
        and num_envs
        and type(actions) is np.ndarray
        and actions.dtype == single.dtype
        and actions.shape == (num_envs, *single.shape)
    ):
        is_any_finite = mode == "pass" and spec.env_name in _warned
        if _all_within(
            actions, single.dtype_limits if is_any_finite else single.limits
        ):
            return [actions]
    try:
        values = flatten(spec.action_space, actions, allows_more=True)
    except SpaceError as error:
        rows = "; each array has one row per env" if num_envs else ""
        raise ActionError(f"actions: {error}{rows}") from None
    if not values:  # the action space has no leaves
        return [np.zeros((num_envs or 1, *EMPTY_LEAF.shape), EMPTY_LEAF.dtype)]
    prefix = partial(_prefix, env_indices, num_envs)
    arrays = []
    for leaf, value in zip(spec.action_leaves, values, strict=True):
        if leaf.is_encoded:
            arrays.append(
                _encode(leaf, value if num_envs else [value], num_envs or 1, prefix)
            )
            continue
        unchecked = _as_array(leaf, value, num_envs)
        array = _cast(leaf, unchecked)
        if not num_envs:
            array = array[np.newaxis]
        precision = min(leaf.dtype, unchecked.dtype, key=lambda dtype: dtype.itemsize)
        arrays.append(_to_bounds(spec.env_name, leaf, array, prefix, mode, precision))
    return arrays


def _as_array(leaf: Leaf, value: Any, num_envs: int) -> Array:
    """Convert the actions of a leaf to an array of the expected shape."""
    shape = (num_envs, *leaf.shape) if num_envs else leaf.shape
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors
        item = value[0] if isinstance(value, list | tuple) and value else value
        tensor = "; write actions.detach().float().cpu().numpy()"
        hint = tensor if hasattr(item, "detach") else ""
        raise _shape_error(leaf, num_envs, f"{error}{hint}") from None
    if not leaf.shape and array.shape == (*shape, 1):
        return array.reshape(shape)
    if array.shape != shape:
        is_number = array.ndim or array.dtype.kind in "biufc"
        got = list(array.shape) if is_number else f"{value!r:.99}"
        sizes = [[n for n in dims if n != 1] for dims in (shape, array.shape)]
        hint = f"; write actions.reshape{shape}" if sizes[0] == sizes[1] else ""
        raise _shape_error(leaf, num_envs, f"got {got}{hint}")
    return array


def _shape_error(leaf: Leaf, num_envs: int, text: str) -> ActionError:
    expected = [num_envs, *leaf.shape] if num_envs else [*leaf.shape]
    rows = ", one row per env" if num_envs else ""
    return ActionError(f"{_label(leaf)}: expected shape {expected}{rows}; {text}")


def _cast(leaf: Leaf, array: Array) -> Array:
    """Cast an array to the leaf's dtype, unless that would change its values."""
    kind, actual = leaf.dtype.kind, array.dtype.kind
    if kind in "ui" and actual in "uib":
        return array  # the bounds check later rejects values that do not fit
    with np.errstate(all="ignore"):
        if kind in "ui" and actual == "f":  # accept whole numbers, as Gymnasium does
            cast = array.astype(leaf.dtype)
            if (cast == array).all():
                return cast
            if not np.isfinite(array).all():
                raise ActionError(
                    f"{_label(leaf)}: expected finite actions; the output of the "
                    f"policy is not finite"
                )
        elif np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            return array.astype(leaf.dtype, copy=False)
    raise ActionError(
        f"{_label(leaf)}: expected {leaf.dtype}; got {array.dtype}; "
        f"cast it with .astype({str(leaf.dtype)!r}) if this is intended"
    )


def _encode(leaf: Leaf, values: Any, num_rows: int, prefix: _Prefix) -> Array:
    if isinstance(values, np.ndarray):  # an array of strings, for example
        values = values.tolist()
    if not isinstance(values, (tuple, list)) or len(values) != num_rows:
        raise ActionError(
            f"{_label(leaf)}: expected a tuple of {num_rows} values, one per env; "
            f"got {values!r:.200}"
        )
    rows = np.zeros((num_rows, *leaf.shape), leaf.dtype)
    for row, value in enumerate(values):
        try:
            rows[row] = encode_row(leaf, value, is_strict=True)
        except SpaceError as error:
            raise ActionError(f"{prefix(row)}{_label(leaf)}: {error}") from None
    return rows


def _to_bounds(
    env_name: str,
    leaf: Leaf,
    array: Array,
    prefix: _Prefix,
    mode: str,
    precision: np.dtype[Any],
) -> Array:
    """Return the actions to pass to the env, according to `mode`, or raise ActionError.

    With "check", actions that are outside the bounds only because of rounding errors
    are clipped: for example, `low + range * x` may exceed `high` by some units in the
    last place. `precision` is the dtype in which the rounding errors occurred.
    """
    is_valid = _is_within(array, leaf.limits)
    if is_valid.all():
        return array
    _check_finite(leaf, array, prefix)
    if mode == "pass":
        if env_name not in _warned:
            _warned.add(env_name)
            warnings.warn(
                f"{_out_of_bounds(leaf, array, is_valid, prefix)}. The action is "
                f"passed to {env_name}, as in Gymnasium; actions='clip' clips all "
                f"actions, and actions='check' raises an error. This warning is shown "
                f"once",
                stacklevel=5,
            )
        return array
    if isinstance(leaf.space, Box):
        clipped: Array = np.clip(array.astype(leaf.dtype, copy=False), *leaf.limits)
        if mode == "clip":
            return clipped
        if precision.kind == "f":
            with np.errstate(all="ignore"):  # very large bounds would cause warnings
                sizes = np.abs(leaf.bounds)
                sizes = np.where(np.isfinite(sizes), sizes, 0)
                largest = sizes.max(axis=0).astype(precision)
                is_valid |= np.abs(array - clipped) <= 4 * np.spacing(largest)
        if is_valid.all():
            return clipped
    raise ActionError(_out_of_bounds(leaf, array, is_valid, prefix))


def _prefix(env_indices: Sequence[int] | Array | None, num_envs: int, row: int) -> str:
    """Return the start of the error message about an action; "" for a single env."""
    index = row if env_indices is None else int(np.ravel(env_indices)[row])
    return f"Env {index}: " if num_envs else ""


def _all_within(array: Array, limits: tuple[Any, Any]) -> bool:
    """Return whether all elements are within limits; False if there is a NaN."""
    if type(limits[0]) is np.ndarray or not array.size:
        return bool(_is_within(array, limits).all())
    # argmin and argmax return the position of NaN if there is one. For small arrays,
    # they take a third of the time of other reductions.
    lowest, highest = array.item(array.argmin()), array.item(array.argmax())
    return bool(lowest >= limits[0] and highest <= limits[1])


def _is_within(array: Array, limits: tuple[Any, Any]) -> Array:
    is_within: Array = (array >= limits[0]) & (array <= limits[1])  # False for NaN
    return is_within


def _check_finite(leaf: Leaf, array: Array, prefix: _Prefix) -> None:
    """Raise ActionError for NaN, infinity, and integers that the dtype cannot hold."""
    is_valid = _is_within(array, leaf.dtype_limits)
    if is_valid.all():
        return
    if leaf.dtype.kind != "f":
        raise ActionError(_out_of_bounds(leaf, array, is_valid, prefix))
    row, where = _first_invalid(is_valid)
    raise ActionError(
        f"{prefix(row)}expected finite actions; got {array[(row, *where)]} in "
        f"{_label(leaf, where)}; the output of the policy is not finite in {leaf.dtype}"
    )


def _out_of_bounds(leaf: Leaf, array: Array, is_valid: Array, prefix: _Prefix) -> str:
    """Describe the first action that is out of bounds."""
    row, where = _first_invalid(is_valid)
    low, high = (np.broadcast_to(bound, leaf.shape)[where] for bound in leaf.bounds)
    return (
        f"{prefix(row)}expected {_label(leaf, where)} in [{low}, {high}]; "
        f"got {array[(row, *where)]}; "
        + (
            "clip actions before the step, or make the batch with actions='clip'"
            if leaf.dtype.kind == "f"
            else "choose an action that the space contains"
        )
    )


def _first_invalid(is_valid: Array) -> tuple[int, tuple[int, ...]]:
    """Return the row of the first invalid action, and the index within the action."""
    row, *where = (int(i) for i in np.argwhere(~is_valid)[0])
    return row, tuple(where)


def _label(leaf: Leaf, where: Sequence[int] = ()) -> str:
    position = "".join(f"[{i}]" for i in where)
    return (f"action {leaf.path!r}" if leaf.path else "action") + position
