"""Numbers in infos as columns: one packed record per row, and a layout for all rows.

Most envs return the same numeric keys in every info. The numbers of adjacent rows with
the same keys and types are packed into records, which are read as arrays in one call.
This takes a fraction of the time that dicts take. The layout is sent with the records,
and each side caches the layouts that it has decoded.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from envserve.spaces import codec
from envserve.spaces.leaves import Array

_PYTHON_DTYPES: Final = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
}
#: Maps each dtype to its format character in `struct`.
_FORMATS: Final = dict(zip(codec.DTYPES, "?bhiqBHIQefd", strict=True))
#: Maximum sizes in bytes of a record and of an encoded layout. Values that do not fit
#: into a record are encoded in dicts.
_MAX_RECORD_BYTES: Final = 1 << 9
_MAX_LAYOUT_BYTES: Final = 1 << 13
#: Upper bound in bytes for the encoded number of the first row, and the lengths of the
#: layout and the records.
_HEADER_BYTES: Final = 32
#: Fixed cost of decoding a column, as the number of values that take as long to decode.
_VALUES_PER_COLUMN: Final = 16
#: Maximum number of combinations of keys and types in the cache `_plans`.
_MAX_PLANS: Final = 1 << 8


class Layout(NamedTuple):
    """The layout of records, each of which has one field per column.

    Attributes:
      encoded: A dict with a zero of each column's type, encoded by `codec`.
      keys: Keys of the columns.
      is_python: For each column, whether its values are Python numbers.
      arrays: Index, dtype and shape of each column whose values are arrays.
      dtype: Dtype of a record; the names of its fields are "0", "1" and so on.
      record: `Struct` that packs the values of a record.
    """

    encoded: bytes
    keys: tuple[str, ...]
    is_python: tuple[bool, ...]
    arrays: tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...]
    dtype: np.dtype[Any]
    record: struct.Struct


class InfoColumns(NamedTuple):
    """The numbers in the infos of rows `start` to `stop` (exclusive), as records."""

    start: int
    stop: int
    layout: Layout
    data: bytes

    @property
    def cost(self) -> tuple[int, int]:
        """Numbers of bytes and of values to count towards the limits of a report."""
        layout, num_rows = self.layout, self.stop - self.start
        num_values = (_VALUES_PER_COLUMN + num_rows) * len(layout.keys)
        return len(self.data) + len(layout.encoded) + _HEADER_BYTES, num_values

    def columns(self) -> Iterator[tuple[str, bool, Array]]:
        """Yield each column: its key, whether it has Python numbers, and an array.

        The arrays `[stop - start, ...]` are read-only.
        """
        layout = self.layout
        records = np.frombuffer(self.data, layout.dtype)
        for index, key in enumerate(layout.keys):
            yield key, layout.is_python[index], records[str(index)]

    def dicts(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each row with a dict of the numbers in its info."""
        values = [
            column.tolist() if is_python else list(column.copy())
            for _, is_python, column in self.columns()
        ]
        for row, numbers in enumerate(zip(*values, strict=True), self.start):
            yield row, dict(zip(self.layout.keys, numbers, strict=True))

    def part(self, rows: Sequence[int]) -> InfoColumns:
        """Return the columns of the given rows: adjacent, and in ascending order."""
        start, stop, size = rows[0], rows[-1] + 1, self.layout.dtype.itemsize
        part = slice((start - self.start) * size, (stop - self.start) * size)
        return InfoColumns(start, stop, self.layout, self.data[part])


class RowInfos(Mapping[int, Mapping[str, Any]]):
    """A mapping from rows to info dicts.

    The numbers in columns become dicts when the first row is read.

    Attributes:
      columns: Numbers in the infos of adjacent rows.
      others: Maps rows to info dicts without the numbers that are in columns.
    """

    def __init__(
        self,
        columns: Sequence[InfoColumns] = (),
        others: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self.columns = [*columns]
        self.others = dict(others or {})
        self._dicts: dict[int, Mapping[str, Any]] | None = None

    def add(self, infos: Mapping[int, Mapping[str, Any]], offset: int = 0) -> None:
        """Add infos of more rows; `offset` is added to the row numbers in `infos`."""
        self._dicts = None
        columns, others = split_columns(infos)
        for start, stop, layout, data in columns:
            column = InfoColumns(start + offset, stop + offset, layout, data)
            self.columns.append(column)
        for row, info in others.items():
            self.others[row + offset] = info

    def simplified(self) -> Mapping[int, Mapping[str, Any]]:
        """Return a plain dict if there are no columns, otherwise this object."""
        return self if self.columns else self.others

    def __bool__(self) -> bool:
        return bool(self.columns or self.others)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._by_row()[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_row())

    def __len__(self) -> int:
        return len(self._by_row())

    def __repr__(self) -> str:
        return repr(self._by_row())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._by_row(),)  # copy and pickle as a dict

    def _by_row(self) -> dict[int, Mapping[str, Any]]:
        if self._dicts is None:
            infos = dict(self.others)
            for columns in self.columns:
                for row, numbers in columns.dicts():
                    infos[row] = {**numbers, **self.others.get(row, {})}
            self._dicts = dict(sorted(infos.items()))
        return self._dicts


def split_columns(
    infos: Mapping[int, Mapping[str, Any]],
) -> tuple[Sequence[InfoColumns], Mapping[int, Mapping[str, Any]]]:
    """Return the columns of infos, and a mapping from rows to all other values."""
    return (infos.columns, infos.others) if isinstance(infos, RowInfos) else ((), infos)


def read_columns(parts: Sequence[tuple[int, bytes, bytes]]) -> list[InfoColumns]:
    """Decode columns that a peer has sent.

    Args:
      parts: For each group of rows, the first row, the encoded layout and the records.

    Raises:
      CodecError: A layout is not valid, the records do not have the length that it
        requires, or the rows are not ascending.
    """
    columns, last = [], 0
    for start, encoded, data in parts:
        layout = _read_layout(encoded)
        num_rows, remainder = divmod(len(data), layout.dtype.itemsize)
        if remainder or not num_rows or start < last:
            raise codec.CodecError("expected whole records, in the order of their rows")
        last = start + num_rows
        columns.append(InfoColumns(start, last, layout, data))
    return columns


def join_columns(columns: Sequence[InfoColumns]) -> list[InfoColumns]:
    """Join the columns of adjacent rows that have the same layout."""
    joined: list[list[InfoColumns]] = []
    for part in sorted(columns, key=itemgetter(0)):
        previous = joined[-1][-1] if joined else None
        if previous and previous.layout is part.layout and previous.stop == part.start:
            joined[-1].append(part)
        else:
            joined.append([part])
    return [
        run[0]._replace(stop=run[-1].stop, data=b"".join([part.data for part in run]))
        for run in joined
    ]


@lru_cache(maxsize=128)
def _read_layout(encoded: bytes) -> Layout:
    zeros = codec.decode(encoded, max_bytes=_MAX_LAYOUT_BYTES)
    if type(zeros) is not dict or not zeros or {*map(type, zeros)} != {str}:
        raise codec.CodecError("expected a dict with a value for each column")
    fields, arrays = [], []
    formats = "<"
    num_bytes = 0
    for index, value in enumerate(zeros.values()):
        dtype, shape, size = _column_type(value)
        num_bytes += size
        if not 0 < size <= num_bytes <= _MAX_RECORD_BYTES:
            raise codec.CodecError(
                f"expected numbers and arrays of at most {_MAX_RECORD_BYTES} bytes in "
                f"total; got at least {num_bytes}"
            )
        fields.append((str(index), dtype.newbyteorder("<"), shape))
        formats += f"{size}s" if shape else _FORMATS[dtype]
        if shape:
            arrays.append((index, dtype, shape))
    is_python = tuple(type(value) in _PYTHON_DTYPES for value in zeros.values())
    dtype, record = np.dtype(fields), struct.Struct(formats)
    return Layout(encoded, (*zeros,), is_python, (*arrays,), dtype, record)


def _column_type(value: Any) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return dtype, shape and size in bytes; size 0 if the value fits no column."""
    is_array, dtype = type(value) is np.ndarray, _PYTHON_DTYPES.get(type(value))
    if is_array or isinstance(value, np.generic):
        dtype = value.dtype
    if dtype not in _FORMATS or (is_array and not value.ndim):
        return np.dtype(np.bool_), (), 0
    shape = value.shape if is_array else ()
    return dtype, shape, dtype.itemsize * math.prod(shape)


#: Maps the keys and types of an info to its layout, and to the keys without a column.
#: None means that the info has no numbers. False means that the keys and types have
#: occurred only once: they get no layout yet, because envs may add keys at random.
_plans: Final[dict[Any, tuple[Layout, Sequence[Any]] | Literal[False] | None]] = {}


def split_infos(
    infos: Mapping[int, Mapping[Any, Any]], max_bytes: int, max_values: int
) -> tuple[list[InfoColumns], Mapping[int, Mapping[Any, Any]]]:
    """Pack the numbers in infos into columns.

    Args:
      infos: Maps rows, in ascending order, to info dicts.
      max_bytes: Maximum total number of bytes; see `InfoColumns.cost`.
      max_values: Maximum total number of values.

    Returns:
      The columns, and the infos with all other values. There are no columns if they
      would exceed a limit.
    """
    runs: list[tuple[int, Layout, list[bytes]]] = []
    unpacked: dict[int, Mapping[Any, Any]] = {}
    plan, last = None, ()
    stop, records = -1, list[bytes]()
    for row, info in infos.items():
        signature = (*info, *map(type, info.values()))
        if signature != last:
            plan, last = _plan_for(signature, info), signature
            stop = -1  # begin a new run
        if plan is None:
            unpacked[row] = info
            continue
        layout, others = plan
        is_plain = not (others or layout.arrays)
        try:
            values = info.values() if is_plain else _values_of(info, layout)
            record = layout.record.pack(*values)
        except (ValueError, struct.error):  # a value does not fit the layout
            unpacked[row] = info
            continue
        if row != stop:
            records = []
            runs.append((row, layout, records))
        records.append(record)
        stop = row + 1
        if others:
            unpacked[row] = {key: info[key] for key in others}
    columns = [
        InfoColumns(start, start + len(records), layout, b"".join(records))
        for start, layout, records in runs
    ]
    costs = [part.cost for part in columns]
    num_bytes, num_values = map(sum, zip((0, 0), *costs, strict=True))
    if num_bytes > max_bytes or num_values > max_values:
        return [], infos
    return columns, unpacked


def _values_of(info: Mapping[Any, Any], layout: Layout) -> list[Any]:
    """Return the values to pack; raise ValueError if an array does not fit `layout`."""
    values = [info[key] for key in layout.keys]
    for index, dtype, shape in layout.arrays:
        array = values[index]
        if array.dtype != dtype or array.shape != shape:
            raise ValueError("an array has another dtype or shape")
        values[index] = array.tobytes()
    return values


def _plan_for(
    signature: tuple[Any, ...], info: Mapping[Any, Any]
) -> tuple[Layout, Sequence[Any]] | None:
    arrays = [value for value in info.values() if type(value) is np.ndarray]
    signature += tuple((array.dtype, array.shape) for array in arrays)
    if signature not in _plans:
        if len(_plans) == _MAX_PLANS:
            _plans.clear()
        _plans[signature] = False
    elif _plans[signature] is False:
        _plans[signature] = _make_plan(info)
    return _plans[signature] or None


def _make_plan(info: Mapping[Any, Any]) -> tuple[Layout, Sequence[Any]] | None:
    zeros: dict[str, Any] = {}
    remaining = _MAX_RECORD_BYTES
    for key, value in info.items():
        size = _column_type(value)[2]
        if type(key) is str and 0 < size <= remaining:
            is_array = type(value) is np.ndarray
            zeros[key] = np.zeros_like(value) if is_array else type(value)(0)
            remaining -= size
    try:
        layout = _read_layout(codec.encode(zeros, keep_types=True))
    except codec.CodecError:  # no value fits a column, or the keys are too long
        return None
    return layout, [key for key in info if key not in zeros]
