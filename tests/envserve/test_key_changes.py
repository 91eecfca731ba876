"""Key files that change or are briefly unreadable while a server uses them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from envserve.errors import ConnectError, KeyFileError
from envserve.keys import clients_file, formats, private_files
from envserve.keys.clients_file import ClientsFile
from envserve.keys.grant import Grant, format_line, parse_line
from envserve.keys.key_folder import KeyFolder
from envserve.server.access import Access
from tests.envserve.conftest import WaitUntil

NOW = 1_800_000_000.0
#: Seconds after which a test fails, even on a busy machine.
PATIENCE = 60.0
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


def with_clients(folder: KeyFolder, count: int) -> ClientsFile:
    """Write a file of many clients, and read it."""
    grants = [
        Grant(name=f"client-{index}", public=index.to_bytes(32))
        for index in range(count)
    ]
    text = "".join(f"{format_line(grant)}\n" for grant in grants)
    private_files.write_private(folder.path / "clients", text)
    folder.clients.read()
    return folder.clients


def num_calls(function: Callable[[], object]) -> int:
    """Return the number of Python and C functions that a function calls."""
    count = 0

    def profile(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_lookup_costs_the_same_with_few_and_many_clients(folder: KeyFolder) -> None:
    def lookups(file: ClientsFile) -> list[int]:
        last = file.grants()[-1]
        return [
            num_calls(lambda: file.find(last.public, NOW)),
            num_calls(lambda: file.find(b"?" * 32, NOW)),
            num_calls(lambda: file.find_name(last.name, NOW)),
            num_calls(lambda: file.find_name("nobody", NOW)),
        ]

    assert lookups(with_clients(folder, 5)) == lookups(with_clients(folder, 5000))


def test_only_changed_lines_are_parsed_again(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = with_clients(folder, 100)
    parsed: list[str] = []

    def parse(line: str) -> Grant | None:
        parsed.append(line)
        return parse_line(line)

    monkeypatch.setattr(clients_file, "parse_line", parse)
    invited = Grant(name="ann", public=b"i" * 32, until=NOW + 9)
    with (folder.path / "clients").open("a") as file:
        file.write(f"{format_line(invited)}\n")
    assert clients.enrol(invited.public, b"a" * 32, NOW)
    assert clients.find_name("ann", NOW)
    assert len(parsed) == 2  # the invitation, and the line that has replaced it


def test_lookups_use_the_old_clients_while_a_thread_reads_the_file(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    access, may_read = Access(folder), threading.Event()
    read_private = private_files.read_private

    def read_late(*arguments: Any) -> str | None:
        assert may_read.wait(PATIENCE)
        return read_private(*arguments)

    monkeypatch.setattr(private_files, "read_private", read_late)
    (folder.path / "clients").write_text("# nobody\n")
    assert not access.refresh.is_done()
    assert access.find_grant(KEY)
    assert access.grant_of("ci")
    # The changed file may contain a key that is not known yet.
    with pytest.raises(KeyFileError, match="the clients file cannot be read now"):
        access.find_grant(b"?" * 32)
    may_read.set()
    wait_until(access.refresh.is_done)
    assert access.find_grant(KEY) is None
    assert access.grant_of("ci") is None
    assert access.find_revoked() == {"ci"}


@pytest.fixture
def hung(folder: KeyFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[HungFiles]:
    files = HungFiles(folder.clients.refresh)
    monkeypatch.setattr(folder.clients, "refresh", files.refresh)
    yield files
    files.respond.set()


class HungFiles:
    """A file system that does not respond until `respond` is set."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self.respond = threading.Event()
        self.num_calls = 0
        self._refresh = refresh

    def refresh(self) -> None:
        self.num_calls += 1
        assert self.respond.wait(PATIENCE)
        self._refresh()


def test_a_file_system_that_does_not_respond_blocks_no_lookup(
    folder: KeyFolder,
    hung: HungFiles,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: WaitUntil,
) -> None:
    access, new = Access(folder), bytes([1] * 32)
    assert not access.refresh.is_done()
    assert not access.refresh.is_done()  # it waits briefly
    later = time.monotonic() + PATIENCE
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: later)
        for _ in range(3):  # then the old clients are used
            assert access.refresh.is_done()
            assert access.find_revoked() == set()
            assert access.find_grant(KEY)
            with pytest.raises(KeyFileError, match="the clients file cannot be read"):
                access.find_grant(new)
    assert hung.num_calls == 1
    hung.respond.set()
    wait_until(access.refresh.is_done)
    assert access.find_grant(new) is None


def test_each_result_follows_a_refresh_that_began_later(
    folder: KeyFolder, wait_until: WaitUntil
) -> None:
    """A refresh for another purpose may have begun before the file was changed."""
    access = Access(folder)
    access.find_revoked()
    wait_until(lambda: not access.refresh.is_running)
    (folder.path / "clients").write_text("# nobody\n")
    wait_until(access.refresh.is_done)
    assert access.find_grant(KEY) is None


def test_a_file_is_read_without_a_thread_if_the_system_is_out_of_threads(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    access = Access(folder)

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    (folder.path / "clients").write_text("# nobody\n")
    wait_until(access.refresh.is_done)
    assert access.find_grant(KEY) is None


def test_a_change_by_this_process_is_complete_before_a_reading_thread_continues(
    folder: KeyFolder, hung: HungFiles, wait_until: WaitUntil
) -> None:
    """Otherwise a client that has just joined would count as revoked."""
    access = Access(folder)
    (folder.path / "clients").write_text("# nobody\n")
    access.refresh.start()
    assert folder.clients.find(KEY, NOW)  # the file is not read yet
    folder.clients.add(Grant(name="ann", public=b"a" * 32), NOW)
    hung.respond.set()
    wait_until(access.refresh.is_done)
    assert [grant.name for grant in folder.clients.grants()] == ["ann"]


def test_many_clients_may_join_at_the_same_time_although_the_disk_is_slow(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [bytes([number]) * 32 for number in range(1, 6)]
    for number, key in enumerate(keys):
        until = time.time() + PATIENCE
        folder.clients.add(Grant(name=f"node-{number}", public=key, until=until), 0.0)
    access = Access(folder)
    monkeypatch.setattr(os, "fsync", lambda _: time.sleep(0.2))

    def enrol(key: bytes) -> str:
        return access.enrol(formats.encode(formats.INVITATION, key), b"\xff" + key[1:])

    with ThreadPoolExecutor(len(keys)) as threads:
        names = [*threads.map(enrol, keys)]
    assert names == [f"node-{number}" for number in range(len(keys))]


def test_a_broken_file_is_not_read_at_each_lookup(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_reads = 0
    read_private = private_files.read_private

    def count(*arguments: Any) -> str | None:
        nonlocal num_reads
        num_reads += 1
        return read_private(*arguments)

    monkeypatch.setattr(private_files, "read_private", count)
    (folder.path / "clients").write_text("what is this\n")
    for _ in range(3):
        assert folder.clients.find(KEY, NOW)
    assert num_reads == 1
    assert not folder.clients.is_current
    # The cause may be outside the file, so it is tried again after a while.
    later = time.monotonic() + 2.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    folder.clients.find(KEY, NOW)
    assert num_reads == 2


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
