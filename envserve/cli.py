"""The `envserve` command: what it has for whom."""

from __future__ import annotations

from collections.abc import Callable

from envserve.commands.doctor import doctor
from envserve.commands.keys import app as keys
from envserve.commands.own_envs import bench, describe, replay
from envserve.commands.page import demo, page
from envserve.commands.servers import check, drain, envs, health
from envserve.commands.start import start
from envserve.commands.status import status, top
from envserve.terminal import make_app

__all__ = ["main"]

app = make_app("envserve", "Environment servers for reinforcement learning.")
_panels: dict[str, tuple[Callable[..., None], ...]] = {
    "See what it is": (demo,),
    "Serve envs": (start, drain),
    "Look at servers": (status, top, page, health, doctor, envs, check),
    "Own envs": (describe, bench, replay),
}
for _panel, _commands in _panels.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
app.add_typer(keys)


def main() -> None:
    """Runs the command that the arguments name."""
    app(prog_name="envserve")
