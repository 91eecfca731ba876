"""Create, open and write the folder of a run.

config.json        all settings
envs.json          env source: env servers and imported modules
metrics.jsonl      one line per iteration or report
tensorboard/       the same metrics for TensorBoard
lock               locked while the run is trained
checkpoints/       see `ppo.run_folder.checkpoint`
algorithm/         other data of the algorithm, such as SAC's replay buffer
evaluation.json    result of the final evaluation, or of a later `ppo evaluate`
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from envserve.regular_file import flush_to_disk, open_no_link
from envserve.text import one_line
from ppo.config.config import Config
from ppo.config.named_configs import read_config, read_table
from ppo.errors import (
    ConfigError,
    RunFolderError,
    RunLockedError,
    RunWriteError,
    UntrustedCodeError,
)
from ppo.run_folder.trust import (
    LOCAL,
    EnvSource,
    describe_code,
    is_trusted,
    keep_folder_unchanged,
    trust_code,
)

__all__ = ["RunFolder"]

_LOGGER = logging.getLogger("envserve")
_SETTINGS = ("config.json", "envs.json")
#: Files that a run folder may contain before the first iteration.
_FIRST_FILES = (
    *("lock", "metrics.jsonl", "tensorboard", *_SETTINGS),
    *(f"{name}.partial" for name in _SETTINGS),
)
#: Errors of `open_no_link` for a link, and of `mkdir` for a link or a file.
_WRONG_KIND_ERRORS = (errno.ELOOP, errno.EEXIST)


class RunFolder:
    """The folder of a run: its paths, and methods that read and write its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.json"
        self.env_source_path = path / "envs.json"
        self.metrics_path = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.algorithm_data = path / "algorithm"
        self._is_locked = False

    @property
    def quoted_path(self) -> str:
        """The path, quoted for the shell."""
        return shlex.quote(str(self.path))

    def has_checkpoint(self) -> bool:
        """Return whether the run can be resumed from a checkpoint."""
        return any(path.name.isdigit() for path in self.checkpoints.glob("*"))

    @classmethod
    def create(
        cls, path: Path, config: Config, env_source: EnvSource = LOCAL
    ) -> "RunFolder":
        """Create a run folder, and save the config and the env source in it.

        A folder that contains only files from before the first iteration is treated as
        empty, because its run never started.

        Raises:
          RunFolderError: The folder is not empty, or cannot be written.
          RunLockedError: Another process is training a run in this folder.
        """
        run = cls(path)
        try:
            check_utf8(path)
            path.mkdir(parents=True, exist_ok=True)
            is_free = run._is_unused()
        except (OSError, UnicodeEncodeError) as error:
            raise RunFolderError(
                f"{path}: cannot create the folder; {reason_of(error)}."
            ) from error
        try:
            read_config(run.config_path)
            is_other = False
            hint = f"continue that run with --resume {run.quoted_path}, or "
        except ConfigError:
            is_other, hint = run.config_path.exists(), ""
        if is_other or not is_free:
            raise RunFolderError(
                f"{path}: expected a new or empty folder, got a folder with files; "
                f"{hint}choose another --run-dir."
            )
        try:
            with run.locked():
                run.save_config(config)
                run.save_env_source(env_source)
        except RunWriteError as error:
            raise RunFolderError(str(error)) from error
        trust_code(config, env_source, path)
        return run

    @classmethod
    def open(cls, path: Path) -> tuple["RunFolder", Config]:
        """Open the folder of a run whose code and servers the user trusts.

        If the folder contains code, Python writes no bytecode from then on, because new
        files next to the code would have to be trusted again.

        Raises:
          UntrustedCodeError: The run names code or servers that this user has
            neither used nor trusted before.
          RunFolderError: The path is not a run folder.
          ConfigError: The config cannot be read.
        """
        run, config = cls.read(path)
        source = run.env_source()
        if not is_trusted(config, source, path):
            raise UntrustedCodeError(
                f"{path}: expected code and servers that you have used before, got "
                f"{describe_code(config, source)}; if you trust the author of the run, "
                "use RunFolder.read."
            )
        keep_folder_unchanged(config, source, path)
        return run, config

    @classmethod
    def read(cls, path: Path) -> tuple["RunFolder", Config]:
        """Open a run folder without checking trust, and read its config.

        The config may name code, which is loaded when the config is used.

        Raises:
          RunFolderError: The path is not a run folder.
          ConfigError: The config cannot be read.
        """
        run = cls(path)
        try:
            is_folder, has_config = path.is_dir(), run.config_path.is_file()
        except OSError as error:
            raise RunFolderError(
                f"{path}: expected a run folder that you can read; {reason_of(error)}."
            ) from error
        if not is_folder:
            raise RunFolderError(f"{path}: expected a run folder, found none.")
        if not has_config:
            raise RunFolderError(
                f"{path}: expected a run folder, but it contains no config.json."
            )
        return run, read_config(run.config_path)

    def remove_if_unused(self) -> bool:
        """Remove the folder if it has no results; return whether it no longer exists.

        Metrics and checkpoints count as results. The folder is also kept if it contains
        files that do not come from a run, if another process trains the run, or if it
        cannot be removed, for example because it is a symbolic link.
        """
        if not self.path.is_dir():
            return True
        ignoring_errors = contextlib.suppress(RunLockedError, RunWriteError, OSError)
        with ignoring_errors, self.locked():
            if self._is_unused():
                shutil.rmtree(self.path)
        return not self.path.is_dir()

    def _is_unused(self) -> bool:
        """Return whether the folder contains nothing, or only files of a new run."""
        path = self.metrics_path
        has_row = path.exists() and path.stat().st_size > 0
        return not has_row and all(
            file.name in _FIRST_FILES for file in self.path.iterdir()
        )

    def env_source(self) -> EnvSource:
        """Read the run's env source; without `envs.json`, the envs are local.

        Raises:
          RunFolderError: `envs.json` cannot be read.
        """
        try:
            return msgspec.convert(read_table(self.env_source_path), EnvSource)
        except FileNotFoundError:
            return EnvSource()
        except (OSError, ValueError, msgspec.ValidationError) as error:
            raise RunFolderError(
                f"{self.env_source_path}: cannot read the run's --connect and --import "
                f"options; {error!r:.200}. Remove this file, and repeat the options."
            ) from error

    def save_env_source(self, env_source: EnvSource) -> None:
        """Replace the saved env source."""
        with self.writing():
            _write_atomically(self.env_source_path, _as_json(env_source))

    def save_config(self, config: Config) -> None:
        """Replace the saved config."""
        with self.writing():
            _write_atomically(self.config_path, _as_json(config))

    def save_evaluation(self, values: Mapping[str, Any]) -> None:
        """Write `evaluation.json`."""
        with self.writing():
            text = json.dumps(dict(values), indent=2) + "\n"
            _write_atomically(self.path / "evaluation.json", text)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Prevent other processes from training this run at the same time.

        The kernel releases the lock when the process exits, even if it is killed.

        Raises:
          RunLockedError: Another process is training the run.
          RunWriteError: The folder cannot be written, or a folder in it is a link.
        """
        if self._is_locked:
            yield
            return
        self.check_folders("algorithm", "checkpoints", "tensorboard")
        with self.writing():
            descriptor = open_no_link(self.path / "lock", os.O_RDWR | os.O_CREAT)
            file = os.fdopen(descriptor, "r+", errors="replace")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = one_line(file.read(200)) or "another process"
                raise RunLockedError(
                    f"{self.path}: this run is already being trained by {holder}; "
                    "wait for that process, or stop it."
                ) from None
            except OSError as error:
                _LOGGER.warning(
                    "%s: this file system has no locks (%s), so make sure that no "
                    "other process trains this run",
                    self.path,
                    reason_of(error),
                )
            with self.writing():
                file.truncate(0)
                holder = f"process {os.getpid()} on {socket.gethostname()}\n"
                # Do not buffer, so that closing the file does not retry a failed write.
                os.write(descriptor, holder.encode())
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False

    def check_folders(self, *names: str) -> None:
        """Check that files can be written to folders in the run folder.

        The folders must not be symbolic links. In a stranger's run, a link may lead to
        any folder of the user, in which files would be removed or overwritten.

        Raises:
          RunWriteError: One of the folders is a link, or the path is not UTF-8.
        """
        with self.writing():
            check_utf8(self.path)
            for path in (self.path / name for name in names):
                if path.is_symlink():
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a write error of Python or TensorFlow into a `RunWriteError`."""
        try:
            yield
        except Exception as error:
            tf = sys.modules.get("tensorflow")  # None if it is not imported
            if isinstance(error, OSError):
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                reason = reason_of(error)
            elif isinstance(error, UnicodeEncodeError):
                is_full, reason = False, reason_of(error)
            elif tf is not None and isinstance(error, tf.errors.OpError):
                is_full = isinstance(error, tf.errors.ResourceExhaustedError)
                reason = os.strerror(errno.ENOSPC) if is_full else error.message
            else:
                raise
            remedy = "free some space" if is_full else "make it writable"
            if isinstance(error, OSError) and error.errno in _WRONG_KIND_ERRORS:
                name = Path(str(error.filename)).name
                reason, remedy = f"{name} is a symbolic link", "replace or remove it"
                if error.errno == errno.ELOOP:
                    remedy += f", because only {self.path} itself can be a link"
                else:
                    reason += ", or a file instead of a folder"
            elif isinstance(error, FileNotFoundError) or not self.path.exists():
                reason = "the folder or a file in it was removed or renamed"
                remedy = "resume the run in its new folder, or start a new run"
            elif isinstance(error, UnicodeEncodeError):
                remedy = "rename the file or folder, or use another locale"
            raise RunWriteError(
                f"{self.path}: cannot be written, {reason}; {remedy}."
            ) from error


def seed_folders(path: Path) -> list[Path]:
    """Return the run folders of a study; empty if the folder is not a study."""
    with contextlib.suppress(OSError):
        return sorted(file.parent for file in path.glob("seed-*/config.json"))
    return []


def _as_json(values: Config | EnvSource) -> str:
    values_by_name = dataclasses.asdict(values)
    return json.dumps(values_by_name, indent=2, ensure_ascii=False) + "\n"


def reason_of(error: OSError | UnicodeEncodeError) -> str:
    """Return the message of an error without its number and path."""
    if isinstance(error, UnicodeEncodeError):
        return "its path, a name in it, or the locale (LC_ALL) is not UTF-8"
    return error.strerror or str(error)


def check_utf8(path: Path) -> None:
    """Raise UnicodeEncodeError if TensorFlow, which uses UTF-8, cannot use a path."""
    text = str(path)
    if text.encode() != os.fsencode(text):
        raise UnicodeEncodeError("utf-8", text, 0, len(text), "the locale differs")


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "w", encoding="utf-8", opener=open_no_link) as file:
        file.write(text)
    flush_to_disk(temporary)
    temporary.replace(path)
    flush_to_disk(path.parent)
