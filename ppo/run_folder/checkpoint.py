"""Checkpoints: everything that an interrupted run needs to go on bit for bit.

Each is a folder named after its iteration. It is written under another name, flushed
to disk and then renamed, so a folder with a proper name is always complete. One written
after an evaluation says what that gave: the best of them is kept.
"""

import json
import math
import operator
import os
import shutil
from pathlib import Path
from typing import Literal, NamedTuple

import tensorflow as tf

from ppo.agent.agent import Agent
from ppo.agent.normalize import ReturnScale
from ppo.errors import CheckpointError
from ppo.learning.update import Updater

CheckpointId = int | Literal["best"] | None
"""A checkpoint: after so many env steps, of the best evaluation, or the newest."""


_EVALUATION = "evaluation.json"


class Counters(NamedTuple):
    """How far a run has come. All randomness derives from these and the seed."""

    iteration: int = 0
    steps: int = 0


def training_state(
    agent: Agent, updater: Updater, return_scale: ReturnScale
) -> tf.train.Checkpoint:
    """Return all objects that a checkpoint must store, so that a run can continue."""
    return tf.train.Checkpoint(
        agent=tf.train.Checkpoint(**agent.trackables),
        return_scale=tf.train.Checkpoint(**return_scale.trackables),
        **updater.trackables,
    )


def save(
    folder: Path,
    counters: Counters,
    state: tf.train.Checkpoint,
    *,
    keep: int,
    evaluation_return: float | None = None,
) -> Path:
    """Write a checkpoint, then remove all but the newest `keep` and the best.

    Args:
        folder: The checkpoints of a run; created if it is missing.
        counters: How far the run has come.
        state: All objects that the checkpoint stores.
        keep: Number of newest checkpoints that are not removed.
        evaluation_return: Mean return of the agent's evaluation, if there was one.

    Returns:
        The folder of the new checkpoint.

    Raises:
        OSError, tf.errors.OpError: It cannot be written, see `RunFolder.writing`;
            earlier checkpoints are untouched.
    """
    final = folder / f"{counters.iteration:08d}"
    partial = folder / f"{final.name}.partial"
    for leftover in folder.glob("*.partial"):  # of a run that was killed
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    state.write(str(partial / "state"))
    (partial / "counters.json").write_text(json.dumps(counters._asdict()) + "\n")
    if evaluation_return is not None:
        text = json.dumps({"mean_return": evaluation_return}) + "\n"
        (partial / _EVALUATION).write_text(text)
    for file in partial.iterdir():
        _flush_to_disk(file)
    _flush_to_disk(partial)
    if final.exists():
        _remove(final)
    partial.rename(final)
    _flush_to_disk(folder)
    best = _find_best(folder)
    for old in _complete_checkpoints(folder)[:-keep]:
        if best is None or old != best[0]:
            _remove(old)
    return final


def restore(folder: Path, state: tf.train.Checkpoint) -> Counters:
    """Load the newest checkpoint of a folder into the objects of a run.

    Raises:
        CheckpointError: there is none, or it belongs to other networks.
    """
    path = checkpoint_at(folder)
    _load_state(path, state, is_complete=True)
    return read_counters(folder)


def variables(state: tf.train.Checkpoint) -> list[tf.Variable]:
    """Return all variables that a checkpoint stores, in a fixed order."""
    parts = tf.train.TrackableView(state).descendants()
    return [part for part in parts if isinstance(part, tf.Variable)]


def load_agent(folder: Path, agent: Agent, which: CheckpointId = None) -> Counters:
    """Load only the agent from a checkpoint, to evaluate it or to make it act.

    Raises:
        CheckpointError: there is none, or it belongs to other networks.
    """
    path = checkpoint_at(folder, which)
    checkpoint = tf.train.Checkpoint(agent=tf.train.Checkpoint(**agent.trackables))
    _load_state(path, checkpoint, is_complete=False)
    return _read_counters(path)


def read_counters(folder: Path, which: CheckpointId = None) -> Counters:
    """Return how far a checkpoint of a folder had come, by default the newest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return _read_counters(checkpoint_at(folder, which))


def best_return(folder: Path) -> float:
    """Return the mean return of the best evaluation that left a checkpoint, or -inf."""
    best = _find_best(folder)
    return -math.inf if best is None else best[1]


def checkpoint_at(folder: Path, which: CheckpointId = None) -> Path:
    """Return a checkpoint of a folder; of equal evaluations the earliest is the best.

    Raises:
        CheckpointError: there is no such checkpoint; names those there are.
    """
    complete = _complete_checkpoints(folder)
    if not complete:
        raise CheckpointError(
            f"{folder}: expected a checkpoint, found none; the run ended before its "
            "first one, start it anew."
        )
    if which is None:
        return complete[-1]
    if which == "best":
        best = _find_best(folder)
        if best is None:
            raise CheckpointError(
                f"{folder}: expected the checkpoint of an evaluation, found none; "
                "train with --set evaluate_every=STEPS, or take the newest."
            )
        return best[0]
    found = {_read_counters(path).steps: path for path in complete}
    if which not in found:
        known = ", ".join(map(str, sorted(found)))
        raise CheckpointError(
            f"{folder}: expected a checkpoint at {which} steps, found those at "
            f"{known}; name one of these, or none for the newest."
        )
    return found[which]


def _read_counters(path: Path) -> Counters:
    """Read how far a run had come when this checkpoint was written."""
    path = path / "counters.json"
    try:
        return Counters(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected the counters of a checkpoint; {error}. Remove this "
            "checkpoint to go on from the one before."
        ) from error


def _find_best(folder: Path) -> tuple[Path, float] | None:
    """Find the best evaluation, the earliest of equals, and its mean return."""
    evaluated = [
        (path, _evaluation_return(path / _EVALUATION))
        for path in _complete_checkpoints(folder)
        if (path / _EVALUATION).exists()
    ]
    return max(evaluated, key=operator.itemgetter(1), default=None)


def _evaluation_return(path: Path) -> float:
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["mean_return"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path}: expected the evaluation of a checkpoint; {error!r}. Remove this "
            "file to forget that there was one."
        ) from error


def _load_state(
    path: Path, checkpoint: tf.train.Checkpoint, *, is_complete: bool
) -> None:
    try:
        status = checkpoint.read(str(path / "state"))
        status.assert_existing_objects_matched()
        if is_complete:
            status.assert_consumed()
        status.expect_partial()  # or TensorFlow complains of what was not asked for
    except (AssertionError, ValueError, tf.errors.OpError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{path}: expected a checkpoint of the networks that the config "
            f"describes; {reason}"
        ) from error


def _complete_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.isdigit())


def _remove(path: Path) -> None:
    """Remove a checkpoint, which at no time is half there under its proper name."""
    doomed = path.with_name(f"{path.name}.old.partial")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
