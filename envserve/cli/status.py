"""`envserve status`: print the envs, leases, speed and faults of servers once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from envserve.cli.options import THIS_HOST, Addresses, Insecure, Timeout
from envserve.cli.terminal import console
from envserve.text import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

    from envserve.monitoring.server_monitor import MonitoredServer


#: Seconds between the two polls that measure a server's speed.
_GAP_SECONDS: Final = 0.5
#: Minimum width of a terminal for tables, in columns; narrower ones show lists.
_TABLE_WIDTH: Final = 76
#: Minimum width for tables with a release column; otherwise, the releases are listed
#: below the tables.
_RELEASE_COLUMN_WIDTH: Final = 110
_FAULTS: Final = {"ENV_ERROR": "raised", "WORKER_DIED": "died", "TIMEOUT": "hung"}


def status(
    addresses: Addresses = (THIS_HOST,),
    *,
    json_: bool = False,
    timeout: Timeout = 2.0,
    insecure: Insecure = False,
) -> int:
    """Show the envs, leases, speed and faults of servers.

    Exit codes: 0 if all servers reply, 1 if any does not, 2 if an address cannot be
    resolved.

    Args:
      json_: Print the complete status as JSON.
    """
    from msgspec import json

    from envserve.monitoring.server_monitor import monitored_servers, poll_servers

    with monitored_servers(addresses, insecure=insecure) as monitored:
        poll_servers(monitored, timeout, _GAP_SECONDS)
        if json_:
            encoded = json.encode([server.as_dict() for server in monitored])
            print(json.format(encoded, indent=2).decode())
        else:
            # In a pipe or file, each error is one line.
            console().print(tables(monitored, console().width), soft_wrap=True)
        if not all(server.is_resolved for server in monitored):
            return 2
        return int(any(server.status is None for server in monitored))


def tables(monitored: Sequence[MonitoredServer], width: int) -> RenderableType:
    """Return tables of servers and of leases, or lists if the terminal is narrow."""
    from rich.console import Group
    from rich.text import Text

    servers = [_server_cells(server) for server in monitored]
    releases: dict[str, list[str]] = {}
    if _TABLE_WIDTH <= width < _RELEASE_COLUMN_WIDTH:  # too narrow for a release column
        for cells in servers:
            releases.setdefault(cells.pop("release"), []).append(cells["server"])
    lines = [f"release {r}: {', '.join(on)}" for r, on in releases.items() if r != "-"]
    leases = [
        {
            "client": lease.client or f"lease {lease.number}",
            "server": server.name,
            "envs": f"{lease.num_envs} {lease.env_name}",
            "connected": _duration(lease.seconds),
            "steps": _number(lease.steps),
            "faults": _faults(lease.faults),
        }
        for server in monitored
        for lease in (server.status.leases if server.status else ())
    ]
    errors = [Text(f"{s.name}: {s.error}", "red") for s in monitored if s.error]
    renderables = (*_as_table(servers, width), *_as_table(leases, width))
    return Group(*renderables, *map(Text, lines), *errors)


def _as_table(
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
    if (status := server.status) is None:
        return cells
    cells["envs"] = f"{status.total_envs - status.free_envs} of {status.total_envs}"
    cells["lag"] = f"{status.loop_lag_ms} ms"
    if status.version:
        cells["release"] = f"{status.version} {status.commit}".rstrip()
        cells["up"] = _duration(status.seconds)
        cells["steps/s"] = _number(server.steps_per_second)
        cells["p50"] = _duration(server.env_step_seconds.quantile(0.5))
        cells["p99"] = _duration(server.env_step_seconds.quantile(0.99))
        cells["faults"] = _faults(status.faults)
    if status.is_starting or status.is_draining:
        cells["up"] = "draining" if status.is_draining else "starting"
    return cells


def _faults(faults: Mapping[str, int]) -> str:
    parts = (f"{n} {_FAULTS.get(kind, kind.lower())}" for kind, n in faults.items())
    return ", ".join(parts) or "0"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
