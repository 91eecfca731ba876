"""Shared parts of the commands: options, error reports, and TensorFlow startup.

The input is checked before TensorFlow is loaded, because loading it takes seconds.
"""

import contextlib
import dataclasses
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from sysconfig import get_path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from msgspec import Meta

from envserve.cli.logs import StderrHandler, TextLines
from envserve.cli.options import Count, add_working_directory, env_names
from envserve.cli.program import Option
from envserve.cli.terminal import console, fail
from envserve.envs.user_envs import (
    check_files_exist,
    env_name_of,
    is_user_env,
    split_reference,
    with_absolute_path,
    working_directory,
)
from envserve.errors import AddressError, EnvserveError, ServerLost
from envserve.python_process import stop_signals, uncollected_imports
from envserve.text import install_command, one_line
from ppo.cli.compilation_cache import enable_compilation_cache
from ppo.cli.progress import Screen
from ppo.config.config import CODE_SETTINGS, Config
from ppo.config.named_configs import CONFIGS, apply_settings, load_config
from ppo.errors import (
    BadInputError,
    ConfigError,
    PpoError,
    RunFolderError,
    UntrustedCodeError,
)
from ppo.run_folder.folder import RunFolder, seed_folders
from ppo.run_folder.trust import (
    EnvSource,
    code_names,
    describe_code,
    is_trusted,
    keep_folder_unchanged,
    trust_code,
)

if TYPE_CHECKING:
    from ppo.run_folder.checkpoint import CheckpointId

#: Names of timeouts in error messages of envserve. The settings of ppo have the same
#: names with the suffix `_seconds`.
_SECONDS: Final = re.findall(
    r"(\w+_(?:after|timeout))_seconds", " ".join(Config.__dataclass_fields__)
)
_TIMEOUT: Final = re.compile(rf"\b({'|'.join(_SECONDS)})\b")

_CONNECT: Final = (
    "Address of an env server, such as sim1 or tcp://127.0.0.1:5555, or local for "
    "worker processes on this host; repeatable. By default, the run's own servers, "
    "or local if it has none."
)
_IMPORT: Final = (
    "Module or Python file that registers envs or wrappers, for worker processes on "
    "this host; repeatable."
)
_TRUST: Final = (
    "Use all code and servers that the run or config names, without asking. Pass this "
    "option only if you trust the author."
)
_CHECKPOINT: Final = (
    "Checkpoint to use: its number of env steps, or 'best' for the one with the best "
    "evaluation during training. By default, the newest."
)
_SAMPLED: Final = (
    "Sample the actions as in training, instead of taking the most likely ones."
)
_NUM_WORKERS: Final = (
    "Number of worker processes on this host; by default, one per core."
)
_INTRA_OP: Final = "TensorFlow threads per operation; 0 lets TensorFlow choose."
_INTER_OP: Final = "TensorFlow operations to run in parallel; 0 lets TensorFlow choose."

Connect = Annotated[list[str] | None, Option(_CONNECT, metavar="ADDRESS")]
Import = Annotated[list[str] | None, Option(_IMPORT, metavar="MODULE")]
Trust = Annotated[bool, Option(_TRUST)]
Checkpoint = Annotated[str | None, Option(_CHECKPOINT, metavar="STEPS|best")]
Sampled = Annotated[bool, Option(_SAMPLED)]
NumWorkers = Annotated[Count | None, Option(_NUM_WORKERS)]
IntraOpThreads = Annotated[int, Meta(ge=0), Option(_INTRA_OP)]
InterOpThreads = Annotated[int, Meta(ge=0), Option(_INTER_OP)]


def config_names() -> list[str]:
    """Return the named configs and the registered envs, for shell completion."""
    return [*CONFIGS, *env_names()]


def setting_keys() -> list[str]:
    """Return `KEY=` for each setting, for shell completion of --set."""
    return [f"{name}=" for name in Config.__dataclass_fields__]


def run_folders() -> list[str]:
    """Return the run folders in the working directory and runs/, for completion."""
    return [
        str(path.parent)
        for folder in (".", "runs")
        for path in Path(folder).glob("*/config.json")
    ]


def user_command(program: str) -> str:
    """Return the name of an installed program, or its path if it is not on PATH."""
    path, found = Path(get_path("scripts"), program), shutil.which(program)
    if not path.exists() or (found is not None and path.samefile(found)):
        return program
    here = working_directory()
    is_below = here and path.is_relative_to(here)
    return shlex.quote(str(path.relative_to(here) if is_below else path))


Run = Annotated[Path, Option("Run folder of `ppo train`.", values=run_folders)]


class SourceOptions(NamedTuple):
    """The values of --connect, --import and --trust; None or False if omitted."""

    connect: list[str] | None = None
    import_modules: list[str] | None = None
    trust: bool = False

    def applied_to(self, source: EnvSource) -> EnvSource:
        """Return `source` with its values replaced by the given options."""
        addresses, modules = source.addresses, source.import_modules
        if self.connect is not None:
            addresses = () if self.connect == ["local"] else tuple(self.connect)
        if self.import_modules is not None:
            modules = tuple(map(with_absolute_path, self.import_modules))
        return EnvSource(addresses=addresses, import_modules=modules)

    def with_moved_files(self, config: Config) -> Config:
        """Return a config with the new paths of files that have been moved.

        If --import names a file with the same name as a file in the config, its path
        replaces the path in the config.
        """
        modules = self.applied_to(EnvSource()).import_modules
        moved = {Path(file).name: file for file in modules if file.endswith(".py")}

        def new_name(reference: str) -> str:
            file = split_reference(reference)[0]
            return f"{moved.get(Path(file).name, file)}{reference.removeprefix(file)}"

        return _with_renamed_code(config, new_name)


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM and SIGHUP, like `KeyboardInterrupt` on Ctrl-C."""


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `Terminated` within this context."""

    def interrupt(*_: object) -> None:
        raise Terminated

    numbers = {*stop_signals()} - {signal.SIGINT}
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def preserved_interrupts(*, is_deferred: bool = False) -> Iterator[None]:
    """Re-raise interrupts at the end of the block, in case its code suppressed them.

    Args:
      is_deferred: Whether to raise interrupts only at the end of the block.
    """
    raised: list[KeyboardInterrupt] = []

    def interrupt(number: int, _: object) -> None:
        is_sigint = number == signal.SIGINT
        raised.append(KeyboardInterrupt() if is_sigint else Terminated())
        if not is_deferred:
            raise raised[-1]

    before = {
        number: signal.signal(number, interrupt)
        for number in stop_signals()
        if callable(signal.getsignal(number))  # true within `sigterm_raises`
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if raised:
            raise raised[-1]


@contextlib.contextmanager
def deferred_stderr() -> Iterator[None]:
    """Buffer output on stderr; write it only if the `with` block raises an exception.

    TensorFlow reports on stderr that it uses oneDNN and finds no GPU; its log levels
    do not suppress these messages.
    """
    with tempfile.TemporaryFile() as buffer:
        before = os.dup(2)
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        except Exception:  # after an interrupt, the output is discarded
            buffer.seek(0)
            os.write(before, buffer.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


def start_tensorflow(
    intra_op_threads: int, inter_op_threads: int, config: Config | None = None
) -> None:
    """Load and configure TensorFlow, without its log output.

    Args:
      intra_op_threads: Threads per operation; 0 lets TensorFlow choose. Two threads
        shorten an update of small networks by a third, but not rollouts.
      inter_op_threads: Operations to run in parallel; 0 lets TensorFlow choose.
      config: Settings of the run. Without `jit_compile` (for image observations),
        oneDNN is enabled: it halves the time of convolutions, but slows down small
        layers.

    Raises:
      BadInputError: TensorFlow is not installed, or there is no temporary folder.
    """
    # The user may have selected another backend for other programs.
    os.environ["KERAS_BACKEND"] = "tensorflow"
    # TensorFlow logs harmless messages as errors; real errors are also raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise BadInputError(
            f"TensorFlow needs a temporary folder: {error.strerror}; set TMPDIR."
        ) from None
    uses_onednn = config is not None and not config.jit_compile
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", str(int(uses_onednn)))
    try:
        is_loaded = "tensorflow" in sys.modules
        imports = contextlib.nullcontext() if is_loaded else uncollected_imports()
        with preserved_interrupts(), deferred_stderr(), imports:
            import tensorflow as tf

            # TensorFlow reads TF_XLA_FLAGS when it looks for devices.
            enable_compilation_cache(tf.__version__)
            gpus = tf.config.list_physical_devices("GPU")
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"Training needs TensorFlow ({error}); {install_command('train')}."
        ) from error
    tf.get_logger().setLevel("ERROR")
    logging.getLogger("absl").setLevel("ERROR")
    for gpu in gpus:  # otherwise, TensorFlow allocates all GPU memory
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus and config is not None and not config.use_gpu:
        tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(intra_op_threads)
    tf.config.threading.set_inter_op_parallelism_threads(inter_op_threads)


@contextlib.contextmanager
def open_run(
    run: Path,
    checkpoint: str | None,
    options: SourceOptions,
    intra_op_threads: int = 1,
    inter_op_threads: int = 1,
    check: Callable[[Config, Sequence[str]], None] = lambda config, addresses: None,
) -> Iterator[tuple[RunFolder, Config, "CheckpointId", EnvSource, Screen]]:
    """Open an existing run and start TensorFlow; report errors of the `with` block.

    `check` is called with the run's config and server addresses before TensorFlow
    starts, because starting TensorFlow takes seconds.

    Yields:
      The run folder, its config (with `min_servers` and `num_servers` set to 0), the
      checkpoint, the source of the envs, and a screen.
    """
    with report_errors():
        which = parse_checkpoint(checkpoint)
        run_folder, stored = RunFolder.read(run)
        if seed_folders(run) and not run_folder.has_checkpoint():
            raise RunFolderError(
                f"{run}: expected the folder of a single run, found runs of several "
                "seeds; choose one of its seed-N folders."
            )
        check_trust(None, run, [], options)
        config = options.with_moved_files(stored).replace(min_servers=0, num_servers=0)
        source = resolve_env_source(run_folder.env_source(), options, stored)
        find_user_code(config, source)
        if source.addresses and options.connect is None:
            print(f"Env servers of the run: {one_line(', '.join(source.addresses))}")
        with Screen(console()) as screen:
            check(config, source.addresses)
            screen.phase("starting TensorFlow")
            start_tensorflow(intra_op_threads, inter_op_threads, config)
            yield run_folder, config, which, source, screen


def check_trust(
    name: str | None, resume: Path | None, changes: list[str], options: SourceOptions
) -> None:
    """Ask the user before using code or servers that are not trusted.

    Code and servers that the user named in the command need no confirmation.

    Args:
      name: Argument CONFIG. If it is a file, it is checked unless `resume` is given.
      resume: Run folder to check.
      changes: Values of --set.
      options: Options that select the envs.

    Raises:
      ConfigError: A setting is invalid, or changes the algorithm of the run.
      UntrustedCodeError: The user does not agree, or there is no terminal.
    """
    is_file = name is not None and name.endswith((".toml", ".json"))
    if resume is not None:
        run, stored = RunFolder.read(resume)
        source = run.env_source()
        keep_folder_unchanged(stored, source, resume)
    elif name is not None and is_file:
        stored, source = load_config(name), EnvSource()
    else:
        return
    apply = apply_settings if resume is None else resumed_config
    config = options.with_moved_files(apply(stored, changes))
    keys = {change.partition("=")[0] for change in changes}
    entered_source = options.applied_to(EnvSource())
    entered = {*entered_source.addresses, *entered_source.import_modules}
    entered.update(*(names for key, names in code_names(config).items() if key in keys))
    if name is not None and not is_file:
        entered.update(*code_names(with_absolute_paths(load_config(name))).values())
    code = describe_code(config, options.applied_to(source), entered)
    if not code or is_trusted(stored, source, resume):
        return
    text = f"{one_line(str(resume or name))} names code or servers that you have not "
    text += f"used before: {code}"
    if not options.trust and not _is_confirmed(f"{text}. Use them? [y/N] "):
        raise UntrustedCodeError(
            f"{text}. If you trust its author, repeat the command with --trust."
        )
    # Trust is recorded only if the question has listed all code of the run or config.
    if code == describe_code(stored, source):
        trust_code(stored, source, resume)


def _is_confirmed(question: str) -> bool:
    """Ask a yes/no question on the terminal; return False if there is no terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def with_absolute_paths(config: Config) -> Config:
    """Return a config whose file names do not depend on the working directory."""
    return _with_renamed_code(config, with_absolute_path)


def _with_renamed_code(config: Config, rename: Callable[[str], str]) -> Config:
    """Return a config in which `rename` replaces each name of an env, code or module.

    `rename` is also called with built-in names, such as "ppo".
    """
    names = {key: rename(getattr(config, key)) for key in ("env_name", *CODE_SETTINGS)}
    lists = {
        key: tuple(map(rename, getattr(config, key)))
        for key in ("import_modules", "callbacks")
    }
    return config.replace(**names, **lists)


def resumed_config(earlier: Config, changes: list[str]) -> Config:
    """Return the config of a resumed run, with the values of --set applied.

    Raises:
      ConfigError: A setting is invalid, or changes the algorithm. The file of an
        algorithm may have moved.
    """
    settings = dict(change.partition("=")[::2] for change in changes)
    algorithm = settings.get("algorithm", earlier.algorithm).strip()
    if env_name_of(algorithm) != env_name_of(earlier.algorithm):
        raise ConfigError(
            f"--set: algorithm: expected {earlier.algorithm}, the algorithm of the "
            f"run, found {algorithm}; start a new run to use another algorithm."
        )
    return apply_settings(earlier, changes)


def resolve_env_source(
    source: EnvSource, options: SourceOptions, config: Config | None = None
) -> EnvSource:
    """Return the env source of an earlier run, with the given options applied.

    --import may also name the new paths of files of the earlier run's `config` that
    have moved. Workers do not import these files, because they load TensorFlow.

    Raises:
      AddressError: The address of a server cannot be resolved.
    """
    from envserve.client.link.discovery import resolve

    names = [] if config is None else user_code_of(config)
    files = {Path(split_reference(name)[0]).name for name in names}
    moved = {name for name in files if name.endswith(".py")}
    moved -= {Path(name).name for name in source.import_modules}
    source = options.applied_to(source)
    modules = tuple(m for m in source.import_modules if Path(m).name not in moved)
    source = dataclasses.replace(source, import_modules=modules)
    try:
        for word in source.addresses:
            resolve(word)
    except AddressError as error:
        raise AddressError(f"--connect: {error}") from error
    return source


def user_code_of(config: Config) -> list[str]:
    """Return the names of functions and classes in a config, without those of envs."""
    return [*(getattr(config, key) for key in CODE_SETTINGS), *config.callbacks]


def find_user_code(config: Config, source: EnvSource) -> None:
    """Add the working directory to the import path if the run names modules in it.

    Raises:
      EnvStartError: A file of an env or a module does not exist. Or other users can
        write to the working directory, and a module is not found elsewhere.
    """
    code = user_code_of(config)
    # With env servers, this process imports neither the envs nor their modules.
    envs = [] if source.addresses else [config.env_name]
    modules = [] if source.addresses else config.import_modules + source.import_modules
    check_files_exist([*modules, *envs])
    words = [*modules, *filter(is_user_env, code + envs)]
    add_working_directory(words, always=any(".py:" in name for name in code))


def parse_checkpoint(text: str | None) -> "CheckpointId":
    """Parse the value of `--checkpoint`.

    Raises:
      BadInputError: The value is neither a number of steps nor "best".
    """
    if text is None:
        return None
    if text == "best":
        return "best"
    try:
        return int(text.replace(",", ""))
    except ValueError:
        raise BadInputError(
            f"--checkpoint: expected a number of env steps or 'best'; got {text!r}."
        ) from None


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Write warnings about envs to stderr as plain lines with a time.

    TensorFlow configures the root logger, which would change their format.
    """
    logger = logging.getLogger("envserve")
    handler = StderrHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(TextLines("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


@contextlib.contextmanager
def report_errors(
    log_format: str = "text", is_restartable: bool = False
) -> Iterator[None]:
    """Print expected errors without a traceback, and exit.

    Args:
      log_format: With "text", warnings about envs are plain lines.
      is_restartable: Whether a supervisor restarts the command. If so, exit with 3
        after the loss of all servers, as for a stopped run, and with 1 if an address
        is unknown, because the servers may start later.
    """
    try:
        with plain_warnings() if log_format == "text" else contextlib.nullcontext():
            yield
    except (PpoError, EnvserveError) as error:
        if isinstance(error, EnvserveError):
            error.args = (_TIMEOUT.sub(r"\1_seconds", str(error)), *error.args[1:])
        if is_restartable and isinstance(error, ServerLost):
            fail(error, 3)
        if is_restartable and isinstance(error, AddressError):
            fail(error, 1)
        fail(error, 2 if isinstance(error, BadInputError) else None)
