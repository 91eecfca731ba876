"""Infos of rows as Gymnasium batches them: a dict of arrays, each with a mask.

The same keys, dtypes and masks as `gymnasium.vector.VectorEnv._add_info` gives, but a
column at a time: that is quick where every row has an info at every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]
#: Rows, and what they have.
_Part = tuple[list[int], Sequence[Any]]

_NUMBERS: Final = frozenset({int, float, bool})
#: Bytes of places in arrays that no row fills.
_MAX_UNFILLED: Final = 1 << 28
#: A number or object, and whether it is there.
_PLACE_BYTES: Final = 9
_MAX_NAMES: Final = 16


def batch_infos(
    infos: Mapping[int, Mapping[str, Any]], num_envs: int
) -> dict[str, Any]:
    """Batches info dicts.

    Args:
      infos: Info dict by row, as far as there are any.
      num_envs: Length of the arrays.

    Returns:
      For each key an array `[num_envs, ...]`, and under "_" and that key the rows that
      have it, bool `[num_envs]`. Dicts in infos are batched likewise. Numbers and
      arrays have the dtype of the first row that has the key; whatever does not fit to
      that, and what is neither, stands in an array of objects. So does what few rows
      have, and would take more than 256 MiB for the others; if even that is too much,
      it is left out, and the first such keys are named under "omitted".
    """
    return _batch(infos, num_envs, _FillBudget(_MAX_UNFILLED))


class _FillBudget:
    """The bytes that array elements of absent rows may take."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def take(self, num_places: int, num_bytes: int) -> bool:
        is_there = num_places * num_bytes <= self._left
        self._left -= is_there * num_places * num_bytes
        return is_there


def _batch(
    infos: Mapping[int, Mapping[str, Any]], num_envs: int, budget: _FillBudget
) -> dict[str, Any]:
    rows_by_keys: dict[tuple[str, ...], list[int]] = {}
    for row in sorted(infos):
        rows_by_keys.setdefault(tuple(infos[row]), []).append(row)
    columns: dict[str, list[_Part]] = {}
    for keys, rows in rows_by_keys.items():
        values = zip(*[infos[row].values() for row in rows], strict=True)
        for key, column in zip(keys, values, strict=True):
            columns.setdefault(key, []).append((rows, column))
    batched: dict[str, Any] = {}
    omitted = []
    for key, parts in columns.items():
        num_unfilled = num_envs - sum(len(rows) for rows, _ in parts)
        if not budget.take(num_unfilled, _PLACE_BYTES):
            omitted.append(key)
            continue
        batched[key] = _batch_column(parts, num_envs, num_unfilled, budget)
        batched[f"_{key}"] = mask = np.zeros(num_envs, np.bool_)
        _write(mask, [(rows, True) for rows, _ in parts])
    if omitted:
        names = ", ".join([f"{key!s:.32}" for key in omitted[:_MAX_NAMES]])
        batched["omitted"] = np.full(num_envs, names, object)
        batched["_omitted"] = np.ones(num_envs, np.bool_)
    return batched


def _batch_column(
    parts: Sequence[_Part], num_envs: int, num_unfilled: int, budget: _FillBudget
) -> Any:
    first = parts[0][1][0]
    kind, shape = type(first), ()
    if isinstance(first, np.ndarray):
        kind, shape = first.dtype, first.shape
    is_array = isinstance(first, np.ndarray) and budget.take(num_unfilled, first.nbytes)
    if is_array or kind in _NUMBERS or isinstance(first, np.number):
        array = np.zeros((num_envs, *shape), kind)
        # Or there are None, or arrays of other shapes, in other rows.
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            _write(array, parts)
            return array
    values = {r: v for rows, vs in parts for r, v in zip(rows, vs, strict=True)}
    if all(isinstance(value, dict) for value in values.values()):
        return _batch(values, num_envs, budget)
    array = np.full(num_envs, None, object)
    for row, value in values.items():
        array[row] = value
    return array


def _write(array: Array, parts: Sequence[tuple[list[int], Any]]) -> None:
    for rows, values in parts:
        array[slice(None) if len(rows) == len(array) else rows] = values
