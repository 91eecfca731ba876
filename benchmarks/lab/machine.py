"""What a reader of measured numbers must know of the machine."""

from __future__ import annotations

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from envserve.cores import num_cores

__all__ = ["machine_facts"]

_PACKAGES: Final = (
    *("envserve", "numpy", "gymnasium", "pyzmq", "mujoco"),
    *("tensorflow", "tensorflow-cpu", "torch"),
    *("stable-baselines3", "tianshou", "envpool"),
)


def machine_facts() -> dict[str, Any]:
    """Returns cores, processor, system, and the versions of what takes part."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # then it takes no part
            versions[package] = version(package)
    return {
        "cores": num_cores(),
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
