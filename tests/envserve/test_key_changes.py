"""Files of keys that change, or cannot be read for a moment, while they are used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from envserve.errors import ConnectError, KeyFileError
from envserve.keys.grant import Grant
from envserve.keys.key_folder import KeyFolder
from envserve.server.access import Access

NOW = 1_800_000_000.0
KEY = bytes(32)


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    folder.clients.add(Grant(name="ci", public=KEY), NOW)
    assert folder.clients.find(KEY, NOW)
    return folder


def test_half_a_file_keeps_who_was_known_until_it_is_whole(folder: KeyFolder) -> None:
    path = folder.path / "clients"
    whole = path.read_text()
    for half in ("", whole[:-1]):
        path.write_text(half)
        assert folder.clients.find(KEY, NOW)
        assert not folder.clients.is_current
    path.write_text("# nobody\n")
    assert folder.clients.find(KEY, NOW) is None


def test_what_was_wrong_beside_the_file_is_looked_at_again(
    folder: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.path.chmod(0o755)
    (folder.path / "clients").write_text("# nobody\n")
    assert all(folder.clients.find(KEY, NOW) for _ in range(3))
    assert len(caplog.records) == 1
    folder.path.chmod(0o700)
    assert folder.clients.find(KEY, NOW) is None


def test_a_new_key_of_a_name_gets_in_once_nothing_is_left_of_the_old_one(
    folder: KeyFolder,
) -> None:
    """Else leases of the one could not be told from leases of the other."""
    access, new = Access(folder), bytes([1] * 32)
    assert access.find(KEY)
    folder.clients.add(Grant(name="ci", public=new), NOW)
    with pytest.raises(KeyFileError, match="ci has had another key"):
        access.find(new)
    assert access.find_revoked() == {"ci"}
    with pytest.raises(KeyFileError, match="ci has had another key"):
        access.find(new)
    access.forget_revoked()
    assert access.find(new)
    assert access.find_revoked() == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_socket_of_another_user_is_not_spoken_to(
    folder: KeyFolder, tmp_path: Path
) -> None:
    path = tmp_path / "envs"
    assert folder.keys_for(f"ipc://{path}") is None  # there is none yet
    path.touch()
    assert folder.keys_for(f"ipc://{path}") is None
    os.chown(path, 65534, 65534)
    with pytest.raises(ConnectError, match="got one of uid 65534"):
        folder.keys_for(f"ipc://{path}")
