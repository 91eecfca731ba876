"""`envserve page` and `envserve demo`: servers and envs in the browser."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envserve.cli.options import Insecure, look_for_modules_here
from envserve.cli.terminal import fail
from envserve.envs.user_envs import is_user_env
from envserve.errors import EnvserveError

if TYPE_CHECKING:
    from envserve.monitoring.page.data_feed import DataFeed

__all__ = ["demo", "page"]

_Port = Annotated[
    int, typer.Option(help="Port of the page, or the next free one.", min=0, max=65535)
]


def page(
    addresses: Annotated[
        list[str], typer.Argument(metavar="ADDRESS", help="Servers to look at.")
    ],
    run: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder of a run, whose learning curve is shown."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to serve the page; by default, to this host.")
    ] = "127.0.0.1",
    port: _Port = 8580,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open it in a browser here.")
    ] = False,
    insecure: Insecure = False,
    end_with_stdin: Annotated[
        bool, typer.Option("--end-with-stdin", hidden=True)
    ] = False,
) -> None:
    """Show servers, their envs and a run in the browser, until Ctrl-C."""
    from envserve.client.link.discovery import resolve
    from envserve.monitoring.observer import Observer
    from envserve.monitoring.page.data_feed import DataFeed
    from envserve.wire.sockets import raise_file_limit

    raise_file_limit()
    # Whoever has started it with that holds the other end.
    wait = sys.stdin.buffer.read if end_with_stdin else threading.Event().wait
    missing = "; the page needs more: pip install 'envserve[page]'"
    try:
        found = [address for word in addresses for address in resolve(word)]
        feed = DataFeed(found, run, partial(Observer, insecure=insecure))
        with contextlib.suppress(KeyboardInterrupt):
            _serve(feed, port, missing, wait, is_opened=open_browser, host=host)
    except EnvserveError as error:
        fail(error, 2)


def demo(
    env: Annotated[
        str, typer.Option(help="Env to learn, as of `start`: Box observations.")
    ] = "CartPole-v1",
    num_envs: Annotated[int, typer.Option(min=2, help="How many, on 2 servers.")] = 32,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show it here, and not in a browser.")
    ] = False,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Open no browser, say only where.")
    ] = False,
    port: _Port = 8580,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="End after so long.")
    ] = None,
) -> None:
    """Learn before your eyes, on two servers that you may kill, until Ctrl-C."""
    from envserve.demo.run import Demo
    from envserve.monitoring.page.data_feed import DataFeed

    look_for_modules_here([env] if is_user_env(env) else [])
    logging.getLogger("envserve").addHandler(logging.NullHandler())  # it is seen
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"Starting two servers, and {num_envs} envs ...", file=sys.stderr)
    missing = "; pip install 'envserve[demo]', or see --terminal"
    try:
        with (
            contextlib.suppress(KeyboardInterrupt),
            tempfile.TemporaryDirectory(prefix="envserve-") as folder,
            Demo(env, num_envs, run := Path(folder, "demo")) as it,
        ):
            if seconds is not None:
                end = threading.Timer(seconds, it.has_ended.set)
                end.daemon = True
                end.start()
            if terminal:
                from envserve.cli.demo_terminal import show

                show(it)
            else:
                feed = DataFeed([server.proxy.address for server in it.servers], run)
                wait, buttons = it.has_ended.wait, it.faults
                is_opened = not no_open
                _serve(feed, port, missing, wait, is_opened=is_opened, buttons=buttons)
            it.check()
    except EnvserveError as error:
        fail(error, 1)


def _serve(
    feed: DataFeed,
    port: int,
    missing: str,
    wait: Callable[[], object],
    *,
    is_opened: bool,
    host: str = "127.0.0.1",
    **shown: Any,
) -> None:
    """Serves a page until a wait is over, or Ctrl-C."""
    try:
        from envserve.monitoring.page.app import build_app
        from envserve.monitoring.page.serve import page_server
    except ModuleNotFoundError as error:
        fail(f"{error}{missing}", 2)
    build = partial(build_app, feed, host=host, **shown)
    server, listening, url = page_server(lambda token: build(token=token), host, port)

    def end(*_: object) -> None:
        server.should_exit = True

    # An interrupt while the server starts could be swallowed by what it imports.
    before = signal.signal(signal.SIGINT, end)
    try:
        print(f"Page: {url}", flush=True)
        threading.Thread(target=lambda: end(wait()), daemon=True).start()
        if is_opened and not webbrowser.open(url):
            print("No browser was found here; open it where there is one.", flush=True)
        server.run(sockets=[listening])
    finally:
        signal.signal(signal.SIGINT, before)
