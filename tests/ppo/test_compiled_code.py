"""The compilation cache: sharing, damaged entries, size limit, and opting out."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ppo.cli import compilation_cache
from ppo.cli.compilation_cache import enable_compilation_cache

FLAG = "--tf_xla_persistent_cache_directory"
#: A cache entry: protobuf fields with the key, the compiled function and the code.
ENTRY = b"\x0a\x02ab" + b"\x12\x81\x01" + bytes(129) + b"\x1a\x04code"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TF_XLA_FLAGS", "")
    return tmp_path / "envserve" / "xla"


def test_processes_share_entries_and_replace_damaged_ones(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.ppo.preload", "tests.ppo.compile_in_turns"]
    result = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, check=True
    )
    report = json.loads(result.stdout)
    assert report["at_once"] == [0, 0], result.stderr
    assert report["again"] == [[0], True]
    # With an incomplete or empty entry, TensorFlow alone fails (exit code 3). Because
    # we check the folder, it compiles the code again.
    assert report["damaged"] == [[3], [0], True, [3], [0], True]


@pytest.mark.parametrize(
    "flags", [f"{FLAG}=", f"--tf_xla_auto_jit=2 {FLAG}=/mine", "/file/of/flags"]
)
def test_cache_flags_of_the_user_are_not_changed(
    root: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setenv("TF_XLA_FLAGS", flags)
    enable_compilation_cache("2.21.0")
    assert os.environ["TF_XLA_FLAGS"] == flags
    assert not root.exists()


def test_other_flags_are_kept_and_each_version_and_machine_has_its_folder(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, xla_flags in (("1.0", ""), ("2.0", ""), ("2.0", "--xla_a=1")):
        monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=2")
        monkeypatch.setenv("XLA_FLAGS", xla_flags)
        enable_compilation_cache(version)
        before, _, folder = os.environ["TF_XLA_FLAGS"].partition(f" {FLAG}=")
        assert before == "--tf_xla_auto_jit=2"
        assert Path(folder).parent == root
        assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert len(list(root.iterdir())) == 3


@pytest.mark.parametrize("name", ["a folder", "file"])
def test_without_a_usable_folder_nothing_is_cached(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    enable_compilation_cache("2.21.0")
    assert os.environ["TF_XLA_FLAGS"] == ""


def test_a_folder_in_which_others_can_write_code_is_not_used(root: Path) -> None:
    root.mkdir(parents=True)
    root.chmod(0o777)
    enable_compilation_cache("2.21.0")
    assert os.environ["TF_XLA_FLAGS"] == ""


def test_nothing_is_cached_on_a_nearly_full_disk(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation_cache, "_MAX_BYTES", 2**63)
    enable_compilation_cache("2.21.0")
    assert os.environ["TF_XLA_FLAGS"] == ""


def test_nothing_is_cached_if_a_quota_is_used_up(root: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # like a quota
    try:
        enable_compilation_cache("2.21.0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.environ["TF_XLA_FLAGS"] == ""


def test_old_and_incomplete_entries_are_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = root / "1.0-other"
    folder.mkdir(parents=True)
    ages = {"new.pb": 0, "mid.pb": 10, "old.pb": 20, "x.pb.tmp": 0, "y.pb.tmp": 9e3}
    monkeypatch.setattr(compilation_cache, "_MAX_BYTES", 2 * len(ENTRY) + 10)
    now = folder.stat().st_mtime
    for name, age in ages.items():
        path = folder / name
        path.write_bytes(ENTRY if path.suffix == ".pb" else b"half")
        os.utime(path, (now - age, now - age))
    (folder / "cut.pb").write_bytes(ENTRY[:-1])
    (folder / "garbage.pb").write_bytes(b"\xff" * 99 + b"\x01")
    enable_compilation_cache("2.21.0")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["mid.pb", "new.pb", "x.pb.tmp"]
