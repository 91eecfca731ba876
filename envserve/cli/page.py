"""`envserve page`: show servers and their envs in the browser."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envserve.cli.options import Addresses, Insecure, Port
from envserve.cli.terminal import fail
from envserve.errors import EnvserveError

if TYPE_CHECKING:
    from envserve.monitoring.page.data_feed import DataFeed


def page(
    addresses: Addresses,
    *,
    run: Path | None = None,
    host: str = "127.0.0.1",
    port: Port = 8580,
    open_: bool = False,
    insecure: Insecure = False,
    end_with_stdin: bool = False,
) -> None:
    """Show servers, their envs and a training run in the browser, until Ctrl-C.

    Args:
      run: Run folder of `ppo train` whose learning curve is shown.
      host: Address to serve the page on; by default, only this host can reach it.
      port: Port of the page; if it is in use, the next free port is used.
      open_: Open the page in a browser.
    """
    from envserve.client.link.discovery import resolve
    from envserve.monitoring.observer import Observer
    from envserve.monitoring.page.data_feed import DataFeed
    from envserve.wire.sockets import raise_file_limit

    if run is not None and run.is_file():
        fail(f"--run: expected a run folder; got the file {run}", 2)
    raise_file_limit()
    # With --end-with-stdin, stdin is a pipe that closes when the parent process ends.
    wait = sys.stdin.buffer.read if end_with_stdin else threading.Event().wait
    missing = "; the page needs additional packages: pip install 'envserve[page]'"
    try:
        resolved = [address for word in addresses for address in resolve(word)]
        feed = DataFeed(resolved, run, partial(Observer, insecure=insecure))
        with contextlib.suppress(KeyboardInterrupt):
            serve_page(feed, port, missing, wait, is_opened=open_, host=host)
    except EnvserveError as error:
        fail(error, 2)


def serve_page(
    feed: DataFeed,
    port: int,
    missing: str,
    wait: Callable[[], object],
    *,
    is_opened: bool,
    host: str = "127.0.0.1",
    **options: Any,
) -> None:
    """Serve the page until `wait` returns, or until Ctrl-C.

    Args:
      feed: Source of the page's data.
      port: Port of the page; if it is in use, the next free port is used.
      missing: Text to append to the error if packages are missing.
      wait: Function that blocks until the page should stop.
      is_opened: Whether to open the page in a browser.
      host: Address to listen on.
      options: Additional arguments of `build_app`.
    """
    try:
        from envserve.monitoring.page.app import build_app
        from envserve.monitoring.page.serve import page_server
    except ModuleNotFoundError as error:
        fail(f"{error}{missing}", 2)
    build = partial(build_app, feed, host=host, **options)
    server, listening, url = page_server(lambda token: build(token=token), host, port)

    def end(*_: object) -> None:
        server.should_exit = True

    # uvicorn installs its own handler later; modules that it imports before that could
    # swallow a KeyboardInterrupt.
    before = signal.signal(signal.SIGINT, end)
    try:
        print(f"Page: {url}", flush=True)
        threading.Thread(target=lambda: end(wait()), daemon=True).start()
        if is_opened and not webbrowser.open(url):
            print("No browser was found; open the URL yourself.", flush=True)
        server.run(sockets=[listening])
    finally:
        signal.signal(signal.SIGINT, before)
