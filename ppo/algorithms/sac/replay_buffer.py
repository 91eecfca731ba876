"""The replay buffer: the most recent transitions, in NumPy arrays on this host.

`save` writes only the transitions since the last save, to a new file that is named
after them. A file is never changed, so a run that is killed while it saves, or before
it writes the next checkpoint, still has all transitions of its newest checkpoint.
"""

import contextlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from envserve.host_resources import cgroup_limits
from envserve.regular_file import flush_to_disk, open_regular
from ppo.errors import CheckpointError, ConfigError
from ppo.rollout import Rollout

_LOGGER = logging.getLogger("envserve")


class ReplayBuffer:
    """Ring buffer of transitions.

    The arrays are allocated when the first rollout is added. They take up physical
    memory only as the buffer fills.

    Args:
      capacity: Maximum number of transitions; the oldest are overwritten.

    Attributes:
      size: Number of transitions in the buffer.
    """

    def __init__(self, capacity: int) -> None:
        self._arrays: list[np.ndarray] = []
        self._structure: Any = None  # that of the transitions, once it is known
        self._capacity = capacity
        self._next = 0  # index of the next row to write
        self._num_added = 0  # transitions since the start of the run
        self._num_saved = 0
        self.size = 0

    def add(self, rollout: Rollout) -> None:
        """Add the valid transitions of a rollout.

        The next observation of a step that ended an episode is the final observation of
        this episode, not the first observation of the next episode.

        Raises:
          ConfigError: This host does not have enough memory for the buffer.
          CheckpointError: Transitions that were read from files have other shapes or
            dtypes.
        """
        valid, done = rollout.valid, rollout.done[rollout.valid]
        with np.errstate(over="ignore"):  # infinite rewards cause a `DivergedError`
            reward = rollout.reward[valid].astype(np.float32)

        def next_rows(leaf: np.ndarray, final: np.ndarray) -> np.ndarray:
            rows = leaf[1:][valid]
            rows[done] = final[valid][done]
            return rows

        observations = rollout.observation, rollout.final_observation
        transitions = {
            "observation": tf.nest.map_structure(
                lambda x: x[:-1][valid], observations[0]
            ),
            "next_observation": tf.nest.map_structure(next_rows, *observations),
            "action": rollout.action[valid],
            "reward": reward,
            "terminated": rollout.terminated[valid],
        }
        leaves = tf.nest.flatten(transitions)
        if self._structure is None:
            self._structure = tf.nest.map_structure(lambda _: 0, transitions)
            self._ensure_arrays(leaves, "the rollout")
        self._append(leaves)

    def sample(self, shape: tuple[int, int], seed: tuple[int, int]) -> dict[str, Any]:
        """Return transitions `[*shape, ...]`, sampled uniformly with replacement."""
        offsets = np.random.default_rng(seed).integers(self.size, size=shape)
        # Count from the oldest transition, so that a resumed run, in which it may have
        # another row, samples the same transitions.
        indices = (self._next - self.size + offsets) % self._capacity
        rows = [array[indices] for array in self._arrays]
        return tf.nest.pack_sequence_as(self._structure, rows)

    def save(self, folder: Path) -> None:
        """Write the transitions that were added since the last save to a new file.

        First, remove files whose transitions were not in the buffer at the last save.
        The preceding checkpoint needs all others if the run is killed before the next
        checkpoint is complete.

        Raises:
          OSError: The file cannot be written.
        """
        for path, _, end in _files(folder):
            if end <= self._num_saved - self._capacity:
                path.unlink()
        count = min(self._num_added - self._num_saved, self._capacity)
        if count > 0:
            folder.mkdir(exist_ok=True)
            path = _path(folder, self._num_added - count, self._num_added)
            indices = np.arange(self._next - count, self._next)  # may be negative
            partial = path.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            with partial.open("xb") as file:  # never follows a link
                np.savez(file, *(array[indices] for array in self._arrays))
            flush_to_disk(partial)
            partial.rename(path)
            flush_to_disk(folder)
        self._num_saved = self._num_added

    def load(self, folder: Path, num_added: int) -> None:
        """Read the newest of the first `num_added` transitions of a run from its files.

        Remove files with later transitions, because a resumed run repeats these steps.

        Raises:
          OSError: A file cannot be removed.
          CheckpointError: A file is damaged.
          ConfigError: This host does not have enough memory for the buffer.
        """
        for partial in folder.glob("*.partial"):  # left behind by a run that was killed
            partial.unlink()
        by_end = {}
        for path, first, end in _files(folder):
            if end > num_added:
                path.unlink()
            else:
                by_end[end] = path, first
        newest = first = max(by_end, default=num_added)
        chain = []
        while newest - first < self._capacity and first in by_end:
            end, (path, first) = first, by_end[first]
            chain.append((path, end - first))
        for path, count in reversed(chain):
            leaves = _read(path, count)
            self._ensure_arrays(leaves, str(path))
            self._append(leaves)
        self._num_added = self._num_saved = newest
        if self.size < (expected := min(num_added, self._capacity)):
            _LOGGER.warning(
                "%s: expected the last %d transitions of the run, found %d; learning "
                "continues when the replay buffer contains random_steps transitions",
                *(folder, expected, self.size),
            )

    def _ensure_arrays(self, leaves: Sequence[np.ndarray], source: str) -> None:
        """Allocate the arrays; if they exist, check that they fit `leaves`.

        Raises:
          CheckpointError: They do not fit; the message names `source`.
          ConfigError: This host does not have enough memory.
        """
        if not self._arrays:
            self._arrays = _allocate(self._capacity, leaves)
        expected, found = (
            [(rows.shape[1:], rows.dtype) for rows in part]
            for part in (self._arrays, leaves)
        )
        if found != expected:
            raise CheckpointError(
                f"{source}: expected transitions with the shapes and dtypes of those "
                f"in the saved replay buffer, {expected}, got {found}; start a new run."
            )

    def _append(self, leaves: Sequence[np.ndarray]) -> None:
        added = len(leaves[0])
        count = min(added, self._capacity)
        indices = (self._next + np.arange(count)) % self._capacity
        for array, rows in zip(self._arrays, leaves, strict=True):
            array[indices] = rows[added - count :]
        self._next = (self._next + count) % self._capacity
        self.size = min(self.size + count, self._capacity)
        self._num_added += added


def _path(folder: Path, first: int, end: int) -> Path:
    """Return the path of the file with transitions `first` to `end - 1` of a run."""
    return folder / f"{first:012d}-{end:012d}.npz"


def _files(folder: Path) -> list[tuple[Path, int, int]]:
    """Return the path of each file, its first transition, and the end of its range."""
    found = []
    for path in folder.glob("*.npz"):
        if match := re.fullmatch(r"(\d{12})-(\d{12})\.npz", path.name, re.ASCII):
            first, end = map(int, match.groups())
            if first < end:
                found.append((path, first, end))
    return found


def _read(path: Path, count: int) -> list[np.ndarray]:
    """Return the leaves `[count, ...]` of the transitions in a file.

    Raises:
      CheckpointError: The file is damaged.
    """
    try:
        with open_regular(path) as file, np.load(file) as arrays:
            # A small compressed file can need any amount of memory.
            if any(part.compress_type for part in arrays.zip.infolist()):
                raise ValueError("expected no compression")
            leaves = list(arrays.values())
        lengths = {len(leaf) for leaf in leaves}
        if lengths != {count}:
            raise ValueError(f"expected {count} transitions, got {sorted(lengths)}")
        if not any(leaf.nbytes for leaf in leaves):
            raise ValueError("expected transitions with data")
        return leaves
    except Exception as error:  # a damaged file can raise almost any error
        raise CheckpointError(
            f"{path}: cannot read transitions of the replay buffer; {error!r:.200}. "
            f"Remove {path.parent} to continue with an empty buffer."
        ) from error


def _allocate(capacity: int, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return arrays for `capacity` rows with the shapes and dtypes of `leaves`."""
    limits = cgroup_limits(Path("/"), "memory", ("limit_in_bytes",))
    available = [limit for (limit,) in limits]
    with contextlib.suppress(OSError):  # no /proc on macOS
        words = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()
        available += [1024 * int(words[0])]
    row_bytes = sum(leaf.nbytes // max(len(leaf), 1) for leaf in leaves)
    max_size = int(0.9 * min(available, default=2**60)) // row_bytes
    if capacity > max_size:
        raise ConfigError(
            f"replay_size: {capacity:,} transitions need "
            f"{capacity * row_bytes / 2**30:.1f} GiB of memory, but only "
            f"{min(available) / 2**30:.1f} GiB are available; set "
            f"replay_size={max_size} or less."
        )
    return [np.zeros((capacity, *rows.shape[1:]), rows.dtype) for rows in leaves]
