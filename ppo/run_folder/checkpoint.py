"""Save and load checkpoints, from which an interrupted run can be resumed.

A checkpoint is a folder named after its iteration. It is written under a temporary
name, flushed to disk and then renamed, so a folder with its final name is always
complete. If the agent was evaluated, its checkpoint also stores the mean return of the
evaluation. The checkpoint with the best evaluation is never removed.
"""

import contextlib
import json
import math
import operator
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from envserve.regular_file import flush_to_disk, open_regular
from envserve.text import one_line
from ppo.agent.agent import Agent
from ppo.agent.trackables import checkpoint_of
from ppo.config.named_configs import read_table
from ppo.errors import CheckpointError

CheckpointId = int | Literal["best"] | None
"""Identifies a checkpoint: its number of env steps, "best" for the one with the best
evaluation, or None for the newest."""

_EVALUATION = "evaluation.json"


class Counters(NamedTuple):
    """Progress of a run. All random numbers derive from the counters and the seed."""

    iteration: int = 0
    steps: int = 0


def training_state(agent: Agent, trackables: Mapping[str, Any]) -> tf.train.Checkpoint:
    """Return all objects that a checkpoint must store, so that a run can be resumed.

    Args:
      agent: The agent.
      trackables: Maps names to the other objects, such as those of the algorithm.
    """
    return checkpoint_of(dict(agent=checkpoint_of(agent.trackables), **trackables))


def save(
    folder: Path,
    counters: Counters,
    state: tf.train.Checkpoint,
    *,
    keep: int,
    evaluation_return: float | None = None,
) -> Path:
    """Write a checkpoint, then remove all except the newest `keep` and the best one.

    Args:
      folder: Folder for the checkpoints of a run; created if it does not exist, but
        the folder of the run must exist.
      counters: Progress of the run.
      state: All objects that the checkpoint stores, from `training_state`.
      keep: Number of newest checkpoints to keep.
      evaluation_return: Mean return of the agent's evaluation, if there was one.

    Returns:
      The folder of the new checkpoint.

    Raises:
      OSError, tf.errors.OpError: The checkpoint cannot be written (see
        `RunFolder.writing`); earlier checkpoints are not affected.
    """
    final = folder / f"{counters.iteration:08d}"
    partial = folder / f"{final.name}.partial"
    for leftover in folder.glob("*.partial"):  # left behind by a run that was killed
        _delete(leftover)
    folder.mkdir(exist_ok=True)
    partial.mkdir()
    state.write(str(partial / "state"))
    (partial / "counters.json").write_text(json.dumps(counters._asdict()) + "\n")
    if evaluation_return is not None:
        text = json.dumps({"mean_return": evaluation_return}) + "\n"
        (partial / _EVALUATION).write_text(text)
    for file in partial.iterdir():
        flush_to_disk(file)
    flush_to_disk(partial)
    if final.exists():
        _remove(final)
    partial.rename(final)
    flush_to_disk(folder)
    best = _find_best(folder)
    for old in _complete_checkpoints(folder)[:-keep]:
        if best is None or old != best[0]:
            _remove(old)
    return final


def restore(folder: Path, state: tf.train.Checkpoint) -> None:
    """Load the newest checkpoint of a folder into the objects of a run.

    Raises:
      CheckpointError: There is no checkpoint, or it does not match the networks.
    """
    _load_state(checkpoint_at(folder), state, is_complete=True)


def variables(state: tf.train.Checkpoint) -> list[tf.Variable]:
    """Return all variables that a checkpoint stores, in a fixed order."""
    # A Keras variable is not a tf.Variable, but contains one.
    parts = [
        part.value if isinstance(part, keras.Variable) else part
        for part in tf.train.TrackableView(state).descendants()
    ]
    return [part for part in parts if isinstance(part, tf.Variable)]


def load_agent(folder: Path, agent: Agent, which: CheckpointId = None) -> Counters:
    """Load the agent from a checkpoint, without the other objects of the run.

    Raises:
      CheckpointError: The checkpoint does not exist, or does not match the networks.
    """
    path = checkpoint_at(folder, which)
    _load_state(path, training_state(agent, {}), is_complete=False)
    return _read_counters(path)


def read_counters(folder: Path, which: CheckpointId = None) -> Counters:
    """Return the counters stored in a checkpoint, by default the newest.

    Raises:
      CheckpointError: The checkpoint does not exist, or is damaged.
    """
    return _read_counters(checkpoint_at(folder, which))


def best_return(folder: Path) -> float:
    """Return the best mean return stored in a checkpoint, or -inf if there is none."""
    best = _find_best(folder)
    return -math.inf if best is None else best[1]


def checkpoint_at(folder: Path, which: CheckpointId = None) -> Path:
    """Return the path of a checkpoint, by default the newest.

    If several checkpoints tie for the best evaluation, return the earliest.

    Raises:
      CheckpointError: The checkpoint does not exist; the message lists those that do.
    """
    complete = _complete_checkpoints(folder)
    if not complete:
        raise CheckpointError(
            f"{folder}: expected a checkpoint, found none; the run ended before it "
            "wrote one. Start a new run."
        )
    if which is None:
        return complete[-1]
    if which == "best":
        best = _find_best(folder)
        if best is None:
            raise CheckpointError(
                f"{folder}: expected a checkpoint with an evaluation, found none; "
                "train with --set evaluate_every=STEPS, or use the newest checkpoint."
            )
        return best[0]
    found = {_read_counters(path).steps: path for path in complete}
    if which not in found:
        known = ", ".join(map(str, sorted(found)))
        raise CheckpointError(
            f"{folder}: expected a checkpoint at {which} steps, found checkpoints at "
            f"{known}; choose one of these, or omit the number to use the newest."
        )
    return found[which]


def _read_counters(path: Path) -> Counters:
    path = path / "counters.json"
    try:
        counters = Counters(**read_table(path))
        if not all(type(n) is int and 0 <= n < 2**53 for n in counters):
            raise ValueError(f"expected counts of iterations and steps, got {counters}")
        return counters
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot read the counters of the checkpoint; {error!r:.200}. "
            "Remove this checkpoint to continue from the preceding one."
        ) from error


def _find_best(folder: Path) -> tuple[Path, float] | None:
    """Return the checkpoint with the best evaluation and its mean return, or None."""
    evaluated = [
        (path, _evaluation_return(path / _EVALUATION))
        for path in _complete_checkpoints(folder)
        if (path / _EVALUATION).exists()
    ]
    return max(evaluated, key=operator.itemgetter(1), default=None)


def _evaluation_return(path: Path) -> float:
    try:
        return float(read_table(path)["mean_return"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: cannot read the evaluation of the checkpoint; {error!r:.200}. "
            "Remove this file to ignore the evaluation."
        ) from error


def _load_state(
    path: Path, checkpoint: tf.train.Checkpoint, *, is_complete: bool
) -> None:
    try:
        # Reject FIFOs, because TensorFlow would wait for them without a limit.
        for file in path.glob("state.*"):
            open_regular(file).close()
        with _plain_path(path) as folder:
            status = checkpoint.read(str(folder / "state"))
        status.assert_existing_objects_matched()
        if is_complete:
            status.assert_consumed()
        status.expect_partial()  # suppresses TensorFlow's warning about unread values
    except OSError as error:
        reason = one_line(str(error), 300)
        raise CheckpointError(f"{path}: cannot be read; {reason}.") from error
    except Exception as error:  # a damaged file can raise almost any error
        reason = one_line(str(error).strip().partition("\n")[0], 300)
        raise CheckpointError(
            f"{path}: expected a checkpoint of the networks that the config describes, "
            "and of its algorithm and optimizer; undo changes of such settings, or "
            f"start a new run. {reason.removesuffix(': attributes {')}"
        ) from error


@contextlib.contextmanager
def _plain_path(path: Path) -> Iterator[Path]:
    """Yield a path at which TensorFlow can read a folder.

    TensorFlow treats paths as patterns, and encodes them in UTF-8 in all locales.
    """
    if not re.search(r"[*?[\\]|[^\x00-\x7f]", str(path)):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ppo-checkpoint-") as folder:
        link = Path(folder, "checkpoint")
        link.symlink_to(path.absolute())
        yield link


def _complete_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    try:
        return sorted(path for path in folder.iterdir() if path.name.isdigit())
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be read, {error.strerror}; make it readable."
        ) from error


def _remove(path: Path) -> None:
    """Remove a checkpoint; rename it first, so that its remains never look complete."""
    renamed = path.with_name(f"{path.name}.old.partial")
    path.rename(renamed)
    _delete(renamed)


def _delete(path: Path) -> None:
    """Delete a folder, or a file or link with the name of a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
