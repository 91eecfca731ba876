"""`envserve invite`: print an invitation that lets one client join."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Annotated, Final

from envserve.cli.keys import At, Home, complete_addresses, key_errors
from envserve.cli.program import Fields
from envserve.errors import CodecError
from envserve.keys import formats
from envserve.keys.grant import format_time, parse_words
from envserve.keys.invitation import Invitation
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair

#: Lifetime of an invitation.
_INVITATION_SECONDS: Final = 15 * 60


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a client, as text for its line in the `clients` file."""

    envs: str | None = None
    """Patterns of env names that the client may use, separated by commas; by default,
    all envs that the server offers."""
    max_envs: str | None = None
    """Maximum number of envs that the client may lease at a time."""
    max_processes: str | None = None
    """Maximum number of worker processes that the client may use at a time."""
    max_leases: str | None = None
    """Maximum number of leases that the client may hold at a time."""
    max_row_mib: str | None = None
    """Maximum shared memory for the rows of the client's envs, in MiB."""
    expose: str | None = None
    """Env attributes the client may use, separated by commas, in the same forms as
    for `envserve start --expose`."""
    kwargs: str | None = None
    """Constructor arguments the client may set, separated by commas, in the same
    forms as for `envserve start --allow-kwarg`."""
    share: str | None = None
    """Weight of the client when clients compete for the server's time; 1 by default."""
    expires: str | None = None
    """Date or time (UTC) at which the key expires, such as 2027-01-01; by default,
    never."""


def invite(
    name: str,
    *,
    at: At,
    stdout: bool = False,
    home: Home = None,
    limits: Annotated[dict[str, str], Fields(Limits)],
) -> None:
    """Print an invitation that lets one client join, once, within 15 minutes.

    Args:
      name: Name of the client: letters, digits and . _ -
      stdout: Print the secret even if stdout is not a terminal.
    """
    with key_errors():
        at = complete_addresses(at)
        if not (stdout or sys.stdout.isatty()):
            raise CodecError(
                "an invitation is a secret, and stdout is not a terminal; pass "
                "--stdout if no other user can read stdout"
            )
        folder, pair, now = KeyFolder(home), KeyPair.generate(), time.time()
        options = [f"{n.replace('_', '-')}={v}" for n, v in limits.items()]
        key = formats.encode(formats.INVITATION, pair.public)
        until = f"until={format_time(now + _INVITATION_SECONDS)}"
        grant = parse_words([name, key, until, *options])
        if not grant.is_valid(now):
            raise CodecError(
                f"expires: expected a date in the future; got {limits['expires']!r}"
            )
        server = folder.ensure_key("server")
        folder.clients.add(grant, now)
    print(Invitation(server.public, pair.secret, name, tuple(at)).line, flush=True)
    print(
        "This line is a secret and works once within 15 minutes. On the client, run: "
        "envserve join",
        file=sys.stderr,
    )
