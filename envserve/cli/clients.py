"""`envserve clients`: list and remove the clients that have a key."""

from __future__ import annotations

import sys
import time
from typing import Annotated

from envserve.cli.keys import Home, key_errors
from envserve.cli.program import Option
from envserve.errors import CodecError
from envserve.keys import formats
from envserve.keys.grant import format_line
from envserve.keys.key_folder import KeyFolder


def _words() -> list[str]:
    """Return the possible arguments, for shell completion."""
    with key_errors():
        return ["remove", *(grant.name for grant in KeyFolder().clients.grants())]


def clients(
    words: Annotated[
        tuple[str, ...], Option(metavar="remove NAME", values=_words)
    ] = (),
    *,
    home: Home = None,
) -> None:
    """List the authorised clients of your servers, or remove one.

    Running servers apply the change within two seconds.

    Args:
      words: Name of a client to remove.
    """
    with key_errors():
        file = KeyFolder(home).clients
        match words:
            case []:
                file.read()
            case ["remove", name]:
                if not file.remove(name):
                    raise CodecError(
                        f"there is no client {name}; envserve clients lists all clients"
                    )
                print(f"removed {name}")
                return
            case _:
                raise CodecError(
                    f"expected no arguments or remove NAME; got {' '.join(words)}"
                )
    now = time.time()
    if not (grants := file.grants()):
        remedy = 'add one with "envserve invite NAME --at ADDRESS"'
        print(f"no clients yet; {remedy}", file=sys.stderr)
    for grant in grants:
        name, _, *limits = format_line(grant).split()
        state = "invited" if grant.is_invitation else formats.fingerprint(grant.public)
        state = state if grant.is_valid(now) else "expired"
        print(f"{name:12} {state:19} {' '.join(limits)}".rstrip())
