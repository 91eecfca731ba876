"""The tables of docs/scaling.md, generated from the numbers in docs/scaling.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from benchmarks.scaling.measure import Point
from benchmarks.scaling.model import CORES, Clock, Model, errors, fit, plan, slowdown
from benchmarks.support.tables import as_markdown, replace_marked

#: Rows and columns of the planning table: durations of an env step in microseconds, and
#: sizes of an observation in bytes.
_ENV_US: Final = (10, 100, 1_000, 10_000)
_SIZES: Final = (16, 1_024, 28_224)
_LARGE: Final = Point(64, 16, 16)
_CLOCKS: Final[tuple[Clock, ...]] = get_args(Clock)
#: Maps keys in scaling.json to rows of the table about joining and leaving servers.
_PHASES: Final = {
    "calm": "undisturbed",
    "leaving": "a server leaves",
    "attaching": "a server joins",
}
Points = Mapping[str, Sequence[Point]]


def write_document(path: Path, numbers: Mapping[str, Any]) -> None:
    """Replace the tables in a page; each is enclosed by two marks with its name."""
    for name, table in tables(numbers).items():
        replace_marked(path, name, table)


def tables(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return a dict from the name of each table on the page to its Markdown."""
    points = {
        part: [Point(*values) for values in measured]
        for part, measured in numbers.items()
        if isinstance(measured, list)
    }
    return {
        "machine": numbers["machine"],
        "model": _model_table(points),
        "errors": _error_table(points),
        "check": _check_table(points, "check"),
        "namespaces": _check_table(points, "namespaces"),
        "goals": _goal_table(points, numbers["attach"]),
        "wire": _wire_table(points),
        "limits": _limit_table(points),
        "attach": _attach_table(numbers["attach"]),
        "plan": _plan_table(points),
    }


def model_of(points: Points, clock: Clock, *, keys: bool) -> Model:
    """Return the model fitted to the measurements of 1 to 16 servers."""
    return fit(points["fit with keys" if keys else "fit"], clock)


def _model_table(points: Points) -> str:
    rows = []
    for clock in _CLOCKS:
        for keys in (False, True):
            model = model_of(points, clock, keys=keys)
            rows.append([clock, _yes_or_no(keys), *(f"{us:.3g}" for us in model)])
    headings = ["clock", "keys", "a: split", "b: server", "c: env", "d: kB"]
    return as_markdown(headings, rows, num_texts=2)


def _error_table(points: Points) -> str:
    fitted = points["fit"]
    model = model_of(points, "thread", keys=False)
    by_point = dict(zip(fitted, errors(model, fitted, "thread"), strict=True))
    shapes = dict.fromkeys((p.envs, p.size) for p in fitted)
    counts = sorted({p.servers for p in fitted})
    rows = [
        [
            f"{shape[0]} env{'s' * (shape[0] > 1)} of {shape[1]:,} bytes",
            *(_percent(by_point[p]) for p in fitted if (p.envs, p.size) == shape),
        ]
        for shape in shapes
    ]
    headings = [f"{n} server{'s' * (n > 1)}" for n in counts]
    return as_markdown(["envs per server", *headings], rows)


def _check_table(points: Points, part: str) -> str:
    rows = []
    for p in points[part]:
        model = model_of(points, "thread", keys=p.keys)
        predicted = model.predict(p)
        cells = [p.servers_are, _yes_or_no(p.keys)]
        cells += [f"{number:g}" for number in (p.delay_ms, p.env_us / 1e3)]
        cells += [f"{number:,}" for number in (p.servers, p.envs, p.size, p.splits)]
        cells += [f"{us:,.0f}" for us in (p.wall, p.process, p.thread, predicted)]
        rows.append([*cells, _percent(predicted / p.thread - 1)])
    headings = [
        *("server", "keys", "delay, ms", "env time, ms", "servers", "envs each"),
        *("bytes", "splits", "wall", "process", "thread", "predicted", "error"),
    ]
    return as_markdown(headings, rows, num_texts=2)


def _goal_table(points: Points, attach: Mapping[str, Any]) -> str:
    by_key = {p[:8]: p for p in points["check"]}  # without the costs
    one, many = by_key[Point(1, 1024, 16)[:8]], by_key[_LARGE[:8]]
    rows = [
        [
            f"us per server and batch step, 64 servers of 16 envs: {clock}",
            "15",
            f"{(getattr(many, clock) - getattr(one, clock)) / 63:.0f}",
        ]
        for clock in _CLOCKS
    ]
    longest = f"{attach['attaching']['p99']:.0f}"
    rows.append(["ms of a step while a server joins, p99", "100", longest])
    return as_markdown(["quantity", "goal (at most)", "measured"], rows)


def _wire_table(points: Points) -> str:
    rows = []
    for p in (*points["check"], *points["namespaces"]):
        if p.env_us or p.delay_ms:
            continue
        cells = [p.servers_are, _yes_or_no(p.keys), f"{p.servers}", f"{p.envs}"]
        cells += [f"{p.size:,}", f"{p.splits}"]
        messages = 2 * p.servers * p.splits / p.num_envs
        rows.append([*cells, f"{messages:.3g}", f"{p.wire / p.num_envs:,.0f}"])
    headings = ["server", "keys", "servers", "envs each", "bytes of observation"]
    headings += ["splits", "messages per env step", "bytes per env step"]
    return as_markdown(headings, rows, num_texts=2)


def _limit_table(points: Points) -> str:
    rows = []
    for size in _SIZES:
        for splits in (1, 2):
            cells = [f"{size:,}", f"{splits}"]
            for keys in (False, True):
                point = _LARGE._replace(size=size, splits=splits)
                us = model_of(points, "thread", keys=keys).predict(point)
                cores = model_of(points, "process", keys=keys).predict(point) / us
                steps = point.num_envs / us * 1e6
                gbit = f"{steps * size * 8 / 1e9:.2g}"
                cells += [f"{steps:,.0f}", gbit, f"{cores:.1f}"]
            rows.append(cells)
    results = ("env steps/s", "Gbit/s", "cores")
    headings = ["bytes", "splits", *results, *(f"{head}, keys" for head in results)]
    return as_markdown(headings, rows, num_texts=2)


def _attach_table(attach: Mapping[str, Any]) -> str:
    columns = ("steps", "p50", "p99", "p100")
    rows = [
        [name, *(f"{attach[phase][column]:,.0f}" for column in columns)]
        for phase, name in _PHASES.items()
    ]
    return as_markdown(["", "steps", "p50, ms", "p99, ms", "longest, ms"], rows)


def _plan_table(points: Points) -> str:
    model = model_of(points, "thread", keys=True)
    factor = slowdown(points["namespaces"], model)
    rows = []
    for env_us in _ENV_US:
        cells = [f"{env_us / 1e3:g} ms"]
        for size in _SIZES:
            hosts, steps, gbit = plan(model, env_us, size, slowdown=factor)
            if hosts > _LARGE.servers:
                cells.append(f"more than {_LARGE.servers} hosts")
                continue
            number = f"{hosts:,} host{'s' * (hosts > 1)}"
            cells.append(f"{number}, {steps:,.0f}/s, {gbit:.2g} Gbit/s")
        rows.append(cells)
    headings = ["env step", *(f"{size:,} bytes" for size in _SIZES)]
    table = as_markdown(headings, rows)
    return (
        f"{table}\nHosts have {CORES} cores. The times of the model are multiplied by "
        f"{factor:.1f}.\n"
    )


def _yes_or_no(is_true: bool) -> str:
    return "yes" if is_true else "no"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:+.0f} %"
