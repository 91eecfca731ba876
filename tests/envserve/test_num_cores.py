"""The default number of workers is one per core that this process may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from envserve.host_resources import num_cores

V2 = "0::/pod/app\n"
V1 = "9:cpuset:/\n4:cpu,cpuacct:/docker/7f\n1:name=systemd:/\n0::/\n"


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        (None, {}, 16),
        (V2, {}, 16),
        (V2, {"pod/app/cpu.max": "max 100000"}, 16),
        (V2, {"pod/app/cpu.max": "200000 100000"}, 2),
        (V2, {"pod/app/cpu.max": "150000 100000"}, 2),
        (V2, {"pod/app/cpu.max": "5000 100000"}, 1),
        (V2, {"pod/app/cpu.max": "900000 100000", "pod/cpu.max": "300000 100000"}, 3),
        (V2, {"cpu.max": "400000 100000"}, 4),  # a container's cgroup is its root
        (V2, {"cpu.max": "odd"}, 16),
        (V2, {"cpu.max": "3200000 100000"}, 16),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        (V1, {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "50000"}, 5),
        (
            V1,
            {
                "cpu/docker/7f/cpu.cfs_quota_us": "100000",
                "cpu/docker/7f/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        (V1, {"cpu.max": "100000 100000"}, 1),
    ],
)
def test_the_cpu_quota_of_a_container_limits_the_cores(
    groups: str | None, files: dict[str, str], cores: int, tmp_path: Path
) -> None:
    if groups is not None:
        files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
        for name, text in {**files, "proc/self/cgroup": groups}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    assert num_cores(tmp_path) == cores


def test_without_a_quota_the_cpu_affinity_limits_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert num_cores(tmp_path) == 2
    assert num_cores() in (1, 2)
