"""The body of GRANTED: what a lease has, enough to lay out its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from envserve import codec
from envserve.errors import RemoteProtocolError, SpaceError
from envserve.lane import Block
from envserve.spec import EnvSpec, describe, restore
from envserve.wire.constants import MAX_BODY_BYTES, MAX_ENTRIES, MAX_NAME_LENGTH
from envserve.wire.fields import Fields

__all__ = ["Granted"]

_U32: Final = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class Granted:
    """Grants a lease.

    Attributes:
      epoch: Number of the lease, which every request on it repeats.
      lease_seconds: Silence after which the server gives the envs up.
      spec: Spaces of every env.
      blocks: The blocks, which partition the rows.
      spare_envs: Whether every row has a spare env.
      is_wrapped: Whether the envs are in the wrappers that were asked for.
    """

    epoch: int
    lease_seconds: float
    spec: EnvSpec
    blocks: tuple[Block, ...]
    spare_envs: bool = False
    is_wrapped: bool = False

    def encode(self) -> bytes:
        """Returns the body; raises CodecError if the spaces are too large to send."""
        body = codec.encode(
            {
                "epoch": self.epoch,
                "lease_seconds": self.lease_seconds,
                "env_name": self.spec.env_name,
                "observation_space": describe(self.spec.observation_space),
                "action_space": describe(self.spec.action_space),
                "blocks": [[b.start, b.stop, b.worker, b.split] for b in self.blocks],
                **({"spare_envs": True} if self.spare_envs else {}),
                **({"is_wrapped": True} if self.is_wrapped else {}),
            }
        )
        if len(body) > MAX_BODY_BYTES:
            raise codec.CodecError(
                f"expected spaces whose description fits into {MAX_BODY_BYTES} bytes; "
                f"got {len(body)}; give large Boxes one low and one high for all"
            )
        return body

    @classmethod
    def decode(cls, body: bytes, num_envs: int) -> Granted:
        """Reads a body; its blocks must partition `num_envs` rows."""
        fields = Fields.decode(body, "GRANTED")
        try:
            spec = EnvSpec(
                fields.text("env_name", MAX_NAME_LENGTH),
                restore(fields.anything("observation_space")),
                restore(fields.anything("action_space")),
            )
        except SpaceError as error:
            raise RemoteProtocolError(f"GRANTED: {error}") from None
        return cls(
            epoch=fields.integer("epoch", 1, _U32),
            lease_seconds=fields.number("lease_seconds"),
            spec=spec,
            blocks=_read_blocks(fields, num_envs),
            spare_envs=fields.boolean("spare_envs", default=False),
            is_wrapped=fields.boolean("is_wrapped", default=False),
        )


def _read_blocks(fields: Fields, num_envs: int) -> tuple[Block, ...]:
    blocks: list[Block] = []
    row = 0
    for item in fields.items("blocks", MAX_ENTRIES):
        if not (
            isinstance(item, list)
            and len(item) >= 4
            and all(type(value) is int and 0 <= value <= _U32 for value in item[:4])
            and row == item[0] < item[1]
            and item[3] < MAX_ENTRIES
        ):
            break
        row = item[1]
        blocks.append(Block(len(blocks), *item[:4]))
    if row != num_envs:
        raise RemoteProtocolError(
            f"GRANTED.blocks: expected [start, stop, worker, split] for each of "
            f"consecutive blocks over {num_envs} rows"
        )
    return tuple(blocks)
