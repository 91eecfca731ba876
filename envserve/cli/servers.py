"""What is asked of a server: `health`, `envs`, `check`; and `drain`."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Annotated, Final

import typer

from envserve.cli.options import Import, Insecure, Timeout, address_of
from envserve.cli.terminal import console, fail
from envserve.errors import ConnectError, EnvserveError

__all__ = ["check", "drain", "envs", "health"]

_COLOURS: Final = {"ok": "green", "fail": "red", "skipped": "yellow"}
_STILL_THERE: Final = 3
#: A server that is there answers at once, also while its envs step.
_ANSWER_SECONDS: Final = 5.0

_Address = Annotated[str, typer.Argument(help="Address of a server.")]


def health(
    address: _Address,
    startup: Annotated[
        bool, typer.Option("--startup", help="Can it start workers? If not, 3.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Does its loop keep up? If not, 4.")
    ] = False,
    ready: Annotated[
        bool,
        typer.Option(
            "--ready", help="Are there envs to have? 3, 5: draining, 6: all leased."
        ),
    ] = False,
    timeout: Timeout = 2.0,
    insecure: Insecure = False,
) -> None:
    """Ask a server how it is.

    The exit code is 0 if it is well, 1 if none answers, 7 if it is of another release.
    Of several servers that a word stands for, the first that is not well counts.
    """
    from envserve.monitoring.health_probe import probe

    asked = {"startup": startup, "live": live, "ready": ready}
    code, text = probe(address, **asked, timeout=timeout, insecure=insecure)
    if code:
        fail(text, code)
    print(text)


def envs(
    address: Annotated[
        str | None, typer.Argument(help="Address of a server; by default, here.")
    ] = None,
    import_module: Import = None,
    timeout: Timeout = 2.0,
    insecure: Insecure = False,
) -> None:
    """List the env names that a server offers, or that one here would offer."""
    from envserve.client.link.connection import ask_welcome
    from envserve.envs.registry import Registry

    try:
        if address is None:
            names = Registry(None, import_module or ()).names
        else:
            address = address_of(address)
            names = ask_welcome(address, timeout, insecure=insecure).env_names
    except EnvserveError as error:
        fail(error, 1)
    for name in names:
        print(name)


def check(
    address: _Address,
    env: Annotated[
        str, typer.Option(help="Env to ask for; by default, the first on offer.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each rule.")
    ] = False,
    insecure: Insecure = False,
) -> None:
    """See whether a server of any make keeps to docs/protocol.md.

    The exit code is 0 if nothing is wrong, 1 if something is or none answers. It takes
    8 envs at a time, and gives them back.
    """
    from rich.text import Text

    from envserve.check.probe_client import ServerUnderTest, SocketLink
    from envserve.check.rules import check as look_at
    from envserve.client.link.connection import ask_welcome

    address = address_of(address)
    out, counts = console(), dict.fromkeys(_COLOURS, 0)
    try:
        ask_welcome(address, 5.0, insecure=insecure)  # knows why nobody answers
        subject = ServerUnderTest(lambda: SocketLink(address, insecure=insecure), env)
        for found in look_at(subject):
            counts[found.outcome] += 1
            if as_json:
                print(json.dumps(found._asdict()), flush=True)
                continue
            why = f"\n        {found.why}" if found.why else ""
            outcome = f"{found.outcome:8}", _COLOURS[found.outcome]
            line = f"{found.section}: {found.title}{why}"
            out.print(Text.assemble(outcome, line), soft_wrap=True)
    except EnvserveError as error:
        fail(error, 1)
    if not as_json:
        print(", ".join(f"{count} {name}" for name, count in counts.items()))
    raise typer.Exit(min(1, counts["fail"]))


def drain(
    address: _Address,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds until it has to be gone.")
    ] = 30.0,
    insecure: Insecure = False,
) -> None:
    """Have a server of yours end as SIGTERM would, and wait until it is gone.

    The exit code is 0 when it is, 1 if none answers or it refuses, 3 if it stays.
    """
    from envserve.client.link.connection import Connection, ask
    from envserve.wire.constants import DRAIN_WORD, MessageType
    from envserve.wire.handshake import Hello
    from envserve.wire.message import Message

    address, deadline = address_of(address), time.monotonic() + timeout
    asked = Message(MessageType.ASK_DRAIN, request=1, body=DRAIN_WORD)
    hello = Message(MessageType.HELLO, request=2, body=Hello(client="drain").encode())
    try:
        with contextlib.closing(Connection(address, insecure=insecure)) as connection:
            patience = min(timeout, _ANSWER_SECONDS)
            boot = ask(connection, asked, MessageType.DRAIN, patience).boot
            # Who answers no more is gone; so is who has another in its place.
            with contextlib.suppress(ConnectError):
                while ask(connection, hello, MessageType.WELCOME, 1.0).boot == boot:
                    if time.monotonic() > deadline:
                        fail(
                            f"{address}: it drains, but is still there after "
                            f"{timeout:g} s; wait on, or send it SIGINT, which does "
                            f"not let episodes end",
                            _STILL_THERE,
                        )
                    connection.wait(0.1, for_writing=False)
    except EnvserveError as error:
        fail(error, 1)
    print(f"{address}: it has drained, and is gone")
