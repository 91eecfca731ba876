"""The folder of one run: config, metrics, checkpoints, evaluation.

config.json        the settings, complete
envs.json          where the envs are
metrics.jsonl      one line per iteration or report
tensorboard/       the same numbers for TensorBoard
checkpoints/       see `ppo.run_folder.checkpoint`
evaluation.json    the evaluation at the end
"""

import contextlib
import dataclasses
import errno
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ppo.config.config import Config
from ppo.config.named_configs import read_config
from ppo.errors import ConfigError, RunFolderError, RunWriteError

_FIRST_FILES = ("config.json", "envs.json", "config.json.partial", "envs.json.partial")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvSource:
    """Where the environments of a run come from; stored in the run folder."""

    addresses: tuple[str, ...] = ()
    """Env servers; if empty, environments run in worker processes of this host."""
    import_modules: tuple[str, ...] = ()
    """Modules or files that local worker processes import."""


_LOCAL = EnvSource()


class RunFolder:
    """Paths of a run, and the checks before anything is written there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.json"
        self.env_source_path = path / "envs.json"
        self.metrics_path = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"

    @property
    def quoted_path(self) -> str:
        """The path, as a shell reads it as one word."""
        return shlex.quote(str(self.path))

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return any(path.name.isdigit() for path in self.checkpoints.glob("*"))

    @classmethod
    def create(
        cls, path: Path, config: Config, env_source: EnvSource = _LOCAL
    ) -> "RunFolder":
        """Create a new folder, and save the config and the source of the envs in it.

        A folder with nothing but these of a run that never began counts as new.

        Raises:
            RunFolderError: the path is taken, or the folder cannot be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            is_free = all(file.name in _FIRST_FILES for file in path.iterdir())
        except OSError as error:
            raise RunFolderError(
                f"{path}: expected a folder that can be created; {_reason(error)}."
            ) from error
        run = cls(path)
        try:
            read_config(run.config_path)
            is_foreign, hint = (
                False,
                f"continue that run with --resume {run.quoted_path}, or ",
            )
        except ConfigError:
            is_foreign, hint = run.config_path.exists(), ""
        if is_foreign or not is_free:
            raise RunFolderError(
                f"{path}: expected a new or empty folder, got one with files in it; "
                f"{hint}choose another --run-dir."
            )
        try:
            _write_atomically(run.config_path, _as_json(config))
            _write_atomically(run.env_source_path, _as_json(env_source))
        except OSError as error:
            raise RunFolderError(
                f"{path}: cannot be written; {_reason(error)}."
            ) from error
        return run

    @classmethod
    def open(cls, path: Path) -> tuple["RunFolder", Config]:
        """Open the folder of an earlier run, and read its config.

        Raises:
            RunFolderError: there is no such folder, or it is not that of a run.
            ConfigError: its config cannot be read.
        """
        run = cls(path)
        if not path.is_dir():
            raise RunFolderError(f"{path}: expected the folder of a run, found none.")
        if not run.config_path.is_file():
            raise RunFolderError(
                f"{path}: expected the folder of a run, found no config.json in it."
            )
        return run, read_config(run.config_path)

    def remove_if_unused(self) -> bool:
        """Remove the folder of a run that has nothing to show; returns whether it did.

        Such a folder has no row of metrics and no checkpoint in it, nor anything that
        is not a run's.
        """
        if not self.path.is_dir():
            return True
        names = {file.name for file in self.path.iterdir()}
        has_row = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
        if has_row or names - {*_FIRST_FILES, "metrics.jsonl", "tensorboard"}:
            return False
        shutil.rmtree(self.path)
        return True

    def env_source(self) -> EnvSource:
        """Return the source of the run's envs; runs without `envs.json` ran locally.

        Raises:
            RunFolderError: `envs.json` cannot be read.
        """
        try:
            text = self.env_source_path.read_bytes()
            return msgspec.json.decode(text, type=EnvSource)
        except FileNotFoundError:
            return EnvSource()
        except (OSError, msgspec.DecodeError) as error:
            raise RunFolderError(
                f"{self.env_source_path}: expected what the run was told by --connect "
                f"and --import; {error!r:.200}. Remove this file, and say them again."
            ) from error

    def save_env_source(self, env_source: EnvSource) -> None:
        """Replace the saved source of the envs."""
        with self.writing():
            _write_atomically(self.env_source_path, _as_json(env_source))

    def save_config(self, config: Config) -> None:
        """Replace the saved config, for a run that goes on with changed settings."""
        with self.writing():
            _write_atomically(self.config_path, _as_json(config))

    def save_evaluation(self, values: Mapping[str, Any]) -> None:
        """Write `evaluation.json`."""
        with self.writing():
            text = json.dumps(dict(values), indent=2) + "\n"
            _write_atomically(self.path / "evaluation.json", text)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a write error of Python or TensorFlow into a `RunWriteError`."""
        try:
            yield
        except Exception as error:
            tf = sys.modules.get("tensorflow")  # not worth loading for its exceptions
            if isinstance(error, OSError):
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                reason = _reason(error)
            elif tf is not None and isinstance(error, tf.errors.OpError):
                is_full = isinstance(error, tf.errors.ResourceExhaustedError)
                reason = os.strerror(errno.ENOSPC) if is_full else error.message
            else:
                raise
            remedy = "free some space" if is_full else "make it writable"
            raise RunWriteError(
                f"{self.path}: cannot be written, {reason}; {remedy}."
            ) from error


def _as_json(values: Config | EnvSource) -> str:
    values_by_name = dataclasses.asdict(values)
    return json.dumps(values_by_name, indent=2, ensure_ascii=False) + "\n"


def _reason(error: OSError) -> str:
    """Say what went wrong, without the number and the path of an `OSError`."""
    return error.strerror or str(error)


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
