"""The exceptions of the trainer, in one tree.

A `BadInputError` can be put right by whoever typed the command or wrote the config.
Any other `PpoError` happened while a run was under way.
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
    "RunWriteError",
    "UnsupportedSpaceError",
    "suggestion",
]


class PpoError(Exception):
    """Base of everything that the trainer raises on purpose."""


class BadInputError(PpoError):
    """What was asked for cannot be done; asking differently helps."""


class ConfigError(BadInputError):
    """A config has an unknown key or a value that is out of range."""


class RunFolderError(BadInputError):
    """A run folder is missing, not empty, or not a run folder."""


class CheckpointError(BadInputError):
    """A checkpoint is missing, or does not fit the networks of the config."""


class OutputError(BadInputError):
    """Where results are to go is taken, or cannot be written."""


class UnsupportedSpaceError(BadInputError):
    """No network is known for an observation or action space."""


class RunWriteError(PpoError):
    """Metrics or a checkpoint could not be written, for instance to a full disk."""


class CallbackError(PpoError):
    """A callback raised, or gave something else than numbers."""


class EnvDataError(PpoError):
    """An env delivered an observation or a reward that is not finite."""


class EnvsLostError(PpoError):
    """Envs fail so often that nothing can be learned or measured with them."""


class LearnerLostError(PpoError):
    """Another learner of the run is gone, or did not come."""


class DivergedError(PpoError):
    """The networks' outputs are no longer finite."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean X?` with the nearest known name, or an empty string.

    A name that contains the given one is nearer than any that is spelt alike, the more
    so if it begins with it.
    """
    names = list(known)
    containing = sorted(
        (known_name for known_name in names if name and name in known_name),
        key=lambda known_name: (not known_name.startswith(name), len(known_name)),
    )
    nearest = containing or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]}?" if nearest else ""
