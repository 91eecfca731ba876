"""`envserve join`: use an invitation to become a client of a server."""

from __future__ import annotations

import getpass
import sys

from envserve.cli.keys import Home, key_errors
from envserve.cli.options import Seconds
from envserve.errors import CodecError
from envserve.keys import formats
from envserve.keys.invitation import Invitation
from envserve.keys.key_folder import KeyFolder


def join(
    line: tuple[str, ...] = (),
    *,
    timeout: Seconds = 10.0,
    replace: bool = False,
    home: Home = None,
) -> None:
    """Use an invitation from a server's operator to register this client.

    Reads the invitation from the terminal without echo, or from stdin.

    Args:
      timeout: Seconds to wait for the server's reply.
      replace: Replace the keys that are recorded for the invitation's addresses, for
        example after the server was set up again.
    """
    with key_errors():
        if line:
            raise CodecError(
                "an invitation is a secret, and other users can read command lines; "
                'run "envserve join" without arguments, then paste the invitation'
            )
        if sys.stdin.isatty():
            text = getpass.getpass("Invitation (not shown): ")
        else:
            text = sys.stdin.readline()
        invitation = Invitation.parse(text)
        from envserve.client.link.join import join as enrol

        folder, server = KeyFolder(home), invitation.server_public
        if not replace:
            folder.check_pins(invitation.addresses, server)
        pair = folder.ensure_key("client")
        reachable = enrol(invitation, pair, timeout)
        previous = {address: folder.pinned_key(address) for address in reachable}
        folder.add_pin(reachable, server, invitation.name, may_replace=replace)
    for address, public in previous.items():
        if public not in (None, server):
            old = formats.fingerprint(public)
            print(f"{address}: the server's previous key, {old}, was replaced")
    print(
        f"joined {', '.join(reachable)} as {invitation.name}; this client's key is "
        f"{formats.fingerprint(pair.public)}, "
        f"the server's {formats.fingerprint(server)}"
    )
    for address in invitation.addresses:
        if address not in reachable:
            print(
                f"{address}: no server with this key replied, so this client cannot "
                f"use this address; check it, and join again once the server replies "
                f"there: envserve invite {invitation.name} --at {address}"
            )
