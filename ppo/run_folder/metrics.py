"""Write the metrics of a run: one JSON object per line, and TensorBoard events.

A row aggregates all iterations since the previous row. Counts and durations are summed.
Settings and running statistics are taken from the last iteration. For divergences, the
row contains the maximum, and for other metrics the mean over iterations.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from envserve.regular_file import open_no_link
from ppo.config.config import Config
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics_file import truncate_after

_SUM = {
    *("invalid_steps", "lost_episodes", "nonfinite_episodes", "rollout_seconds"),
    *("undone_epochs", "update_seconds"),
}
_ROLLOUT_METRICS = {
    *("invalid_steps", "lost_episodes", "mean_length", "mean_return"),
    *("nonfinite_episodes", "valid_fraction"),
}
_LAST = {"iteration", "kl_penalty", "learning_rate", "mean_length", "mean_return"}
_LARGEST = {"kl", "ratio_deviation"}


class MetricsWriter:
    """Appends rows of metrics to `metrics.jsonl` and to TensorBoard events.

    Args:
      folder: Run folder, which contains `metrics.jsonl` and `tensorboard`.
      config: Settings of the run, which are also written for TensorBoard.
      resumed_from: Iteration and env steps of the checkpoint that the run resumes
        from; later rows are discarded, because the run will write them again.

    Raises:
      RunWriteError: The files cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        *,
        resumed_from: tuple[int, int] | None = None,
    ) -> None:
        self._writing = RunFolder(folder).writing
        self._path = folder / "metrics.jsonl"
        events = folder / "tensorboard"
        iteration, steps = resumed_from or (0, 0)
        with self._writing():
            if resumed_from is not None:
                truncate_after(self._path, iteration)
                truncate_events(events, steps + 1)
            self._events = tf.summary.create_file_writer(str(events))
            if not iteration:
                with self._events.as_default(step=0):
                    _write_config(config)
            # Do not buffer, so that closing the file does not retry a failed write.
            self._lines = open(self._path, "ab", buffering=0, opener=open_no_link)  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._writing(), self._lines:
            self._events.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics after `step` env steps; non-finite values become null.

        Raises:
          RunWriteError: The row cannot be written, for example on a full disk, or
            the folder has been removed or renamed.
        """
        row = {
            name: value if math.isfinite(value) else None
            for name, value in values.items()
        }
        line = (json.dumps({"steps": step, **row}) + "\n").encode()
        with self._writing(), self._events.as_default(step=step):
            # Writing to a file that has been removed raises no error. The files are not
            # compared, because inode numbers change on some network file systems.
            os.stat(self._path)
            while line:
                line = line[self._lines.write(line) :]
            # One event with all scalars: an operation for each takes 0.6 ms.
            summary = Summary()
            with np.errstate(over="ignore"):  # float64 that overflows float32
                for name, value in values.items():
                    summary.MergeFrom(scalar_pb(tensorboard_tag(name), value))
            tf.summary.experimental.write_raw_pb(summary.SerializeToString())


def tensorboard_tag(name: str) -> str:
    """Return a metric's TensorBoard tag, GROUP/NAME."""
    if "/" in name:  # from an env's info or a callback
        return name
    if name.startswith("evaluation_"):
        return name.replace("_", "/", 1)
    if name == "iteration" or name.endswith(("_seconds", "_per_second")):
        return f"time/{name}"
    if name in _ROLLOUT_METRICS:
        return f"rollout/{name}"
    is_scale = name.startswith("observation_") or name == "reward_scale"
    return f"{'normalization' if is_scale else 'losses'}/{name}"


def _write_config(config: Config) -> None:
    """Write a config to TensorBoard, as text and as hyperparameters to compare."""
    from tensorboard.plugins.hparams import api as hparams

    values = config.all_settings
    rows = [f"| {key} | `{value}` |" for key, value in values.items()]
    tf.summary.text("config", "\n".join(["| setting | value |", "|---|---|", *rows]))
    plain = {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in values.items()
    }
    hparams.hparams(plain)


def truncate_events(folder: Path, step: int) -> None:
    """Make TensorBoard discard the events from `step` on.

    TensorBoard reads event files in the order of their names, which begin with the
    time. It ignores the first session start; each later session start discards the
    events from its step on. Therefore, the file written here has two session starts.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"events.out.tfevents.{int(time.time()):010d}.0.restart"
    path.unlink(missing_ok=True)  # a link in a stranger's run, to any file
    now = time.time()
    version = tf.compat.v1.Event(wall_time=now, file_version="brain.Event:2")
    log = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
    start = tf.compat.v1.Event(wall_time=now, step=step, session_log=log)
    with tf.io.TFRecordWriter(str(path)) as records:
        for event in (version, start, start):
            records.write(event.SerializeToString())


def is_due(every: int, before: int, after: int) -> bool:
    """Return whether (before, after] contains a multiple of `every`.

    If `every` is 0, return False.
    """
    return every > 0 and before // every < after // every


class ReportWindow:
    """Aggregates the metrics of several iterations into one row."""

    def __init__(self) -> None:
        self._steps = 0
        self._values: dict[str, list[float]] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, steps: int, values: Mapping[str, float]) -> None:
        """Add the metrics of an iteration that collected `steps` valid steps."""
        self._steps += steps
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def take(self) -> dict[str, float]:
        """Return the aggregated row, with throughputs, and start a new row."""
        row = {name: _aggregate(name, values) for name, values in self._values.items()}
        rollout, update = row["rollout_seconds"], row["update_seconds"]
        row["steps_per_second"] = _per_second(self._steps, rollout + update)
        row["rollout_steps_per_second"] = _per_second(self._steps, rollout)
        row["update_steps_per_second"] = _per_second(self._steps, update)
        self._steps = 0
        self._values = {}
        return row


def _aggregate(name: str, values: list[float]) -> float:
    if name in _LAST or name.startswith("info/"):
        return values[-1]
    known = [value for value in values if not math.isnan(value)]
    if name in _SUM:
        return sum(known)
    if not known:
        return math.nan
    return max(known) if name in _LARGEST else sum(known) / len(known)


def _per_second(steps: int, seconds: float) -> float:
    return steps / seconds if seconds > 0 else math.nan
