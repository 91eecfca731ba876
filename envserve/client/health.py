"""What is wrong with a server, for who starts, restarts and routes to servers.

Each probe is a question of its own: a server that has nothing to give away must not be
restarted for it.
"""

from __future__ import annotations

import enum
from typing import Final

from envserve.wire import Welcome

__all__ = ["Ailment", "Probe", "diagnose"]

_MAX_LAG_MS: Final = 5000


class Probe(enum.Enum):
    """What may be asked."""

    STARTUP = enum.auto()  # can workers be started?
    LIVE = enum.auto()  # does the serving loop keep up?
    READY = enum.auto()  # are there envs to have?


class Ailment(enum.IntEnum):
    """What may be wrong, as exit codes of `envserve health`."""

    NO_ANSWER = 1
    STARTING = 3  # workers cannot be started yet: imports go on, or have failed
    LAGGING = 4  # the serving loop was late by more than 5 s within the last 10
    DRAINING = 5
    FULL = 6


_TESTED_BY: Final = {
    Ailment.STARTING: (Probe.STARTUP, Probe.READY),
    Ailment.LAGGING: (Probe.LIVE,),
    Ailment.DRAINING: (Probe.READY,),
    Ailment.FULL: (Probe.READY,),
}


def diagnose(welcome: Welcome, probes: set[Probe]) -> tuple[Ailment, str] | None:
    """Returns the first thing wrong that any of the probes looks for, and a text."""
    has = {
        Ailment.STARTING: (welcome.is_starting, "workers cannot be started yet"),
        Ailment.LAGGING: (
            welcome.loop_lag_ms > _MAX_LAG_MS,
            f"its loop was {welcome.loop_lag_ms / 1000:.1f} s late",
        ),
        Ailment.DRAINING: (welcome.is_draining, "it is draining"),
        Ailment.FULL: (
            not welcome.free_envs,
            f"all of its {welcome.total_envs} envs are leased",
        ),
    }
    for ailment, (is_so, text) in has.items():
        if is_so and probes.intersection(_TESTED_BY[ailment]):
            return ailment, text
    return None
