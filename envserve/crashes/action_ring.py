"""The last actions of each env, in shared memory: they outlive the worker.

For each row there is a point to begin from: a reset with a known seed, or the state of
the env's random generator before a reset. From there on the same actions lead to where
the env is.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta

from envserve.slab import Layout, arrays_nbytes, map_arrays
from envserve.spaces.env_spec import EnvSpec

__all__ = [
    "ActionHistory",
    "ActionRing",
    "Count",
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
_MAX_ACTION_BYTES: Final = 16 << 10

#: What is known of an env; a count is one of the steps of its row.
_RECORD: Final = np.dtype(
    [
        ("is_known", np.int64),
        ("incarnation", np.int64),
        ("begun_at", np.int64),  # count at the begin of the episode
        ("seed", np.int64),
        ("seeded_at", np.int64),  # count at the reset with that; or _NEVER
        ("kept_at", np.int64),  # count at the generator's state; or _NEVER
        ("generator", np.uint64, 6),
        ("is_touched", np.int64),  # by calls
        ("options", np.int64),  # digest of the last options at a reset
        ("options_at", np.int64),  # count at that reset; or _NEVER
    ]
)
_NEVER: Final = -1
_EARLIER: Final = -2  # than the last reset, without a step in between
#: Records of a row: of its env, and of one that has failed.
_PRESENT, _FAILED = range(2)

_RNG_KIND: Final = "PCG64"
_LOW: Final = (1 << 64) - 1
#: What Gymnasium says of a generator that the env has set itself.
_SET_BY_ENV: Final = -1


@dataclass(frozen=True)
class ActionHistory:
    """How to get an env to where it is, or was when it failed.

    Attributes:
      incarnation: How often the env had been rebuilt.
      seed: Seed of the reset to begin with, or None.
      generator: State of the generator before the reset to begin with, or None.
      actions: One array `[num_actions, ...]` per action leaf, applied since.
      num_missing: Actions before these, and after that reset, which are not kept.
      episode_step: How many actions the running episode has seen.
      is_touched: Whether a caller has called its methods, or set its attributes.
      options: What the reset to begin with has got, as of `lane.Reset`.
      misses_options: Whether that is not known, or an earlier one has got some.
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
    """The rings and records of a pool's rows.

    The worker of a row writes, and only one that is not at work is read.

    Attributes:
      num_steps: How many steps of a row are kept; 0 if actions are too long.
      counts: How many steps each row has begun.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, memory: Any) -> None:
        """Lays itself over memory of at least `ring_nbytes` bytes."""
        self.num_steps = _num_steps(spec, num_envs)
        arrays = map_arrays(_layout(spec, num_envs), memory)
        self._records, self._counts, *self._rings = arrays
        self.counts = self._counts.data

    def note_step(self, actions: Sequence[Array], start: int, stop: int) -> None:
        """Notes that the rows of a block are about to be stepped with their actions."""
        count = self.counts[start]  # of all rows of the block
        if self.num_steps:
            slot = count % self.num_steps
            for ring, array in zip(self._rings, actions, strict=True):
                ring[slot, start:stop] = array[start:stop]
        self._counts[start:stop] = count + 1

    def row(self, row: int) -> RowRecord:
        """Returns the record of a row, empty; for its worker."""
        self._records[row] = 0
        self.counts[row] = 0
        return RowRecord(self._records[row], self.counts, row, self.num_steps)

    def glance(self, row: int) -> tuple[int | None, int]:
        """Returns a row's last seed, if all since is known, and its episode's steps."""
        known, _, begun_at, seed, seeded_at, *_ = self._records[row, _PRESENT].item()
        is_seeded = known == 1 and min(seed, seeded_at) >= 0
        return seed if is_seeded else None, max(0, self.counts[row] - begun_at)

    def read(
        self, row: int, options: bytes = b"", *, has_failed: bool = False
    ) -> ActionHistory | None:
        """Returns what a row has been through; None if it was never reset.

        Args:
          row: The row.
          options: What it was last reset with, of resets with options.
          has_failed: Read of the env that has failed in the last step, and has been
            replaced since; not of the present one.
        """
        record = self._records[row, _FAILED if has_failed else _PRESENT].item()
        known, incarnation, begun_at, seed, seeded_at, kept_at, state, *others = record
        touched, digest, options_at = others
        count = self.counts[row]
        # Code of an env can write here too.
        if known != 1 or not max(seeded_at, kept_at, 0) <= begun_at <= count:
            return None
        generator = None
        since = seeded_at
        if seeded_at < 0 or count - seeded_at > self.num_steps:
            seed = None
            since = begun_at
            if kept_at >= 0:
                generator, since = tuple(state.tolist()), kept_at
        has_options = options_at == since and digest == zlib.crc32(options)
        num_kept = min(count - since, self.num_steps)
        slots = np.arange(count - num_kept, count) % max(1, self.num_steps)
        return ActionHistory(
            incarnation=incarnation,
            seed=seed,
            generator=generator,
            actions=tuple(ring[slots, row] for ring in self._rings),
            num_missing=count - since - num_kept,
            episode_step=count - begun_at,
            is_touched=bool(touched),
            options=options if has_options else b"",
            misses_options=options_at != _NEVER and not has_options,
        )


class RowRecord:
    """What one row has been through, as its worker writes it."""

    def __init__(self, records: Array, counts: Any, row: int, num_steps: int) -> None:
        """Takes the row's records, and where the steps of rows are counted."""
        self._records = records
        self._present = records[_PRESENT]
        self._counts = counts
        self._row = row
        self._interval = num_steps // 8
        self._due_at = -1
        self._seeded = self._options = (0, _NEVER)
        self._is_touched = 0

    @classmethod
    def private(cls) -> RowRecord:
        """Returns one in memory of its own, for an env that is not in a row yet."""
        counts = memoryview(bytearray(8)).cast("q")
        return cls(np.zeros(2, _RECORD), counts, 0, 0)

    def begin_as_before(self) -> bool:
        """Notes that an env is about to reset itself; False if `begin` must do it."""
        count = self._counts[self._row]
        if count >= self._due_at:
            return False
        self._present["begun_at"] = count
        return True

    def begin(
        self,
        env: Any,
        incarnation: int,
        seed: int | None,
        last_seed: int | None,
        options: bytes = b"",
        *,
        is_autoreset: bool,
    ) -> None:
        """Notes that an env is about to be reset, and a point to begin from.

        Args:
          env: The env without its wrappers.
          incarnation: How often it has been rebuilt.
          seed: What it is reset with.
          last_seed: The last seed that it has had before.
          options: What it is reset with besides.
          is_autoreset: Whether whoever replays the actions will know of this reset.
        """
        count = self._counts[self._row]
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
            self._options = (0, _EARLIER)
        self._write(incarnation, count, generator)

    def adopt(self, other: RowRecord, incarnation: int) -> None:
        """Notes that an env takes over, right after a reset that `other` has noted."""
        _, _, _, seed, seeded_at, kept_at, state, *_ = other._present.item()
        count = self._counts[self._row]
        self._seeded = (seed, _NEVER if seeded_at < 0 else count)
        if self._options[1] == count:  # they were the other env's
            self._options = (0, _EARLIER)
        self._write(incarnation, count, None if kept_at < 0 else state)

    def touch(self) -> None:
        """Notes that the env has been changed by other means than actions."""
        self._is_touched = 1
        self._present["is_touched"] = 1

    def keep_failed(self) -> None:
        """Keeps the record of an env that is about to be replaced."""
        self._options = (0, _NEVER)
        self._records[_FAILED] = self._present

    def _write(
        self, incarnation: int, count: int, generator: RngState | Array | None
    ) -> None:
        self._due_at = count + self._interval
        kept_at = _NEVER if generator is None else count
        state = (0,) * 6 if generator is None else generator
        self._records[_PRESENT] = (
            *(1, incarnation, count, *self._seeded),
            *(kept_at, state, self._is_touched, *self._options),
        )


def ring_nbytes(spec: EnvSpec, num_envs: int) -> int:
    """Returns how many bytes a ring needs."""
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
    """Returns the state of the `np_random` of an env, without its wrappers.

    None for one without a PCG64, or whose generator does not come from the seed that it
    was given last, if any: such an env must have its luck from elsewhere.
    """
    try:
        if seed is not None and env.np_random_seed not in (seed, _SET_BY_ENV):
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
