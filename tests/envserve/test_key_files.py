"""Key files are atomic and private, and rejected if others can read or own them."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from envserve.address import NamedAddress
from envserve.errors import ConnectError, KeyFileError, RemoteProtocolError
from envserve.keys import formats
from envserve.keys.clients_file import ClientsFile
from envserve.keys.grant import Grant
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair
from envserve.keys.private_files import read_private

NOW = 1_800_000_000.0
FILES = ("server.key", "client.key", "clients", "servers")


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "a" / "keys")


def create_all_files(folder: KeyFolder) -> None:
    folder.ensure_key("server")
    folder.ensure_key("client")
    folder.clients.add(Grant(name="ci", public=bytes(32)), NOW)
    folder.add_pin(["tcp://sim1:5555"], bytes(32), "ci")


def read_all_files(folder: KeyFolder) -> None:
    folder.key("server")
    folder.key("client")
    ClientsFile(folder.path / "clients").read()
    folder.pinned_key("tcp://sim1:5555")


def invite(folder: KeyFolder, name: str, **more: float) -> bytes:
    public = KeyPair.generate().public
    until = more.pop("until", NOW + 900)
    folder.clients.add(Grant(name=name, public=public, until=until, **more), NOW)  # type: ignore[arg-type]
    return public


def test_an_error_of_a_signal_handler_is_raised(
    tmp_path: Path, folder: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> NoReturn:
        raise TimeoutError("raised by a handler of SIGALRM")

    folder.ensure_key("server")
    monkeypatch.setattr(socket, "getaddrinfo", interrupt)
    with pytest.raises(TimeoutError, match="SIGALRM"):
        folder.keys_for("tcp://sim1:5555")

    class Interrupted(type(tmp_path)):  # type: ignore[misc]
        @property
        def parent(self) -> Path:
            interrupt()

    with pytest.raises(TimeoutError, match="SIGALRM"):
        read_private(Interrupted(tmp_path) / "clients")

    fake_os = SimpleNamespace(stat=interrupt)
    monkeypatch.setattr("envserve.keys.key_folder.os", fake_os)
    with pytest.raises(TimeoutError, match="SIGALRM"):
        folder.keys_for("ipc:///run/envs")


def test_reading_creates_no_files(folder: KeyFolder) -> None:
    read_all_files(folder)
    assert folder.key("server") is folder.key("client") is None
    assert folder.pinned_key("tcp://127.0.0.1:5555") is None
    assert folder.clients.find(bytes(32), NOW) is None
    assert not folder.path.parent.exists()


def test_files_are_private_for_any_umask(folder: KeyFolder) -> None:
    before = os.umask(0)
    try:
        create_all_files(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(FILES)
    for path in folder.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_changed_file_and_its_name_are_flushed_to_disk(
    folder: KeyFolder, flushed_inodes: list[int]
) -> None:
    invite(folder, "ci")
    clients = folder.path / "clients"
    assert flushed_inodes == [clients.stat().st_ino, folder.path.stat().st_ino]


def test_a_key_is_created_once_and_read_afterwards(folder: KeyFolder) -> None:
    pair = folder.ensure_key("server")
    assert pair is not None
    assert folder.ensure_key("server") == folder.key("server") == pair
    assert folder.ensure_key("client") != pair
    first, second = (folder.path / "server.key").read_text().splitlines()
    assert first.startswith("# envserve key, 20")
    assert first.endswith("; keep it secret: it identifies you")
    assert second == formats.encode(formats.SECRET, pair.secret)
    assert folder.new_key("server") == folder.key("server") != pair


def test_concurrent_calls_create_only_one_key(folder: KeyFolder) -> None:
    found = []
    threads = [
        threading.Thread(
            target=lambda: found.append(KeyFolder(folder.path).ensure_key("server"))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [folder.key("server")] * 4


def test_the_default_folder_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ENVSERVE_HOME", raising=False)
    assert KeyFolder().path == tmp_path / ".config" / "envserve"
    monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path / "b"))
    assert KeyFolder().path == tmp_path / "b"
    assert KeyFolder(tmp_path / "c").path == tmp_path / "c"


def test_the_error_about_a_key_that_others_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = KeyFolder(tmp_path / ".config" / "envserve")
    create_all_files(folder)
    (folder.path / "server.key").chmod(0o644)
    with pytest.raises(KeyFileError) as caught:
        folder.ensure_key("server")
    assert str(caught.value) == (
        "~/.config/envserve/server.key can be read by others (mode 0644); chmod 600, "
        "and create a new one if others may have read it: envserve keys new"
    )


@pytest.mark.parametrize("name", [*FILES, "."])
@pytest.mark.parametrize("mode", [0o040, 0o004, 0o020, 0o002])
def test_files_that_others_can_read_or_write_are_rejected(
    folder: KeyFolder, name: str, mode: int
) -> None:
    create_all_files(folder)
    path = folder.path / name
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(KeyFileError, match=r"can be (read|written) by others \(mode 0"):
        read_all_files(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_read(folder: KeyFolder, name: str, kind: str) -> None:
    create_all_files(folder)
    path = folder.path / name
    if kind == "link":
        path.rename(folder.path / "real")
        path.symlink_to(folder.path / "real")
    else:
        path.unlink()
        os.mkfifo(path, 0o600) if kind == "pipe" else path.mkdir(0o700)
    with pytest.raises(
        KeyFileError, match=f"{name} (cannot be read|is not a regular file)"
    ):
        read_all_files(folder)


def test_a_file_in_place_of_the_key_folder_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("")
    with pytest.raises(KeyFileError, match="notes is not a folder; set ENVSERVE_HOME"):
        read_all_files(KeyFolder(file))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", [*FILES, "."])
def test_files_of_another_user_are_rejected(folder: KeyFolder, name: str) -> None:
    create_all_files(folder)
    os.chown(folder.path / name, 65534, -1)
    with pytest.raises(KeyFileError, match=r"belongs to another user \(uid 65534\)"):
        read_all_files(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_use_the_key_folder() -> None:
    code = (
        "import os, sys; from envserve.keys.key_folder import KeyFolder\n"
        # Import first, because the other user may not have access to the interpreter.
        "import envserve.keys.key_pair; os.setuid(65534)\n"
        "try: KeyFolder(sys.argv[1]).ensure_key('server')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o711)
        create_all_files(folder := KeyFolder(Path(top, "keys")))
        finished = subprocess.run(
            [sys.executable, "-c", code, str(folder.path)],
            capture_output=True,
            text=True,
            timeout=90,
        )
    assert "KeyFileError" in finished.stdout, finished.stderr
    assert "belongs to another user (uid 0); expected uid 65534" in finished.stdout


def test_an_invalid_key_file_is_rejected_without_repeating_its_content(
    folder: KeyFolder,
) -> None:
    folder.ensure_key("client")
    path = folder.path / "client.key"
    text = path.read_text()
    message = r"client\.key: expected .*, or run envserve keys new client$"
    # It is empty after the disk was full, for example.
    for wrong in ("", text[:-5], text + text, text.replace("secret", "public")):
        path.write_text(wrong)
        with pytest.raises(KeyFileError, match=message) as caught:
            folder.ensure_key("client")
        assert text.split(".")[-1][:40] not in str(caught.value)


def test_key_files_may_begin_with_a_byte_order_mark(folder: KeyFolder) -> None:
    """Some editors write one."""
    invite(folder, "ci")
    key = folder.ensure_key("server")
    for path in folder.path.iterdir():
        path.write_text(path.read_text(), "utf-8-sig")
    assert folder.ensure_key("server") == key
    assert [grant.name for grant in KeyFolder(folder.path).clients.grants()] == ["ci"]


@pytest.mark.parametrize("number", [2, 13])
def test_the_error_about_a_home_folder_that_is_not_writable_states_the_remedy(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, "It refuses")

    monkeypatch.setattr(Path, "mkdir", fails)
    with pytest.raises(KeyFileError, match=r"It refuses; .* set ENVSERVE_HOME"):
        folder.ensure_key("server")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (28, "free disk space"),
        (30, "free disk space"),
        (40, "expected a file or folder"),
    ],
)
def test_a_file_that_cannot_be_replaced_is_unchanged(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    create_all_files(folder)
    before = (folder.path / "clients").read_text()

    def fails(*_: object) -> None:
        raise OSError(number, "It refuses")

    monkeypatch.setattr(os, "replace", fails)
    text = f"clients cannot be written: It refuses; {remedy}"
    with pytest.raises(KeyFileError, match=text):
        folder.clients.remove("ci")
    assert (folder.path / "clients").read_text() == before
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(FILES)


def test_a_pin_applies_to_each_of_its_addresses_until_it_is_replaced(
    folder: KeyFolder,
) -> None:
    old, new, own = bytes(32), b"n" * 32, folder.ensure_key("server")
    folder.add_pin(["tcp://sim1:5555", "tcp://10.0.0.7:5555"], old, "trainer-1")
    folder.add_pin(["tcp://sim1:5555", "tcp://127.0.0.1:7"], new, "t-1")
    assert folder.pinned_key("tcp://10.0.0.7:5555") == old
    assert folder.pinned_key("tcp://sim1:5555") == new
    assert folder.pinned_key("tcp://sim2:5555") is None
    # On loopback, a client expects this user's server if no key is pinned.
    assert own is not None
    assert folder.keys_for("tcp://127.0.0.1:5555") == (own.public, folder.key("client"))
    assert folder.keys_for("tcp://127.0.0.1:7") == (new, folder.key("client"))
    (folder.path / "servers").write_text(
        f"tcp://a:1,tcp://b:1  {formats.encode(formats.PUBLIC, old)}  # as trainer-1\n"
    )
    assert folder.pinned_key("tcp://a:1") == folder.pinned_key("tcp://b:1") == old


def test_pins_ignore_the_case_of_host_names(folder: KeyFolder) -> None:
    old, new = b"o" * 32, b"n" * 32
    folder.add_pin(["tcp://Sim1:5555", "ray://Default/envs"], old, "t-1")
    assert folder.pinned_key("tcp://sim1:5555") == old
    resolved = NamedAddress("tcp://10.0.0.8:5555", "tcp://SIM1:5555")
    assert folder.pinned_key(resolved) == old
    assert folder.pinned_key("ray://default/envs") is None
    folder.add_pin(["tcp://SIM1:5555"], new, "t-1")
    assert folder.pinned_key("tcp://Sim1:5555") == new
    public = formats.encode(formats.PUBLIC, old)
    (folder.path / "servers").write_text(f"tcp://Sim2:5555 {public}\n")
    assert folder.pinned_key("tcp://sim2:5555") == old


def test_a_pin_with_a_wildcard_applies_to_all_servers_of_a_cluster(
    folder: KeyFolder,
) -> None:
    cluster, one = b"c" * 32, b"o" * 32
    folder.add_pin(["tcp://*:5555"], cluster, "trainer")
    folder.add_pin(["tcp://10.0.0.7:5555"], one, "trainer")
    assert folder.pinned_key("tcp://10.0.0.8:5555") == cluster
    assert folder.pinned_key("tcp://[fe80::1]:5555") == cluster
    assert folder.pinned_key("tcp://10.0.0.7:5555") == one
    assert folder.pinned_key("tcp://10.0.0.8:5556") is None
    folder.add_pin(["tcp://sims:5555"], one, "trainer")
    resolved = NamedAddress("tcp://10.0.0.8:5555", "tcp://sims:5555")
    assert folder.keys_for(resolved) == (one, folder.key("client"))


def test_an_invalid_pin_is_an_error(folder: KeyFolder) -> None:
    create_all_files(folder)
    with (folder.path / "servers").open("a") as file:
        file.write("tcp://sim2:5555\n")
    with pytest.raises(KeyFileError, match="servers, line 2: expected addresses"):
        folder.pinned_key("tcp://sim2:5555")


def test_a_client_has_keys_only_for_servers_that_it_joined(folder: KeyFolder) -> None:
    assert folder.keys_for("ipc:///run/envs") is None
    with pytest.raises(ConnectError) as caught:
        folder.keys_for("tcp://sim1:5555")
    assert str(caught.value) == (
        "tcp://sim1:5555: no key of this server is known here, so its identity "
        'cannot be checked; run "envserve invite NAME --at tcp://sim1:5555" on sim1 '
        'and "envserve join" here'
    )
    with pytest.raises(ConnectError, match="keys make DIR server NAME --at ray://lab/"):
        folder.keys_for(NamedAddress("tcp://10.0.0.7:5555", "ray://lab/sims"))
    assert not folder.path.exists()
    folder.add_pin(["tcp://sim1:5555"], b"s" * 32, "ci")
    found = folder.keys_for("tcp://sim1:5555")
    assert found == (b"s" * 32, folder.key("client"))


def test_a_client_expects_its_own_server_at_every_name_of_this_host(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"sim1": "127.0.0.1", "sim1.lab": "127.0.0.2", "sim2": "192.0.2.7"}
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *_, **__: [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (names.get(host, host), 0))
        ],
    )
    # Without a server key, this user has no server.
    with pytest.raises(ConnectError, match="no key of this server is known here"):
        folder.keys_for("tcp://sim1:5555")
    assert not folder.path.exists()
    own = folder.ensure_key("server")
    for host in ("sim1", "sim1.lab", "127.0.0.3"):
        assert folder.keys_for(f"tcp://{host}:5555") == (
            own.public,
            folder.key("client"),
        )
    with pytest.raises(ConnectError, match="no key of this server is known here"):
        folder.keys_for("tcp://sim2:5555")
    folder.add_pin(["tcp://sim1:5555"], b"s" * 32, "ci")
    assert folder.keys_for("tcp://sim1:5555") == (b"s" * 32, folder.key("client"))


def test_the_user_of_the_folder_is_authorised_as_local(folder: KeyFolder) -> None:
    create_all_files(folder)
    own = folder.key("client")
    assert own is not None
    found = folder.clients.find(own.public, NOW)
    assert found == Grant(name="local", public=own.public)


def test_an_invitation_can_be_used_once(folder: KeyFolder) -> None:
    invitation = invite(folder, "ci", max_envs=8)
    public = KeyPair.generate().public
    found = folder.clients.find(invitation, NOW)
    assert found is not None
    assert found.is_invitation
    grant = folder.clients.enrol(invitation, public, NOW)
    assert grant == Grant(name="ci", public=public, max_envs=8)
    assert folder.clients.find(public, NOW) == grant
    assert folder.clients.find(invitation, NOW) is None
    assert folder.clients.enrol(invitation, bytes(32), NOW) is None
    assert folder.clients.grants() == [grant]


def test_an_invitation_expires(folder: KeyFolder) -> None:
    invitation = invite(folder, "ci")
    assert folder.clients.find(invitation, NOW + 899) is not None
    assert folder.clients.find(invitation, NOW + 900) is None
    assert folder.clients.enrol(invitation, bytes(32), NOW + 900) is None
    assert folder.clients.enrol(bytes(32), bytes(32), NOW) is None
    folder.clients.add(Grant(name="other", public=bytes(32)), NOW + 900)
    assert [grant.name for grant in folder.clients.grants()] == ["other"]


def test_using_a_new_invitation_replaces_the_old_key(folder: KeyFolder) -> None:
    first, second = KeyPair.generate().public, KeyPair.generate().public
    folder.clients.enrol(invite(folder, "ci"), first, NOW)
    unused = invite(folder, "ci")
    invitation = invite(folder, "ci")
    assert folder.clients.find(unused, NOW) is None
    assert folder.clients.find(first, NOW) is not None
    folder.clients.enrol(invitation, second, NOW)
    assert folder.clients.find(first, NOW) is None
    assert folder.clients.find(second, NOW) is not None


def test_joining_with_the_key_of_another_client_raises_protocol_error(
    folder: KeyFolder,
) -> None:
    public = KeyPair.generate().public
    folder.clients.enrol(invite(folder, "trainer-1"), public, NOW)
    with pytest.raises(RemoteProtocolError, match="known as trainer-1"):
        folder.clients.enrol(invite(folder, "trainer-2"), public, NOW)
    found = folder.clients.find(public, NOW)
    assert found is not None
    assert found.name == "trainer-1"


def test_a_key_cannot_be_added_under_a_second_name(folder: KeyFolder) -> None:
    create_all_files(folder)
    with pytest.raises(KeyFileError, match="other and ci have the same key; create"):
        folder.clients.add(Grant(name="other", public=bytes(32)), NOW)
    read_all_files(folder)
    assert [grant.name for grant in folder.clients.grants()] == ["ci"]


def test_removing_a_client_removes_key_and_invitation_but_no_comments(
    folder: KeyFolder,
) -> None:
    create_all_files(folder)
    path = folder.path / "clients"
    path.write_text(path.read_text() + "\n# of the lab\n")
    invite(folder, "ci")
    invite(folder, "other")
    assert folder.clients.remove("ci")
    assert not folder.clients.remove("ci")
    assert [grant.name for grant in folder.clients.grants()] == ["other"]
    assert path.read_text().count("#") == 2


def break_line(path: Path) -> None:
    path.write_text(path.read_text() + "trainer-9 envserve-public-1.short\n")


def repeat_line(path: Path) -> None:
    path.write_text(path.read_text() + path.read_text())


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (break_line, "line 3: expected envserve-public-1. and 43 characters"),
        (repeat_line, "line 4: expected each name and each key only once"),
        (lambda path: path.chmod(0o666), "can be read by others (mode 0666)"),
        (Path.unlink, "no longer exists"),
    ],
    ids=["broken", "repeated", "open", "gone"],
)
def test_an_unreadable_clients_file_is_logged_and_keeps_the_authorised_clients(
    folder: KeyFolder, caplog: pytest.LogCaptureFixture, damage: object, text: str
) -> None:
    create_all_files(folder)
    path = folder.path / "clients"
    whole = path.read_text()
    clients = folder.clients
    assert clients.find(bytes(32), NOW) is not None
    assert callable(damage)
    damage(path)
    with caplog.at_level(logging.ERROR):
        assert all(clients.find(bytes(32), NOW) for _ in range(3))
    (record,) = caplog.records
    assert text in record.message
    assert record.message.endswith(
        "; the clients from the last successful read stay authorised"
    )
    # A server that starts now has no clients from an earlier read, so it fails.
    if "exists" not in text:
        with pytest.raises(KeyFileError):
            ClientsFile(path).read()
    path.unlink(missing_ok=True)
    path.touch(0o600)
    path.write_text(whole.replace("ci ", "cd "))
    found = clients.find(bytes(32), NOW)
    assert found is not None
    assert found.name == "cd"


def test_a_change_waits_for_another_process_up_to_a_time_limit(
    folder: KeyFolder,
) -> None:
    create_all_files(folder)
    fd = os.open(folder.path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(KeyFileError, match="has been locked by another process"):
            folder.clients.remove("ci")
    finally:
        os.close(fd)
    assert folder.clients.remove("ci")


def test_a_file_system_without_locks_is_an_error_with_a_remedy(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(KeyFileError, match=r"locked: No locks.*; set ENVSERVE_HOME"):
        folder.ensure_key("client")
