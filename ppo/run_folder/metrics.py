"""Numbers of a run over time: one JSON object per line, and TensorBoard events."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import tensorflow as tf

from ppo.run_folder.metrics_file import cut_off_after

__all__ = ["MetricsWriter"]


class MetricsWriter:
    """Appends rows of numbers to `metrics.jsonl` and to TensorBoard events.

    Args:
        folder: where `metrics.jsonl` is appended to; events go to `tensorboard` in it.
        resumed_from: iteration and env steps of the checkpoint that a run goes on from:
            what it reported after these is dropped, since it will do that again.

    Raises:
        OSError: the files cannot be written.
    """

    def __init__(
        self, folder: Path, *, resumed_from: tuple[int, int] | None = None
    ) -> None:
        if resumed_from is not None:
            iteration, steps = resumed_from
            cut_off_after(folder / "metrics.jsonl", iteration)
            _announce_restart(folder / "tensorboard", steps + 1)
        # Unbuffered: what a full disk has refused must not come up again in close().
        self._lines = (folder / "metrics.jsonl").open("ab", buffering=0)
        self._events = tf.summary.create_file_writer(str(folder / "tensorboard"))

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the files."""
        self.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row; numbers that are not finite become null in the JSON.

        Args:
            step: env steps so far, the x axis.
            values: numbers by name.

        Raises:
            OSError: the row cannot be written, for instance because the disk is full.
        """
        row = {
            name: value if math.isfinite(value) else None
            for name, value in values.items()
        }
        line = (json.dumps({"steps": step, **row}) + "\n").encode()
        while line:
            line = line[self._lines.write(line) :]
        with self._events.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)

    def close(self) -> None:
        """Flush and close both outputs; a second call does nothing."""
        if not self._lines.closed:
            self._events.close()
            self._lines.close()


def _announce_restart(folder: Path, step: int) -> None:
    """Tell TensorBoard to forget what it has of this step and later ones.

    It reads event files in the order of their names, which begin with the time; behind
    that comes a host name in those that TensorFlow writes. The first start of a session
    that it meets is nothing special to it: only from the second on they are restarts.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"events.out.tfevents.{int(time.time()):010d}.0.restart"
    now = time.time()
    version = tf.compat.v1.Event(wall_time=now, file_version="brain.Event:2")
    log = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
    start = tf.compat.v1.Event(wall_time=now, step=step, session_log=log)
    with tf.io.TFRecordWriter(str(path)) as records:
        for event in (version, start, start):
            records.write(event.SerializeToString())
