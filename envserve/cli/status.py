"""`envserve status` and `envserve top`: what servers do, once or again and again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from envserve.cli.options import Insecure, Timeout
from envserve.cli.terminal import console, fail, keyboard

if TYPE_CHECKING:
    from rich.console import RenderableType

    from envserve.monitoring.server_monitor import MonitoredServer

__all__ = ["status", "top"]

#: Between the two looks that tell how fast a server is.
_GAP_SECONDS: Final = 0.5
#: Narrower terminals get lists in place of tables; wider ones have room for releases.
_TABLE_WIDTH: Final = 76
_WIDE: Final = 110
_UNITS: Final = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3))
_FAULTS: Final = {"ENV_ERROR": "raised", "WORKER_DIED": "died", "TIMEOUT": "hung"}

_Addresses = Annotated[
    list[str],
    typer.Argument(metavar="ADDRESS", help="sim1, ipc:///path, dns://sims, file:///x."),
]


def status(
    addresses: _Addresses,
    as_json: Annotated[
        bool, typer.Option("--json", help="All of it, as JSON.")
    ] = False,
    timeout: Timeout = 2.0,
    insecure: Insecure = False,
) -> None:
    """Say what servers are doing.

    The exit code is 0 if all have answered, else 1.
    """
    from msgspec import json

    from envserve.monitoring.server_monitor import monitored_servers, poll_servers

    with monitored_servers(addresses, insecure=insecure) as monitored:
        poll_servers(monitored, timeout, _GAP_SECONDS)
        if as_json:
            said = json.encode([server.plain() for server in monitored])
            print(json.format(said, indent=2).decode())
        else:
            console().print(_shown(monitored, console().width))
        if not all(server.is_known for server in monitored):
            raise typer.Exit(2)
        raise typer.Exit(any(server.status is None for server in monitored))


def top(
    addresses: _Addresses,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds from one look to the next.")
    ] = 1.0,
    insecure: Insecure = False,
) -> None:
    """Show what servers are doing, again and again, until q or Ctrl-C.

    The exit code is 2 if no host has any of these names.
    """
    from rich.live import Live

    from envserve.monitoring.server_monitor import monitored_servers, poll_servers

    screen = console()
    live = Live(console=screen, screen=True, auto_refresh=False)
    with (
        contextlib.suppress(KeyboardInterrupt),
        monitored_servers(addresses, insecure=insecure) as monitored,
    ):
        if not any(server.is_known for server in monitored):
            fail(monitored[0].error, 2)
        with (
            keyboard() as pressed_within,
            live if screen.is_terminal else contextlib.nullcontext(),
        ):
            has_ended = False
            while not has_ended:
                poll_servers(monitored, interval)
                shown = _shown(monitored, screen.width)
                if live.is_started:
                    live.update(shown, refresh=True)
                else:
                    screen.print(shown)
                    sys.stdout.flush()
                has_ended = "q" in pressed_within(interval).lower()


def _shown(monitored: Sequence[MonitoredServer], width: int) -> RenderableType:
    """Returns tables of servers and of leases; lists, where these are too wide."""
    from rich.console import Group
    from rich.text import Text

    servers = [_server_cells(server) for server in monitored]
    if width < _WIDE:
        for cells in servers:
            del cells["release"]
    leases = [
        {
            "client": lease.client or f"lease {lease.number}",
            "of": server.name,
            "envs": f"{lease.num_envs} {lease.env_name}",
            "since": _duration(lease.seconds),
            "steps": _number(lease.steps),
            "faults": _faults(lease.faults),
        }
        for server in monitored
        for lease in (server.status.leases if server.status else ())
    ]
    errors = [Text(f"{s.name}: {s.error}", "red") for s in monitored if s.error]
    return Group(*_laid_out(servers, width), *_laid_out(leases, width), *errors)


def _laid_out(
    rows: Sequence[Mapping[str, str]], width: int
) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    if width >= _TABLE_WIDTH:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in rows[0]:
            table.add_column(Text(name, "bold"), overflow="fold")
        for cells in rows:
            table.add_row(*map(Text, cells.values()))
        yield table
    else:
        for cells in rows:
            (_, first), *others = cells.items()
            lines = [f"  {name}: {cell}" for name, cell in others if cell != "-"]
            if lines:
                yield Text("\n".join((first, *lines)), overflow="fold")
    yield Text()


def _server_cells(server: MonitoredServer) -> dict[str, str]:
    names = "release up envs steps/s p50 p99 faults lag"
    cells = {"server": server.name, **dict.fromkeys(names.split(), "-")}
    if (found := server.status) is None:
        return cells
    cells["envs"] = f"{found.total_envs - found.free_envs} of {found.total_envs}"
    cells["lag"] = f"{found.loop_lag_ms} ms"
    if found.version:
        cells["release"] = found.version
        cells["up"] = _duration(found.seconds)
        cells["steps/s"] = _number(server.steps_per_second)
        cells["p50"] = _duration(server.env_step_seconds.quantile(0.5))
        cells["p99"] = _duration(server.env_step_seconds.quantile(0.99))
        cells["faults"] = _faults(found.faults)
    if found.is_starting or found.is_draining:
        cells["up"] = "draining" if found.is_draining else "starting"
    return cells


def _faults(faults: Mapping[str, int]) -> str:
    words = (f"{n} {_FAULTS.get(kind, kind.lower())}" for kind, n in faults.items())
    return ", ".join(words) or "0"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    """Returns a duration with the unit that suits it."""
    if seconds is None:
        return "-"
    for unit, least in _UNITS:
        if seconds >= least:
            return f"{seconds / least:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
