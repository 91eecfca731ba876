"""The demo in a terminal: a mark per env, the numbers, and a key for each fault."""

from __future__ import annotations

import threading

from rich.console import Group
from rich.live import Live
from rich.text import Text

from envserve.cli.terminal import console, keyboard
from envserve.demo.run import Demo
from envserve.errors import EnvserveError

__all__ = ["show"]

_LOOK_SECONDS = 0.1


def show(demo: Demo) -> None:
    """Shows it until it ends, or somebody presses q."""
    told: list[str] = []
    names = {name[0]: name for name in demo.faults}
    screen = Live(console=console(), get_renderable=lambda: _screen(demo, told))
    with keyboard() as pressed_within, screen:
        while not demo.has_ended.is_set():
            for key in pressed_within(_LOOK_SECONDS):
                if key == "q":
                    return
                if key in names:
                    args = demo, names[key], told
                    threading.Thread(target=_inject, args=args, daemon=True).start()


def _inject(demo: Demo, name: str, told: list[str]) -> None:
    label, inject = demo.faults[name]
    told.append(f"{label} ...")
    try:
        told.append(inject())
    except EnvserveError as error:
        told.append(str(error))


def _screen(demo: Demo, told: list[str]) -> Group:
    row, away = demo.row, demo.away()
    head = Text(f"{row['demo_wrong']:,} wrong of {row['rows_checked']:,} transitions, ")
    head.stylize("bold red" if row["demo_wrong"] else "bold green")
    head.append(f"mean return {row.get('mean_return', 0):.1f}", "bold")
    marks = Text()
    for index, is_away in enumerate(away.tolist()):
        if index * 2 % len(away) == 0:
            marks.append(f"\nserver {1 + index * 2 // len(away)} ")
        marks.append(" ." if is_away else " #", "dim" if is_away else "green")
    keys = ", ".join(f"{name[0]} {label}" for name, (label, _) in demo.faults.items())
    return Group(head, marks, "", Text(f"{keys}, q Quit", "dim"), *told[-5:])
