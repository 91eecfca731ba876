"""The notebook in examples/, executed by Jupyter."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


@pytest.mark.timeout(400)
def test_the_notebook_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for name, value in {"PATH": path, "JUPYTER_PLATFORM_DIRS": "1"}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=place
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert "observations: float32 (8, 4)" in text
    lost, reason = re.findall(r"(\d+) of 800 transitions were lost; (.*)", text)[0]
    assert 0 < int(lost) < 100
    assert "exited with code 7" in reason
    (trained,) = re.findall(
        r"Evaluation after 28,672 steps: mean return ([\d.]+)", text
    )
    assert float(trained) > 100.0
    assert "26,624 steps: mean return " in text
