"""Files of keys: whole, private, and refused if others can read or own them."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from envserve.errors import ConnectError, KeyFileError, RemoteProtocolError
from envserve.keys import formats
from envserve.keys.clients_file import ClientsFile
from envserve.keys.grant import Grant
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair

NOW = 1_800_000_000.0
FILES = ("server.key", "client.key", "clients", "servers")


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "a" / "keys")


def fill(folder: KeyFolder) -> None:
    folder.ensure_key("server")
    folder.ensure_key("client")
    folder.clients.add(Grant(name="ci", public=bytes(32)), NOW)
    folder.add_pin(["tcp://sim1:5555"], bytes(32), "ci")


def read_all(folder: KeyFolder) -> None:
    folder.key("server")
    folder.key("client")
    ClientsFile(folder.path / "clients").read()
    folder.pinned_key("tcp://sim1:5555")


def invite(folder: KeyFolder, name: str, **more: float) -> bytes:
    public = KeyPair.make().public
    until = more.pop("until", NOW + 900)
    folder.clients.add(Grant(name=name, public=public, until=until, **more), NOW)  # type: ignore[arg-type]
    return public


def test_nothing_is_made_that_was_not_asked_for(folder: KeyFolder) -> None:
    read_all(folder)
    assert folder.key("server") is folder.key("client") is None
    assert folder.pinned_key("tcp://127.0.0.1:5555") is None
    assert folder.clients.find(bytes(32), NOW) is None
    assert not folder.path.parent.exists()


def test_what_is_made_is_private_whatever_the_umask(folder: KeyFolder) -> None:
    before = os.umask(0)
    try:
        fill(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(FILES)
    for path in folder.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_is_made_once_and_read_again(folder: KeyFolder) -> None:
    pair = folder.ensure_key("server")
    assert pair is not None
    assert folder.ensure_key("server") == folder.key("server") == pair
    assert folder.ensure_key("client") != pair
    first, second = (folder.path / "server.key").read_text().splitlines()
    assert first.startswith("# envserve key, 20")
    assert first.endswith("; whoever has it is you")
    assert second == formats.encode(formats.SECRET, pair.secret)
    assert folder.new_key("server") == folder.key("server") != pair


def test_two_that_make_a_key_at_once_have_the_same(folder: KeyFolder) -> None:
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


def test_the_folder_is_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ENVSERVE_HOME", raising=False)
    assert KeyFolder().path == tmp_path / ".config" / "envserve"
    monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path / "b"))
    assert KeyFolder().path == tmp_path / "b"
    assert KeyFolder(tmp_path / "c").path == tmp_path / "c"


def test_a_key_that_others_can_read_is_refused_in_these_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = KeyFolder(tmp_path / ".config" / "envserve")
    fill(folder)
    (folder.path / "server.key").chmod(0o644)
    with pytest.raises(KeyFileError) as caught:
        folder.ensure_key("server")
    assert str(caught.value) == (
        "~/.config/envserve/server.key can be read by others (mode 0644); chmod 600, "
        "and make a new one if somebody may have read it: envserve keys new"
    )


@pytest.mark.parametrize("name", [*FILES, "."])
@pytest.mark.parametrize("mode", [0o040, 0o004, 0o020, 0o002])
def test_no_file_may_be_read_or_written_by_others(
    folder: KeyFolder, name: str, mode: int
) -> None:
    fill(folder)
    path = folder.path / name
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(KeyFileError, match=r"can be (read|written) by others \(mode 0"):
        read_all(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_a_file_is_read(folder: KeyFolder, name: str, kind: str) -> None:
    fill(folder)
    path = folder.path / name
    if kind == "link":
        path.rename(folder.path / "real")
        path.symlink_to(folder.path / "real")
    else:
        path.unlink()
        os.mkfifo(path, 0o600) if kind == "pipe" else path.mkdir(0o700)
    with pytest.raises(KeyFileError, match=f"{name} (cannot be read|is no file)"):
        read_all(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", [*FILES, "."])
def test_what_belongs_to_another_user_is_refused(folder: KeyFolder, name: str) -> None:
    fill(folder)
    os.chown(folder.path / name, 65534, -1)
    with pytest.raises(KeyFileError, match=r"belongs to another user \(uid 65534\)"):
        read_all(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_no_file_of_ours() -> None:
    code = (
        "import os, sys; from envserve.keys.key_folder import KeyFolder\n"
        "import envserve.keys.key_pair; os.setuid(65534)\n"  # its Python may be private
        "try: KeyFolder(sys.argv[1]).ensure_key('server')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o711)
        fill(folder := KeyFolder(Path(top, "keys")))
        finished = subprocess.run(
            [sys.executable, "-c", code, str(folder.path)],
            capture_output=True,
            text=True,
            timeout=90,
        )
    assert "KeyFileError" in finished.stdout, finished.stderr
    assert "belongs to another user (uid 0); expected uid 65534" in finished.stdout


def test_a_key_file_with_other_content_is_refused_and_not_repeated(
    folder: KeyFolder,
) -> None:
    pair = folder.ensure_key("server")
    assert pair is not None
    path = folder.path / "server.key"
    text = path.read_text()
    for wrong in ("", text[:-5], text + text, text.replace("secret", "public")):
        path.write_text(wrong)
        with pytest.raises(KeyFileError, match=r"server\.key: expected") as caught:
            folder.ensure_key("server")
        assert text.split(".")[-1][:40] not in str(caught.value)


@pytest.mark.parametrize(
    ("number", "remedy"), [(28, "room"), (30, "room"), (40, "a file or folder of this")]
)
def test_a_file_that_cannot_be_replaced_is_what_it_was(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    fill(folder)
    before = (folder.path / "clients").read_text()

    def fails(*_: object) -> None:
        raise OSError(number, "It refuses")

    monkeypatch.setattr(os, "replace", fails)
    text = f"clients cannot be written: It refuses; expected {remedy}"
    with pytest.raises(KeyFileError, match=text):
        folder.clients.remove("ci")
    assert (folder.path / "clients").read_text() == before
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(FILES)


def test_a_pin_is_found_by_each_address_and_replaced_by_a_later_one(
    folder: KeyFolder,
) -> None:
    old, new, own = bytes(32), b"n" * 32, folder.ensure_key("server")
    folder.add_pin(["tcp://sim1:5555", "tcp://10.0.0.7:5555"], old, "trainer-1")
    folder.add_pin(["tcp://sim1:5555", "tcp://127.0.0.1:7"], new, "t-1")
    assert folder.pinned_key("tcp://10.0.0.7:5555") == old
    assert folder.pinned_key("tcp://sim1:5555") == new
    assert folder.pinned_key("tcp://sim2:5555") is None
    # On loopback this user's own server is expected, if nothing else was noted.
    assert own is not None
    assert folder.keys_for("tcp://127.0.0.1:5555") == (own.public, folder.key("client"))
    assert folder.keys_for("tcp://127.0.0.1:7") == (new, folder.key("client"))
    (folder.path / "servers").write_text(
        f"tcp://a:1,tcp://b:1  {formats.encode(formats.PUBLIC, old)}  # as trainer-1\n"
    )
    assert folder.pinned_key("tcp://a:1") == folder.pinned_key("tcp://b:1") == old


def test_one_pin_fits_all_servers_of_a_cluster(folder: KeyFolder) -> None:
    cluster, one = b"c" * 32, b"o" * 32
    folder.add_pin(["tcp://*:5555"], cluster, "trainer")
    folder.add_pin(["tcp://10.0.0.7:5555"], one, "trainer")
    assert folder.pinned_key("tcp://10.0.0.8:5555") == cluster
    assert folder.pinned_key("tcp://[fe80::1]:5555") == cluster
    assert folder.pinned_key("tcp://10.0.0.7:5555") == one
    assert folder.pinned_key("tcp://10.0.0.8:5556") is None


def test_a_pin_that_cannot_be_read_is_an_error_and_not_no_pin(
    folder: KeyFolder,
) -> None:
    fill(folder)
    with (folder.path / "servers").open("a") as file:
        file.write("tcp://sim2:5555\n")
    with pytest.raises(KeyFileError, match="servers, line 2: expected addresses"):
        folder.pinned_key("tcp://sim2:5555")


def test_a_client_has_keys_for_servers_that_it_joined(folder: KeyFolder) -> None:
    assert folder.keys_for("ipc:///run/envs") is None
    with pytest.raises(ConnectError) as caught:
        folder.keys_for("tcp://sim1:5555")
    assert str(caught.value) == (
        "tcp://sim1:5555: no key of that server is known here, so it could be "
        'anybody\'s; run "envserve invite NAME" on sim1 and "envserve join" here'
    )
    assert not folder.path.exists()
    folder.add_pin(["tcp://sim1:5555"], b"s" * 32, "ci")
    found = folder.keys_for("tcp://sim1:5555")
    assert found == (b"s" * 32, folder.key("client"))


def test_the_user_of_the_folder_is_known_without_a_line(folder: KeyFolder) -> None:
    fill(folder)
    own = folder.key("client")
    assert own is not None
    found = folder.clients.find(own.public, NOW)
    assert found == Grant(name="local", public=own.public)


def test_an_invitation_is_good_once(folder: KeyFolder) -> None:
    invitation = invite(folder, "ci", max_envs=8)
    public = KeyPair.make().public
    found = folder.clients.find(invitation, NOW)
    assert found is not None
    assert found.is_invitation
    grant = folder.clients.enrol(invitation, public, NOW)
    assert grant == Grant(name="ci", public=public, max_envs=8)
    assert folder.clients.find(public, NOW) == grant
    assert folder.clients.find(invitation, NOW) is None
    assert folder.clients.enrol(invitation, bytes(32), NOW) is None
    assert folder.clients.grants() == [grant]


def test_an_invitation_is_good_for_its_time(folder: KeyFolder) -> None:
    invitation = invite(folder, "ci")
    assert folder.clients.find(invitation, NOW + 899) is not None
    assert folder.clients.find(invitation, NOW + 900) is None
    assert folder.clients.enrol(invitation, bytes(32), NOW + 900) is None
    assert folder.clients.enrol(bytes(32), bytes(32), NOW) is None
    folder.clients.add(Grant(name="other", public=bytes(32)), NOW + 900)
    assert [grant.name for grant in folder.clients.grants()] == ["other"]


def test_a_new_invitation_takes_the_place_of_the_old_key_once_it_is_used(
    folder: KeyFolder,
) -> None:
    first, second = KeyPair.make().public, KeyPair.make().public
    folder.clients.enrol(invite(folder, "ci"), first, NOW)
    unused = invite(folder, "ci")
    invitation = invite(folder, "ci")
    assert folder.clients.find(unused, NOW) is None
    assert folder.clients.find(first, NOW) is not None
    folder.clients.enrol(invitation, second, NOW)
    assert folder.clients.find(first, NOW) is None
    assert folder.clients.find(second, NOW) is not None


def test_who_joins_with_anothers_key_does_not_move_it(folder: KeyFolder) -> None:
    public = KeyPair.make().public
    folder.clients.enrol(invite(folder, "trainer-1"), public, NOW)
    with pytest.raises(RemoteProtocolError, match="known here as trainer-1"):
        folder.clients.enrol(invite(folder, "trainer-2"), public, NOW)
    found = folder.clients.find(public, NOW)
    assert found is not None
    assert found.name == "trainer-1"


def test_removing_takes_key_and_invitation_and_leaves_comments(
    folder: KeyFolder,
) -> None:
    fill(folder)
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
    ("harm", "text"),
    [
        (break_line, "line 3: expected envserve-public-1. and 43 characters"),
        (repeat_line, "line 4: expected each name and each key once"),
        (lambda path: path.chmod(0o666), "can be read by others (mode 0666)"),
        (Path.unlink, "is gone"),
    ],
    ids=["broken", "repeated", "open", "gone"],
)
def test_a_file_that_cannot_be_read_keeps_who_was_known_and_says_so(
    folder: KeyFolder, caplog: pytest.LogCaptureFixture, harm: object, text: str
) -> None:
    fill(folder)
    path = folder.path / "clients"
    whole = path.read_text()
    clients = folder.clients
    assert clients.find(bytes(32), NOW) is not None
    assert callable(harm)
    harm(path)
    with caplog.at_level(logging.ERROR):
        assert all(clients.find(bytes(32), NOW) for _ in range(3))
    (record,) = caplog.records
    assert text in record.message
    assert record.message.endswith("; the clients known before stay known")
    # A server that starts now has nobody to keep, and does not start.
    if "gone" not in text:
        with pytest.raises(KeyFileError):
            ClientsFile(path).read()
    path.unlink(missing_ok=True)
    path.touch(0o600)
    path.write_text(whole.replace("ci ", "cd "))
    found = clients.find(bytes(32), NOW)
    assert found is not None
    assert found.name == "cd"


def test_a_change_waits_for_another_process_and_not_for_ever(
    folder: KeyFolder,
) -> None:
    fill(folder)
    fd = os.open(folder.path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(KeyFileError, match="is being changed by another process"):
            folder.clients.remove("ci")
    finally:
        os.close(fd)
    assert folder.clients.remove("ci")
