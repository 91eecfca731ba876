"""What a reader of a benchmark's numbers must know of the machine."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

__all__ = ["available_cores", "machine_facts"]

_PACKAGES: Final = (
    *("envserve", "numpy", "gymnasium", "pyzmq", "mujoco"),
    *("tensorflow", "tensorflow-cpu", "torch"),
    *("stable-baselines3", "tianshou", "envpool"),
)


def available_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_facts() -> dict[str, Any]:
    """Returns cores, processor, system, and the versions of what takes part."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # then it takes no part
            versions[package] = version(package)
    return {
        "cores": available_cores(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
