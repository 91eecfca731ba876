"""What is wrong with a server, for who starts, restarts and routes to servers.

Each probe is a question of its own: a server that has nothing to give away must not be
restarted for it.
"""

from __future__ import annotations

import enum
from typing import Final

from envserve.wire import Welcome

__all__ = ["Ailment", "diagnose"]

_MAX_LAG_MS: Final = 5000


class Ailment(enum.IntEnum):
    """What may be wrong, as exit codes of `envserve health`."""

    NO_ANSWER = 1
    STARTING = 3  # workers cannot be started yet: imports go on, or have failed
    LAGGING = 4  # the serving loop was late by more than 5 s within the last 10
    DRAINING = 5
    FULL = 6
    MISMATCH = 7  # it speaks other versions of the protocol


def diagnose(
    welcome: Welcome, *, startup: bool = False, live: bool = False, ready: bool = False
) -> tuple[Ailment, str] | None:
    """Returns the first thing wrong that is asked about, and a text.

    Args:
      welcome: What the server says.
      startup: Can workers be started?
      live: Does the serving loop keep up?
      ready: Are there envs to have?
    """
    if (startup or ready) and welcome.is_starting:
        return Ailment.STARTING, "workers cannot be started yet"
    if live and welcome.loop_lag_ms > _MAX_LAG_MS:
        return Ailment.LAGGING, f"its loop was {welcome.loop_lag_ms / 1000:.1f} s late"
    if ready and welcome.is_draining:
        return Ailment.DRAINING, "it is draining"
    if ready and not welcome.free_envs:
        return Ailment.FULL, f"all of its {welcome.total_envs} envs are leased"
    return None
