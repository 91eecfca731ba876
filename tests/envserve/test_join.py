"""`envserve join` with a real server: an invitation admits exactly one client."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envserve.cli.app import PROGRAM
from envserve.client.link import join
from envserve.client.link.connection import Connection
from envserve.client.link.zmq_guards.diagnosis import Finding
from envserve.errors import ConnectError, KeyFileError
from envserve.keys import formats, private_files
from envserve.keys.invitation import Invitation
from envserve.keys.key_folder import KeyFolder, Role
from envserve.keys.key_pair import KeyPair
from envserve.wire.constants import MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Hello, Join
from envserve.wire.message import Message, decode, encode
from tests.command_line import invoke
from tests.envserve.conftest import PATIENCE, Serve, WaitUntil
from tests.envserve.server_process import ServerProcess
from tests.envserve.stalls import fastest

RunAt = Callable[..., Any]

#: Seconds within which a reply arrives on an idle machine.
SHORT = 0.5


@pytest.fixture
def run_at(tmp_path: Path) -> RunAt:
    """Run a command with a separate ENVSERVE_HOME."""

    def run(home: str, *words: str, **more: Any) -> Any:
        env = {"ENVSERVE_HOME": str(tmp_path / home)}
        return invoke(PROGRAM, words, env=env, **more)

    return run


@pytest.fixture
def server(tmp_path: Path, serve: Serve) -> ServerProcess:
    home = {"ENVSERVE_HOME": str(tmp_path / "server")}
    return serve("--audit", str(tmp_path / "audit"), environment=home)


def invite(run_at: RunAt, server: ServerProcess, name: str = "trainer-1") -> str:
    result = run_at("server", "invite", name, "--at", server.address, "--stdout")
    assert result.exit_code == 0, result.stderr
    return str(result.stdout)


def test_an_invitation_admits_one_client_until_it_is_removed(
    run_at: RunAt, server: ServerProcess, tmp_path: Path, wait_until: WaitUntil
) -> None:
    line, patient = invite(run_at, server), ("--timeout", str(PATIENCE))
    joined = run_at("client", "join", input=line)
    assert joined.exit_code == 0, joined.stderr
    pair = KeyFolder(tmp_path / "client").key("client")
    key = KeyFolder(tmp_path / "server").key("server")
    assert pair is not None
    assert key is not None
    prints = [formats.fingerprint(public) for public in (pair.public, key.public)]
    assert joined.stdout == (
        f"joined {server.address} as trainer-1; this client's key is {prints[0]}, "
        f"the server's {prints[1]}\n"
    )
    assert run_at("server", "clients").stdout.split() == ["trainer-1", prints[0]]
    assert run_at("client", "health", server.address, *patient).exit_code == 0
    wait_until(lambda: "joined" in (tmp_path / "audit").read_text())
    (event,) = (json.loads(t) for t in (tmp_path / "audit").read_text().splitlines())
    assert (event["event"], event["name"]) == ("joined", "trainer-1")
    assert (event["fingerprint"], event["address"]) == (prints[0], "127.0.0.1")
    again = run_at("another", "join", input=line)
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == (
        "Error: this invitation was already used, or is older than 15 minutes; "
        "ask for a new one: envserve invite trainer-1\n"
    )
    assert KeyFolder(tmp_path / "another").pinned_key(server.address) is None
    run_at("server", "clients", "remove", "trainer-1")
    wait_until(
        lambda: run_at("client", "health", server.address, "--timeout", "1").exit_code
    )


def exchange(
    connection: Connection, message: Message, seconds: float = PATIENCE
) -> Message | None:
    """Send a message; return the reply, or None if none arrives in time."""
    connection.wait(PATIENCE, for_writing=True)
    assert connection.send(encode(message))
    connection.wait(seconds, for_writing=False)
    frames = connection.receive()
    return decode(frames) if frames else None


def test_an_invitation_can_only_be_used_to_join(
    run_at: RunAt, server: ServerProcess
) -> None:
    invitation = Invitation.parse(invite(run_at, server))
    once = KeyPair.from_secret(invitation.secret)
    keys = invitation.server_public, once
    joining = Message(type=MessageType.JOIN, body=Join(public=bytes(32)).encode())
    with contextlib.closing(Connection(server.address, keys)) as connection:
        for kind in (MessageType.HELLO, MessageType.ATTACH, MessageType.PING):
            message = Message(type=kind, body=Hello().encode())
            assert exchange(connection, message, SHORT) is None
        short = Message(type=MessageType.JOIN, body=b"\x81\xa6public\xc4\x01a")
        reply = exchange(connection, short)
        assert reply is not None
        assert reply.type is MessageType.ERROR
        reply = exchange(connection, joining)
        assert reply is not None
        assert reply.type is MessageType.JOINED
        # The invitation is used up, even for a client that is still connected with it.
        reply = exchange(connection, joining)
        assert reply is not None
        text = ErrorBody.decode(reply.body).text
        assert text == "expected the key of a valid invitation"
        hello = Message(type=MessageType.HELLO)
        assert exchange(connection, hello, SHORT) is None


def test_a_clients_file_that_cannot_be_changed_is_logged_without_a_traceback(
    run_at: RunAt, server: ServerProcess, tmp_path: Path
) -> None:
    invitation = Invitation.parse(invite(run_at, server))
    keys = invitation.server_public, KeyPair.from_secret(invitation.secret)
    message = Message(type=MessageType.JOIN, body=Join(public=bytes(32)).encode())
    with contextlib.closing(Connection(server.address, keys)) as connection:
        connection.wait(PATIENCE, for_writing=True)
        (tmp_path / "server" / "clients").write_text("no key\n")
        reply = exchange(connection, message)
    assert reply is not None
    assert reply.type is MessageType.ERROR
    assert "a client cannot join: " in server.log
    assert "Traceback" not in server.log


def test_other_clients_do_not_wait_while_a_join_waits_for_the_key_folder(
    run_at: RunAt, server: ServerProcess, tmp_path: Path
) -> None:
    invitation = Invitation.parse(invite(run_at, server))
    keys = invitation.server_public, KeyPair.from_secret(invitation.secret)
    known = KeyFolder(tmp_path / "server").key("client")
    assert known is not None
    joining = Message(type=MessageType.JOIN, body=Join(public=bytes(32)).encode())
    hello = Message(type=MessageType.HELLO, body=Hello().encode())

    def longest_wait() -> float:
        assert new.send(encode(joining))
        longest, reply = 0.0, None
        while reply is None:  # the server gives up after a second
            began_at = time.monotonic()
            assert exchange(old, hello) is not None
            longest = max(longest, time.monotonic() - began_at)
            reply = new.receive()
        assert decode(reply).type is MessageType.ERROR
        return longest

    with (
        contextlib.closing(Connection(server.address, keys)) as new,
        contextlib.closing(Connection(server.address, (keys[0], known))) as old,
    ):
        new.wait(PATIENCE, for_writing=True)
        assert exchange(old, hello) is not None
        with private_files.locked(tmp_path / "server"):
            assert fastest(longest_wait, SHORT) < SHORT
        reply = exchange(new, joining)
        assert reply is not None
        assert reply.type is MessageType.JOINED


def test_a_client_without_an_invitation_cannot_join(
    run_at: RunAt, server: ServerProcess, tmp_path: Path
) -> None:
    assert run_at("client", "join", input=invite(run_at, server)).exit_code == 0
    run_at("server", "invite", "trainer-2", "--at", server.address, "--stdout")
    message = Message(type=MessageType.JOIN, body=Join(public=bytes(32)).encode())
    keys = KeyFolder(tmp_path / "client").keys_for(server.address)
    with contextlib.closing(Connection(server.address, keys)) as connection:
        reply = exchange(connection, message)
    assert reply is not None
    assert reply.type is MessageType.ERROR


def test_no_secret_is_visible_to_other_users(
    run_at: RunAt, server: ServerProcess, tmp_path: Path
) -> None:
    line = invite(run_at, server)
    joined = run_at("client", "join", "--timeout", "20", input=line)
    assert joined.exit_code == 0, joined.stderr
    run_at("another", "join", input=line)
    secrets = [line[18:].partition(".")[0][-40:]]
    roles: tuple[tuple[str, Role], ...] = (
        ("server", "server"),
        ("server", "client"),
        ("client", "client"),
    )
    for home, role in roles:
        pair = KeyFolder(tmp_path / home).ensure_key(role)
        secrets.append(formats.encode(formats.SECRET, pair.secret)[18:])
    visible = joined.stdout + joined.stderr + server.log
    clients = run_at("server", "clients").stdout
    visible += clients + (tmp_path / "server" / "clients").read_text()
    folder = Path("/proc", str(server.process.pid))
    for name in ("cmdline", "environ"):
        if (folder / name).exists():
            visible += (folder / name).read_text(errors="replace")
    assert "ENVSERVE_HOME" in visible or not folder.exists()
    assert [secret for secret in secrets if secret in visible] == []


def test_no_key_is_pinned_for_a_server_that_does_not_reply(
    run_at: RunAt, server: ServerProcess, tmp_path: Path
) -> None:
    line = invite(run_at, server)
    host, _, port = server.address.rpartition(":")
    elsewhere = line.replace(f":{port}", ":1")
    start = time.monotonic()
    result = run_at("client", "join", "--timeout", "0.5", input=elsewhere)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {host}:1: ")
    assert time.monotonic() - start < 40
    assert KeyFolder(tmp_path / "client").pinned_key(f"{host}:1") is None
    # The invitation was not used, so it is still valid at the server's second address.
    both = line.replace(f":{port}", f":1,127.0.0.1:{port}")
    result = run_at("client", "join", "--timeout", "20", input=both)
    assert result.exit_code == 0, result.stderr
    joined, missing = result.stdout.splitlines()
    assert joined.startswith(f"joined {server.address} as trainer-1; ")
    assert missing == (
        f"{host}:1: no server with this key replied, so this client cannot use this "
        f"address; check it, and join again once the server replies there: envserve "
        f"invite trainer-1 --at {host}:1"
    )
    assert KeyFolder(tmp_path / "client").pinned_addresses == [server.address]


def test_an_invitation_does_not_replace_the_key_of_another_server(
    run_at: RunAt, server: ServerProcess, serve: Serve, tmp_path: Path
) -> None:
    assert run_at("client", "join", input=invite(run_at, server)).exit_code == 0
    home = {"ENVSERVE_HOME": str(tmp_path / "other")}
    other = serve(environment=home)
    both = ("--at", other.address, "--at", server.address)
    line = run_at("other", "invite", "x", *both, "--stdout").stdout
    file = tmp_path / "client" / "servers"
    before = file.read_text()
    result = run_at("client", "join", input=line)
    assert (result.exit_code, result.stdout) == (2, "")
    keys = [KeyFolder(tmp_path / home).key("server") for home in ("server", "other")]
    prints = [formats.fingerprint(key.public) for key in keys if key]
    assert result.stderr == (
        f"Error: {server.address}: the key of another server ({prints[0]}) is recorded "
        f"for this address in {file}; expected the key in the invitation "
        f"({prints[1]}). Nothing was changed, and the invitation is still valid. If "
        f"the server was set up again, run: envserve join --replace\n"
    )
    assert file.read_text() == before
    # Even with --replace, only an address that replies with the new key is replaced.
    result = run_at("client", "join", "--timeout", "20", "--replace", input=line)
    assert result.exit_code == 0, result.stderr
    joined, missing = result.stdout.splitlines()
    assert joined.startswith(f"joined {other.address} as x; ")
    assert missing.startswith(f"{server.address}: no server with this key replied")
    for each in (server, other):
        patient = ("--timeout", str(PATIENCE))
        health = run_at("client", "health", each.address, *patient)
        assert health.exit_code == 0, health.stderr


def test_a_server_that_was_set_up_again_can_be_joined_with_replace(
    run_at: RunAt, server: ServerProcess, tmp_path: Path
) -> None:
    old = KeyPair.generate().public
    KeyFolder(tmp_path / "client").add_pin([server.address], old, "trainer-1")
    line = invite(run_at, server)
    assert run_at("client", "join", input=line).exit_code == 2
    result = run_at("client", "join", "--replace", input=line)
    assert result.exit_code == 0, result.stderr
    replaced, joined = result.stdout.splitlines()
    assert replaced == (
        f"{server.address}: the server's previous key, {formats.fingerprint(old)}, was "
        f"replaced"
    )
    assert joined.startswith(f"joined {server.address}")


def test_a_pin_that_appears_during_a_join_is_not_replaced(tmp_path: Path) -> None:
    folder, (old, new) = KeyFolder(tmp_path / "keys"), (b"o" * 32, b"n" * 32)
    folder.add_pin(["tcp://sim1:5555"], old, "ann")
    addresses = ["tcp://sim2:5555", "tcp://sim1:5555"]
    with pytest.raises(KeyFileError, match="tcp://sim1:5555: the key of another"):
        folder.add_pin(addresses, new, "ann", may_replace=False)
    assert folder.pinned_addresses == ["tcp://sim1:5555"]
    folder.add_pin(addresses, old, "ann", may_replace=False)
    assert folder.pinned_addresses == ["tcp://sim1:5555", "tcp://sim2:5555"]


@pytest.mark.parametrize(
    ("findings", "text"),
    [
        ([Finding.REFUSED], "tcp://a:1: connection refused: no program is listening"),
        ([Finding.NOT_ZEROMQ], "tcp://a:1: the program that listens there does not s"),
        (
            [Finding.OTHER_SERVER, Finding.REFUSED],
            r"tcp://a:1: no server with the key of this invitation .* replied; .*"
            r"; tcp://b:1: connection refused: no program is listening there",
        ),
    ],
)
def test_a_join_that_cannot_succeed_ends_early_and_reports_the_listener(
    monkeypatch: pytest.MonkeyPatch, findings: list[Finding], text: str
) -> None:
    addresses = ("tcp://a:1", "tcp://b:1")[: len(findings)]
    found = dict(zip(addresses, findings, strict=True))
    monkeypatch.setattr(join, "diagnose_connection", lambda at, *_: found[at])
    pair = KeyPair.generate()
    invitation = Invitation(pair.public, pair.secret, "ci", addresses)
    with pytest.raises(ConnectError, match=text):
        join.join(invitation, pair, 3600.0)


def test_an_interrupted_join_stops_trying_all_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[str] = []

    def diagnose(address: str, *_: object) -> Finding:
        if address == "tcp://a:1":
            raise KeyboardInterrupt
        attempts.append(address)
        return Finding.UNKNOWN

    monkeypatch.setattr(join, "diagnose_connection", diagnose)
    pair = KeyPair.generate()
    addresses = ("tcp://a:1", "tcp://b:1")
    invitation = Invitation(pair.public, pair.secret, "ci", addresses)
    with pytest.raises(KeyboardInterrupt):
        join.join(invitation, pair, 60.0)
    assert len(attempts) < 100  # an attempt takes 0.2 s
