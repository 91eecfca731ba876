"""`envserve drain`: stop a server once its episodes have ended."""

from __future__ import annotations

import contextlib
import time
from typing import Final

from envserve.cli.options import THIS_HOST, Address, Insecure, Seconds, address_of
from envserve.cli.terminal import fail
from envserve.errors import ConnectError, EnvStartError

#: Exit code if the server is still running after the timeout.
_STILL_RUNNING: Final = 3
#: Maximum time to wait for each reply. Servers reply immediately, even while envs are
#: being stepped.
_REPLY_SECONDS: Final = 5.0


def drain(
    address: Address = THIS_HOST,
    *,
    timeout: Seconds = 30.0,
    insecure: Insecure = False,
) -> None:
    """Stop a server once its running episodes have ended; wait until it has exited.

    The server waits up to its --drain-grace seconds for running episodes. Exit
    codes: 0 once the server has exited, 1 if it does not reply or rejects the request,
    3 if it is still running after the timeout.

    Args:
      timeout: Seconds to wait for the server to exit.
    """
    from envserve.client.link.connection import Connection
    from envserve.client.link.sessionless_requests import request
    from envserve.wire.constants import DRAIN_WORD, MessageType
    from envserve.wire.handshake import Hello
    from envserve.wire.message import Message

    address, deadline = address_of(address), time.monotonic() + timeout
    drain = Message(MessageType.ASK_DRAIN, request=1, body=DRAIN_WORD)
    hello = Message(MessageType.HELLO, request=2, body=Hello(client="drain").encode())
    try:
        with contextlib.closing(Connection(address, insecure=insecure)) as connection:
            seconds = min(timeout, _REPLY_SECONDS)
            boot = request(connection, hello, MessageType.WELCOME, seconds).boot

            def is_running() -> bool:
                """Return whether the server has neither exited nor been restarted."""
                try:
                    reply = request(connection, hello, MessageType.WELCOME, seconds)
                except ConnectError:  # a server that hangs keeps its connections
                    return connection.poll()[1]
                return reply.boot == boot

            try:
                request(connection, drain, MessageType.DRAIN, seconds)
            except ConnectError:  # the server may have exited before it replied
                if is_running():
                    raise
            else:
                while is_running():
                    if time.monotonic() > deadline:
                        fail(
                            f"{address}: the server is still draining after "
                            f"{timeout:g} s; wait longer (--timeout), or send it "
                            f"SIGINT, which cuts off running episodes",
                            _STILL_RUNNING,
                        )
                    connection.wait(0.1, for_writing=False)
    except EnvStartError as error:  # a rejection by the server; the input is valid
        fail(error, 1)
    print(f"{address}: the server has drained and exited")
