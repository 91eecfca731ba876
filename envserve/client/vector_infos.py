"""Batch the info dicts of rows like Gymnasium: a dict of arrays, each with a mask.

The result has the same keys, dtypes and masks as that of
`gymnasium.vector.VectorEnv._add_info`. It is computed key by key instead of row by row,
which is faster if every row has infos at every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np

from envserve.slab import Array
from envserve.spaces.info_columns import join_columns, split_columns

#: Rows whose info has a certain key, and the values of this key in the same order.
_Part = tuple[list[int], Sequence[Any]]

_NUMBERS: Final = frozenset({int, float, bool})
#: Maximum total size of array elements for rows whose info lacks the array's key.
_MAX_UNFILLED_BYTES: Final = 1 << 28
#: Size of an array element (a number or pointer), including its mask.
_ELEMENT_BYTES: Final = 9
_MAX_NAMES: Final = 16


def batch_infos(
    infos: Mapping[int, Mapping[str, Any]], num_envs: int
) -> dict[str, Any]:
    """Batch info dicts.

    The array of a key also has elements for rows whose info lacks the key. The memory
    of all these elements is limited to 256 MiB in total. If the numeric array of a key
    would exceed the limit, its values are stored as an array of objects. If this array
    would also exceed the limit, the values are omitted, and the array "omitted" names
    the first omitted keys.

    Args:
      infos: Maps rows to info dicts, for rows that have one.
      num_envs: Length of the arrays.

    Returns:
      For each key, an array `[num_envs, ...]`; and under the same key with prefix "_",
      a mask of the rows that have the key, bool `[num_envs]`. Nested dicts are batched
      in the same way. Numbers and arrays are stored with the dtype and shape of the
      first row that has the key. All other values, values that do not fit this dtype
      and shape, and the values of "final_obs", are stored as an array of objects.
    """
    return _batch(infos, num_envs, _FillBudget(_MAX_UNFILLED_BYTES))


class _FillBudget:
    """The remaining memory for filler elements.

    The array of a key has filler elements in all rows whose info lacks this key.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def take(self, num_elements: int, num_bytes: int) -> bool:
        """Reserve memory for elements of `num_bytes` each; return whether they fit."""
        fits = num_elements * num_bytes <= self._left
        self._left -= fits * num_elements * num_bytes
        return fits


def _batch(
    infos: Mapping[int, Mapping[str, Any]], num_envs: int, budget: _FillBudget
) -> dict[str, Any]:
    packed, infos = split_columns(infos)
    rows_by_keys: dict[tuple[str, ...], list[int]] = {}
    for row in sorted(infos):
        rows_by_keys.setdefault(tuple(infos[row]), []).append(row)
    columns: dict[str, list[_Part]] = {}
    for keys, rows in rows_by_keys.items():
        values = zip(*[infos[row].values() for row in rows], strict=True)
        for key, column in zip(keys, values, strict=True):
            columns.setdefault(key, []).append((rows, column))
    batched, masks = dict[str, Any](), dict[str, Array]()
    all_rows = np.ones(num_envs, np.bool_)
    for part in join_columns(packed):
        rows = [*range(part.start, part.stop)]
        for key, is_python, array in part.columns():
            is_array = is_python or array.ndim > 1 or array.dtype != np.bool_
            is_array = is_array and key not in columns and key != "final_obs"
            if is_array and len(rows) == num_envs:
                batched[key], mask = array.copy(), all_rows.copy()
                batched[f"_{key}"] = masks[f"_{key}"] = mask
            else:
                numbers = array.tolist() if is_python else list(array.copy())
                columns.setdefault(key, []).append((rows, numbers))
    omitted = []
    for key, parts in columns.items():
        parts.sort(key=itemgetter(0))  # the first row determines the dtype
        # The sum can exceed `num_envs`, because a server may send a value twice: in a
        # column and in a dict.
        num_unfilled = max(0, num_envs - sum(len(rows) for rows, _ in parts))
        if not budget.take(num_unfilled, _ELEMENT_BYTES):
            omitted.append(key)
            continue
        batched[key] = _batch_column(key, parts, num_envs, num_unfilled, budget)
        mask = np.zeros(num_envs, np.bool_)
        batched[f"_{key}"] = masks[f"_{key}"] = mask
        _write(mask, [(rows, True) for rows, _ in parts])
    if omitted:
        names = ", ".join([f"{key!s:.32}" for key in omitted[:_MAX_NAMES]])
        batched["omitted"] = np.full(num_envs, names, object)
        batched["_omitted"] = np.ones(num_envs, np.bool_)
    # If an env has the keys "x" and "_x", the mask of "x" replaces the value of "_x".
    batched |= masks
    return batched


def _batch_column(
    key: str,
    parts: Sequence[_Part],
    num_envs: int,
    num_unfilled: int,
    budget: _FillBudget,
) -> Any:
    is_batched = key != "final_obs"  # Gymnasium never batches its values
    first = parts[0][1][0]
    kind, shape = type(first), ()
    if isinstance(first, np.ndarray):
        kind, shape = first.dtype, first.shape
    is_array = isinstance(first, np.ndarray) and budget.take(num_unfilled, first.nbytes)
    is_array = is_array or kind in _NUMBERS or isinstance(first, np.number)
    if is_batched and is_array:
        array = np.zeros((num_envs, *shape), kind)
        # This fails if other rows have None, or arrays of other shapes.
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            _write(array, parts)
            return array
    values = {r: v for rows, vs in parts for r, v in zip(rows, vs, strict=True)}
    if is_batched and all(isinstance(value, dict) for value in values.values()):
        return _batch(values, num_envs, budget)
    array = np.full(num_envs, None, object)
    for row, value in values.items():
        array[row] = value
    return array


def _write(array: Array, parts: Sequence[tuple[list[int], Any]]) -> None:
    for rows, values in parts:
        if array.ndim == 1:
            array[slice(None) if len(rows) == len(array) else rows] = values
        else:  # one by one, because a number must fill its whole row, as in Gymnasium
            for row, value in zip(rows, values, strict=True):
                array[row] = value
