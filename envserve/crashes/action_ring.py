"""The last actions of each env, in shared memory, so that they outlive the worker.

A replay begins at a start point: a reset with a known seed, or the state of the env's
random generator before a reset. Repeating the actions since then leads to the env's
present state. Each row has a record of its start point, and the pool has a ring buffer
with the actions of the last steps.

Each row has a step count. A record stores the count at each event, such as a reset.
These counts locate the actions since the start point in the ring, so recording a step
costs only a copy of its actions. Reading the state of a random generator takes longer.
Therefore, an autoreset begins no new start point until the steps since the last one
fill an eighth of the ring.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta

from envserve.slab import Array, Layout, arrays_nbytes, map_arrays
from envserve.spaces.env_spec import EnvSpec

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
#: Non-negative int; a record stores it as uint64.
_Uint64 = Annotated[int, Meta(ge=0)]
#: State of a PCG64 generator: high and low half of the state, high and low half of the
#: increment, has_uint32, uinteger.
RngState = tuple[_Uint64, _Uint64, _Uint64, _Uint64, _Uint64, _Uint64]

#: Maximum number of steps that the ring keeps for each row.
_MAX_STEPS: Final = 2048
#: Maximum size of the actions in a ring, for all its rows together.
_MAX_RING_BYTES: Final = 8 << 20
#: Maximum size of a recorded action; copying a larger one would cost more than the
#: step's message.
_MAX_ACTION_BYTES: Final = 16 << 10

#: Layout of an env's record. Fields that end in "_at" contain the number of steps that
#: the row had begun when an event happened, or a negative number (see below).
_RECORD: Final = np.dtype(
    [
        ("is_known", np.int64),  # 1 once the env has been reset
        ("incarnation", np.int64),
        ("episode_at", np.int64),  # at the start of the episode
        ("seed", np.int64),
        ("seeded_at", np.int64),  # at the reset with `seed`, or _NEVER
        ("generator_at", np.int64),  # when `generator` was read, or _NEVER
        ("generator", np.uint64, 6),  # an RngState
        ("is_touched", np.int64),  # whether calls may have changed the env
        ("options", np.int64),  # CRC-32 of the options in the last reset that had any
        ("options_at", np.int64),  # at that reset, _NEVER or _BEFORE_LAST_RESET
    ]
)
#: Count of an event that has not happened.
_NEVER: Final = -1
#: Value of "options_at" if the reset with options was followed directly by a reset
#: without options. Both have the same number of steps, so the number does not suffice.
_BEFORE_LAST_RESET: Final = -2
#: Indices of a row's records: for its current env, and for the last env that failed.
_CURRENT, _FAILED = range(2)

_RNG_KIND: Final = "PCG64"
_LOW: Final = (1 << 64) - 1
#: Value of Gymnasium's `np_random_seed` if the env has assigned its own generator.
_ASSIGNED_BY_ENV: Final = -1


@dataclass(frozen=True)
class ActionHistory:
    """The actions that lead an env from a start point to its present or failed state.

    Attributes:
      incarnation: Number of times the env of the row had been rebuilt.
      seed: Seed of the reset at the start point, or None.
      generator: State of the generator before the reset at the start point, or None.
      actions: One array `[num_actions, ...]` per action leaf: the last actions since
        the start point.
      num_missing: Number of earlier actions since the start point that the ring no
        longer contains.
      episode_step: Number of steps in the current episode.
      is_touched: Whether a caller has called methods or set attributes of the env.
      options: Encoded options of the reset at the start point; see `lane.Reset`.
      misses_options: Whether the options of the reset at the start point are unknown,
        or an earlier reset had options.
    """

    incarnation: Count
    seed: Count | None
    generator: RngState | None
    actions: tuple[Array, ...]
    num_missing: Count
    episode_step: Count
    is_touched: bool
    options: bytes = b""
    misses_options: bool = False


class ActionRing:
    """The rings and records of all rows of a pool.

    The worker of a row writes the row's ring and record. Other processes read both only
    while this worker is idle or dead.

    Attributes:
      num_steps: Number of steps that the ring keeps for each row; 0 if actions are too
        large.
      counts: Memory view, int64 `[num_envs]`: number of steps that each row has begun.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, memory: Any) -> None:
        """Map the ring to a buffer of at least `ring_nbytes` bytes."""
        self.num_steps = _num_steps(spec, num_envs)
        arrays = map_arrays(_layout(spec, num_envs), memory)
        self._records, self._counts, *self._rings = arrays
        self.counts = self._counts.data

    def step_recorder(
        self, actions: Sequence[Array], start: int, stop: int
    ) -> Callable[[], None]:
        """Return a function that adds the present actions of a block to the ring.

        Call the returned function immediately before the rows of the block are stepped.

        Args:
          actions: Arrays `[num_envs, ...]` that hold the present actions, one per
            action leaf.
          start: First row of the block.
          stop: The last row of the block plus one.
        """
        counts, num_steps = self._counts[start:stop], self.num_steps
        copies = [
            (ring[:, start:stop], array[start:stop])
            for ring, array in zip(self._rings, actions, strict=True)
            if num_steps
        ]
        count_of_block = counts.data  # the rows of a block have equal counts

        def record_step() -> None:
            count = count_of_block[0]
            for ring, array in copies:
                ring[count % num_steps] = array
            counts[...] = count + 1

        return record_step

    def row_record(self, row: int) -> RowRecord:
        """Clear both records of a row, and return their writer for the row's worker."""
        self._records[row] = 0
        self.counts[row] = 0
        return RowRecord(self._records[row], self.counts, row, self.num_steps)

    def seed_and_steps(self, row: int) -> tuple[int | None, int]:
        """Return the last seed of a row and the number of steps in its episode.

        The seed is None if the env's state cannot be reproduced from it.
        """
        known, _, episode_at, seed, seeded_at, *_ = self._records[row, _CURRENT].item()
        steps = max(0, self.counts[row] - episode_at)
        is_seeded = known == 1 and min(seed, seeded_at) >= 0
        return seed if is_seeded else None, steps

    def read(
        self, row: int, options: bytes = b"", *, has_failed: bool = False
    ) -> ActionHistory | None:
        """Return the history of a row, or None if its env was never reset.

        Args:
          row: Index of the row.
          options: Encoded options of the last reset of the row that had options.
          has_failed: Whether to read the history of the env that failed in the last
            step and was replaced, instead of the current env.
        """
        record = self._records[row, _FAILED if has_failed else _CURRENT].item()
        known, incarnation, episode_at, seed, seeded_at, *others = record
        generator_at, state, is_touched, digest, options_at = others
        count = self.counts[row]
        # The record may be invalid: env code in the worker can overwrite it.
        if known != 1 or not max(seeded_at, generator_at, 0) <= episode_at <= count:
            return None
        generator = None
        start = seeded_at
        if seeded_at < 0 or count - seeded_at > self.num_steps:
            seed = None
            start = episode_at
            if generator_at >= 0:
                generator, start = tuple(state.tolist()), generator_at
        has_options = options_at == start and digest == zlib.crc32(options)
        num_kept = min(count - start, self.num_steps)
        slots = np.arange(count - num_kept, count) % max(1, self.num_steps)
        return ActionHistory(
            incarnation=incarnation,
            seed=seed,
            generator=generator,
            actions=tuple(ring[slots, row] for ring in self._rings),
            num_missing=count - start - num_kept,
            episode_step=count - episode_at,
            is_touched=bool(is_touched),
            options=options if has_options else b"",
            misses_options=options_at != _NEVER and not has_options,
        )


class RowRecord:
    """Writes the records of one row, in the row's worker."""

    def __init__(self, records: Array, counts: Any, row: int, num_steps: int) -> None:
        """Attach to a row's records and to the step counts of all rows."""
        self._records = records
        self._current = records[_CURRENT]
        self._counts = counts
        self._row = row
        self._renewal_steps = num_steps // 8
        self._renewal_due_at = -1
        self._seeded = self._options = (0, _NEVER)
        self._is_touched = 0

    @classmethod
    def private(cls) -> RowRecord:
        """Return a writer of records in private memory, for an env not yet in a row."""
        counts = memoryview(bytearray(8)).cast("q")
        return cls(np.zeros(2, _RECORD), counts, 0, 0)

    def begin_episode(
        self,
        env: Any,
        incarnation: int,
        seed: int | None,
        last_seed: int | None,
        options: bytes = b"",
        *,
        is_autoreset: bool,
    ) -> None:
        """Record that an env is about to be reset, with a new start point if possible.

        An autoreset keeps the start point until it is too old.

        Args:
          env: The env without its wrappers.
          incarnation: Number of times the env of the row has been rebuilt.
          seed: Seed of the reset, or None.
          last_seed: Last seed of the env before this reset.
          options: Encoded options of the reset.
          is_autoreset: Whether the reset is an autoreset. Replaying the actions repeats
            autoresets, so the last reset with a seed may remain the start point.
        """
        count = self._counts[self._row]
        if is_autoreset and count < self._renewal_due_at:
            self._current["episode_at"] = count
            return
        generator: RngState | None = None
        if seed is not None:
            self._seeded = (seed, count)
        else:
            generator = _read_rng_state(env, last_seed)
            if not is_autoreset:
                self._seeded = (0, _NEVER)
        if options:
            self._options = (zlib.crc32(options), count)
        elif self._options[1] == count:
            self._options = (0, _BEFORE_LAST_RESET)
        self._write(incarnation, count, generator)

    def adopt(self, other: RowRecord, incarnation: int) -> None:
        """Record that another env takes over the row; `other` contains its reset."""
        _, _, _, seed, seeded_at, generator_at, state, *_ = other._current.item()
        count = self._counts[self._row]
        self._seeded = (seed, _NEVER if seeded_at < 0 else count)
        # No step has followed the reset with options, so the count alone cannot show
        # that the row was reset again.
        if self._options[1] == count:
            self._options = (0, _BEFORE_LAST_RESET)
        self._write(incarnation, count, None if generator_at < 0 else state)

    def mark_touched(self) -> None:
        """Record that a call may have changed the env."""
        self._is_touched = 1
        self._current["is_touched"] = 1

    def save_failed_record(self) -> None:
        """Save the record of an env that failed and is about to be replaced."""
        self._options = (0, _NEVER)
        self._records[_FAILED] = self._current

    def _write(
        self, incarnation: int, count: int, generator: RngState | Array | None
    ) -> None:
        self._renewal_due_at = count + self._renewal_steps
        generator_at = _NEVER if generator is None else count
        state = (0,) * 6 if generator is None else generator
        self._records[_CURRENT] = (
            1,
            incarnation,
            count,
            *self._seeded,
            generator_at,
            state,
            self._is_touched,
            *self._options,
        )


def ring_nbytes(spec: EnvSpec, num_envs: int) -> int:
    """Return the size of the buffer for an `ActionRing` in bytes."""
    return arrays_nbytes(_layout(spec, num_envs))


def _layout(spec: EnvSpec, num_envs: int) -> Layout:
    num_steps = _num_steps(spec, num_envs)
    return [
        ((num_envs, 2), _RECORD),
        ((num_envs,), np.dtype(np.int64)),
        *(
            ((num_steps, num_envs, *leaf.shape), leaf.dtype)
            for leaf in spec.action_leaves
        ),
    ]


def _num_steps(spec: EnvSpec, num_envs: int) -> int:
    nbytes = sum(leaf.nbytes for leaf in spec.action_leaves)
    if nbytes > _MAX_ACTION_BYTES:
        return 0
    return max(1, min(_MAX_STEPS, _MAX_RING_BYTES // max(1, nbytes * num_envs)))


def _read_rng_state(env: Any, seed: int | None) -> RngState | None:
    """Return the state of an env's `np_random`.

    Args:
      env: The env without its wrappers.
      seed: The last seed of the env, or None.

    Returns:
      The state; None if the generator is not a PCG64, or was not seeded with `seed`,
      because such an env has another source of randomness.
    """
    try:
        if seed is not None and env.np_random_seed not in (seed, _ASSIGNED_BY_ENV):
            return None
        state = env.np_random.bit_generator.state
        if state["bit_generator"] != _RNG_KIND:
            return None
        inner = state["state"]
        value, increment = inner["state"], inner["inc"]
        return (
            value >> 64,
            value & _LOW,
            increment >> 64,
            increment & _LOW,
            state["has_uint32"],
            state["uinteger"],
        )
    except Exception:  # np_random may be user code that raises
        return None


def restore_rng_state(env: Any, state: RngState) -> None:
    """Set the state of an env's `np_random` generator, which must exist already."""
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
