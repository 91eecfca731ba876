"""Encode infos within a budget, whatever env code has put into them.

Values without a plain form are left out, as are the largest values if an info exceeds
the budget. Their keys are listed under "omitted".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from envserve.spaces import codec

__all__ = ["InfoBudget", "PackedInfo", "encode_infos", "join_infos", "snapshot"]

#: How many keys of a row are named, and how many characters of each.
_MAX_NAMES: Final = 16
_MAX_NAME: Final = 32
#: More than what a row takes besides its pairs and names.
_ROW_BYTES: Final = 32
_ROW_VALUES: Final = 4
_ANY_NUMBER: Final = 1 << 60
#: More than what a row's number takes.
_KEY_BYTES: Final = 9
#: So many values can be looked at one by one in a few milliseconds.
_FEW_VALUES: Final = 1 << 13
#: In place of an info that is left out as a whole, and its number of values.
_ALL_OMITTED: Final = codec.encode({"omitted": ["..."]})
_OMITTED_VALUES: Final = 3
_PACKER: Final = msgpack.Packer()


class InfoBudget(NamedTuple):
    """The most bytes, and values as `codec.check` counts them, that infos may take."""

    num_bytes: int
    num_values: int

    def allows(self, num_bytes: int, num_values: int) -> bool:
        """Return whether so many bytes and values are within the budget."""
        return num_bytes <= self.num_bytes and num_values <= self.num_values

    def share(self, num_bytes: int, num_values: int) -> float:
        """Return the share of the budget that so many bytes and values take."""
        return max(num_bytes / self.num_bytes, num_values / self.num_values)

    def holds(self, encoded: bytes) -> bool:
        """Return whether an encoded value is within the budget."""
        if len(encoded) > self.num_bytes:
            return False
        if 4 * len(encoded) <= self.num_values:  # so few bytes hold no more
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


class _Info:
    """A row's: encoded pairs of key and value, and the names of what is left out."""

    def __init__(self, info: Mapping[Any, Any]) -> None:
        self.omitted: list[str] = []
        self.num_bytes, self.num_values = _ROW_BYTES, _ROW_VALUES
        self.pairs: dict[Any, tuple[bytes, int]] = {}
        for key, value in info.items():
            try:
                encoded = codec.encode([[{key: value}]])  # as deep as in a report
            except codec.CodecError:
                self._name(key)
                continue
            count = codec.check(encoded, _ANY_NUMBER)
            self.pairs[key] = encoded[3:], count
            self.num_bytes += len(encoded)
            self.num_values += count

    def omit(self, key: Any) -> None:
        pair, count = self.pairs.pop(key)
        self.num_bytes -= len(pair) + 3
        self.num_values -= count
        self._name(key)

    def _name(self, key: Any) -> None:
        if len(self.omitted) > _MAX_NAMES:
            return
        text = str(key) if type(key) in (str, int) else type(key).__name__
        if len(self.omitted) == _MAX_NAMES:
            text = "..."
        name = text[:_MAX_NAME].encode(errors="backslashreplace")
        self.omitted.append(name.decode())
        self.num_bytes += 2 + len(name)
        self.num_values += 1

    def encode(self) -> bytes:
        if self.omitted:
            self.pairs["omitted"] = codec.encode({"omitted": self.omitted})[1:], 0
        return _pack_map([pair for pair, _ in self.pairs.values()])


def _pack_map(pairs: Sequence[bytes]) -> bytes:
    return b"".join([_PACKER.pack_map_header(len(pairs)), *pairs])


def encode_infos(
    infos: Mapping[int, Mapping[Any, Any]], row_budget: InfoBudget, budget: InfoBudget
) -> bytes:
    """Encodes infos by row, as a map.

    Each row's has `row_budget`, and all of them together `budget`, which is not less.
    """
    try:
        encoded = codec.encode(infos)
    except codec.CodecError:
        pass
    else:
        if row_budget.holds(encoded):
            return encoded
    fitted = {row: _Info(info) for row, info in infos.items()}
    for info in fitted.values():
        _omit_largest([info], row_budget)
    _omit_largest(fitted.values(), budget)
    encoded = _pack_map([_PACKER.pack(r) + info.encode() for r, info in fitted.items()])
    return encoded if budget.holds(encoded) else codec.encode({})  # names alone


def join_infos(
    packed: Mapping[int, PackedInfo],
    infos: Mapping[int, Mapping[Any, Any]],
    budget: InfoBudget,
) -> bytes:
    """Does the same with infos that have been encoded already.

    Where their pairs are many, those that exceed the budget go row by row, the largest
    first: to look at each pair would take seconds.
    """
    num_bytes = _ROW_BYTES + sum(len(p.encoded) + _KEY_BYTES for p in packed.values())
    num_values = _ROW_VALUES + sum(p.num_values + 2 for p in packed.values())
    kept = {row: each.encoded for row, each in packed.items()}
    if not budget.allows(num_bytes, num_values):
        if num_values <= _FEW_VALUES:
            return encode_infos(infos, budget, budget)
        shares = {
            r: budget.share(len(p.encoded), p.num_values) for r, p in packed.items()
        }
        for row in sorted(shares, key=lambda row: shares[row], reverse=True):
            if budget.allows(num_bytes, num_values):
                break
            num_bytes -= len(kept[row]) - len(_ALL_OMITTED)
            num_values -= packed[row].num_values - _OMITTED_VALUES
            kept[row] = _ALL_OMITTED
        if not budget.allows(num_bytes, num_values):
            return codec.encode({})  # names alone
    return _pack_map([_PACKER.pack(row) + each for row, each in kept.items()])


def _omit_largest(infos: Collection[_Info], budget: InfoBudget) -> None:
    num_bytes = sum(info.num_bytes for info in infos)
    num_values = sum(info.num_values for info in infos)
    if budget.allows(num_bytes, num_values):
        return
    sizes = [
        (budget.share(len(pair), count), info, key)
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


def snapshot(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an info as it is now, with copies of the containers and arrays in it.

    An env may go on to use its own: to clear them when it is reset, say.
    """
    try:
        copied: Mapping[str, Any] = _copy(info, {})
    except Exception:  # a container of the user's that raises, or too deep
        return info  # what has no plain form is left out when it is sent
    return copied


def _copy(value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if id(value) in seen:
        return seen[id(value)][1]
    copied: Any = value
    if isinstance(value, Mapping):
        seen[id(value)] = value, (copied := {})  # with it, as its id is not another's
        copied.update((key, _copy(each, seen)) for key, each in value.items())
    elif isinstance(value, list | tuple):
        seen[id(value)] = value, (copied := [])
        copied.extend(_copy(each, seen) for each in value)
    return copied
