"""Startup, liveness and readiness probes of a server, for container platforms.

The probes are separate because a failed liveness probe restarts the container: a server
whose envs are all leased is not ready, but must not be restarted.
"""

from __future__ import annotations

import enum
from typing import Final

from envserve.client.link.discovery import resolve
from envserve.client.link.sessionless_requests import request_welcome
from envserve.errors import AddressError, EnvserveError, ProtocolMismatch
from envserve.text import counted
from envserve.wire.handshake import Welcome

_MAX_LAG_MS: Final = 5000


class HealthProblem(enum.IntEnum):
    """Exit codes of `envserve health`."""

    NO_REPLY = 1
    """The server does not reply, or the client cannot connect."""
    NO_ADDRESS = 2
    """The address is invalid or cannot be resolved."""
    STARTING = 3
    """The server cannot start workers: its imports have not finished or have failed."""
    LAGGING = 4
    """The event loop was late by more than 5 s within the last 10 s."""
    DRAINING = 5
    """The server is draining."""
    FULL = 6
    """All envs are leased."""
    MISMATCH = 7
    """The server and this client have no protocol version in common."""


def diagnose(
    welcome: Welcome, *, startup: bool = False, live: bool = False, ready: bool = False
) -> tuple[HealthProblem, str] | None:
    """Return the first problem that a probe finds and its description, or None.

    The keyword arguments select the probes. If no probe is selected, every server that
    replies is healthy.
    """
    if (startup or ready) and welcome.is_starting:
        return HealthProblem.STARTING, "workers cannot be started yet"
    if live and welcome.loop_lag_ms > _MAX_LAG_MS:
        seconds = welcome.loop_lag_ms / 1000
        return HealthProblem.LAGGING, f"the event loop was {seconds:.1f} s late"
    if ready and welcome.is_draining:
        return HealthProblem.DRAINING, "the server is draining"
    if ready and not welcome.free_envs:
        return HealthProblem.FULL, f"all {welcome.total_envs} envs are leased"
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
    """Return the exit code of `envserve health`, and the message to print.

    If the address resolves to several servers, the first one with a problem
    determines the result.
    """
    lines = []
    try:
        for server in resolve(address):
            welcome = request_welcome(server, timeout, insecure=insecure)
            if problem := diagnose(welcome, startup=startup, live=live, ready=ready):
                return problem[0], f"{server}: {problem[1]}"
            lines.append(
                f"{server}: serving {counted(welcome.num_names, 'env name')}; "
                f"{welcome.free_envs} of {welcome.total_envs} envs free"
            )
    except AddressError as error:
        return HealthProblem.NO_ADDRESS, str(error)
    except ProtocolMismatch as error:
        return HealthProblem.MISMATCH, f"ProtocolMismatch: {error}"
    except EnvserveError as error:
        return HealthProblem.NO_REPLY, str(error)
    return 0, "\n".join(lines)
