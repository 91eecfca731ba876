"""The files of a chaos run.

CASE.json     machine, counts, latencies and checks of a case
CASE.log      the log of the case
peers.json    results for other projects' envs after the same faults
tables.md     Markdown tables of all results in the folder
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.support.machine import describe_machine, machine_facts
from benchmarks.support.tables import as_markdown
from tests.chaos.case_result import CaseResult
from tests.chaos.trial import ChaosCase

COLUMNS: Final = (
    *("case", "fault", "goal", "result"),
    *("faults", "row-steps", "wrong", "lost rows by status"),
    *("p50 ms", "p99 ms", "max ms"),
)
_NUM_TEXTS: Final = 4
PEER_COLUMNS: Final = (
    *("vectorised env", "fault", "result of the step", "results of later steps"),
    *("wrong pairings", "recovers"),
)


def save_case(
    folder: Path, case: ChaosCase, result: CaseResult, options: Mapping[str, Any]
) -> None:
    """Save the result of a case, and rewrite the tables."""
    words = {"case": case.name, "does": case.fault, "goal": case.goal}
    _save(folder, case.name, {**words, **result.as_json()}, options)


def save_peers(
    folder: Path, rows: Sequence[Sequence[str]], options: Mapping[str, Any]
) -> None:
    _save(folder, "peers", {"columns": PEER_COLUMNS, "rows": rows}, options)


def _save(
    folder: Path, name: str, result: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    circumstances = {
        "finished": datetime.datetime.now().astimezone().isoformat("T", "seconds"),
        "machine": machine_facts(),
        "options": dict(options),
    }
    text = json.dumps({**circumstances, **result}, indent=2)
    folder.joinpath(f"{name}.json").write_text(f"{text}\n")
    folder.joinpath("tables.md").write_text(_tables(folder))


def _tables(folder: Path) -> str:
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    results = [result for result in found if "case" in result]
    parts = []
    if found:
        versions = {
            k: v for part in found for k, v in part["machine"]["versions"].items()
        }
        parts.append(describe_machine({**found[0]["machine"], "versions": versions}))
    if results:
        results.sort(key=lambda result: result["options"].get("position", 0))
        rows = [row_of(result) for result in results]
        parts.append(as_markdown(COLUMNS, rows, _NUM_TEXTS))
        notes = _scale_notes(results)
        notes += [line for result in results for line in notes_of(result)]
        parts.append("".join(f"* {line}\n" for line in notes))
    for result in found:
        if "columns" in result:
            parts.append(as_markdown(result["columns"], result["rows"], 4))
    return "\n".join(part for part in parts if part)


def row_of(result: Mapping[str, Any]) -> list[str]:
    """Return the table cells of a case.

    Args:
      result: The JSON data of the case.
    """
    latency = result["latency_seconds"]
    losses = ", ".join(f"{n:,} {status}" for status, n in result["losses"].items())
    if result["padding"]:
        losses = f"{losses or '-'}; {result['padding']:,} padded"
    if result["late"]:
        losses += f"; {result['late']:,} late"
    return [
        *(result["case"], result["does"], result["goal"], result["verdict"]),
        *(f"{result[name]:,}" for name in ("faults", "row_steps", "wrong")),
        losses or "-",
        *(_milliseconds(latency[name]) for name in ("p50", "p99", "max")),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def _scale_notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes that list the cases that ran at a reduced scale."""
    scales: dict[float, list[str]] = {}
    for result in results:
        scales.setdefault(result["options"]["scale"], []).append(result["case"])
    return [
        f"{', '.join(names)}: {scale:g} of the full counts"
        for scale, names in sorted(scales.items(), reverse=True)
        if scale != 1.0
    ]


def notes_of(result: Mapping[str, Any]) -> list[str]:
    """Return the notes about a case, to be shown below the table."""
    name = result["case"]
    lines = [f"{name}: {note}" for note in result["notes"]]
    if result["skipped"]:
        lines.append(f"{name}: skipped, {result['skipped']}")
    if result["error"]:
        lines.append(f"{name}: {result['error'].splitlines()[0]}")
    for check in result["checks"]:
        if not check["is_met"]:
            measured = check["measured"]
            number = "nothing" if measured is None else f"{measured:.4g}"
            lines.append(f"{name}: {check['meaning']}: {number}, goal {check['goal']}")
    return lines
