"""`envserve health`: check the health of a server; the exit code names the problem.

`envserve.__main__` has a fast path for simple forms of this command, because containers
run it every few seconds.
"""

from __future__ import annotations

from envserve.cli.options import THIS_HOST, Address, Insecure, Timeout
from envserve.cli.terminal import fail


def health(
    address: Address = THIS_HOST,
    *,
    startup: bool = False,
    live: bool = False,
    ready: bool = False,
    timeout: Timeout = 2.0,
    insecure: Insecure = False,
) -> None:
    """Check whether a server is healthy, and report it as the exit code.

    Exit codes: 0 if the server is healthy, 1 if it does not reply, 7 if its
    release is incompatible; "Exit codes" in the docs lists all codes. If the address
    resolves to several servers, the first unhealthy one determines the exit code.

    Args:
      startup: Check that workers can be started; if not, exit with 3.
      live: Check that the event loop was at most 5 s late within the last 10 s; if not,
        exit with 4.
      ready: Check that envs are available; exit with 3 while workers cannot be started,
        5 if the server is draining, 6 if all envs are leased.
    """
    from envserve.monitoring.health_probe import probe

    probes = {"startup": startup, "live": live, "ready": ready}
    code, text = probe(address, **probes, timeout=timeout, insecure=insecure)
    if code:
        fail(text, code)
    print(text)
