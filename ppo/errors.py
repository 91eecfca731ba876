"""All exceptions of the trainer.

A `BadInputError` reports a mistake in the command or in the config, which the user can
correct. Any other `PpoError` reports a failure during a run.
"""

import difflib
from collections.abc import Iterable

__all__ = [
    "BadInputError",
    "CallbackError",
    "CheckpointError",
    "ConfigError",
    "DivergedError",
    "EnvDataError",
    "EnvsLostError",
    "LearnerLostError",
    "OutputError",
    "PpoError",
    "RunFolderError",
    "RunLockedError",
    "RunWriteError",
    "UnsupportedSpaceError",
    "UntrustedCodeError",
    "suggestion",
]


class PpoError(Exception):
    """Base class of all exceptions of the trainer."""


class BadInputError(PpoError):
    """The command or the config is wrong; the message explains the remedy."""


class ConfigError(BadInputError):
    """A config has an unknown key or a value that is out of range."""


class RunFolderError(BadInputError):
    """A folder is missing, is not empty, or is not a run folder."""


class UntrustedCodeError(BadInputError):
    """A run or config names code or servers that the user has not agreed to use."""


class CheckpointError(BadInputError):
    """A checkpoint is missing, or does not match the networks of the config."""


class OutputError(BadInputError):
    """The output path already exists or cannot be written."""


class UnsupportedSpaceError(BadInputError):
    """The observation space or the action space is not supported."""


class RunWriteError(PpoError):
    """Metrics or a checkpoint could not be written, for example on a full disk."""


class RunLockedError(PpoError):
    """Another process is training the same run."""


class CallbackError(PpoError):
    """A callback raised an exception or returned something other than numbers."""


class EnvDataError(PpoError):
    """An env returned an observation or a reward that is not finite."""


class EnvsLostError(PpoError):
    """Envs fail too often for training or evaluation."""


class LearnerLostError(PpoError):
    """Another learner of the run failed, or did not connect in time."""


class DivergedError(PpoError):
    """Training has diverged: network outputs or gradients are not finite."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean X?` with the most similar known name, or an empty string.

    Known names that begin with `name` come first, then those that contain it, then
    those with a similar spelling.
    """
    names = list(known)
    containing = sorted(
        (known_name for known_name in names if name and name in known_name),
        key=lambda known_name: (not known_name.startswith(name), len(known_name)),
    )
    nearest = containing or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]}?" if nearest else ""
