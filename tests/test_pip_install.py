"""scripts/pip_install.py prints its progress during a long installation."""

import os
import sys
from pathlib import Path

import pytest

from scripts import pip_install


def test_progress_lines_are_printed_and_the_exit_code_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    lines: list[str] = []

    def append(line: str, **_: object) -> None:
        lines.append(line)
        if sum(each.endswith("s  Collecting x") for each in lines) == 2:
            gate.write_text("enough")

    waits = f"print('Collecting x', flush=True); open({str(gate)!r}).read(); exit(3)"
    monkeypatch.setattr(pip_install, "COMMAND", (sys.executable, "-c", waits))
    monkeypatch.setattr(pip_install, "SECONDS_BETWEEN_LINES", 0.1)
    monkeypatch.setattr(pip_install, "print", append, raising=False)
    monkeypatch.setattr(sys, "argv", ["pip_install.py"])
    assert pip_install.main() == 3
    assert lines[-1].endswith("s  Collecting x")
