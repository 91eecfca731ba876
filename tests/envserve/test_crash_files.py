"""Repro files are few, private and complete; file system errors are logged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from envserve.crashes.crash_folder import CrashFolder, default_folder


def test_a_file_is_private_complete_and_named_after_the_env(tmp_path: Path) -> None:
    files = CrashFolder(tmp_path / "new" / "folder")
    path = files.write("envs/Odd name\n-v0 env 7", b"content", 0.0)
    assert path is not None
    assert path.parent == tmp_path / "new" / "folder"
    assert path.name.startswith("envs-Odd-name-v0-env-7-")
    assert path.read_bytes() == b"content"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == [path.name]


def test_one_file_per_second_is_written_and_the_newest_are_kept(tmp_path: Path) -> None:
    other_files = [tmp_path / name for name in ("notes.txt", "download.part")]
    for file in other_files:
        file.touch()
        os.utime(file, (0, 0))
    files = CrashFolder(tmp_path)
    first = files.write("a", b"", -2.0)
    assert first is not None
    leftover = first.with_name(f"{first.name}.part")  # left by a killed process
    first.rename(leftover)
    os.utime(leftover, (0, 0))
    paths = []
    for number in range(52):
        now = 2.0 * number
        assert files.may_write(now)
        path = files.write("a", b"", now)
        assert path is not None
        os.utime(path, (number, number))
        paths.append(path)
        assert not files.may_write(now + 0.9)
    newest = files.write("b", b"", 200.0)
    left = {*tmp_path.iterdir()} - {*other_files}
    assert left == {*paths[3:], newest}  # 50 in all
    assert all(file.exists() for file in other_files)
    assert not leftover.exists()


@pytest.mark.parametrize(("mib", "num_left"), [(0, 50), (20, 5)])
def test_files_of_the_owner_with_the_most_files_are_deleted_first(
    tmp_path: Path, mib: int, num_left: int
) -> None:
    """Keep 50 files or 64 MiB: three of 20 MiB, the newest, and the other owner's."""
    crasher, other = (CrashFolder(tmp_path, owner) for owner in ("lease 1", "lease 2"))
    evidence = other.write("env-1", bytes(100), 0.0)
    assert evidence is not None
    os.utime(evidence, (0, 0))
    for number in range(1, 70):
        path = crasher.write("env-1", b"", number)
        assert path is not None
        os.truncate(path, mib << 20)
        os.utime(path, (number, number))
    left = {*tmp_path.iterdir()}
    assert {evidence, path} < left
    assert len(left) == num_left


def test_the_newest_file_is_kept_if_the_clock_was_set_back(tmp_path: Path) -> None:
    files = CrashFolder(tmp_path)
    for number in range(50):
        path = files.write("a", b"", number)
        assert path is not None
        os.utime(path, (1e10, 1e10))
    for number in (50, 51):
        path = files.write("a", b"", number)
        assert path is not None
        assert path.exists()
    assert len(os.listdir(tmp_path)) == 50


@pytest.mark.parametrize("kind", ["file", "full", "gone"])
def test_a_failing_file_system_is_logged_once_until_it_works_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    folder = tmp_path / "crashes"
    if kind == "file":
        folder.write_text("not a folder")
    elif kind == "full":
        replace = os.replace

        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", refuse)
    else:
        folder = Path("/proc/no/such/folder")
    files = CrashFolder(folder)
    for now in (0.0, 1.0, 2.0):
        assert files.write("a", b"content", now) is None
    assert len(caplog.messages) == 1
    assert "cannot write repro files" in caplog.text
    if kind == "full":
        assert list(folder.iterdir()) == []
        monkeypatch.setattr(os, "replace", replace)
        assert files.write("a", b"content", 3.0) is not None


@pytest.mark.parametrize("kind", ["link", "open", "of_another"])
def test_a_default_folder_that_others_can_use_is_rejected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = default_folder()
    assert folder.parent == tmp_path
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    if kind == "link":
        folder.symlink_to(real)
    elif kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.mkdir(mode=0o700)
        monkeypatch.setattr(os, "getuid", lambda: 123_456)
        monkeypatch.setattr(
            "envserve.crashes.crash_folder.default_folder", lambda: folder
        )
    files = CrashFolder(None)
    assert files.write("a", b"content", 0.0) is None
    assert "only this user can access" in caplog.text
    assert list(real.iterdir()) == []
    assert folder.is_symlink() or list(folder.iterdir()) == []


def test_a_missing_temporary_folder_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", refuse)
    files = CrashFolder(None)
    assert "default" in repr(files)
    assert files.write("a", b"content", 0.0) is None
    assert files.write("a", b"content", 1.0) is None
    assert len(caplog.messages) == 1
    assert "No usable temporary directory" in caplog.text


def test_the_default_folder_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = CrashFolder(None).write("a", b"content", 0.0)
    assert path is not None
    assert path.parent == default_folder()
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_an_error_of_a_signal_handler_is_raised(tmp_path: Path) -> None:
    class Interrupted(type(tmp_path)):  # type: ignore[misc]
        def mkdir(self, *_: object, **__: object) -> None:
            raise TimeoutError("raised by a handler of SIGALRM")

    with pytest.raises(TimeoutError, match="SIGALRM"):
        CrashFolder(Interrupted(tmp_path)).write("a", b"content", 0.0)
