"""`envserve envs`: list the names of envs on a server or on this host."""

from __future__ import annotations

from envserve.cli.options import (
    Import,
    Insecure,
    MaybeAddress,
    Timeout,
    address_of,
    import_from_here,
)
from envserve.cli.terminal import fail
from envserve.errors import EnvserveError


def envs(
    address: MaybeAddress = None,
    *,
    import_: Import = None,
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
    try:
        if address is None:
            names = offered_names(None, import_ or ())
        else:
            address = address_of(address)
            names = request_welcome(address, timeout, insecure=insecure).env_names
    except EnvserveError as error:
        fail(error)
    for name in names:
        print(name)
