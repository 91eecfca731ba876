"""`envserve top`: show the status of servers, updated until the user stops it."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Final

from msgspec import Meta

from envserve.cli.options import THIS_HOST, Addresses, Insecure
from envserve.cli.status import tables
from envserve.cli.terminal import console, fail, keyboard

#: Maximum seconds to wait for replies: a silent server delays the view, q and Ctrl-C.
_TIMEOUT_SECONDS: Final = 2.0


def top(
    addresses: Addresses = (THIS_HOST,),
    *,
    interval: Annotated[float, Meta(ge=0.1, le=1e6)] = 1.0,
    insecure: Insecure = False,
) -> None:
    """Show the status of servers and keep it updated, until q or Ctrl-C.

    Exit code 2: none of the addresses can be resolved.

    Args:
      interval: Seconds between two updates.
    """
    from rich.live import Live

    from envserve.monitoring.server_monitor import monitored_servers, poll_servers

    screen = console()
    live = Live(console=screen, screen=True, auto_refresh=False)
    can_redraw = screen.is_terminal and not screen.is_dumb_terminal
    with (
        contextlib.suppress(KeyboardInterrupt),
        monitored_servers(addresses, insecure=insecure) as monitored,
    ):
        if not any(server.is_resolved for server in monitored):
            fail(monitored[0].error, 2)
        with (
            keyboard() as wait_for_keys,
            live if can_redraw else contextlib.nullcontext(),
        ):
            has_ended = False
            while not has_ended:
                poll_servers(monitored, min(interval, _TIMEOUT_SECONDS))
                view = tables(monitored, screen.width)
                if live.is_started:
                    live.update(view, refresh=True)
                else:
                    screen.print(view, soft_wrap=True)
                    sys.stdout.flush()
                has_ended = "q" in wait_for_keys(interval).lower()
