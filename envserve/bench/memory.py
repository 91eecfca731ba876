"""How much memory a process and all that it has started take, on Linux."""

from __future__ import annotations

from pathlib import Path

__all__ = ["proportional_set_bytes", "with_descendants"]


def with_descendants(pid: int) -> list[int]:
    """Returns a process and the processes that it has started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in parentheses, may itself hold spaces and parentheses.
                fields = entry.joinpath("stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def proportional_set_bytes(pids: list[int]) -> int:
    """Returns the sum of their proportional set sizes.

    There, a page that several processes share counts for each by its share.
    """
    return sum(_proportional_set_bytes(pid) for pid in pids)


def _proportional_set_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("Pss:"))
    return int(kibibytes) << 10
