"""Attribute access on envs of a block: what a worker is asked, and its answer.

The answer has the values of the first rows, as many as there is room for, and at least
one. Rows beyond were not called; rows that have failed have a fault instead.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Self

from envserve.errors import CallError
from envserve.lane import Block, Call, Fault, Outcome
from envserve.spaces import codec
from envserve.worker.channel import MAX_CALL_BYTES
from envserve.worker.worker_report import encode_report, fault_of, read_report

__all__ = [
    "MAX_RESULT_VALUES",
    "CallTask",
    "answer_call",
    "answer_call_of_all",
    "call_payload",
    "read_answer",
]

#: Bytes of the report, which stands before the values.
_LENGTH: Final = struct.Struct("<I")
#: No row is called once the values of those before it are that long; and once they are
#: as long as this, divided among all blocks.
_ENOUGH_BYTES: Final = 4 << 20
_ENOUGH_OF_ALL: Final = 32 << 20
#: Values in a row's result, as `codec.check` counts them: each takes time to read.
#: All rows of an answer have less than twice as many.
MAX_RESULT_VALUES: Final = 1 << 17
_NOTHING: Final = codec.encode(None)
#: Begins a list whose length follows.
_LIST: Final = b"\xdd"


def call_payload(call: Call, num_blocks: int = 1) -> bytes:
    """Returns what to tell a worker of a pool of so many blocks.

    Raises:
      CallError: The arguments are too long.
    """
    if len(call.arguments) > MAX_CALL_BYTES:
        raise CallError(
            f"{call.name}: expected arguments of at most {MAX_CALL_BYTES} bytes; "
            f"got {len(call.arguments)}"
        )
    enough = min(_ENOUGH_BYTES, _ENOUGH_OF_ALL // num_blocks)
    told = [call.env_indices, call.kind, call.name, call.arguments, enough]
    return codec.encode(told)


class CallTask(NamedTuple):
    """What a worker was told: the fields of `lane.Call`, and how many bytes will do."""

    rows: list[int]
    kind: str
    name: str
    arguments: bytes
    enough: int

    @classmethod
    def read(cls, payload: bytes) -> Self:
        """Reads what the pool has said."""
        return cls(*codec.decode(payload, max_bytes=2 * MAX_CALL_BYTES))

    @property
    def changes_env(self) -> bool:
        """Whether an env may be another than before."""
        return self.kind in ("call", "set")

    def arguments_for(self, position: int) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments for a row, which are its own, by its position."""
        arguments, named = codec.decode(self.arguments, max_bytes=MAX_CALL_BYTES)
        return ([arguments[position]] if self.kind == "set" else arguments), named


def answer_call(
    task: CallTask, value_of: Callable[[int], Any], *, is_once: bool = False
) -> bytes:
    """Carries it out; returns what to tell the pool.

    Args:
      task: What is asked.
      value_of: Gives a row's value, by its position, or raises what its env does.
      is_once: Whether rows that there is no room for cannot be asked anew.
    """
    values: list[bytes] = []
    faults: list[Fault] = []
    size = num_values = 0
    enough = _ENOUGH_BYTES if is_once else task.enough
    for position, row in enumerate(task.rows):
        if size > enough or num_values > MAX_RESULT_VALUES:
            if not is_once:
                break
            value_of = _refuse
        try:
            # In a list, since that is how deep it will be.
            value = codec.encode([value_of(position)])
            num_values += codec.check(value, MAX_RESULT_VALUES)
            value = value[1:]
            if len(value) > MAX_CALL_BYTES:
                raise ValueError(
                    f"expected a result below {MAX_CALL_BYTES} bytes; got {len(value)}"
                )
        except Exception as error:
            value, fault = _NOTHING, fault_of(row, error)
            if isinstance(error, codec.CodecError):  # it says all
                fault = fault._replace(text=str(error))
            faults.append(fault)
            num_values += 1
        values.append(value)
        size += len(value)
    report = encode_report(len(task.rows), 1, faults)
    head = _LENGTH.pack(len(report)) + report + _LIST + len(values).to_bytes(4, "big")
    return b"".join([head, *values])


def answer_call_of_all(task: CallTask, env: Any, rows: Sequence[int]) -> bytes:
    """Does the same with one env for all rows of a block: what it gives, all get.

    Of a list or tuple with something for each row, they get their own.
    """
    try:
        value = _use(task, env)
    except Exception as error:
        value = error

    def value_of(position: int) -> Any:
        if isinstance(value, Exception):
            raise value
        if isinstance(value, tuple | list) and len(value) == len(rows):
            return value[task.rows[position] - rows[0]]
        return value

    return answer_call(task, value_of, is_once=task.kind == "call")


def _refuse(position: int) -> Any:
    raise ValueError(
        f"expected at most {_ENOUGH_BYTES >> 20} MiB of values of all rows of a vector "
        f"env, which was called; got more; give less at once"
    )


def _use(task: CallTask, env: Any) -> Any:
    arguments, named = task.arguments_for(-1)
    if task.kind == "set":
        given = [
            codec.encode(task.arguments_for(at)[0]) for at in range(len(task.rows))
        ]
        if len({*given}) > 1:
            raise ValueError("expected one value for a vector env; got several")
        return setattr(env, task.name, arguments[0])
    value = getattr(env, task.name)
    if task.kind == "call" and (callable(value) or arguments or named):
        return value(*arguments, **named)
    return value


def read_answer(payload: bytes, block: Block) -> Outcome:
    """Read a worker's answer, of which `result` has the values.

    Raises:
      ValueError: It is none of this block.
    """
    start = _LENGTH.size
    end = start + int.from_bytes(payload[:start], "little")
    if end > len(payload):
        raise ValueError(f"expected an answer to a call; got {len(payload)} bytes")
    outcome, _ = read_report(payload[start:end], block, 1)
    return Outcome(block.index, faults=outcome.faults, result=payload[end:])
