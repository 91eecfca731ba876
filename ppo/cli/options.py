"""What the commands share: options, TensorFlow's start, and how errors are shown.

TensorFlow is only loaded once the input is checked.
"""

import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from envserve.cli.options import Count
from envserve.cli.program import Option
from envserve.cli.terminal import console, fail
from envserve.envs.user_envs import with_absolute_path
from envserve.errors import (
    AddressError,
    EnvserveError,
    EnvStartError,
    SpaceError,
    UnknownEnv,
    VideoError,
    WrapperError,
)
from ppo.cli.compilation_cache import keep_compiled_code
from ppo.cli.progress import Screen
from ppo.config.config import Config
from ppo.errors import BadInputError, PpoError, RunFolderError
from ppo.run_folder.folder import EnvSource, RunFolder

if TYPE_CHECKING:
    from ppo.run_folder.checkpoint import CheckpointId


_BAD_INPUT = (
    *(BadInputError, UnknownEnv, SpaceError, EnvStartError, WrapperError),
    *(AddressError, VideoError),
)

_CONNECT: Final = (
    "Address of an env server, such as sim1 or tcp://127.0.0.1:5555, or local for "
    "worker processes on this host; repeatable. By default, those of the run, or local "
    "for a new run."
)
_IMPORT: Final = (
    "Module or Python file that registers envs or wrappers, for worker processes on "
    "this host; repeatable."
)
_CHECKPOINT: Final = (
    "Checkpoint to use, by its number of env steps, or best for the one with the best "
    "evaluation during training; by default, the newest."
)
_NUM_WORKERS: Final = (
    "Number of worker processes on this host; by default, one per core."
)
_INTRA_OP: Final = "Threads that TensorFlow uses for one operation; 0 lets it choose."
_INTER_OP: Final = "Operations that TensorFlow runs in parallel; 0 lets it choose."

Run = Annotated[Path, Option("Run folder of `ppo train`.")]
Connect = Annotated[list[str] | None, Option(_CONNECT, metavar="ADDRESS")]
Import = Annotated[list[str] | None, Option(_IMPORT, metavar="MODULE")]
Checkpoint = Annotated[str | None, Option(_CHECKPOINT, metavar="STEPS|best")]
NumWorkers = Annotated[Count | None, Option(_NUM_WORKERS)]
IntraOpThreads = Annotated[int, Meta(ge=0), Option(_INTRA_OP)]
InterOpThreads = Annotated[int, Meta(ge=0), Option(_INTER_OP)]


class Terminated(KeyboardInterrupt):
    """SIGTERM has come, where that interrupts as Ctrl-C does."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Have SIGTERM raise `Terminated` within, where nothing else awaits it."""

    def interrupt(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Let an interrupt end what runs within, also if that has swallowed it."""
    seen: list[KeyboardInterrupt] = []

    def note(number: int, _: object) -> None:
        is_end = number == signal.SIGTERM
        seen.append(Terminated() if is_end else KeyboardInterrupt())
        raise seen[-1]

    before: dict[int, Any] = {signal.SIGINT: signal.signal(signal.SIGINT, note)}
    if callable(signal.getsignal(signal.SIGTERM)):  # as `terminable` makes it
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if seen:
            raise seen[-1]


@contextlib.contextmanager
def errors_held() -> Iterator[None]:
    """Show what is written to standard error within only if something is raised.

    TensorFlow says there that it uses oneDNN and finds no GPU, and no level of its log
    keeps it from it.
    """
    with tempfile.TemporaryFile() as held:
        before = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(before, held.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


def start_tensorflow(
    intra_op_threads: int, inter_op_threads: int, config: Config | None = None
) -> None:
    """Load TensorFlow quietly, with so many threads; 0 leaves the number to it.

    Two take a third off an update of small networks; a rollout uses none of them. Where
    updates are not compiled, as those of images, oneDNN's convolutions take half the
    time of others; small layers are slower with it.

    Raises:
        BadInputError: TensorFlow is not installed.
    """
    # What it calls an error arrives as one; that compiled code was loaded is none.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    has_plain_updates = config is not None and not config.jit_compile
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", str(int(has_plain_updates)))
    try:
        with interrupts_kept(), errors_held():
            import tensorflow as tf

            gpus = tf.config.list_physical_devices("GPU")
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"Training needs TensorFlow ({error}): pip install 'envserve[train]'."
        ) from error
    keep_compiled_code(tf.__version__)
    tf.get_logger().setLevel("ERROR")
    logging.getLogger("absl").setLevel("ERROR")
    for gpu in gpus:  # all of its memory is taken otherwise
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus and config is not None and not config.use_gpu:
        tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(intra_op_threads)
    tf.config.threading.set_inter_op_parallelism_threads(inter_op_threads)


@contextlib.contextmanager
def opened_run(
    run: Path,
    checkpoint: str | None,
    connect: list[str] | None,
    import_modules: list[str] | None,
    intra_op_threads: int = 1,
    inter_op_threads: int = 1,
) -> Iterator[tuple[RunFolder, Config, "CheckpointId", EnvSource, Screen]]:
    """Check what a command was given of a run, then start TensorFlow.

    Errors within are reported. Yields folder, config, checkpoint, place and screen; the
    config is content with fewer servers than the training wanted.
    """
    with reported_errors():
        which = which_checkpoint(checkpoint)
        run_folder, config = RunFolder.open(run)
        if any(run.glob("seed-*/config.json")) and not run_folder.has_checkpoint():
            raise RunFolderError(
                f"{run}: expected the folder of one run, found those of several seeds; "
                f"name one of them."
            )
        config = config.replace(min_servers=0, num_servers=0)
        place = place_of(run_folder.env_source(), connect, import_modules)
        if place.addresses and connect is None:
            print(f"Env servers of the run: {', '.join(place.addresses)}")
        with Screen(console()) as screen:
            screen.phase("starting TensorFlow")
            start_tensorflow(intra_op_threads, inter_op_threads, config)
            yield run_folder, config, which, place, screen


def place_of(
    place: EnvSource, connect: list[str] | None, import_modules: list[str] | None
) -> EnvSource:
    """Return where envs are; raises AddressError if nobody knows a server.

    That is as options say, else as it was.
    """
    from envserve.client.link.discovery import resolve

    addresses, modules = place.addresses, place.import_modules
    if connect is not None:
        addresses = () if connect == ["local"] else tuple(connect)
    if import_modules is not None:
        modules = tuple(map(with_absolute_path, import_modules))
    place = EnvSource(addresses=addresses, import_modules=modules)
    try:
        for word in place.addresses:
            resolve(word)
    except AddressError as error:
        raise AddressError(f"--connect: {error}") from error
    return place


def which_checkpoint(text: str | None) -> "CheckpointId":
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
def reported_errors(log_format: str = "text", again: bool = False) -> Iterator[None]:
    """Print known errors instead of a traceback; warnings of envs are plain in text."""
    try:
        with plain_warnings() if log_format == "text" else contextlib.nullcontext():
            yield
    except (PpoError, EnvserveError) as error:
        may_pass = again and isinstance(error, AddressError)  # servers may come
        fail(error, 2 if isinstance(error, _BAD_INPUT) and not may_pass else 1)
