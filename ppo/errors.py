"""All exceptions of the trainer.

A `BadInputError` reports a mistake in the command or in the config, which the user can
correct. Any other `PpoError` reports a failure during a run.
"""

from collections.abc import Iterable

from envserve.text import nearest_name

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
    "TrainingStopped",
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
    """A checkpoint is missing or damaged, or does not match the run's networks."""


class OutputError(BadInputError):
    """The output path already exists or cannot be written."""


class UnsupportedSpaceError(BadInputError):
    """The observation space or the action space is not supported."""


class RunWriteError(PpoError):
    """Metrics or a checkpoint could not be written, for example on a full disk."""


class RunLockedError(PpoError):
    """Another process is training the same run."""


class CallbackError(PpoError):
    """A callback or a schedule raised an exception, or returned no valid numbers."""


class EnvDataError(PpoError):
    """An env returned NaN or infinity, or its episodes do not end."""


class EnvsLostError(PpoError):
    """Envs fail too often for training or evaluation."""


class LearnerLostError(PpoError):
    """Another learner of the run failed, or did not connect in time."""


class TrainingStopped(PpoError):
    """Training must stop now, without waiting for the envs to complete a rollout."""


class DivergedError(PpoError):
    """Training has diverged: network outputs or gradients are not finite."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean X?` with the most similar known name, or ""."""
    nearest = nearest_name(name, known)
    return f" Did you mean {nearest}?" if nearest else ""
