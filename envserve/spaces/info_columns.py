"""Numbers in infos as columns: one packed record per row, and a layout for all rows.

Most envs return the same numeric keys in every info. Encoding, decoding and batching
them as dicts takes longer than the rest of a step. Instead, the numbers of adjacent
rows with the same keys and types are packed into records, which are read as arrays in
one call. The layout (keys, types and shapes) is sent with the records, and each end
caches the layouts that it has seen.
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

Array = np.ndarray[Any, Any]

#: Python types in columns, with the dtypes that store them.
_PYTHON_DTYPES: Final = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
}
#: Format for `struct` by dtype.
_FORMATS: Final = {dtype: dtype.char for dtype in codec.DTYPES} | {
    np.dtype(np.int64): "q",
    np.dtype(np.uint64): "Q",
}
#: Kinds of values; sent as numbers.
_PYTHON, _SCALAR, _ARRAY = range(3)
#: Maximum sizes of a record and of an encoded layout in bytes, and maximum number of
#: columns. Larger values are encoded as dicts.
_MAX_RECORD_BYTES: Final = 1 << 9
_MAX_LAYOUT_BYTES: Final = 1 << 13
_MAX_COLUMNS: Final = 1 << 7
_MAX_DIMENSIONS: Final = 8
#: Upper bound for the encoded lengths and the first row of columns in bytes.
_HEADER_BYTES: Final = 32
#: Decoding a column takes as long as decoding this number of values, in addition to
#: its values.
_VALUES_PER_COLUMN: Final = 16
#: Maximum number of combinations of keys and types that a worker remembers.
_MAX_PLANS: Final = 1 << 8


class Layout(NamedTuple):
    """The columns of records.

    Attributes:
      encoded: The layout as bytes, for `read_layout`.
      keys: Keys of the columns.
      is_python: For each column, whether its values are Python numbers.
      names: Names of the fields of a record, "0", "1" and so on.
      dtype: Dtype of a record.
    """

    encoded: bytes
    keys: tuple[str, ...]
    is_python: tuple[bool, ...]
    names: tuple[str, ...]
    dtype: np.dtype[Any]


class InfoColumns(NamedTuple):
    """The numbers in the infos of adjacent rows.

    Attributes:
      start: First row.
      stop: Row after the last.
      layout: Keys and types of the numbers.
      data: The records of the rows.
    """

    start: int
    stop: int
    layout: Layout
    data: bytes

    @property
    def cost(self) -> tuple[int, int]:
        """The numbers of bytes and values that count towards the limits of reports."""
        layout, num_rows = self.layout, self.stop - self.start
        num_values = (_VALUES_PER_COLUMN + num_rows) * len(layout.keys)
        return len(self.data) + len(layout.encoded) + _HEADER_BYTES, num_values

    def columns(self) -> Iterator[tuple[str, bool, Array]]:
        """Yield key, whether the values are Python numbers, and array `[n, ...]`.

        The arrays are read-only.
        """
        _, keys, is_python, names, dtype = self.layout
        records = np.frombuffer(self.data, dtype)
        for key, is_number, name in zip(keys, is_python, names, strict=True):
            yield key, is_number, records[name]

    def dicts(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each row, and the numbers in its info as a dict."""
        values = [
            column.tolist() if is_python else list(column.copy())
            for _, is_python, column in self.columns()
        ]
        for row, numbers in enumerate(zip(*values, strict=True), self.start):
            yield row, dict(zip(self.layout.keys, numbers, strict=True))

    def part(self, rows: Sequence[int]) -> InfoColumns:
        """Return the columns of some adjacent rows."""
        start, stop, size = rows[0], rows[-1] + 1, self.layout.dtype.itemsize
        part = slice((start - self.start) * size, (stop - self.start) * size)
        return InfoColumns(start, stop, self.layout, self.data[part])


class RowInfos(Mapping[int, Mapping[str, Any]]):
    """Infos by row, some of whose numbers are in columns until a row is read.

    Attributes:
      columns: Numbers in the infos of adjacent rows.
      others: All other values, by row.
    """

    def __init__(
        self,
        columns: Sequence[InfoColumns] = (),
        others: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Store the arguments."""
        self.columns = [*columns]
        self.others = dict(others or {})
        self._dicts: dict[int, Mapping[str, Any]] | None = None

    def add(self, infos: Mapping[int, Mapping[str, Any]], offset: int = 0) -> None:
        """Add the infos of other rows, whose numbers increase by `offset`."""
        self._dicts = None
        columns, others = split_columns(infos)
        for start, stop, *rest in columns:
            self.columns.append(InfoColumns(start + offset, stop + offset, *rest))
        for row, info in others.items():
            self.others[row + offset] = info

    def simplified(self) -> Mapping[int, Mapping[str, Any]]:
        """Return a plain dict if there are no columns, otherwise this object."""
        return self if self.columns else self.others

    def __bool__(self) -> bool:
        """Return whether there are any infos."""
        return bool(self.columns or self.others)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """Return the info of a row."""
        return self._by_row()[row]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the rows that have an info."""
        return iter(self._by_row())

    def __len__(self) -> int:
        """Return the number of rows that have an info."""
        return len(self._by_row())

    def __repr__(self) -> str:
        """Return the representation of a dict."""
        return repr(self._by_row())

    def _by_row(self) -> dict[int, Mapping[str, Any]]:
        if self._dicts is None:
            found = dict(self.others)
            for each in self.columns:
                for row, numbers in each.dicts():
                    found[row] = {**numbers, **self.others.get(row, {})}
            self._dicts = dict(sorted(found.items()))
        return self._dicts


@lru_cache(maxsize=128)
def read_layout(encoded: bytes) -> Layout:
    """Decode a layout from a peer.

    Raises:
      CodecError: The layout is not valid.
    """
    columns = codec.decode(encoded, max_bytes=_MAX_LAYOUT_BYTES)
    if type(columns) is not list or not 0 < len(columns) <= _MAX_COLUMNS:
        raise codec.CodecError(f"expected a list of 1 to {_MAX_COLUMNS} columns")
    keys, kinds, fields, num_bytes = [], [], [], 0
    for at, column in enumerate(columns):
        if type(column) is not list or len(column) != 4:
            raise codec.CodecError("expected a key, kind, dtype and shape of a column")
        key, kind, code, shape = column
        dtype = codec.dtype_from_code(code)
        is_shape = (type(shape) is list and len(shape) <= _MAX_DIMENSIONS) and all(
            type(size) is int and 0 < size <= _MAX_RECORD_BYTES for size in shape
        )
        if type(key) is not str or kind not in range(3) or not is_shape:
            raise codec.CodecError("expected a str, a kind of value, and a shape")
        num_bytes += dtype.itemsize * math.prod(shape)
        if bool(shape) != (kind == _ARRAY) or num_bytes > _MAX_RECORD_BYTES:
            raise codec.CodecError(
                f"expected records of at most {_MAX_RECORD_BYTES} bytes, and a shape "
                f"of arrays only"
            )
        if kind == _PYTHON and dtype not in _PYTHON_DTYPES.values():
            raise codec.CodecError(f"expected a dtype of Python numbers; got {dtype}")
        keys.append(key)
        kinds.append(kind == _PYTHON)
        fields.append((str(at), dtype.newbyteorder("<"), tuple(shape)))
    if len({*keys}) < len(keys):
        raise codec.CodecError("expected each key once")
    names = tuple(name for name, *_ in fields)
    return Layout(encoded, tuple(keys), tuple(kinds), names, np.dtype(fields))


def read_columns(parts: Sequence[tuple[int, bytes, bytes]]) -> list[InfoColumns]:
    """Decode columns from a peer: first row, layout and records of each.

    Raises:
      CodecError: A layout is not valid, records have another length, or the rows are
        not ascending.
    """
    found, last = [], 0
    for start, encoded, data in parts:
        layout = read_layout(encoded)
        num_rows, rest = divmod(len(data), layout.dtype.itemsize)
        if rest or not num_rows:
            raise codec.CodecError("the length of records does not match their layout")
        if start < last:
            raise codec.CodecError("expected columns in the order of their rows")
        last = start + num_rows
        found.append(InfoColumns(start, last, layout, data))
    return found


def split_columns(
    infos: Mapping[int, Mapping[str, Any]],
) -> tuple[Sequence[InfoColumns], Mapping[int, Mapping[str, Any]]]:
    """Return the columns of infos, and all other values."""
    return (infos.columns, infos.others) if isinstance(infos, RowInfos) else ((), infos)


class _Plan(NamedTuple):
    """The layout of infos with certain keys and types, and how to pack them.

    Attributes:
      layout: Layout of the records.
      keys: Keys of the numbers.
      arrays: Position in `keys`, dtype and shape of each array.
      others: Keys of all other values.
      record: Packs a record.
    """

    layout: Layout
    keys: tuple[str, ...]
    arrays: tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...]
    others: tuple[Any, ...]
    record: struct.Struct

    def values(self, info: Mapping[str, Any]) -> list[Any]:
        """Return the values to pack; raise ValueError if an array differs."""
        values = [info[key] for key in self.keys]
        for at, dtype, shape in self.arrays:
            array = values[at]
            if array.dtype != dtype or array.shape != shape:
                raise ValueError("an array has another dtype or shape")
            values[at] = array.tobytes()
        return values


#: Plans by the keys and types of infos; None for infos without numbers, and False for
#: keys and types that occurred only once, because envs may add keys at random.
_plans: Final[dict[tuple[Any, ...], _Plan | Literal[False] | None]] = {}


def split_infos(
    infos: Mapping[int, Mapping[Any, Any]], max_bytes: int, max_values: int
) -> tuple[list[InfoColumns], Mapping[int, Mapping[Any, Any]]]:
    """Pack the numbers in infos into columns.

    Args:
      infos: Info dict by row, with ascending rows.
      max_bytes: Maximum total number of bytes; see `InfoColumns.cost`.
      max_values: Maximum total number of values.

    Returns:
      The columns, and the infos with all other values. There are no columns if they
      would exceed a limit.
    """
    runs: list[tuple[int, _Plan, list[bytes]]] = []
    others: dict[int, Mapping[Any, Any]] = {}
    records: list[bytes] = []
    last: tuple[Any, ...] = ()  # the signature of the row before
    plan, is_plain, stop = None, False, -1
    for row, info in infos.items():
        signature = (*info, *map(type, info.values()))
        if signature != last:
            last, plan, stop = signature, _plan_for(signature, info), -1
            if plan is not None:
                is_plain = not plan.others and not plan.arrays
                pack = plan.record.pack
        if plan is None:
            others[row] = info
            continue
        try:
            record = pack(*(info.values() if is_plain else plan.values(info)))
        except (ValueError, struct.error):  # also an int beyond 64 bits
            others[row] = info
            continue
        if row != stop:
            records = []
            runs.append((row, plan, records))
        records.append(record)
        stop = row + 1
        if plan.others:
            others[row] = {key: info[key] for key in plan.others}
    columns = [
        InfoColumns(start, start + len(records), plan.layout, b"".join(records))
        for start, plan, records in runs
    ]
    costs = [each.cost for each in columns]
    num_bytes, num_values = map(sum, zip((0, 0), *costs, strict=True))
    if num_bytes > max_bytes or num_values > max_values:
        return [], infos
    return columns, others


def join_columns(columns: Sequence[InfoColumns]) -> list[InfoColumns]:
    """Join the columns of adjacent rows that have the same layout."""
    joined: list[list[InfoColumns]] = []
    for each in sorted(columns, key=itemgetter(0)):
        before = joined[-1][-1] if joined else None
        if before and before.layout is each.layout and before.stop == each.start:
            joined[-1].append(each)
        else:
            joined.append([each])
    return [
        InfoColumns(
            run[0].start,
            run[-1].stop,
            run[0].layout,
            b"".join([each.data for each in run]),
        )
        for run in joined
    ]


def _plan_for(signature: tuple[Any, ...], info: Mapping[Any, Any]) -> _Plan | None:
    arrays = [value for value in info.values() if type(value) is np.ndarray]
    if arrays:
        signature += tuple((array.dtype, array.shape) for array in arrays)
    if signature not in _plans:
        if len(_plans) == _MAX_PLANS:
            _plans.clear()
        _plans[signature] = False
        return None
    if _plans[signature] is False:
        _plans[signature] = _make_plan(info)
    return _plans[signature] or None


def _make_plan(info: Mapping[Any, Any]) -> _Plan | None:
    columns: list[list[Any]] = []
    arrays: list[tuple[int, np.dtype[Any], tuple[int, ...]]] = []
    others, formats, left = [], "<", _MAX_RECORD_BYTES
    for key, value in info.items():
        kind, dtype, shape = _kind_of(value)
        size = dtype.itemsize * math.prod(shape)
        if dtype not in _FORMATS or type(key) is not str or not 0 < size <= left:
            others.append(key)
            continue
        left -= size
        if kind == _ARRAY:
            arrays.append((len(columns), dtype, shape))
        formats += f"{size}s" if kind == _ARRAY else _FORMATS[dtype]
        columns.append([key, kind, codec.dtype_code(dtype), [*shape]])
    try:
        layout = read_layout(codec.encode(columns))
    except codec.CodecError:  # no columns, too many, or keys that are too long
        return None
    return _Plan(
        layout, layout.keys, tuple(arrays), tuple(others), struct.Struct(formats)
    )


def _kind_of(value: Any) -> tuple[int, np.dtype[Any], tuple[int, ...]]:
    """Return the kind, dtype and shape of a value; dtype object if it is no number."""
    if type(value) in _PYTHON_DTYPES:
        return _PYTHON, _PYTHON_DTYPES[type(value)], ()
    if isinstance(value, np.generic):
        return _SCALAR, value.dtype, ()
    if type(value) is np.ndarray and value.ndim:
        return _ARRAY, value.dtype, value.shape
    return _SCALAR, np.dtype(np.object_), ()
