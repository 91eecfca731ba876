"""Access attributes of a batch's envs: call a method, or get or set a value.

A reply contains the values of a block's first rows, as many as fit. The access then
sends another request for the remaining rows, until it has all values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

from envserve.client.lane_group import LaneGroup
from envserve.client.row_set import BatchBlock
from envserve.errors import CallError, RemoteProtocolError
from envserve.lane import Call, CallKind, Outcome
from envserve.spaces import codec
from envserve.spaces.attribute_values import METHOD, from_plain
from envserve.worker.attribute_calls import MAX_RESULT_VALUES

#: Maximum size in bytes of the encoded `set_attr` values in one call of a block, unless
#: the call sets only one row. Servers limit the size of a message.
_MAX_SET_BYTES: Final = 1 << 10


class AttributeAccess:
    """A call, get or set on several envs that was started."""

    def __init__(
        self,
        group: LaneGroup,
        rows: Sequence[int],
        kind: CallKind,
        name: str,
        arguments: Sequence[Any] | Mapping[int, Any],
        kwargs: Mapping[str, Any],
        call: Callable[..., Any],
    ) -> None:
        """Send the first requests.

        For "set", `arguments` maps rows to values. If the attribute is a method, its
        value is a function that passes the row and the name of the method to `call`.

        Raises:
          CallError: The arguments cannot be sent.
        """
        self._group, self._rows, self._call = group, rows, call
        self._kind, self._name = kind, name
        self._arguments, self._kwargs = arguments, kwargs
        # The arguments of a call or get are the same for all rows: pack them once.
        self._shared = self._pack(rows) if kind != "set" else b""
        self._values: dict[int, Any] = {}
        self._called: list[tuple[BatchBlock, list[int]]] = []
        self._start(sorted(rows))

    def _pack(self, rows: Sequence[int]) -> bytes:
        """Encode the arguments for these rows."""
        values = self._arguments
        if self._kind == "set":
            values = [self._arguments[row] for row in rows]
        try:
            return codec.encode([list(values), self._kwargs], keep_types=True)
        except codec.CodecError as error:
            if self._kind == "set" and len(rows) > 1:
                for row in rows:
                    self._pack([row])  # raises the error of the first invalid value
            named = {f"arguments[{n}]": value for n, value in enumerate(values)}
            if self._kind == "set":
                named = {"value": values[0]}
            text = f"{self._name}: {codec.explain(error, {**named, **self._kwargs})}"
            if not rows:
                raise CallError(text) from None
            raise CallError(f"Env {rows[0]}: {text}", env_index=rows[0]) from None

    def _start(self, rows: Sequence[int]) -> None:
        """Send a request to each block that contains any of these ascending rows."""
        calls: dict[int, Call] = {}
        called = []
        for block, group in groupby(rows, self._group.blocks.block_of):
            part = [*group]
            packed = self._shared or self._pack(part)
            while (
                self._kind == "set" and len(part) > 1 and len(packed) > _MAX_SET_BYTES
            ):
                part = part[: len(part) // 2]
                packed = self._pack(part)
            lane_rows = tuple([row - block.offset for row in part])
            call = Call(block.lane_block, lane_rows, self._kind, self._name, packed)
            calls[block.position] = call
            called.append((block, part))
        self._group.start(calls)
        self._called = called

    def finish(self, deadline: float) -> list[Any]:
        """Wait for the access until a monotonic deadline; return one value per row.

        Raises:
          CallError: The access failed in an env.
          EnvTimeout: The access has not finished in time; call this again to wait
            longer.
        """
        while len(self._values) < len(self._rows):
            positions = {block.position for block, _ in self._called}
            outcomes = self._group.finish(positions, deadline)
            for (block, part), outcome in zip(self._called, outcomes, strict=True):
                self._check(block, part, outcome)
                for row, value in zip(part, values_of(outcome.result), strict=False):
                    method = partial(self._call, row, self._name)
                    self._values[row] = method if value is METHOD else value
            if missing := sorted({*self._rows} - self._values.keys()):
                self._start(missing)
        return [self._values[row] for row in self._rows]

    def _check(self, block: BatchBlock, rows: Sequence[int], outcome: Outcome) -> None:
        """Raise CallError if the access failed in any of these rows."""
        faults = {fault.env_index + block.offset: fault for fault in outcome.faults}
        for row in rows:
            if (fault := faults.get(row)) is not None:
                raise CallError(
                    f"Env {row} ({block.lane.name}): {self._name}: {fault.cause}",
                    env_index=row,
                    remote_traceback=fault.detail,
                )


def values_of(result: bytes) -> list[Any]:
    """Decode the values in a reply.

    Raises:
      RemoteProtocolError: The reply contains no value.
    """
    limit = 2 * MAX_RESULT_VALUES
    values = codec.decode(result, max_bytes=len(result), max_values=limit)
    if not isinstance(values, list) or not values:
        raise RemoteProtocolError("expected a value for at least one env; got none")
    return [from_plain(value) for value in values]
