"""Fixtures that run a benchmark command in this process."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cases import envs
from benchmarks.cli import main
from benchmarks.harness import Case
from envserve.bench.interleaved import Measurements, interleave
from envserve.pool.launcher import Launcher
from tests.envserve.conftest import pools_of

Bench = Callable[..., dict[str, Any]]


def measure_here(
    cases: Sequence[Case], repetitions: int, say: Callable[[str], None]
) -> Measurements:
    """Measure cases like `measure_cases`, but in this process, which starts faster."""
    with contextlib.ExitStack() as stack:
        measures = {
            case.name: stack.enter_context(case.open(**case.arguments))
            for case in pickle.loads(pickle.dumps(cases))  # as for a process
        }
        return interleave(measures, repetitions, say)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    def run(*arguments: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--outdir", str(tmp_path)])
        assert caught.value.code == 0
        result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
        assert result["benchmark"] == arguments[0]
        assert all(
            np.isfinite(list(repetition.values())).all()
            for repetitions in result["repetitions"].values()
            for repetition in repetitions
        )
        return result

    return run


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with contextlib.closing(Launcher([envs.MODULE], ["CartPole-v1"])) as launcher:
        yield launcher


@pytest.fixture
def bench_here(
    bench: Bench, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """Return `bench`, but measure the cases in this process."""
    monkeypatch.setattr("benchmarks.command.measure_cases", measure_here)
    with pools_of(launcher):
        yield bench
