"""Key files that change or are briefly unreadable while a server uses them."""

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


def test_an_incomplete_clients_file_does_not_change_the_authorised_clients(
    folder: KeyFolder,
) -> None:
    path = folder.path / "clients"
    whole = path.read_text()
    for half in ("", whole[:-1]):
        path.write_text(half)
        assert folder.clients.find(KEY, NOW)
        assert not folder.clients.is_current
    path.write_text("# nobody\n")
    assert folder.clients.find(KEY, NOW) is None


def test_a_problem_outside_the_file_is_checked_again(
    folder: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.path.chmod(0o755)
    (folder.path / "clients").write_text("# nobody\n")
    assert all(folder.clients.find(KEY, NOW) for _ in range(3))
    assert len(caplog.records) == 1
    folder.path.chmod(0o700)
    assert folder.clients.find(KEY, NOW) is None


def test_a_new_key_of_a_name_is_accepted_once_the_old_one_is_forgotten(
    folder: KeyFolder,
) -> None:
    """Otherwise the leases of the two keys would be indistinguishable."""
    access, new = Access(folder), bytes([1] * 32)
    assert access.find_grant(KEY)
    folder.clients.add(Grant(name="ci", public=new), NOW)
    with pytest.raises(KeyFileError, match="ci: a previous key is still in use"):
        access.find_grant(new)
    assert access.find_revoked() == {"ci"}
    with pytest.raises(KeyFileError, match="ci: a previous key is still in use"):
        access.find_grant(new)
    access.forget_revoked()
    assert access.find_grant(new)
    assert access.find_revoked() == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_socket_of_another_user_is_rejected(
    folder: KeyFolder, tmp_path: Path
) -> None:
    path = tmp_path / "envs"
    assert folder.keys_for(f"ipc://{path}") is None  # it does not exist yet
    path.touch()
    assert folder.keys_for(f"ipc://{path}") is None
    os.chown(path, 65534, 65534)
    with pytest.raises(ConnectError, match="got one of uid 65534"):
        folder.keys_for(f"ipc://{path}")
