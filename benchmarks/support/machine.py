"""Describe the machine on which a benchmark was measured."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from envserve.host_resources import num_cores

_PACKAGES: Final = (
    *("envserve", "numpy", "gymnasium", "pyzmq", "mujoco"),
    *("tensorflow", "tensorflow-cpu", "torch"),
    *("stable-baselines3", "tianshou", "envpool"),
)


def machine_facts() -> dict[str, Any]:
    """Return a dict with the cores, processor, system and package versions."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # not installed
            versions[package] = version(package)
    return {
        "cores": num_cores(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def describe_machine(machine: Mapping[str, Any]) -> str:
    """Return one line of text that describes the result of `machine_facts`."""
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    return (
        f"{machine['cores']} cores of {machine['processor']}, "
        f"{machine['system']}, Python {machine['python']}; {versions}.\n"
    )


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
