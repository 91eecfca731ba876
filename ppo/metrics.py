"""Numbers of a run over time: one JSON object per line, and TensorBoard events."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import tensorflow as tf

__all__ = ["MetricsWriter"]


class MetricsWriter:
    """Appends rows of numbers to `metrics.jsonl` and to TensorBoard events.

    Args:
        folder: where `metrics.jsonl` is appended to; events go to `tensorboard` in it.
    """

    def __init__(self, folder: Path) -> None:
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
