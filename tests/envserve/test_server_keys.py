"""Authorisation and revocation, with server and client processes that have keys."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envserve.client.link.remote_lane import RemoteLane
from envserve.client.link.sessionless_requests import request_welcome
from envserve.errors import ConnectError
from envserve.keys.grant import Grant
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair
from envserve.lane import Outcome
from envserve.session.client.liveness import Timeouts
from tests.envserve.conftest import Serve
from tests.envserve.pool_driver import attach_lane, reset, step
from tests.envserve.server_process import ServerProcess, command, make_config
from tests.envserve.session_client import SessionClient
from tests.envserve.stalls import fastest

#: Seconds within which a client with a valid key connects.
SHORT = 1.0
#: Seconds within which a revoked client is disconnected, even on a busy machine.
SOON = 40.0
#: Maximum step time of other clients while they reconnect; 0.2 s on an idle machine.
MAX_STEP_SECONDS = 6.0


class Homes:
    """Several users' key folders; the server runs as the user `server`."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._patch = patch
        self.server = self.of("server")
        self.server.ensure_key("client")
        self.server.ensure_key("server")

    def of(self, name: str) -> KeyFolder:
        return KeyFolder(self._root / name)

    def become(self, name: str) -> None:
        """Use a user's keys in this process and its children."""
        self._patch.setenv("ENVSERVE_HOME", str(self._root / name))

    def pin(self, name: str, address: str) -> None:
        """Store the server's key for a user, and become that user."""
        keys = self.server.key("server")
        assert keys is not None
        self.of(name).add_pin([address], keys.public, name)
        self.become(name)

    def authorise(self, name: str, **limits: Any) -> None:
        keys = self.of(name).ensure_key("client")
        grant = Grant(name=name, public=keys.public, **limits)
        self.server.clients.add(grant, time.time())


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Homes:
    homes = Homes(tmp_path / "homes", monkeypatch)
    homes.become("server")
    return homes


@pytest.fixture
def server(serve: Serve, homes: Homes, tmp_path: Path) -> ServerProcess:
    audit = "--audit", str(tmp_path / "audit")
    return serve("--allow-kwarg", "length", "--drain-grace", "0", *audit)


@pytest.fixture
def lane_of(server: ServerProcess, homes: Homes) -> Iterator[Callable[..., RemoteLane]]:
    """Begin to attach as a user with a pinned server key."""
    with contextlib.ExitStack() as stack:

        def begin(name: str, connect_seconds: float = 20.0) -> RemoteLane:
            homes.pin(name, server.address)
            timeouts = Timeouts(connect_seconds=connect_seconds)
            lane = RemoteLane(server.address, make_config(), timeouts)
            return stack.enter_context(contextlib.closing(lane))

        yield begin


def client_of(server: ServerProcess, homes: Homes, name: str) -> SessionClient:
    homes.authorise(name)
    homes.pin(name, server.address)
    return SessionClient(server.address, 2)


def assert_no_failures(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.error is None
        assert not outcome.faults


def start_and_fail(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*options), capture_output=True, text=True, timeout=60, check=False
    )


def test_an_unknown_client_is_rejected_until_it_is_authorised(
    server: ServerProcess, homes: Homes, lane_of: Callable[..., RemoteLane]
) -> None:
    lane = lane_of("ann")
    with pytest.raises(ConnectError):
        request_welcome(server.address, SHORT)
    homes.authorise("ann")
    lane.finish_start(time.monotonic() + 20)
    reset(lane)
    assert "of ann: 4 envserve/Ledger-v0, granted" in server.log


def test_a_client_rejects_a_server_with_another_key(
    server: ServerProcess, homes: Homes
) -> None:
    homes.authorise("ann")
    homes.of("ann").add_pin([server.address], KeyPair.generate().public, "ann")
    homes.become("ann")
    with pytest.raises(ConnectError):
        request_welcome(server.address, SHORT)


def test_a_server_with_keys_rejects_clients_without_keys(
    server: ServerProcess, homes: Homes
) -> None:
    with pytest.raises(ConnectError):
        request_welcome(server.address, SHORT, insecure=True)
    homes.authorise("ann")
    homes.pin("ann", server.address)  # a pinned key overrides `insecure=True`
    assert request_welcome(server.address, 20.0, insecure=True).num_names > 0


def test_a_client_uses_a_server_without_keys_only_on_request(
    serve: Serve, homes: Homes
) -> None:
    server = serve("--insecure-no-auth")
    with pytest.raises(ConnectError):
        request_welcome(server.address, SHORT)
    assert request_welcome(server.address, 20.0, insecure=True).num_names > 0
    homes.pin("server", server.address)
    with pytest.raises(ConnectError):
        request_welcome(server.address, SHORT, insecure=True)


@pytest.mark.parametrize("how", ["removed", "expired", "replaced"])
def test_a_revoked_key_ends_its_leases_and_no_others(
    server: ServerProcess, homes: Homes, tmp_path: Path, how: str
) -> None:
    with contextlib.closing(attach_lane(server)) as lane:
        client = client_of(server, homes, "ann")
        with client, client_of(server, homes, "bob") as other:
            client.reset()
            other.reset()
            client.step(1)
            clients = homes.server.clients
            (ann,) = [g for g in clients.grants(time.time()) if g.name == "ann"]
            if how == "removed":
                assert clients.remove("ann")
            elif how == "expired":
                clients.add(replace(ann, expires=time.time() + 0.5), time.time())
            else:
                clients.add(replace(ann, public=KeyPair.generate().public), time.time())
            longest, started = 0.0, time.monotonic()
            while not client.is_over:
                assert time.monotonic() < started + SOON, server.log
                before = time.monotonic()
                assert_no_failures(step(lane, 1))
                longest = max(longest, time.monotonic() - before)
                assert_no_failures(other.step(2))
                client.pump()
            assert "the key of this client was removed or has expired" in str(
                client.session.error
            )
            assert_no_failures(step(lane, 1))
            assert_no_failures(other.step(2))
            assert longest < MAX_STEP_SECONDS
            homes.become("ann")
            with pytest.raises(ConnectError):
                request_welcome(server.address, SHORT)
    assert "closed all connections (keys" in server.log
    assert (tmp_path / "audit").read_text().count('"event": "revoked"') == 1


def test_a_removed_client_loses_its_lease_within_two_seconds(
    server: ServerProcess, homes: Homes
) -> None:
    names = iter(["ann", "bob", "eve"])

    def attempt() -> float:
        with client_of(server, homes, name := next(names)) as client:
            client.reset()
            started = time.monotonic()
            assert homes.server.clients.remove(name)
            while not client.is_over:
                assert time.monotonic() < started + SOON, server.log
                client.pump()
            return time.monotonic() - started

    assert fastest(attempt, 2.0) < 2.0


def test_an_unreadable_clients_file_neither_admits_nor_excludes_clients(
    server: ServerProcess, homes: Homes, lane_of: Callable[..., RemoteLane]
) -> None:
    with client_of(server, homes, "ann") as client:
        file = homes.server.path / "clients"
        text = file.read_text()
        file.write_text("what is this")
        newcomer = lane_of("bob")
        with pytest.raises(ConnectError):
            request_welcome(server.address, 3 * SHORT)
        homes.become("ann")
        assert request_welcome(server.address, 20.0).num_names > 0
        client.reset()
        client.step(1)
        file.write_text(text)
        homes.authorise("bob")
        newcomer.finish_start(time.monotonic() + 20)
        client.step(2)
    assert "the clients from the last successful read stay authorised" in server.log


def test_a_server_listens_for_other_hosts_once_a_client_has_a_key(
    serve: Serve, homes: Homes
) -> None:
    result = start_and_fail("--bind", "tcp://0.0.0.0:0")
    assert result.returncode == 2
    *_, message = result.stderr.splitlines(keepends=True)
    assert message == (
        "Error: tcp://0.0.0.0:0 is reachable from other hosts, but no client has "
        'a key yet; run "envserve invite NAME --at ADDRESS" first, or bind to '
        "tcp://127.0.0.1\n"
    )
    homes.authorise("ann")
    port = serve(bind=("tcp://0.0.0.0:0",)).address.rpartition(":")[2]
    homes.pin("ann", f"tcp://127.0.0.1:{port}")
    assert request_welcome(f"tcp://127.0.0.1:{port}", 20.0).num_names > 0


def test_a_key_that_others_can_read_is_not_used(homes: Homes) -> None:
    (homes.server.path / "server.key").chmod(0o644)
    result = start_and_fail("--bind", "tcp://127.0.0.1:0")
    assert result.returncode == 2
    assert "server.key can be read by others (mode 0644); chmod 600" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_server_without_tcp_needs_no_keys(serve: Serve, tmp_path: Path) -> None:
    home = tmp_path / "none"
    bind = (f"ipc://{tmp_path}/envs",)
    server = serve(bind=bind, environment={"ENVSERVE_HOME": str(home)})
    assert server.welcome().num_names > 0
    assert not home.exists()
