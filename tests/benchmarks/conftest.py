"""A fixture that runs a benchmark command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cli import main

Bench = Callable[..., dict[str, Any]]


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
