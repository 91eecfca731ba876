"""The arrays of a batch: one array per leaf of the spaces, one row per env.

`Rows` are these arrays, in private or shared memory. A `Slab` is the shared memory of a
pool: its rows, a heartbeat per worker and optional extra memory. It is an unnamed file
(a memfd on Linux) whose descriptor the pool passes to its workers. The kernel frees it
when the last process that has mapped it exits, even if all of them are killed.
"""

from __future__ import annotations

import ctypes
import enum
import fcntl
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import Array as Array

#: Shape and dtype of each array.
Layout = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]

_ALIGNMENT: Final = 64  # a cache line, so that no two heartbeats share one
_BEAT_BYTES: Final = 8 * _ALIGNMENT
_VM_INHERIT_NONE: Final = 2  # from mach/vm_inherit.h


class Status(enum.IntEnum):
    """The outcome of a row's last step. A transition is valid only with status OK.

    ENV_ERROR, WORKER_DIED, TIMEOUT and SERVER_LOST end the episode of the row. PENDING
    and LATE do not.
    """

    OK = 0
    ENV_ERROR = 1
    """The env raised an exception, or returned a value outside its spaces."""
    WORKER_DIED = 2
    TIMEOUT = 3
    """The env hung and its worker was killed."""
    SERVER_LOST = 4
    PENDING = 5
    """Padding: nothing happened, because the env or its server is not available."""
    LATE = 6
    """The delayed result of an action that was sent before the row became padding."""


#: Values of `Status` as ints, which NumPy compares faster than enum members.
OK: Final = int(Status.OK)
PENDING: Final = int(Status.PENDING)
LATE: Final = int(Status.LATE)


@dataclass(frozen=True)
class Rows:
    """The arrays `[num_envs, ...]` of actions and results of all envs.

    Attributes:
      observation: One array per observation leaf. After the end of an episode, it
        contains the first observation of the next one.
      action: One array per action leaf.
      reward: float64 `[num_envs]`.
      terminated: bool `[num_envs]`.
      truncated: bool `[num_envs]`.
      status: uint8 `[num_envs]`; see `Status`.
      flags: The previous three arrays as one, uint8 `[3, num_envs]`.
      final_observation: One array per observation leaf, with the last observation of
        each episode that has ended in this step. Other rows are undefined.
    """

    observation: tuple[Array, ...]
    action: tuple[Array, ...]
    reward: Array
    terminated: Array
    truncated: Array
    status: Array
    flags: Array
    final_observation: tuple[Array, ...]

    def at(self, index: Any) -> Rows:
        """Return some of the rows: views for a slice, copies for an index array."""
        return Rows(
            observation=tuple(leaf[index] for leaf in self.observation),
            action=tuple(leaf[index] for leaf in self.action),
            reward=self.reward[index],
            terminated=self.terminated[index],
            truncated=self.truncated[index],
            status=self.status[index],
            flags=self.flags[:, index],
            final_observation=tuple(leaf[index] for leaf in self.final_observation),
        )

    @classmethod
    def allocate(cls, spec: EnvSpec, num_envs: int) -> Rows:
        """Return zeroed rows in private memory."""
        return cls.map(spec, num_envs, bytearray(rows_nbytes(spec, num_envs)))

    @classmethod
    def map(cls, spec: EnvSpec, num_envs: int, buffer: Any) -> Rows:
        """Return rows that are mapped onto a buffer of at least `rows_nbytes` bytes."""
        arrays = map_arrays(_layout(spec, num_envs), buffer)
        num_observations = len(spec.observation_leaves)
        num_actions = len(spec.action_leaves)
        reward_index = num_observations + num_actions
        reward, terminated, truncated, status = arrays[reward_index : reward_index + 4]
        flags = np.lib.stride_tricks.as_strided(
            terminated.view(np.uint8), (3, num_envs), (_aligned(num_envs), 1)
        )
        return cls(
            observation=tuple(arrays[:num_observations]),
            action=tuple(arrays[num_observations:reward_index]),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            status=status,
            flags=flags,
            final_observation=tuple(arrays[reward_index + 4 :]),
        )


#: Value of a heartbeat's column 1 during the first step of an env.
FIRST_STEP: Final = 2
#: Amount by which each env call increases its worker's heartbeat. The bits below it
#: contain the called row + 1.
BEAT_INCREMENT: Final = 1 << 20


def private_heartbeat() -> memoryview:
    """Return a heartbeat in private memory, for an env outside a pool."""
    return memoryview(bytearray(_BEAT_BYTES)).cast("q")


def next_beat(beat: int, row: int) -> int:
    """Return the heartbeat that follows `beat` when the env of `row` is called."""
    return (beat & -BEAT_INCREMENT) + BEAT_INCREMENT + row + 1


def row_of_beat(beat: int) -> int | None:
    """Return the row of the last env call; None if no env has been called yet."""
    row = beat % BEAT_INCREMENT
    return row - 1 if row else None


def rows_nbytes(spec: EnvSpec, num_envs: int) -> int:
    """Return the number of bytes that `Rows.map` needs."""
    return arrays_nbytes(_layout(spec, num_envs))


def rows_mib(spec: EnvSpec, num_envs: int) -> int:
    """Return the size of the rows in MiB, rounded up."""
    return max(1, -(-rows_nbytes(spec, num_envs) >> 20))


def _layout(spec: EnvSpec, num_envs: int) -> Layout:
    observations = [(leaf.shape, leaf.dtype) for leaf in spec.observation_leaves]
    actions = [(leaf.shape, leaf.dtype) for leaf in spec.action_leaves]
    # Reward, terminated, truncated and status.
    others = [((), np.dtype(kind)) for kind in (np.float64, bool, bool, np.uint8)]
    fields = [*observations, *actions, *others, *observations]
    return [((num_envs, *shape), dtype) for shape, dtype in fields]


def arrays_nbytes(layout: Layout) -> int:
    """Return the number of bytes that `map_arrays` needs."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in layout)


def map_arrays(layout: Layout, buffer: Any) -> list[Array]:
    """Return arrays that are mapped onto a buffer, one after the other."""
    arrays: list[Array] = []
    offset = 0
    for shape, dtype in layout:
        arrays.append(np.ndarray(shape, dtype, buffer, offset))
        offset += _aligned(arrays[-1].nbytes)
    return arrays


def _aligned(nbytes: int) -> int:
    """Return the size of an array in bytes, with at least one byte of padding."""
    return (nbytes // _ALIGNMENT + 1) * _ALIGNMENT


def copy_observation_to_final(rows: Rows, index: slice) -> None:
    """Copy the current observations of the given rows to `final_observation`.

    This saves the last observation of an episode before a reset overwrites it. The
    worker may have died before it checked the observation, so NaN and infinity are
    replaced with 0.
    """
    for final, observation in zip(
        rows.final_observation, rows.observation, strict=True
    ):
        values = observation[index]
        if values.dtype.kind == "f":
            observation[index] = np.where(np.isfinite(values), values, 0)
        final[index] = observation[index]


def copy_final_to_observation(rows: Rows, index: Any) -> None:
    """Undo `copy_observation_to_final`: copy `final_observation` of some rows back."""
    for final, observation in zip(
        rows.final_observation, rows.observation, strict=True
    ):
        observation[index] = final[index]


def write_lost(rows: Rows, index: slice, status: Status) -> None:
    """Write the last row of episodes that a fault has ended: truncated, reward 0.

    Observations are unchanged, because they already belong to the next episode.
    """
    rows.reward[index] = 0.0
    rows.terminated[index] = False
    rows.truncated[index] = True
    rows.status[index] = status


def write_pending(rows: Rows, index: slice) -> None:
    """Turn rows into padding: reward 0, no end of episode, unchanged observations."""
    rows.reward[index] = 0.0
    rows.terminated[index] = False
    rows.truncated[index] = False
    rows.status[index] = Status.PENDING


class Slab:
    """The shared memory of a pool: its rows and a heartbeat per worker.

    Attributes:
      fd: Descriptor of the memory, which the pool sends to its workers.
      rows: The rows, as views into the memory.
      heartbeats: int64 `[num_workers, 64]`, one row per worker. Column 0 changes with
        every env call and encodes the called row (see `row_of_beat`). Column 1 is 1
        during a reset or call, and `FIRST_STEP` during the first step of an env,
        because these operations have longer timeouts than an ordinary step. Columns 8
        and above are the cells of `step_timings`.
      flags: uint8 `[3, n]` with terminated, truncated and status. The columns after the
        rows are padding, which is zero unless an env writes outside its memory.
      plain_flags: Bytes to compare with `flags`: the two are equal if no episode ended
        and all statuses are OK.
      extra: The `extra_nbytes` bytes of memory after the heartbeats.
    """

    fd = -1  # so that `close` works if `create` is interrupted

    def __init__(self, fd: int, spec: EnvSpec, num_envs: int, num_workers: int) -> None:
        """Map memory that `create` has allocated; take ownership of the descriptor."""
        self.fd = fd
        self._map(spec, num_envs, num_workers)

    def _map(self, spec: EnvSpec, num_envs: int, num_workers: int) -> None:
        self._memory = mmap.mmap(self.fd, 0)
        self.rows = Rows.map(spec, num_envs, self._memory)
        length = _aligned(num_envs)
        self.flags = np.lib.stride_tricks.as_strided(self.rows.flags, (3, length))
        self.plain_flags = bytes(3 * length)
        offset = _aligned(rows_nbytes(spec, num_envs))
        self.heartbeats: Array = np.ndarray(
            (num_workers, _BEAT_BYTES // 8), np.int64, self._memory, offset
        )
        self.extra = memoryview(self._memory)[offset + num_workers * _BEAT_BYTES :]

    @classmethod
    def create(
        cls, spec: EnvSpec, num_envs: int, num_workers: int, extra_nbytes: int = 0
    ) -> Slab:
        """Allocate a zeroed slab, with a heartbeat per worker, in new shared memory."""
        nbytes = _aligned(rows_nbytes(spec, num_envs)) + num_workers * _BEAT_BYTES
        slab = cls.__new__(cls)
        slab.fd = anonymous_file()
        try:
            os.ftruncate(slab.fd, nbytes + extra_nbytes)
            if sys.platform == "linux":
                # If an env could shrink the file, accessing the memory would kill
                # every process that has mapped it.
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(slab.fd, fcntl.F_ADD_SEALS, seals)
            slab._map(spec, num_envs, num_workers)
        except BaseException:
            slab.close()
            raise
        return slab

    def withhold_from_children(self) -> None:
        """Exclude the memory from the processes that this process forks.

        If an env forks a child that also returns from `step`, the child must not write
        to the env's row.
        """
        if sys.platform == "darwin":
            memory = np.frombuffer(self._memory, np.uint8)
            address = ctypes.c_void_p(memory.ctypes.data)
            size = ctypes.c_size_t(memory.nbytes)
            ctypes.CDLL(None).minherit(address, size, _VM_INHERIT_NONE)
        else:
            self._memory.madvise(mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped while an array uses it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    # Closes a slab whose owner was interrupted before it could store the slab.
    __del__ = close

    def __repr__(self) -> str:
        state = "closed" if self.fd < 0 else f"fd {self.fd}"
        return f"<Slab {len(self._memory)} bytes, {state}>"


def anonymous_file() -> int:
    """Return the descriptor of a new, empty file in memory."""
    if sys.platform == "linux":
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        return os.memfd_create("envserve-slab", flags)
    with tempfile.TemporaryFile(prefix="envserve-slab-") as file:
        return os.dup(file.fileno())
