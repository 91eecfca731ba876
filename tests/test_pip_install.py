"""The script by which make installs speaks while it takes long."""

import os
import sys
from pathlib import Path

import pytest

from scripts import pip_install


def test_a_line_comes_now_and_then_and_the_exit_code_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    told: list[str] = []

    def tell(line: str, **_: object) -> None:
        told.append(line)
        if sum(each.endswith("s  Collecting x") for each in told) == 2:
            gate.write_text("enough")

    waits = f"print('Collecting x', flush=True); open({str(gate)!r}).read(); exit(3)"
    monkeypatch.setattr(pip_install, "COMMAND", (sys.executable, "-c", waits))
    monkeypatch.setattr(pip_install, "SECONDS_BETWEEN_LINES", 0.1)
    monkeypatch.setattr(pip_install, "print", tell, raising=False)
    monkeypatch.setattr(sys, "argv", ["pip_install.py"])
    assert pip_install.main() == 3
    assert told[-1].endswith("s  Collecting x")
