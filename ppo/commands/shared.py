"""What the commands share: options, TensorFlow's start, and how errors are shown.

TensorFlow is only loaded once the input is checked.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from envserve.errors import (
    EnvserveError,
    EnvStartError,
    SpaceError,
    UnknownEnv,
    WrapperError,
)
from ppo.config import Config
from ppo.errors import BadInputError, PpoError
from ppo.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from ppo.run_folder.checkpoint import Which

__all__ = [
    "Connect",
    "Import",
    "NumWorkers",
    "Run",
    "Threads",
    "WhichCheckpoint",
    "opened_run",
    "plain_warnings",
    "reported_errors",
    "start_tensorflow",
    "which_checkpoint",
]

_BAD_INPUT = (BadInputError, UnknownEnv, SpaceError, EnvStartError, WrapperError)

Run = Annotated[Path, typer.Argument(help="Folder of a run.")]
Connect = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS",
        help="Env server, such as tcp://127.0.0.1:5555; repeatable. Default: local "
        "worker processes.",
    ),
]
Import = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Module or file that registers envs or wrappers, for local workers; "
        "repeatable.",
    ),
]
WhichCheckpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="STEPS|best",
        help="Take the checkpoint after so many env steps, or that of the best "
        "evaluation on the way. Default: the newest.",
    ),
]
NumWorkers = Annotated[
    int | None,
    typer.Option(min=1, help="Local worker processes. Default: one per core."),
]
Threads = Annotated[
    int, typer.Option(min=0, help="TensorFlow's threads; 0 leaves it to TensorFlow.")
]


def start_tensorflow(intra_op_threads: int, inter_op_threads: int) -> None:
    """Load TensorFlow quietly, with so many threads; 0 leaves the number to it.

    Two take a third off an update of small networks; a rollout uses none of them.

    Raises:
        BadInputError: TensorFlow is not installed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    try:
        import tensorflow as tf
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"Training needs TensorFlow ({error}): pip install 'envserve[train]'."
        ) from error
    tf.get_logger().setLevel("ERROR")
    tf.config.threading.set_intra_op_parallelism_threads(intra_op_threads)
    tf.config.threading.set_inter_op_parallelism_threads(inter_op_threads)


@contextlib.contextmanager
def opened_run(
    run: Path, checkpoint: str | None, intra_op_threads: int, inter_op_threads: int
) -> Iterator[tuple[RunFolder, Config, "Which"]]:
    """Check what a command was given of a run, then start TensorFlow.

    Errors within are reported. Yields the folder, its config and which checkpoint.
    """
    with reported_errors():
        which = which_checkpoint(checkpoint)
        run_folder, config = RunFolder.open(run)
        start_tensorflow(intra_op_threads, inter_op_threads)
        yield run_folder, config, which


def which_checkpoint(text: str | None) -> "Which":
    """Read what `--checkpoint` was given.

    Raises:
        BadInputError: it is neither a number of steps nor "best".
    """
    if text is None:
        return None
    if text == "best":
        return "best"
    try:
        return int(text.replace(",", ""))
    except ValueError:
        raise BadInputError(
            f"--checkpoint: expected a number of env steps or best, got {text!r}."
        ) from None


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Write warnings of the envs to stderr as they are, also above a live bar.

    Left to the root logger, their looks change once TensorFlow's logging sets it up.
    """
    logger = logging.getLogger("envserve")
    handler = logging.lastResort  # looks up sys.stderr anew for each line
    assert handler is not None
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
    """Print known errors in red instead of a traceback, and set the exit code.

    Warnings of the envs are plain meanwhile.
    """
    try:
        with plain_warnings():
            yield
    except (PpoError, EnvserveError) as error:
        console = Console(stderr=True)
        text = _one_line(error)
        console.print(f"Error: {text}", style="red", markup=False, soft_wrap=True)
        for note in getattr(error, "__notes__", []):
            console.print(note, markup=False, soft_wrap=True)
        code = 2 if isinstance(error, _BAD_INPUT) else 1
        raise typer.Exit(code) from error


def _one_line(error: Exception) -> str:
    """Shorten the traceback of a worker to its last line; the log has all of it."""
    traceback = str(getattr(error, "remote_traceback", "")).strip()
    if not traceback:
        return str(error)
    return f"{str(error).splitlines()[0]}: {traceback.splitlines()[-1]}"
