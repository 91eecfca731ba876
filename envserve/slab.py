"""Rows: an array per leaf, a row per env; and the shared memory they live in.

A slab is an unnamed file (a memfd on Linux) that pool and workers map. It is passed
on by descriptor, so nothing is left behind, however its processes end.
"""

from __future__ import annotations

import enum
import fcntl
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from envserve.spaces.env_spec import EnvSpec

__all__ = [
    "BEAT",
    "Rows",
    "Slab",
    "Status",
    "anonymous_file",
    "arrays_nbytes",
    "keep_last_observation",
    "map_arrays",
    "next_beat",
    "private_heartbeat",
    "restore_last_observation",
    "row_of_beat",
    "rows_mib",
    "rows_nbytes",
    "write_lost",
    "write_pending",
]

Array = np.ndarray[Any, Any]
#: Shapes and dtypes of arrays.
Layout = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]

_ALIGNMENT: Final = 64  # a cache line: no two arrays, and no two heartbeats, share one
_BEAT_BYTES: Final = 8 * _ALIGNMENT


class Status(enum.IntEnum):
    """What became of a row's last step. A transition is valid when it is OK.

    The episode has ended in a row that is ENV_ERROR, WORKER_DIED, TIMEOUT or
    SERVER_LOST; it goes on in one that is PENDING or LATE.
    """

    OK = 0
    ENV_ERROR = 1  # the env raised, or returned what its spaces do not allow
    WORKER_DIED = 2
    TIMEOUT = 3  # the env hung and its worker was killed
    SERVER_LOST = 4
    PENDING = 5  # padding: nothing was done; the env, or its server, is not back yet
    LATE = 6  # what an action has led to that was sent before the padding


@dataclass(frozen=True)
class Rows:
    """Arrays `[num_envs, ...]` of everything that a batch step moves.

    Attributes:
      observation: One array per observation leaf; after an episode's end, the first
        of the next episode.
      action: One array per action leaf.
      reward: float64 `[num_envs]`.
      terminated: bool `[num_envs]`.
      truncated: bool `[num_envs]`.
      status: uint8 `[num_envs]`, see `Status`.
      final_observation: Like observation; an ended episode's last one. Rows whose
        episode goes on hold no meaning.
    """

    observation: tuple[Array, ...]
    action: tuple[Array, ...]
    reward: Array
    terminated: Array
    truncated: Array
    status: Array
    final_observation: tuple[Array, ...]

    def at(self, index: Any) -> Rows:
        """Returns some rows: views for a slice, copies for an array of indices."""
        return Rows(
            observation=tuple(leaf[index] for leaf in self.observation),
            action=tuple(leaf[index] for leaf in self.action),
            reward=self.reward[index],
            terminated=self.terminated[index],
            truncated=self.truncated[index],
            status=self.status[index],
            final_observation=tuple(leaf[index] for leaf in self.final_observation),
        )

    @classmethod
    def allocate(cls, spec: EnvSpec, num_envs: int) -> Rows:
        """Returns rows in private memory, all zero."""
        return cls.map(spec, num_envs, bytearray(rows_nbytes(spec, num_envs)))

    @classmethod
    def map(cls, spec: EnvSpec, num_envs: int, buffer: Any) -> Rows:
        """Returns rows that live in a buffer of at least `rows_nbytes` bytes."""
        arrays = map_arrays(_layout(spec, num_envs), buffer)
        num_observations = len(spec.observation_leaves)
        num_actions = len(spec.action_leaves)
        head = num_observations + num_actions
        reward, terminated, truncated, status = arrays[head : head + 4]
        return cls(
            observation=tuple(arrays[:num_observations]),
            action=tuple(arrays[num_observations:head]),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            status=status,
            final_observation=tuple(arrays[head + 4 :]),
        )


#: What one call of an env adds to its row's beat.
BEAT: Final = 1 << 20


def private_heartbeat() -> memoryview:
    """Returns a heartbeat that nobody looks at."""
    return memoryview(bytearray(_BEAT_BYTES)).cast("q")


def next_beat(beat: int, row: int) -> int:
    """Returns a beat of a row that differs from an earlier one."""
    return (beat & -BEAT) + BEAT + row + 1


def row_of_beat(beat: int) -> int | None:
    """Returns the row whose env was called last; None if there was no call yet."""
    row = beat % BEAT
    return row - 1 if row else None


def rows_nbytes(spec: EnvSpec, num_envs: int) -> int:
    """Returns how many bytes `Rows.map` needs."""
    return arrays_nbytes(_layout(spec, num_envs))


def rows_mib(spec: EnvSpec, num_envs: int) -> int:
    """Returns how many MiB that is, and at least one."""
    return max(1, -(-rows_nbytes(spec, num_envs) >> 20))


def _layout(spec: EnvSpec, num_envs: int) -> Layout:
    observations = [(leaf.shape, leaf.dtype) for leaf in spec.observation_leaves]
    actions = [(leaf.shape, leaf.dtype) for leaf in spec.action_leaves]
    # Reward, terminated, truncated, status.
    others = [((), np.dtype(kind)) for kind in (np.float64, bool, bool, np.uint8)]
    fields = [*observations, *actions, *others, *observations]
    return [((num_envs, *shape), dtype) for shape, dtype in fields]


def arrays_nbytes(layout: Layout) -> int:
    """Returns how many bytes `map_arrays` needs."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in layout)


def map_arrays(layout: Layout, buffer: Any) -> list[Array]:
    """Returns arrays that lie one behind the other in a buffer."""
    arrays: list[Array] = []
    offset = 0
    for shape, dtype in layout:
        arrays.append(np.ndarray(shape, dtype, buffer, offset))
        offset += _aligned(arrays[-1].nbytes)
    return arrays


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def keep_last_observation(rows: Rows, part: slice) -> None:
    """Makes the last observations the final ones, before new ones are written.

    They may be of a step that was never answered. What is not finite becomes 0, since
    nobody has checked it.
    """
    for final, last in zip(rows.final_observation, rows.observation, strict=True):
        if last.dtype.kind == "f":
            last[part] = np.where(np.isfinite(last[part]), last[part], 0)
        final[part] = last[part]


def restore_last_observation(rows: Rows, part: Any) -> None:
    """Makes final observations, that were kept, the last ones again, of some rows."""
    for final, last in zip(rows.final_observation, rows.observation, strict=True):
        last[part] = final[part]


def write_lost(rows: Rows, part: slice, status: Status) -> None:
    """Ends the episodes of some rows; their observations are the next ones already."""
    rows.reward[part] = 0.0
    rows.terminated[part] = False
    rows.truncated[part] = True
    rows.status[part] = status


def write_pending(rows: Rows, part: slice) -> None:
    """Has nothing happen in some rows; their observations stay as they are."""
    rows.reward[part] = 0.0
    rows.terminated[part] = False
    rows.truncated[part] = False
    rows.status[part] = Status.PENDING


class Slab:
    """Shared memory with the rows of one pool and a heartbeat per worker.

    Attributes:
      fd: Descriptor of the memory, to be sent to workers.
      rows: The rows, as views into the memory.
      heartbeats: int64 `[num_workers, 64]`; column 0 is another one after every call of
        an env, and tells which one it was, see `row_of_beat`; column 1 is 1 while the
        worker is inside a reset. From column 8 on are the cells of `step_timings`.
      extra: What lies behind them, for whoever has asked for it.
    """

    fd = -1  # before there is one

    def __init__(self, fd: int, spec: EnvSpec, num_envs: int, num_workers: int) -> None:
        """Maps memory that `create` has sized; takes ownership of the descriptor."""
        self.fd = fd
        self._map(spec, num_envs, num_workers)

    def _map(self, spec: EnvSpec, num_envs: int, num_workers: int) -> None:
        self._memory = mmap.mmap(self.fd, 0)
        self.rows = Rows.map(spec, num_envs, self._memory)
        at = _aligned(rows_nbytes(spec, num_envs))
        self.heartbeats: Array = np.ndarray(
            (num_workers, _BEAT_BYTES // 8), np.int64, self._memory, at
        )
        self.extra = memoryview(self._memory)[at + num_workers * _BEAT_BYTES :]

    @classmethod
    def create(
        cls, spec: EnvSpec, num_envs: int, num_workers: int, extra_nbytes: int = 0
    ) -> Slab:
        """Returns a slab in new memory, all zero."""
        nbytes = _aligned(rows_nbytes(spec, num_envs)) + num_workers * _BEAT_BYTES
        slab = cls.__new__(cls)
        slab.fd = anonymous_file()
        try:
            os.ftruncate(slab.fd, nbytes + extra_nbytes)
            if hasattr(os, "memfd_create"):
                # Who shrinks a file ends all that have mapped it.
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(slab.fd, fcntl.F_ADD_SEALS, seals)
            slab._map(spec, num_envs, num_workers)
        except BaseException:
            slab.close()
            raise
        return slab

    def close(self) -> None:
        """Closes the descriptor; the memory goes with the last array that uses it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close  # of one that an interrupt has kept its owner from getting

    def __repr__(self) -> str:
        state = "closed" if self.fd < 0 else f"fd {self.fd}"
        return f"<Slab {len(self._memory)} bytes, {state}>"


def anonymous_file() -> int:
    """Returns a descriptor of a new file in memory, empty."""
    if hasattr(os, "memfd_create"):
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        return os.memfd_create("envserve-slab", flags)
    with tempfile.TemporaryFile(prefix="envserve-slab-") as file:
        return os.dup(file.fileno())
