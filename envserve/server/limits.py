"""The operating system's limits on a server process."""

from __future__ import annotations

import logging
import resource
from typing import Final

__all__ = ["raise_file_limit"]

_LOGGER: Final = logging.getLogger(__name__)


def raise_file_limit() -> None:
    """Allows as many open files as may be: every worker and client needs some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS: "unlimited" is more than it gives
        _LOGGER.info("the limit of %d open files stays: %s", soft, error)
