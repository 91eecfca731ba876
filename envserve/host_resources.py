"""The CPU and memory limits of this process, set by its affinity and cgroups."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def num_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that affinity and cgroups let this process use."""
    if sys.platform == "linux":
        pinned: int | None = len(os.sched_getaffinity(0))
    else:
        pinned = os.cpu_count()
    return max(1, min(pinned or 1, _cgroup_cores(root)))


@cache
def _cgroup_cores(root: Path) -> int:
    """Return the number of cores that the cgroups (v1 or v2) of a container allow."""
    limit = 1 << 16
    names = "cfs_quota_us", "cfs_period_us"
    for quota, period in cgroup_limits(root, "cpu", names):
        if quota > 0:
            limit = min(limit, -(-quota // period))
    return limit


def cgroup_limits(
    root: Path, controller: str, v1_names: tuple[str, ...]
) -> Iterator[list[int]]:
    """Yield the limits of this process's cgroup and of each of its ancestors.

    Args:
      root: Root of the file system.
      controller: "cpu" or "memory".
      v1_names: Names of the cgroups v1 files that correspond to v2's `max`.
    """
    with contextlib.suppress(OSError, ValueError):  # the system has no cgroups
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            files = v1_names if controllers else ("max",)
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = base / path.lstrip("/")
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # no limit is set
                    values = [
                        (folder / f"{controller}.{name}").read_text() for name in files
                    ]
                    yield [int(number) for number in " ".join(values).split()]
