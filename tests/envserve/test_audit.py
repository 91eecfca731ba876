"""The audit log has one line per event, which only the server's user can read."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio

from envserve.errors import ServerError
from envserve.server.audit import AuditLog
from envserve.session.server.decisions import Audit

KNOWN = {"ann": ("7QK2", "10.0.0.7")}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def describe(user: str) -> tuple[str, str]:
    return KNOWN.get(user, ("", ""))


@pytest_asyncio.fixture
async def audit(tmp_path: Path) -> AsyncIterator[AuditLog]:
    audit = AuditLog(str(tmp_path / "audit"), describe, asyncio.get_running_loop())
    with contextlib.closing(audit):
        yield audit


async def test_each_event_is_a_line_that_only_this_user_can_read(
    audit: AuditLog, tmp_path: Path
) -> None:
    audit.write(Audit("attached", "ann", "CartPole-v1", 4))
    audit.write(Audit("ended", "ann", "CartPole-v1", 4, "detached"))
    path = tmp_path / "audit"
    assert path.stat().st_mode & 0o777 == 0o600
    first, second = lines_of(path)
    assert first.pop("time").startswith("20")
    assert first == {
        "event": "attached",
        "name": "ann",
        "fingerprint": "7QK2",
        "address": "10.0.0.7",
        "env": "CartPole-v1",
        "count": 4,
        "reason": "",
        "times": 1,
    }
    assert (second["event"], second["reason"]) == ("ended", "detached")


async def test_key_and_address_of_a_client_without_a_name_are_fields(
    audit: AuditLog, tmp_path: Path
) -> None:
    audit.write(Audit("refused", reason="unknown key", fingerprint="R3TD", address="x"))
    audit.write(Audit("joined", "ann", address="10.0.0.8"))
    unknown, joined = lines_of(tmp_path / "audit")
    fields = ("name", "fingerprint", "address", "reason")
    assert [unknown[f] for f in fields] == ["", "R3TD", "x", "unknown key"]
    assert [joined[f] for f in fields] == ["ann", "7QK2", "10.0.0.8", ""]


async def test_repeated_rejections_within_a_second_take_two_lines(
    tmp_path: Path,
) -> None:
    audit = AuditLog(str(tmp_path / "audit"), describe, asyncio.get_running_loop())
    for index in range(100):
        audit.write(Audit("refused", "ann", reason=f"number {index}"))
        audit.write(Audit("over quota", "bob", reason=f"number {index}"))
    path = tmp_path / "audit"
    assert [line["times"] for line in lines_of(path)] == [1, 1]
    audit.close()
    lines = [(one["name"], one["times"], one["reason"]) for one in lines_of(path)]
    assert lines[2:] == [("ann", 99, "number 99"), ("bob", 99, "number 99")]


def test_a_timer_writes_the_line_with_the_count(tmp_path: Path) -> None:
    loop = mock.Mock()
    audit = AuditLog(str(tmp_path / "audit"), describe, loop)
    for _ in range(3):
        audit.write(Audit("refused", "ann"))
    ((seconds, write),) = (call.args for call in loop.call_later.mock_calls[:1])
    assert seconds == 1.0
    write()
    audit.write(Audit("refused", "ann"))
    assert [one["times"] for one in lines_of(tmp_path / "audit")] == [1, 2, 1]
    audit.close()


async def test_texts_of_peers_are_printable_and_short(
    audit: AuditLog, tmp_path: Path
) -> None:
    text = "\x1b]0;\u202eevil\n" + "x" * 9000
    audit.write(Audit("refused", "", text, address="\x1b]0;\u202e"))
    (line,) = (tmp_path / "audit").read_text().splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 1000


async def test_events_of_a_revoked_key_have_its_fingerprint(
    audit: AuditLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit.write(Audit("attached", "ann"))
    monkeypatch.delitem(KNOWN, "ann")
    audit.write(Audit("revoked", "ann"))
    assert [one["fingerprint"] for one in lines_of(tmp_path / "audit")] == ["7QK2"] * 2


async def test_an_existing_file_is_appended_to_and_restricted_to_this_user(
    tmp_path: Path,
) -> None:
    path = tmp_path / "audit"
    path.touch(0o644)
    loop = asyncio.get_running_loop()
    for _ in range(2):
        audit = AuditLog(str(path), describe, loop)
        audit.write(Audit("attached", "ann"))
        audit.close()
    assert len(lines_of(path)) == 2
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_file_that_cannot_be_opened_is_an_error_at_the_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")  # opening it must not wait for a reader
    mode = os.stat("/dev/full").st_mode
    for name in ("none/audit", "link", ".", "pipe", "/dev/full"):
        with pytest.raises(ServerError, match=r"--audit: cannot write .*: "):
            AuditLog(str(tmp_path / name), describe, asyncio.get_running_loop())
    assert os.stat("/dev/full").st_mode == mode


async def test_a_full_disk_is_logged_once_and_has_no_other_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit"
    audit = AuditLog(str(path), describe, asyncio.get_running_loop())
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "write", side_effect=full):
        for _ in range(3):
            audit.write(Audit("attached", "ann"))
    audit.close()
    assert caplog.text.count("cannot write the audit log") == 1


async def test_a_line_that_did_not_fit_is_completed_when_there_is_space_again(
    audit: AuditLog, tmp_path: Path
) -> None:
    write, full = os.write, OSError(errno.ENOSPC, "No space left on device")

    def write_part(file: int, data: bytes) -> int:
        return write(file, data[:20])

    with mock.patch.object(os, "write", side_effect=write_part):
        audit.write(Audit("attached", "ann"))
    with mock.patch.object(os, "write", side_effect=full):
        audit.write(Audit("attached", "bob"))
    audit.write(Audit("ended", "ann"))
    events = [line["event"] for line in lines_of(tmp_path / "audit")]
    assert events == ["attached", "ended"]
