"""The last actions of each env, in shared memory: they outlive the worker.

For each row there is a point to begin from: a reset with a known seed, or the state of
the env's random generator before a reset. From there on the same actions lead to where
the env is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta

from envserve.spec import EnvSpec

__all__ = [
    "ActionRing",
    "Count",
    "Played",
    "RngState",
    "RowRecord",
    "restore_rng_state",
    "ring_nbytes",
]

Array = np.ndarray[Any, Any]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Word = Annotated[int, Meta(ge=0)]  # and below 2**64, as a record holds it
#: State and increment of a PCG64, high and low half each; has_uint32; uinteger.
RngState = tuple[_Word, _Word, _Word, _Word, _Word, _Word]

_MAX_STEPS: Final = 2048
_MAX_RING_BYTES: Final = 8 << 20
#: Longer actions are not kept: copying them would cost more than the step's message.
_MAX_ACTION_BYTES: Final = 4096

#: Kind, incarnation, count at the begin of the episode; a seed and its count (-1: not
#: to be used); count at the generator's state, and that; whether calls have changed it.
_RECORD: Final = struct.Struct("<4q q q 6Q q")
_RECORD_BYTES: Final = 128
_NOTHING, _KNOWN = 0, 1
_SEED_ONLY: Final = -1  # in place of the count at the generator's state
#: Records of a row: its present, the one before, and that of an env that has failed.
_PRESENT, _BEFORE, _FAILED = range(3)
_ROW_BYTES: Final = 3 * _RECORD_BYTES

_RNG_KIND: Final = "PCG64"
_LOW: Final = (1 << 64) - 1
#: What Gymnasium says of a generator that the env has set itself.
_SET_BY_ENV: Final = -1


@dataclass(frozen=True)
class Played:
    """How to get an env to where it is, or was when it failed.

    Attributes:
      incarnation: How often the env had been rebuilt.
      seed: Seed of the reset to begin with, or None.
      generator: State of the generator before the reset to begin with, or None.
      actions: One array `[num_actions, ...]` per action leaf, applied since.
      num_missing: Actions before these, and after that reset, which are not kept.
      episode_step: How many actions the running episode has seen.
      is_touched: Whether a caller has called its methods, or set its attributes.
    """

    incarnation: Count
    seed: Count | None
    generator: RngState | None
    actions: tuple[Array, ...]
    num_missing: Count
    episode_step: Count
    is_touched: bool


class ActionRing:
    """The rings and records of a pool's rows.

    The worker of a row writes, and only one that is not at work is read.

    Attributes:
      num_steps: How many steps of a block are kept; 0 if actions are too long.
    """

    def __init__(
        self, spec: EnvSpec, num_envs: int, memory: Any, offset: int = 0
    ) -> None:
        """Lays itself over memory of at least `ring_nbytes` bytes."""
        self.num_steps = _num_steps(spec, num_envs)
        self._memory = memoryview(memory)
        self._records_at = offset
        offset += num_envs * _ROW_BYTES
        self.counts = self._memory[offset : offset + 8 * num_envs].cast("q")
        offset += _aligned(8 * num_envs)
        rings = []
        for leaf in spec.action_leaves:
            shape = (self.num_steps, num_envs, *leaf.shape)
            ring: Array = np.ndarray(shape, leaf.dtype, memory, offset)
            rings.append(ring)
            offset += _aligned(ring.nbytes)
        self._rings = tuple(rings)

    def note_step(self, actions: Sequence[Array], start: int, stop: int) -> None:
        """Notes that the rows of a block are about to be stepped with their actions."""
        counts = self.counts
        count = counts[start]
        if self.num_steps:
            slot = count % self.num_steps
            for ring, array in zip(self._rings, actions, strict=True):
                ring[slot, start:stop] = array[start:stop]
        counts[start] = count + 1

    def row(self, row: int, block_start: int) -> RowRecord:
        """Returns the record of a row, empty; for its worker."""
        at = self._records_at + row * _ROW_BYTES
        records = self._memory[at : at + _ROW_BYTES]
        records[:] = bytes(_ROW_BYTES)
        self.counts[block_start] = 0
        return RowRecord(records, self.counts, block_start, self.num_steps)

    def read(
        self,
        row: int,
        block_start: int,
        *,
        has_failed: bool = False,
        max_actions: int | None = None,
    ) -> Played | None:
        """Returns what a row has been through; None if it was never reset.

        Args:
          row: The row.
          block_start: First row of its block.
          has_failed: Read of the env that has failed in the last step, and has been
            replaced since; not of the present one.
          max_actions: Take no more than so many, the last ones.
        """
        slot = _FAILED if has_failed else _PRESENT
        at = self._records_at + row * _ROW_BYTES + slot * _RECORD_BYTES
        kind, incarnation, begun_at, seed, seeded_at, kept_at, *rest = (
            _RECORD.unpack_from(self._memory, at)
        )
        count = self.counts[block_start]
        # Code of an env can write here too.
        if kind != _KNOWN or not max(seeded_at, kept_at, 0) <= begun_at <= count:
            return None
        generator = None
        since = seeded_at
        if seeded_at < 0 or count - seeded_at > self.num_steps:
            seed = None
            since = begun_at
            if kept_at >= 0:
                generator, since = tuple(rest[:6]), kept_at
        num_kept = min(count - since, self.num_steps)
        if max_actions is not None:
            num_kept = min(num_kept, max_actions)
        slots = np.arange(count - num_kept, count) % max(1, self.num_steps)
        return Played(
            incarnation=incarnation,
            seed=seed,
            generator=generator,
            actions=tuple(ring[slots, row] for ring in self._rings),
            num_missing=count - since - num_kept,
            episode_step=count - begun_at,
            is_touched=bool(rest[6]),
        )


class RowRecord:
    """What one row has been through, as its worker writes it."""

    def __init__(
        self, records: Any, counts: Any, block_start: int, num_steps: int
    ) -> None:
        """Takes the row's records, and where the steps of its block are counted."""
        self._records = records
        self._words = records.cast("q")
        self._counts = counts
        self._block_start = block_start
        self._interval = num_steps // 8
        self._written_at = self._due_at = -1
        self._seeded = (0, _SEED_ONLY)
        self._is_touched = 0

    @classmethod
    def private(cls) -> RowRecord:
        """Returns one in memory of its own, for an env that is not in a row yet."""
        counts = memoryview(bytearray(8)).cast("q")
        return cls(memoryview(bytearray(_ROW_BYTES)), counts, 0, 0)

    def begin_as_before(self) -> bool:
        """Notes that an env is about to reset itself; False if `begin` must do it."""
        count = self._counts[self._block_start]
        if count >= self._due_at:
            return False
        self._words[2] = count
        return True

    def begin(
        self,
        env: Any,
        incarnation: int,
        seed: int | None,
        last_seed: int | None,
        *,
        is_autoreset: bool,
    ) -> None:
        """Notes that an env is about to be reset, and a point to begin from.

        Args:
          env: The env without its wrappers.
          incarnation: How often it has been rebuilt.
          seed: What it is reset with.
          last_seed: The last seed that it has had before.
          is_autoreset: Whether whoever replays the actions will know of this reset.
        """
        count = self._counts[self._block_start]
        generator: RngState | None = None
        if seed is not None:
            self._seeded = (seed, count)
        else:
            generator = _read_rng_state(env, last_seed)
            if not is_autoreset:
                self._seeded = (0, _SEED_ONLY)
        self._write(incarnation, count, generator)

    def adopt(self, other: RowRecord, incarnation: int) -> None:
        """Notes that an env takes over, right after the reset that `other` has noted.

        Args:
          other: Where that was noted.
          incarnation: How often the row's envs have been rebuilt.
        """
        fields = _RECORD.unpack_from(other._records)
        count = self._counts[self._block_start]
        self._seeded = (fields[3], _SEED_ONLY if fields[4] < 0 else count)
        generator = None if fields[5] < 0 else fields[6:12]
        self._write(incarnation, count, generator)

    def touch(self) -> None:
        """Notes that the env has been changed by other means than actions."""
        self._is_touched = 1
        self._words[12] = 1

    def keep_failed(self, *, is_over: bool) -> None:
        """Keeps the record of an env that is about to be replaced.

        Args:
          is_over: Whether its episode has ended in this very step, and the next one
            has begun, by which time the failure was seen.
        """
        count = self._counts[self._block_start]
        is_new = is_over and self._written_at == count
        slot = _BEFORE if is_new else _PRESENT
        start = slot * _RECORD_BYTES
        record = self._records[start : start + _RECORD_BYTES]
        self._records[_FAILED * _RECORD_BYTES :] = record

    def _write(self, incarnation: int, count: int, generator: RngState | None) -> None:
        self._written_at, self._due_at = count, count + self._interval
        before = slice(_BEFORE * _RECORD_BYTES, (_BEFORE + 1) * _RECORD_BYTES)
        self._records[before] = self._records[:_RECORD_BYTES]
        _RECORD.pack_into(
            self._records,
            0,
            *(_KNOWN, incarnation, count, *self._seeded),
            _SEED_ONLY if generator is None else count,
            *(generator or (0,) * 6),
            self._is_touched,
        )


def ring_nbytes(spec: EnvSpec, num_envs: int) -> int:
    """Returns how many bytes a ring needs."""
    num_steps = _num_steps(spec, num_envs)
    return (
        num_envs * _ROW_BYTES
        + _aligned(8 * num_envs)
        + sum(
            _aligned(num_steps * num_envs * leaf.nbytes) for leaf in spec.action_leaves
        )
    )


def _num_steps(spec: EnvSpec, num_envs: int) -> int:
    nbytes = sum(leaf.nbytes for leaf in spec.action_leaves)
    if nbytes > _MAX_ACTION_BYTES:
        return 0
    return max(1, min(_MAX_STEPS, _MAX_RING_BYTES // max(1, nbytes * num_envs)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _read_rng_state(env: Any, seed: int | None) -> RngState | None:
    """Returns the state of an env's `np_random`.

    Args:
      env: The env without its wrappers.
      seed: What it was last seeded with.

    Returns:
      The state; None for an env without a PCG64, or whose generator does not come
      from that seed: such an env must have its luck from elsewhere.
    """
    try:
        if env.np_random_seed not in (seed, _SET_BY_ENV):
            return None
        state = env.np_random.bit_generator.state
        if state["bit_generator"] != _RNG_KIND:
            return None
        inner = state["state"]
        value, increment = inner["state"], inner["inc"]
        return (
            *(value >> 64, value & _LOW, increment >> 64, increment & _LOW),
            *(state["has_uint32"], state["uinteger"]),
        )
    except Exception:  # an env's attribute may be anything, and do anything
        return None


def restore_rng_state(env: Any, state: RngState) -> None:
    """Sets the state of an env's `np_random`, which `reset` must have made."""
    high, low, increment_high, increment_low, has_uint32, uinteger = state
    env.np_random.bit_generator.state = {
        "bit_generator": _RNG_KIND,
        "state": {
            "state": (high << 64) | low,
            "inc": (increment_high << 64) | increment_low,
        },
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
