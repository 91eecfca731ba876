"""`envserve page`: show servers and their envs in the browser."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from envserve.cli.options import THIS_HOST, Addresses, Host, Insecure, Port
from envserve.cli.terminal import fail
from envserve.errors import EnvserveError
from envserve.text import install_command

if TYPE_CHECKING:
    from envserve.monitoring.page.data_feed import DataFeed


#: Maximum time for which the page of a finished run stays open for its viewers.
_VIEWING_SECONDS: Final = 60


def page(
    addresses: Addresses = (THIS_HOST,),
    *,
    run: Path | None = None,
    host: Host = "127.0.0.1",
    port: Port = 8580,
    open_: bool = False,
    insecure: Insecure = False,
    end_with_stdin: bool = False,
) -> None:
    """Show servers, their envs and a training run in the browser, until Ctrl-C.

    Args:
      run: Run folder of `ppo train` whose learning curve is shown.
      host: Address to serve the page on; by default, only this host can open the page.
      port: Port of the page; if it is in use, the next free port is used.
      open_: Open the page in a browser.
    """
    from envserve.client.link.discovery import resolve
    from envserve.monitoring.observer import Observer
    from envserve.monitoring.page.data_feed import DataFeed
    from envserve.wire.sockets import raise_file_limit

    if run is not None and os.path.isfile(run):
        fail(f"--run: expected a run folder; got the file {run}", 2)
    if run is not None and not os.path.exists(run) and not end_with_stdin:
        print(f"--run: {run} does not exist yet; its curve appears once it does.")
    raise_file_limit()
    missing = f"; the page needs additional packages: {install_command('page')}"
    try:
        resolved = [address for name in addresses for address in resolve(name)]
        feed = DataFeed(resolved, run, partial(Observer, insecure=insecure))
        until_parent_ends = partial(_wait_for_parent, feed)
        wait = until_parent_ends if end_with_stdin else threading.Event().wait
        with contextlib.suppress(KeyboardInterrupt):
            serve_page(feed, port, missing, wait, is_opened=open_, host=host)
    except EnvserveError as error:
        fail(error, 2)


def _wait_for_parent(feed: DataFeed) -> None:
    """Wait until stdin is closed, which also happens if the parent process is killed.

    A parent that has finished normally writes to stdin before closing it. In this case,
    also wait until no browser shows the page.
    """
    if sys.stdin.read() and feed.subscribers:
        feed.finish_run()
        seconds = f"up to {_VIEWING_SECONDS} s"
        print(f"The page stays open for {seconds}; Ctrl-C closes it.", flush=True)
        for _ in range(_VIEWING_SECONDS):
            # A browser that reloads the page reconnects within this time.
            time.sleep(1.0)
            if not feed.subscribers:
                return


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
    """Serve the page until `wait` returns, or until SIGINT or SIGTERM.

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

    # Install handlers before uvicorn installs its own. Until then, Ctrl-C would raise
    # KeyboardInterrupt, which a module that uvicorn imports could swallow. The handlers
    # are also needed after uvicorn has shut down, because it then raises the signal
    # again.
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, end))
        print(f"Page: {url}", flush=True)
        threading.Thread(target=lambda: end(wait()), daemon=True).start()
        if is_opened and not webbrowser.open(url):
            print("No browser was found; open the URL yourself.", flush=True)
        server.run(sockets=[listening])
