"""The tables of docs/scaling.md, made of the numbers in docs/scaling.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from benchmarks.lab.tables import as_markdown, replace_marked
from benchmarks.scaling.measure import Point
from benchmarks.scaling.model import CORES, Clock, Model, errors, fit, plan, slowdown

#: Microseconds of an env's step, and bytes of its observation.
_ENV_US: Final = (10, 100, 1_000, 10_000)
_SIZES: Final = (16, 1_024, 28_224)
_LARGE: Final = Point(64, 16, 16)
_CLOCKS: Final[tuple[Clock, ...]] = get_args(Clock)
Points = Mapping[str, Sequence[Point]]


def write_document(path: Path, numbers: Mapping[str, Any]) -> None:
    """Replaces the tables of a page, each between two marks with its name."""
    for name, table in tables(numbers).items():
        replace_marked(path, name, table)


def tables(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Returns the page's tables in Markdown, by their names."""
    points = {
        part: [Point(*each) for each in found]
        for part, found in numbers.items()
        if isinstance(found, list)
    }
    return {
        "machine": numbers["machine"],
        "model": _models(points),
        "errors": _errors(points),
        "check": _checked(points, "check"),
        "namespaces": _checked(points, "namespaces"),
        "goals": _goals(points, numbers["attach"]),
        "wire": _wire(points),
        "limits": _limits(points),
        "attach": _attach(numbers["attach"]),
        "plan": _plans(points),
    }


def model_of(points: Points, clock: Clock, *, keys: bool) -> Model:
    """Returns the model of what was measured on 1 to 16 servers."""
    return fit(points["fit with keys" if keys else "fit"], clock)


def _models(points: Points) -> str:
    rows = []
    for clock in _CLOCKS:
        for keys in (False, True):
            model = model_of(points, clock, keys=keys)
            rows.append([clock, _yes(keys), *(f"{us:.3g}" for us in model)])
    heads = ["clock", "keys", "a: split", "b: server", "c: env", "d: kB"]
    return as_markdown(heads, rows, num_texts=2)


def _errors(points: Points) -> str:
    found = points["fit"]
    off = dict(zip(found, errors(fit(found, "thread"), found, "thread"), strict=True))
    shapes = dict.fromkeys((p.envs, p.size) for p in found)
    counts = sorted({p.servers for p in found})
    rows = [
        [
            f"{envs} envs of {size:,} bytes",
            *(_percent(off[p]) for p in found if (p.envs, p.size) == (envs, size)),
        ]
        for envs, size in shapes
    ]
    return as_markdown(["a server has", *(f"{n} servers" for n in counts)], rows)


def _checked(points: Points, part: str) -> str:
    rows = []
    for p in points[part]:
        model = model_of(points, "thread", keys=p.keys)
        rows.append(
            [
                *(
                    p.servers_are,
                    _yes(p.keys),
                    f"{p.delay_ms:g}",
                    f"{p.env_us / 1e3:g}",
                ),
                *(f"{number:,}" for number in (p.servers, p.envs, p.size, p.splits)),
                *(f"{us:,.0f}" for us in (p.wall, p.process, p.thread)),
                f"{model.predict(p):,.0f}",
                _percent(model.predict(p) / p.thread - 1),
            ]
        )
    heads = [
        *("servers are", "keys", "delay, ms", "envs take, ms", "servers", "envs each"),
        *("bytes", "splits", "wall", "process", "thread", "predicted", "off by"),
    ]
    return as_markdown(heads, rows, num_texts=2)


def _goals(points: Points, attach: Mapping[str, Any]) -> str:
    found = {p[:8]: p for p in points["check"]}
    one, many = found[Point(1, 1024, 16)[:8]], found[_LARGE[:8]]
    rows = [
        [
            f"us per server and batch step, 64 servers of 16 envs: {clock}",
            "15",
            f"{(getattr(many, clock) - getattr(one, clock)) / 63:.0f}",
        ]
        for clock in _CLOCKS
    ]
    longest = f"{attach['attaching']['p99']:.0f}"
    rows.append(["ms of a step while a server is attached to, p99", "100", longest])
    return as_markdown(["what", "at most", "measured"], rows)


def _wire(points: Points) -> str:
    rows = []
    for p in (*points["check"], *points["namespaces"]):
        if p.env_us or p.delay_ms:
            continue
        cells = [
            p.servers_are,
            _yes(p.keys),
            f"{p.servers}",
            f"{p.envs}",
            f"{p.size:,}",
        ]
        messages = 2 * p.servers * p.splits / p.num_envs
        each = p.wire / p.num_envs
        rows.append([*cells, f"{p.splits}", f"{messages:.3g}", f"{each:,.0f}"])
    heads = ["servers are", "keys", "servers", "envs each", "bytes of observation"]
    heads += ["splits", "messages per env step", "bytes per env step"]
    return as_markdown(heads, rows, num_texts=2)


def _limits(points: Points) -> str:
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
    each = ("env steps/s", "Gbit/s", "cores")
    heads = ["bytes", "splits", *each, *(f"{head}, keys" for head in each)]
    return as_markdown(heads, rows, num_texts=2)


def _attach(attach: Mapping[str, Any]) -> str:
    parts = ("calm", "leaving", "attaching")
    rows = [
        [part, *(f"{attach[part][n]:,.0f}" for n in ("steps", "p50", "p99", "p100"))]
        for part in parts
    ]
    return as_markdown(["", "steps", "p50, ms", "p99, ms", "longest, ms"], rows)


def _plans(points: Points) -> str:
    model = model_of(points, "thread", keys=True)
    factor = slowdown(points["namespaces"], model)
    rows = []
    for env_us in _ENV_US:
        cells = [f"{env_us / 1e3:g} ms"]
        for size in _SIZES:
            hosts, steps, gbit = plan(model, env_us, size, slowdown=factor)
            found = f"{hosts:,}: {steps:,.0f}/s, {gbit:.2g} Gbit/s"
            cells.append(found if hosts <= _LARGE.servers else f"> {_LARGE.servers}")
        rows.append(cells)
    heads = [f"an env takes; hosts of {CORES} cores", *(f"{s:,} bytes" for s in _SIZES)]
    table = as_markdown(heads, rows)
    return f"{table}\nHere the model's times are multiplied by {factor:.1f}.\n"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _percent(part: float) -> str:
    return f"{100 * part:+.0f} %"
