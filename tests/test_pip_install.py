"""scripts/pip_install.py prints its progress during a long installation."""

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from scripts import pip_install

#: Prints as pip does, and waits twice until the test writes to a FIFO.
FAKE_PIP = """
import sys
for line in ("Collecting x", "Installing collected packages: an.X, y\\n  Attempting"):
    print(line, flush=True)
    open(sys.argv[1]).read()
sys.exit(3)
"""


def test_progress_lines_are_printed_and_the_exit_code_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    lines: list[str] = []
    awaited = ["never", "s  1 of 2 packages installed, next y", "s  Collecting x"]

    def append(line: str, **_: object) -> None:
        lines.append(line)
        if line.endswith(awaited[-1]):
            awaited.pop()
            gate.write_text("enough")

    monkeypatch.setattr(
        pip_install, "COMMAND", (sys.executable, "-c", FAKE_PIP, str(gate))
    )
    monkeypatch.setattr(pip_install, "SECONDS_BETWEEN_LINES", 0.1)
    monkeypatch.setattr(pip_install, "print", append, raising=False)
    monkeypatch.setattr(sys, "argv", ["pip_install.py"])
    (tmp_path / "an_x-1.0.dist-info").mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert pip_install.main() == 3
    assert awaited == ["never"]
    assert lines[-1].endswith("s  1 of 2 packages installed, next y")


def test_packages_are_compiled_after_a_successful_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.py").write_text("x = 1")
    (tmp_path / "bad.py").write_text("print 'Python 2'")
    monkeypatch.setattr(pip_install, "COMMAND", (sys.executable, "-c", "pass"))
    monkeypatch.setattr(sys, "argv", ["pip_install.py"])
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert pip_install.main() == 0
    (compiled,) = (tmp_path / "__pycache__").iterdir()
    assert compiled.name.startswith("good.")


def test_output_that_is_not_utf8_is_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = r"import sys; sys.stdout.buffer.write(b'\xff\n'); sys.exit(3)"
    monkeypatch.setattr(pip_install, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(sys, "argv", ["pip_install.py"])
    assert pip_install.main() == 3
