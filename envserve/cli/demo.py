"""`envserve demo`: train on two servers, and inject faults by button or keyboard."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from envserve.cli.options import Env, Port, import_from_here
from envserve.cli.page import serve_page
from envserve.cli.terminal import console, keyboard
from envserve.errors import EnvserveError
from envserve.text import install_command

if TYPE_CHECKING:
    from rich.console import Group

    from envserve.demo.run import Demo


_POLL_SECONDS: Final = 0.1


def demo(
    *,
    env: Env = "CartPole-v1",
    num_envs: Annotated[int, Meta(ge=2)] = 32,
    terminal: bool = False,
    no_open: bool = False,
    port: Port = 8580,
    seconds: Annotated[float, Meta(ge=0, le=1e6)] | None = None,
) -> None:
    """Watch an agent learn on two servers while you break them; Ctrl-C ends the demo.

    Args:
      env: Env to train on, with Box observations: a registered name, FILE.py:CLASS or
        MODULE:NAME.
      num_envs: Total number of envs on both servers.
      terminal: Show the demo in the terminal instead of the browser.
      no_open: Print the URL of the page without opening a browser.
      port: Port of the page; if it is in use, the next free port is used.
      seconds: Seconds after which the demo ends; by default, it runs until Ctrl-C.
    """
    from envserve.demo.run import Demo
    from envserve.monitoring.page.data_feed import DataFeed
    from envserve.wire.sockets import socket_folder

    import_from_here((), env)
    # Do not log to the terminal: the page, or the terminal view, shows faults.
    logging.getLogger("envserve").addHandler(logging.NullHandler())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"Starting two servers and {num_envs} envs ...", file=sys.stderr)
    missing = f"; {install_command('demo')}, or use --terminal"
    with contextlib.suppress(KeyboardInterrupt), socket_folder() as folder:
        with Demo(env, num_envs, run := Path(folder, "demo")) as running:
            if seconds is not None:
                timer = threading.Timer(seconds, running.has_ended.set)
                timer.daemon = True
                timer.start()
            with contextlib.suppress(KeyboardInterrupt):
                if terminal:
                    _run_in_terminal(running)
                else:
                    addresses = [server.proxy.address for server in running.servers]
                    feed, wait = DataFeed(addresses, run), running.has_ended.wait
                    options: dict[str, Any] = {"buttons": running.controls}
                    options |= {"is_opened": not no_open}
                    serve_page(feed, port, missing, wait, **options)
            running.check()
        print(running)


def _run_in_terminal(demo: Demo) -> None:
    """Show the demo in the terminal until it ends, or the user presses q."""
    from rich.live import Live

    messages: list[str] = []
    names = {name[0]: name for name in demo.controls}
    screen = Live(console=console(), get_renderable=lambda: _render(demo, messages))
    with keyboard() as wait_for_keys, screen:
        while not demo.has_ended.is_set():
            for key in wait_for_keys(_POLL_SECONDS):
                if key == "q":
                    return
                if key in names:
                    args = demo, names[key], messages
                    threading.Thread(target=_press, args=args, daemon=True).start()


def _press(demo: Demo, name: str, messages: list[str]) -> None:
    label, act = demo.controls[name]
    messages.append(f"{label} ...")
    try:
        messages.append(act())
    except EnvserveError as error:
        messages.append(str(error))


def _render(demo: Demo, messages: list[str]) -> Group:
    from rich.console import Group
    from rich.text import Text

    row, absent = demo.metrics, demo.absent_rows()
    head = Text(f"{row['demo_wrong']:,} of {row['rows_checked']:,} transitions wrong, ")
    head.stylize("bold red" if row["demo_wrong"] else "bold green")
    head.append(f"faults: {demo.num_faults:,}, ", "bold")
    head.append(f"mean return {row.get('mean_return', 0):.1f}", "bold")
    marks = Text()
    half = len(absent) // 2
    for index, is_absent in enumerate(absent.tolist()):
        if index in (0, half):
            marks.append(f"\nserver {1 + index // half} ")
        marks.append(" ." if is_absent else " #", "dim" if is_absent else "green")
    names = demo.controls.items()
    keys = ", ".join(f"{name[0]} {label}" for name, (label, _) in names)
    lines = map(Text, messages[-5:])
    return Group(head, marks, "", Text(f"{keys}, q Quit", "dim"), *lines)
