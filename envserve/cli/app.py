"""The `envserve` command: what it has for whom."""

from __future__ import annotations

from collections.abc import Callable

from envserve.cli.doctor import doctor
from envserve.cli.envs import bench, describe, replay
from envserve.cli.keys import app as keys
from envserve.cli.page import demo, page
from envserve.cli.servers import check, drain, envs, health
from envserve.cli.start import start
from envserve.cli.status import status, top
from envserve.cli.terminal import make_app

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
