"""Pipes, devices and huge files are rejected at once instead of being read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from envserve.cli.app import PROGRAM
from envserve.regular_file import open_regular
from tests.command_line import invoke

SPECIAL: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_special_files_are_rejected(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "file")
    with pytest.raises(
        OSError, match=r"not a regular file|Is a directory|Too many levels"
    ):
        open_regular(tmp_path / "file")
    result = invoke(PROGRAM, ["replay", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "cannot read the repro file" in result.stderr
    assert result.stderr.count("\n") == 1


def test_files_beyond_the_limit_and_links_can_be_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link", 1 << 20) as file:
        assert file.read() == b"x"
    os.truncate(tmp_path / "file", 1 << 40)  # takes no space on the disk
    with pytest.raises(OSError, match="larger than 1 MiB"):
        open_regular(tmp_path / "file", 1 << 20)
    with pytest.raises(OSError, match="Too many levels"):
        open_regular(tmp_path / "link", follow_links=False)
