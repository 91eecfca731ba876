"""Health probes of a server, as container platforms use them.

Each probe checks one thing: a server whose envs are all leased must not be restarted.
"""

from __future__ import annotations

import enum
from typing import Final

from envserve.client.link.discovery import resolve
from envserve.client.link.probe import request_welcome
from envserve.errors import AddressError, EnvserveError, ProtocolMismatch
from envserve.wire.handshake import Welcome

_MAX_LAG_MS: Final = 5000


class HealthProblem(enum.IntEnum):
    """Exit codes of `envserve health`."""

    NO_ANSWER = 1
    NO_ADDRESS = 2
    STARTING = 3  # workers cannot be started yet: imports go on, or have failed
    LAGGING = 4  # the serving loop was late by more than 5 s within the last 10
    DRAINING = 5
    FULL = 6
    MISMATCH = 7  # it speaks other versions of the protocol


def diagnose(
    welcome: Welcome, *, startup: bool = False, live: bool = False, ready: bool = False
) -> tuple[HealthProblem, str] | None:
    """Return the first problem of those to check, and a text; None without problem."""
    if (startup or ready) and welcome.is_starting:
        return HealthProblem.STARTING, "workers cannot be started yet"
    if live and welcome.loop_lag_ms > _MAX_LAG_MS:
        seconds = welcome.loop_lag_ms / 1000
        return HealthProblem.LAGGING, f"its loop was {seconds:.1f} s late"
    if ready and welcome.is_draining:
        return HealthProblem.DRAINING, "it is draining"
    if ready and not welcome.free_envs:
        return HealthProblem.FULL, f"all of its {welcome.total_envs} envs are leased"
    return None


def probe(
    address: str,
    *,
    startup: bool = False,
    live: bool = False,
    ready: bool = False,
    timeout: float = 2.0,
    insecure: bool = False,
) -> tuple[int, str]:
    """Return the exit code of `envserve health`, and a text to print.

    Of several servers, the first with a problem counts.
    """
    said = []
    try:
        for each in resolve(address):
            welcome = request_welcome(each, timeout, insecure=insecure)
            if found := diagnose(welcome, startup=startup, live=live, ready=ready):
                return found[0], f"{each}: {found[1]}"
            said.append(
                f"{each}: serving {welcome.num_names} env "
                f"name{'s' * (welcome.num_names != 1)}; "
                f"{welcome.free_envs} of {welcome.total_envs} envs free"
            )
    except AddressError as error:
        return HealthProblem.NO_ADDRESS, str(error)
    except ProtocolMismatch as error:
        return HealthProblem.MISMATCH, f"ProtocolMismatch: {error}"
    except EnvserveError as error:
        return HealthProblem.NO_ANSWER, str(error)
    return 0, "\n".join(said)
