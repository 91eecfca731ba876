"""What is asked of a block.

Operations are checked in full before anything is sent: an impossible one must cost
its caller an error, not a worker its life.
"""

from __future__ import annotations

from dataclasses import dataclass

from envserve import codec
from envserve.channel import MAX_CALL_BYTES, Kind, pack_frame
from envserve.errors import CallError, LocalProtocolError
from envserve.lane import Block, Call, Reset

__all__ = ["Operation", "call_operation", "reset_operation"]


@dataclass(slots=True)
class Operation:
    """What runs on a block, from its submission until it is finished.

    Attributes:
      kind: STEP, RESET or CALL.
      block: The block.
      payload: What the worker needs besides.
      is_whole_reset: Whether it is a reset of all rows of the block.
      sequence: Number by which its answer is known.
      ticket: The submitter's number for it.
      started_at: When it was submitted.
    """

    kind: Kind
    block: Block
    payload: bytes = b""
    is_whole_reset: bool = False
    sequence: int = 0
    ticket: int = 0
    started_at: float = 0.0

    def frame(self) -> bytes:
        """Returns what to send to the worker."""
        return pack_frame(self.kind, self.block.index, self.sequence, self.payload)


def reset_operation(block: Block, reset: Reset) -> Operation:
    """Makes a reset.

    Raises:
      LocalProtocolError: A row is not of the block, or seeds are too few, too many or
        out of [0, 2**63).
    """
    rows = range(block.start, block.stop)
    chosen = rows if reset.env_indices is None else reset.env_indices
    if any(row not in rows for row in chosen):
        raise LocalProtocolError(
            f"block {block.index}: expected env_indices from {rows.start} to "
            f"{rows.stop - 1}; got {reset.env_indices}"
        )
    seeds = reset.seeds
    if seeds is not None and (
        len(seeds) != len(chosen) or not all(0 <= seed < 2**63 for seed in seeds)
    ):
        raise LocalProtocolError(
            f"block {block.index}: expected {len(chosen)} seeds in [0, 2**63); "
            f"got {seeds}"
        )
    payload = b""
    if reset.env_indices is not None or seeds is not None:
        payload = codec.encode({"rows": reset.env_indices, "seeds": seeds})
    return Operation(Kind.RESET, block, payload, set(chosen) == set(rows))


def call_operation(block: Block, call: Call) -> Operation:
    """Makes a call; raises CallError for arguments that cannot be sent."""
    message = {
        "row": call.env_index,
        "kind": call.kind,
        "name": call.name,
        "arguments": list(call.arguments),
    }
    try:
        payload = codec.encode(message)
        if len(payload) > MAX_CALL_BYTES:
            raise codec.CodecError(
                f"expected at most {MAX_CALL_BYTES} bytes; got {len(payload)}"
            )
    except codec.CodecError as error:
        raise CallError(
            f"Env {call.env_index}: {call.name}: {error}", env_index=call.env_index
        ) from None
    return Operation(Kind.CALL, block, payload)
