"""Encode info dicts within a budget of bytes and values.

Values that cannot be encoded are omitted, and so are the largest values of infos that
exceed the budget. The keys of omitted values are listed under the key "omitted".
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from envserve.spaces import codec
from envserve.spaces.info_columns import InfoColumns

#: Maximum number of omitted keys listed per row, and maximum length of each.
_MAX_OMITTED_NAMES: Final = 16
_MAX_OMITTED_NAME_LENGTH: Final = 32
#: Upper bounds for the bytes and values of a row's info, in addition to its key-value
#: pairs and omitted keys.
_ROW_OVERHEAD_BYTES: Final = 32
_ROW_OVERHEAD_VALUES: Final = 4
_UNLIMITED: Final = 1 << 60
#: Upper bound for the size of an encoded row number.
_ROW_KEY_BYTES: Final = 9
#: Above this number of values, `join_infos` omits infos as a whole, because comparing
#: key-value pairs would take more than a few milliseconds.
_MAX_VALUES_BY_PAIR: Final = 1 << 13
#: Encoded placeholder for an info that is omitted as a whole, and its number of values.
_ALL_OMITTED: Final = codec.encode({"omitted": ["..."]})
_OMITTED_VALUES: Final = 3
_PACKER: Final = msgpack.Packer()
_EMPTY_MAP: Final = codec.encode({})
#: Replaces a value that cannot be copied.
_NOT_PLAIN: Final = object()
#: Types of values that need no copy.
_SCALARS: Final = frozenset(
    {type(None), bool, int, float, str, np.bool_, np.int64, np.float32, np.float64}
)


class InfoBudget(NamedTuple):
    """Maximum number of bytes and of values in encoded infos.

    Values are counted as in `codec.check`.
    """

    num_bytes: int
    num_values: int

    def allows(self, num_bytes: int, num_values: int) -> bool:
        """Return whether these numbers of bytes and values are within the budget."""
        return num_bytes <= self.num_bytes and num_values <= self.num_values

    def used_fraction(self, num_bytes: int, num_values: int) -> float:
        """Return the used fraction of the byte or value budget, whichever is larger.

        The fraction exceeds 1 if the budget is exceeded.
        """
        return max(num_bytes / self.num_bytes, num_values / self.num_values)

    def half(self) -> InfoBudget:
        """Return half of the budget."""
        return InfoBudget(self.num_bytes // 2, self.num_values // 2)

    def within(self, other: InfoBudget) -> InfoBudget:
        """Return the minimum of two budgets, separately for bytes and values."""
        return InfoBudget(*map(min, self, other))

    def without(self, columns: Iterable[InfoColumns]) -> InfoBudget:
        """Return the budget that these columns leave for other infos."""
        num_bytes, num_values = self
        for part in columns:
            cost = part.cost
            num_bytes -= cost[0]
            num_values -= cost[1]
        return InfoBudget(num_bytes, num_values)

    def fits(self, encoded: bytes) -> bool:
        """Return whether an encoded value is within the budget."""
        if len(encoded) > self.num_bytes:
            return False
        if 4 * len(encoded) <= self.num_values:  # too short to contain more values
            return True
        try:
            codec.check(encoded, self.num_values)
        except codec.CodecError:
            return False
        return True


class PackedInfo(NamedTuple):
    """The encoded info of a row, and the number of values in it."""

    encoded: bytes
    num_values: int


class _EncodedInfo:
    """The encoded key-value pairs of one row's info, and its omitted keys.

    If a value of the info is a dict, such as "reset_info", single pairs of this dict
    can be omitted, too.
    """

    def __init__(self, info: Mapping[Any, Any], depth: int = 2) -> None:
        """Encode the pairs; `depth` is the number of containers around the info."""
        self.omitted: list[str] = []
        self.num_bytes, self.num_values = _ROW_OVERHEAD_BYTES, _ROW_OVERHEAD_VALUES
        self.pairs: dict[Any, tuple[bytes, int]] = {}
        self.inner: dict[bytes, _EncodedInfo] = {}
        for key, value in info.items():
            try:
                if depth == 2 and isinstance(value, Mapping):
                    packed_key = codec.encode(key, keep_types=True)
                    self.inner[packed_key] = _EncodedInfo(value, depth + 1)
                    self.num_bytes += len(packed_key)
                    continue
                # Nest the value as deeply as in a report, so that the same depth limit
                # applies.
                nested: Any = {key: value}
                for _ in range(depth):
                    nested = [nested]
                encoded = codec.encode(nested, keep_types=True)
            except Exception:  # the key or value may be a user-defined object
                self._add_omitted(key)
                continue
            pair, count = encoded[depth + 1 :], codec.check(encoded, _UNLIMITED)
            self.pairs[key] = pair, count
            self.num_bytes += len(pair)
            self.num_values += count

    def omit(self, key: Any) -> None:
        pair, count = self.pairs.pop(key)
        self.num_bytes -= len(pair)
        self.num_values -= count
        self._add_omitted(key)

    def _add_omitted(self, key: Any) -> None:
        if len(self.omitted) > _MAX_OMITTED_NAMES:
            return
        text = str(key) if type(key) in (str, int) else type(key).__name__
        if len(self.omitted) == _MAX_OMITTED_NAMES:
            text = "..."
        name = text[:_MAX_OMITTED_NAME_LENGTH].encode(errors="backslashreplace")
        self.omitted.append(name.decode())
        self.num_bytes += 2 + len(name)
        self.num_values += 1

    def encode(self) -> bytes:
        if self.omitted:
            self.pairs["omitted"] = codec.encode({"omitted": self.omitted})[1:], 0
        pairs = [pair for pair, _ in self.pairs.values()]
        inner = [key + info.encode() for key, info in self.inner.items()]
        return _pack_map([*pairs, *inner])


def _pack_map(pairs: Sequence[bytes]) -> bytes:
    return b"".join([_PACKER.pack_map_header(len(pairs)), *pairs])


def encode_infos(
    infos: Mapping[int, Mapping[Any, Any]], row_budget: InfoBudget, budget: InfoBudget
) -> bytes:
    """Encode info dicts as a map from row to info.

    Values that exceed a budget are omitted; the info lists their keys instead.

    Args:
      infos: Maps rows to info dicts.
      row_budget: Budget for the info of each row.
      budget: Budget for the infos of all rows together; not less than `row_budget`.

    Returns:
      The encoded map; an empty map if the lists of omitted keys alone exceed `budget`.
    """
    if not infos:
        return _EMPTY_MAP
    try:
        encoded = codec.encode(infos, keep_types=True)
    except Exception:
        pass  # encode the pairs one by one
    else:
        if row_budget.fits(encoded):
            return encoded
    fitted = {row: _EncodedInfo(info) for row, info in infos.items()}
    parts = [[info, *info.inner.values()] for info in fitted.values()]
    for part in parts:
        _omit_largest(part, row_budget)
    _omit_largest([*chain.from_iterable(parts)], budget)
    pairs = [_PACKER.pack(row) + info.encode() for row, info in fitted.items()]
    encoded = _pack_map(pairs)
    # The lists of omitted keys alone may exceed the budget.
    return encoded if budget.fits(encoded) else _EMPTY_MAP


def join_infos(
    packed: Mapping[int, PackedInfo],
    infos: Mapping[int, Mapping[Any, Any]],
    budget: InfoBudget,
) -> bytes:
    """Join encoded infos into a map, in the format of `encode_infos`.

    If the budget is exceeded, omit the largest values. If there are more than 8,192
    values, omit the whole infos of rows instead, the largest first, because comparing
    the sizes of all key-value pairs would take seconds.

    Args:
      packed: Maps rows to encoded infos.
      infos: Maps the same rows to their infos before encoding.
      budget: Budget for the infos of all rows together.
    """
    num_bytes = _ROW_OVERHEAD_BYTES + sum(
        len(p.encoded) + _ROW_KEY_BYTES for p in packed.values()
    )
    num_values = _ROW_OVERHEAD_VALUES + sum(p.num_values + 2 for p in packed.values())
    encoded = {row: info.encoded for row, info in packed.items()}
    if not budget.allows(num_bytes, num_values):
        if num_values <= _MAX_VALUES_BY_PAIR:
            return encode_infos(infos, budget, budget)
        shares = {
            row: budget.used_fraction(len(info.encoded), info.num_values)
            for row, info in packed.items()
        }
        for row in sorted(shares, key=lambda row: shares[row], reverse=True):
            if budget.allows(num_bytes, num_values):
                break
            num_bytes -= len(encoded[row]) - len(_ALL_OMITTED)
            num_values -= packed[row].num_values - _OMITTED_VALUES
            encoded[row] = _ALL_OMITTED
        if not budget.allows(num_bytes, num_values):
            return _EMPTY_MAP
    return _pack_map([_PACKER.pack(row) + info for row, info in encoded.items()])


def _omit_largest(infos: Collection[_EncodedInfo], budget: InfoBudget) -> None:
    num_bytes = sum(info.num_bytes for info in infos)
    num_values = sum(info.num_values for info in infos)
    if budget.allows(num_bytes, num_values):
        return
    sizes = [
        (budget.used_fraction(len(pair), count), info, key)
        for info in infos
        for key, (pair, count) in info.pairs.items()
    ]
    for _, info, key in sorted(sizes, key=itemgetter(0), reverse=True):
        if budget.allows(num_bytes, num_values):
            return
        num_bytes -= info.num_bytes
        num_values -= info.num_values
        info.omit(key)
        num_bytes += info.num_bytes
        num_values += info.num_values


def copy_info(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of an info, including its nested containers and arrays.

    A copy is necessary because the env may change its info later, for example by
    clearing it in the next reset, and because several envs may share an info.
    """
    try:
        types = {*map(type, info.values())}
        if types <= _SCALARS:  # the usual case
            return {**info}
        if types - {np.ndarray} <= _SCALARS:
            return {
                key: value.copy() if type(value) is np.ndarray else value
                for key, value in info.items()
            }
        copied: dict[str, Any] = _copy(info, {})
        return copied
    except Exception:  # a user-defined object raised, or the nesting is too deep
        copied = {}
    with contextlib.suppress(Exception):
        for key, value in info.items():
            copied[key] = _NOT_PLAIN  # will be omitted when the info is encoded
            with contextlib.suppress(Exception):
                copied[key] = _copy(value, {})
    return copied


def _copy(value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    if hasattr(type(value), "__array__") and not isinstance(value, np.generic):
        return codec.as_numpy(value).copy()
    if id(value) in seen:
        return seen[id(value)][1]
    copied: Any = value
    if isinstance(value, Mapping):
        # Keep the value alive, so that no other object gets its id.
        copied = {}
        seen[id(value)] = value, copied
        copied.update((key, _copy(item, seen)) for key, item in value.items())
    elif isinstance(value, list | tuple):
        copied = []
        seen[id(value)] = value, copied
        copied.extend(_copy(item, seen) for item in value)
        if isinstance(value, tuple):
            copied = tuple(copied)
            seen[id(value)] = value, copied
    return copied
