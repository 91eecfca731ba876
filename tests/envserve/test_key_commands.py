"""`envserve invite`, `clients` and `keys`: their output, secrecy and errors."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from envserve.cli.app import PROGRAM
from envserve.errors import KeyFileError
from envserve.keys import formats
from envserve.keys.clients_file import ClientsFile
from envserve.keys.grant import Grant
from envserve.keys.invitation import Invitation
from envserve.keys.key_folder import KeyFolder, Role
from tests.command_line import invoke

Run = Callable[..., Any]
AT = ("--at", "tcp://sim1:5555")
SECRETS = re.compile(r"envserve-(secret|invite)-1\.[\w-]{43}")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def run(home: Path) -> Run:
    return lambda *words, **more: invoke(PROGRAM, words, **more)


def test_invite_prints_a_line_and_writes_a_grant(run: Run, home: Path) -> None:
    limits = ["--envs", "ALE/*,CartPole-v1", "--max-envs", "64", "--share", "2"]
    before = time.time()
    result = run("invite", "trainer-1", *AT, *limits, "--stdout")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith(
        "This line is a secret and works once within 15 minutes."
    )
    invitation = Invitation.parse(result.stdout)
    assert (invitation.name, invitation.addresses) == (
        "trainer-1",
        ("tcp://sim1:5555",),
    )
    folder = KeyFolder(home)
    server = folder.key("server")
    assert server is not None
    assert invitation.server_public == server.public
    (grant,) = folder.clients.grants()
    assert grant.is_invitation
    assert before + 899 < (grant.until or 0) < time.time() + 900
    assert (grant.envs, grant.max_envs, grant.share) == (
        ("ALE/*", "CartPole-v1"),
        64,
        2.0,
    )


def test_a_host_may_be_named_ray(run: Run) -> None:
    result = run("invite", "ci", "--at", "ray", "--stdout")
    assert Invitation.parse(result.stdout).addresses == ("tcp://ray:5555",)


def test_invite_requires_a_terminal_or_the_stdout_option(run: Run, home: Path) -> None:
    result = run("invite", "trainer-1", *AT)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "Error: an invitation is a secret, and stdout is not a terminal; pass "
        "--stdout if no other user can read stdout\n"
    )
    assert not home.exists()
    master, terminal = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-m", "envserve", "invite", "trainer-1", *AT],
            stdout=terminal,
            stderr=subprocess.DEVNULL,
            timeout=90,
        )
        assert Invitation.parse(os.read(master, 1000).decode()).name == "trainer-1"
    finally:
        os.close(master)
        os.close(terminal)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("local", *AT), "expected a name other than local"),
        (("a b", *AT), "name"),
        (("ci\n", *AT), "name"),
        (("ci", *AT, "--envs", "A\n"), "envs"),
        (("ci", "--at", "udp://sim1:5555"), "--at: expected an address like sim1"),
        (("ci", "--at", "ipc:///run/envs"), "--at: expected the tcp:// address"),
        (("ci", "--at", "sim1,sim2"), "--at: expected the address of one server"),
        (("ci", "--at", "häuschen"), "a host of ASCII letters"),
        (("ci", "--at", "sim#1"), "got 'sim#1'; repeat --at"),
        (("ci", "--at", "tcp://0.0.0.0:5555"), "at which clients reach the server"),
        (("ci", "--at", "sim*"), "--at: expected the tcp:// address"),
        (("ci", "--at", "ray://lab/sims"), "--at: expected the tcp:// address"),
        (("ci", "--at", "ray://lab"), "--at: expected ray://namespace/name"),
        (("ci", *AT, "--max-envs", "x"), "Error: max-envs: expected an int; got 'x'\n"),
        (("ci", *AT, "--envs", "A #"), "envs"),
        (("ci", *AT, "--envs", "A,"), "envs"),
        (("ci", *AT, "--expires", "soon"), "expires: expected a date"),
        (("ci", *AT, "--expires", "2020-01-01"), "in the future; got '2020-01-01'\n"),
    ],
)
def test_an_invalid_invite_command_creates_no_files(
    run: Run, home: Path, words: tuple[str, ...], text: str
) -> None:
    result = run("invite", *words, "--stdout")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert text in result.stderr
    assert result.stderr.count("\n") == 1
    assert not home.exists()


def test_join_does_not_accept_an_invitation_as_an_argument(
    run: Run, home: Path
) -> None:
    result = run("join", "envserve-invite-1.abc", "more")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "Error: an invitation is a secret, and other users can read command lines; run "
        '"envserve join" without arguments, then paste the invitation\n'
    )
    result = run("join", input="envserve-invite-1.abc\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected the line that envserve invite printed" in result.stderr
    assert not home.exists()


def test_a_pasted_invitation_is_not_echoed(home: Path) -> None:
    master, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "envserve", "join"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,  # without a controlling terminal for the prompt
    ) as process:
        os.close(terminal)
        shown = b""
        while not shown.endswith(b": "):
            shown += os.read(master, 1000)
        os.write(master, b"envserve-invite-1.abc.secret\n")
        with contextlib.suppress(OSError):  # Linux raises it when a terminal closes
            while more := os.read(master, 1000):
                shown += more
        assert process.wait(90) == 2
    os.close(master)
    assert shown.startswith(b"Invitation (not shown): ")
    assert b"Error: expected the line" in shown
    assert b"abc" not in shown


def test_an_empty_list_of_clients_is_explained_on_stderr(run: Run) -> None:
    result = run("clients")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("no clients yet; add one with")
    assert "[remove NAME]\n" in run("clients", "--help").stdout


def test_clients_can_be_listed_without_secrets_and_removed(
    run: Run, home: Path
) -> None:
    folder = KeyFolder(home)
    public, now = bytes(32), time.time()
    folder.clients.add(Grant(name="ci", public=public, max_envs=8), now)
    folder.clients.add(Grant(name="old", public=b"o" * 32, expires=1.0), now)
    run("invite", "trainer-1", *AT)
    run("invite", "trainer-1", *AT, "--stdout")
    result = run("clients")
    assert [line.split()[:3] for line in result.stdout.splitlines()] == [
        ["ci", formats.fingerprint(public), "max-envs=8"],
        ["old", "expired", "expires=1970-01-01T00:00:01Z"],
        ["trainer-1", "invited", result.stdout.split()[-1]],
    ]
    assert "until=20" in result.stdout
    assert not SECRETS.search(result.stdout + result.stderr)
    assert run("clients", "remove", "ci").stdout == "removed ci\n"
    result = run("clients", "remove", "ci")
    assert result.exit_code == 2
    text = "Error: there is no client ci; envserve clients lists all clients\n"
    assert result.stderr == text
    assert [grant.name for grant in folder.clients.grants()] == ["old", "trainer-1"]


def test_the_home_option_selects_the_key_folder(run: Run, tmp_path: Path) -> None:
    grant = Grant(name="ci", public=bytes(32))
    KeyFolder(tmp_path / "x").clients.add(grant, 0.0)
    home = ("--home", str(tmp_path / "x"))
    assert run("clients", *home, "remove", "ci").exit_code == 0
    assert run("clients", *home).stdout == ""
    result = run("clients", "drop", "ci")
    assert result.exit_code == 2
    text = "Error: expected no arguments or remove NAME; got drop ci\n"
    assert result.stderr == text


def test_a_key_file_that_others_can_read_fails_with_exit_code_2(
    run: Run, home: Path
) -> None:
    KeyFolder(home).ensure_key("server")
    (home / "server.key").chmod(0o640)
    result = run("invite", "ci", *AT, "--stdout")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "server.key can be read by others (mode 0640); chmod 600" in result.stderr
    assert not (home / "clients").exists()


def test_keys_make_creates_a_folder_per_role(run: Run, tmp_path: Path) -> None:
    made = tmp_path / "made"
    ats = (*AT, "--at", "tcp://sim2:5555")
    result = run("keys", "make", str(made), "server", "trainer-1", "ci", *ats)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{made}: ci server trainer-1\n"
    assert sorted(str(path.relative_to(made)) for path in made.rglob("*.*")) == [
        "ci/client.key",
        "server/client.key",
        "server/server.key",
        "trainer-1/client.key",
    ]
    server = KeyFolder(made / "server")
    key = server.key("server")
    assert key is not None
    for name in ("trainer-1", "ci"):
        client = KeyFolder(made / name)
        pair = client.key("client")
        assert pair is not None
        grant = server.clients.find(pair.public, time.time())
        assert grant == Grant(name=name, public=pair.public)
        for address in ("tcp://sim1:5555", "tcp://sim2:5555"):
            assert client.keys_for(address) == (key.public, pair)
            # With the server's key folder, a client on any host is the server's user.
            assert server.keys_for(address) == (key.public, server.key("client"))
        assert not {path.name for path in client.path.iterdir()} & {"server.key"}
    for path in made.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600)


def test_keys_make_creates_a_folder_of_the_servers_user_without_the_servers_key(
    run: Run, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    result = run("keys", "make", str(made), "server", "local", *AT)
    assert (result.exit_code, result.stderr) == (0, "")
    server, local = KeyFolder(made / "server"), KeyFolder(made / "local")
    assert {path.name for path in local.path.iterdir()} == {"client.key", "servers"}
    keys = local.keys_for("tcp://sim1:5555")
    assert keys == server.keys_for("tcp://sim1:5555")
    assert keys is not None
    grant = server.clients.find(keys[1].public, time.time())
    assert grant == Grant(name="local", public=keys[1].public)
    server.new_key("client")
    assert run("keys", "make", str(made), "local", *AT).exit_code == 0
    assert local.key("client") == server.key("client")


def test_keys_make_keeps_existing_keys_and_does_not_restore_removed_clients(
    run: Run, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    run("keys", "make", str(made), "server", "trainer-1", *AT)
    before = {p: p.read_bytes() for p in made.rglob("*") if p.is_file()}
    run("keys", "make", str(made), "server", "trainer-1", *AT)
    assert {p: p.read_bytes() for p in made.rglob("*") if p.is_file()} == before
    KeyFolder(made / "server").clients.remove("trainer-1")
    run("keys", "make", str(made), "trainer-1", "ci", *AT)
    grants = ClientsFile(made / "server" / "clients").grants()
    assert [grant.name for grant in grants] == ["ci"]


def test_adding_an_address_restores_no_client_and_raises_no_limit(
    run: Run, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    run("keys", "make", str(made), "server", "ci", "gone", *AT)
    clients = KeyFolder(made / "server").clients
    (narrowed,) = (g for g in clients.grants() if g.name == "ci")
    clients.add(replace(narrowed, max_envs=3), 0.0)
    clients.remove("gone")
    run("keys", "make", str(made), "server", "ci", "gone", "--at", "tcp://new:1", *AT)
    grants = ClientsFile(made / "server" / "clients").grants()
    assert [(grant.name, grant.max_envs) for grant in grants] == [("ci", 3)]
    assert "tcp://new:1" in KeyFolder(made / "ci").pinned_addresses


def test_keys_make_replaces_deleted_keys_and_keeps_limits(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    words = ("keys", "make", str(made), "server", "ci", *AT)
    run(*words)
    server, client = KeyFolder(made / "server"), KeyFolder(made / "ci")
    (grant,) = server.clients.grants()
    server.clients.add(replace(grant, max_envs=3), 0.0)
    (made / "ci" / "client.key").unlink()
    (made / "server" / "server.key").unlink()
    full = mock.Mock(side_effect=KeyFileError("no space left"))
    with monkeypatch.context() as patch:
        patch.setattr(ClientsFile, "add", full)
        assert run(*words).exit_code == 2
    assert run(*words).exit_code == 0
    pair, key = client.key("client"), server.key("server")
    assert pair is not None
    assert key is not None
    assert pair.public != grant.public
    assert client.keys_for("tcp://sim1:5555") == (key.public, pair)
    (grant,) = ClientsFile(made / "server" / "clients").grants()
    assert (grant.public, grant.max_envs) == (pair.public, 3)


def test_a_role_cannot_be_a_path(run: Run, tmp_path: Path) -> None:
    result = run("keys", "make", str(tmp_path / "made"), "../away", *AT)
    assert result.exit_code == 2
    assert not (tmp_path / "away").exists()


@pytest.mark.parametrize(
    ("role", "text"),
    [("server", "until they join again: envserve invite"), ("client", "envserve join")],
)
def test_keys_new_prints_the_consequences(
    run: Run, home: Path, role: Role, text: str
) -> None:
    folder = KeyFolder(home)
    old = folder.ensure_key(role)
    (home / f"{role}.key").chmod(0o644)
    result = run("keys", "new", *([role] if role == "client" else []))
    assert result.exit_code == 0, result.stderr
    new = folder.ensure_key(role)
    assert new != old
    assert formats.fingerprint(new.public) in result.stdout
    assert text in result.stdout
    assert not SECRETS.search(result.stdout + result.stderr)


def test_keys_can_be_mounted_as_a_kubernetes_secret_as_documented(
    run: Run, tmp_path: Path
) -> None:
    document = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    (command,) = re.findall(r'command: \[sh, -c, "(.*)"\]', document)
    made, secret, keys = (tmp_path / name for name in ("made", "secret", "keys"))
    assert run("keys", "make", str(made), "server", "ci", *AT).exit_code == 0
    # Kubernetes mounts a secret as symbolic links to group-readable files.
    (secret / "..data").mkdir(parents=True)
    keys.mkdir(mode=0o777)
    for path in (made / "server").iterdir():
        (secret / "..data" / path.name).write_bytes(path.read_bytes())
        (secret / "..data" / path.name).chmod(0o440)
        (secret / path.name).symlink_to(f"..data/{path.name}")
    command = command.replace("/secret", str(secret)).replace("/keys", str(keys))
    subprocess.run(["sh", "-c", command], check=True, timeout=90)
    folder = KeyFolder(keys / "home")
    assert folder.key("server") == KeyFolder(made / "server").key("server")
    assert [grant.name for grant in folder.clients.grants()] == ["ci"]
