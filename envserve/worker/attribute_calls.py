"""Attribute access on the envs of a block: request, execution and reply.

The reply contains the values of the first rows: as many as fit, and at least one. The
remaining rows were not called, so the client sends another request for them. A row
whose call failed has a fault, and None instead of a value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from envserve.errors import CallError
from envserve.lane import Block, Call, Fault, Outcome
from envserve.spaces import codec
from envserve.spaces.attribute_values import to_plain
from envserve.worker.channel import MAX_CALL_BYTES
from envserve.worker.worker_report import decode_report, encode_report, fault_from_error

#: The beginning of a reply: the length of the report. The report itself and the list
#: of values follow.
_LENGTH: Final = struct.Struct("<I")
#: Once the values in a reply exceed this size, no further row is called.
_SOFT_LIMIT_BYTES: Final = 4 << 20
#: Maximum total size of the values in the replies of all blocks of a pool; each block
#: may use an equal share.
_POOL_SOFT_LIMIT_BYTES: Final = 32 << 20
#: Maximum number of values in the result of a row, counted as in `codec.check`. It is
#: limited because each value takes time to decode. A reply, with all its rows, has less
#: than twice this number.
MAX_RESULT_VALUES: Final = 1 << 17
_NONE: Final = codec.encode(None)
#: First byte of an encoded list; the length of the list follows.
_LIST_MARKER: Final = b"\xdd"


def encode_call(call: Call, num_blocks: int = 1) -> bytes:
    """Encode a call for a worker in a pool with `num_blocks` blocks.

    Raises:
      CallError: The arguments are too long.
    """
    if len(call.arguments) > MAX_CALL_BYTES:
        raise CallError(
            f"{call.name}: expected arguments of at most {MAX_CALL_BYTES} bytes; "
            f"got {len(call.arguments)}"
        )
    limit = min(_SOFT_LIMIT_BYTES, _POOL_SOFT_LIMIT_BYTES // num_blocks)
    fields = [call.env_indices, call.kind, call.name, call.arguments, limit]
    return codec.encode(fields)


class CallRequest(NamedTuple):
    """A call that the worker has received: `lane.Call` and the reply's size limit."""

    rows: list[int]
    kind: str
    name: str
    arguments: bytes
    soft_limit_bytes: int

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Decode the payload of CALL."""
        return cls(*codec.decode(payload, max_bytes=2 * MAX_CALL_BYTES))

    @property
    def may_change_env(self) -> bool:
        """Whether the call may change an env; reading an attribute does not."""
        return self.kind in ("call", "set")

    def arguments_for(self, position: int) -> tuple[list[Any], dict[str, Any]]:
        """Decode a new copy of the arguments for the row at a position of `rows`."""
        arguments, keywords = codec.decode(self.arguments, max_bytes=MAX_CALL_BYTES)
        return ([arguments[position]] if self.kind == "set" else arguments), keywords


def run_call(
    request: CallRequest,
    get_value: Callable[[int], Any],
    *,
    must_return_all: bool = False,
) -> bytes:
    """Run a call on each row, and encode the reply.

    Values of an env's `metadata` that are not plain are omitted.

    Args:
      request: The call.
      get_value: Function that takes the position of a row in `request.rows`, and runs
        the call on the env of this row. It returns the value or raises the env's error.
      must_return_all: Whether rows whose values do not fit into the reply get a fault,
        because the call must not be repeated. If False, they are left for another
        request.
    """
    values: list[bytes] = []
    faults: list[Fault] = []
    size = num_values = 0
    limit = _SOFT_LIMIT_BYTES if must_return_all else request.soft_limit_bytes
    for position, row in enumerate(request.rows):
        if size > limit or num_values > MAX_RESULT_VALUES:
            if not must_return_all:
                break
            get_value = _raise_too_large
        try:
            # Encode the value inside a list, as in the reply, so that the limit on the
            # nesting depth applies to both in the same way.
            plain = to_plain(get_value(position))
            if request.name == "metadata" and isinstance(plain, Mapping):
                plain = {key: plain[key] for key in plain if _is_plain(key, plain[key])}
            value = codec.encode([plain], keep_types=True)
            num_values += codec.check(value, MAX_RESULT_VALUES)
            value = value[1:]
            if len(value) > MAX_CALL_BYTES:
                raise ValueError(
                    f"expected a result of at most {MAX_CALL_BYTES} bytes; "
                    f"got {len(value)}"
                )
        except Exception as error:
            value, fault = _NONE, fault_from_error(row, error)
            if isinstance(error, codec.CodecError):  # clear without a traceback
                fault = fault._replace(text=str(error))
            faults.append(fault)
            num_values += 1
        values.append(value)
        size += len(value)
    report = encode_report(len(request.rows), 1, faults)
    head = _LENGTH.pack(len(report)), report
    return b"".join([*head, _LIST_MARKER, len(values).to_bytes(4, "big"), *values])


def run_call_on_vector_env(
    request: CallRequest, env: Any, rows: Sequence[int], attributes: dict[str, Any]
) -> bytes:
    """Run a call once, on the vector env of a block, and encode the reply.

    If the returned value is a list or tuple with one item per row of the block, each
    row gets its item. Otherwise, each row gets the whole value. An attribute that the
    call sets is added to `attributes`.
    """
    try:
        value = _apply_to_vector_env(request, env, attributes)
    except Exception as error:
        value = error

    def value_of(position: int) -> Any:
        if isinstance(value, Exception):
            raise value
        if isinstance(value, tuple | list) and len(value) == len(rows):
            return value[request.rows[position] - rows[0]]
        return value

    return run_call(request, value_of, must_return_all=request.kind == "call")


def _is_plain(key: Any, value: Any) -> bool:
    """Return whether an item of an env's metadata can be sent."""
    try:
        codec.encode([{key: value}], keep_types=True)
    except Exception:  # the value may be a user-defined object
        return False
    return True


def _raise_too_large(position: int) -> Any:
    raise ValueError(
        f"expected at most {_SOFT_LIMIT_BYTES >> 20} MiB of values for all rows of a "
        f"vector env; got more; the call was executed, but its values were dropped"
    )


def _apply_to_vector_env(
    request: CallRequest, env: Any, attributes: dict[str, Any]
) -> Any:
    arguments, keywords = request.arguments_for(-1)
    if request.kind == "set":
        values = [
            codec.encode(request.arguments_for(index)[0], keep_types=True)
            for index in range(len(request.rows))
        ]
        if len({*values}) > 1:
            raise ValueError(
                "expected the same value for all rows of a vector env; got different "
                "values"
            )
        setattr(env, request.name, arguments[0])
        attributes[request.name] = request.arguments_for(-1)[0][0]  # not the env's copy
        return None
    is_space = request.name in ("action_space", "observation_space")
    value = getattr(env, f"single_{request.name}" if is_space else request.name)
    if request.kind == "call" and (callable(value) or arguments or keywords):
        return value(*arguments, **keywords)
    return value


def decode_results(payload: bytes, block: Block) -> Outcome:
    """Decode a worker's reply; the outcome's `result` contains the values.

    Raises:
      ValueError: The payload is not a valid reply for this block.
    """
    start = _LENGTH.size
    end = start + int.from_bytes(payload[:start], "little")
    if end > len(payload):
        raise ValueError(
            f"expected a reply of at least {end} bytes, because its report has "
            f"{end - start} bytes; got {len(payload)} bytes"
        )
    outcome, _ = decode_report(payload[start:end], block, 1)
    return Outcome(block.index, faults=outcome.faults, result=payload[end:])
