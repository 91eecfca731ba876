"""`envserve envs`: list the names of envs on a server or on this host."""

from __future__ import annotations

import sys

from envserve.cli.options import (
    Import,
    Insecure,
    MaybeAddress,
    Timeout,
    address_of,
    import_from_here,
)
from envserve.text import counted


def envs(
    address: MaybeAddress = None,
    *,
    import_: Import = (),
    timeout: Timeout = 2.0,
    insecure: Insecure = False,
) -> None:
    """List the names of the envs that a server offers, or that are registered here.

    Args:
      address: Address of a server; by default, list the envs registered here.
    """
    from envserve.client.link.sessionless_requests import request_welcome
    from envserve.envs.registry import offered_names

    import_from_here(import_)
    num_omitted = 0
    if address is None:
        names = offered_names(None, import_)
    else:
        address = address_of(address)
        welcome = request_welcome(address, timeout, insecure=insecure)
        names = welcome.env_names
        num_omitted = welcome.num_names - len(names)
    for name in names:
        print(name)
    if num_omitted > 0:
        text = f"the server offers {counted(num_omitted, 'more name')}"
        print(f"{text}, but its replies list at most {len(names):,}", file=sys.stderr)
