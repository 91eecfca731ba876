"""Words for servers, and what a probe of one loads."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import envserve.ray
from envserve.address import complete
from envserve.cli.servers import health
from envserve.client import BatchEnv
from envserve.client.link.discovery import resolve
from envserve.client.link.zmq_guards.diagnosis import Finding, diagnose_connection
from envserve.errors import AddressError, ConnectError
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair
from envserve.monitoring.health_probe import probe


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names of hosts, and their addresses."""
    hosts = {"sim1": ["10.0.0.7"], "sims": ["10.0.0.9", "10.0.0.10", "10.0.0.9", "::7"]}

    def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (ip, 0)) for ip in hosts[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return hosts


@pytest.mark.parametrize(
    ("word", "address"),
    [
        ("sim1", "tcp://sim1:5555"),
        ("sim1:7", "tcp://sim1:7"),
        ("tcp://sim1", "tcp://sim1:5555"),
        ("tcp://sim1:7", "tcp://sim1:7"),
        ("127.0.0.1", "tcp://127.0.0.1:5555"),
        ("[::1]:7", "tcp://[::1]:7"),
        ("dns://sim1", "tcp://10.0.0.7:5555"),
        ("dns://127.0.0.1:7", "tcp://127.0.0.1:7"),
        ("ipc:///run/envs", "ipc:///run/envs"),
    ],
)
@pytest.mark.usefixtures("known")
def test_a_word_stands_for_an_address(word: str, address: str) -> None:
    assert resolve(word) == (address,)


@pytest.mark.usefixtures("known")
def test_a_name_stands_for_all_its_addresses_and_its_key_for_all_of_them(
    tmp_path: Path,
) -> None:
    found = resolve("dns://sims:7")
    assert found == ("tcp://10.0.0.10:7", "tcp://10.0.0.9:7", "tcp://[::7]:7")
    folder = KeyFolder(tmp_path / "keys")
    server = KeyPair.make().public
    folder.ensure_key("client")
    folder.add_pin(["tcp://sims:7"], server, "me")
    for address in found:
        keys = folder.keys_for(address)
        assert keys is not None
        assert keys[0] == server
    with pytest.raises(ConnectError, match="no key of that server is known"):
        folder.keys_for("tcp://10.0.0.9:7")


def test_a_file_is_read_anew_at_each_look(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text("# ours\n\nsim1  # the big one\nipc:///run/envs\nsim1:5555\n")
    assert resolve(f"file://{path}") == ("tcp://sim1:5555", "ipc:///run/envs")
    path.write_text("[::1]:7\n")
    assert resolve(f"file://{path}") == ("tcp://[::1]:7",)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, r"'file://.*servers': expected a file of addresses.*No such file"),
        (b"\xff\xfe", r"expected a file of addresses, one a line; .*decode"),
        (b"# nobody yet\n", r"file://.*servers: expected an address a line; .* none"),
        (b"sim1\na b\n", r"servers:2: expected an address like sim1.*got 'a b'"),
        (b"dns://sims\n", r"servers:1: expected one address; got 'dns://sims'"),
        (b"file:///x\n", r"servers:1: expected an address like .*'file:///x'"),
    ],
)
def test_a_file_that_is_none_of_addresses_is_said(
    tmp_path: Path, content: bytes | None, text: str
) -> None:
    path = tmp_path / "servers"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(AddressError, match=text) as raised:
        resolve(f"file://{path}")
    assert "\n" not in str(raised.value)
    assert probe(f"file://{path}") == (2, str(raised.value))


def test_ray_is_asked_for_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {("envs", "sims"): ["tcp://10.0.0.9:7", "tcp://10.0.0.10:7"]}
    monkeypatch.setattr(envserve.ray, "addresses", lambda *asked: known[asked])
    found = resolve("ray://envs/sims")
    assert found == ("tcp://10.0.0.9:7", "tcp://10.0.0.10:7")
    assert [getattr(each, "name", None) for each in found] == ["ray://envs/sims"] * 2
    with pytest.raises(AddressError, match="expected ray://namespace/name"):
        resolve("ray://envs")


@pytest.mark.parametrize(
    "word", ["", "tcp://", "udp://a:1", "tcp:/x", "a:b", "a:70000", "[::1", "ipc://"]
)
def test_other_words_are_errors(word: str) -> None:
    with pytest.raises(AddressError, match="expected an address like sim1, sim1:5555"):
        complete(word)


@pytest.mark.usefixtures("known")
def test_a_host_that_nobody_knows_is_said_at_once() -> None:
    text = "cannot resolve sim2; is it spelled right"
    with pytest.raises(AddressError, match=text):
        BatchEnv.connect("CartPole-v1", ["sim1", "sim2"], 2, connect_timeout=1e9)
    code, said = probe("sim2", timeout=1e9)
    assert code == 2
    assert said.startswith(text)


@pytest.mark.parametrize("name", ["sim..local", "x" * 64, "sims." + "x" * 64])
def test_a_host_that_can_have_no_name_is_said_like_one_that_nobody_knows(
    name: str,
) -> None:
    for word in (name, f"dns://{name}:7"):
        with pytest.raises(AddressError, match=f"cannot resolve {name}; is") as raised:
            resolve(word)
        assert "\n" not in str(raised.value)
    assert diagnose_connection(f"tcp://{name}:7", None, 60.0) is Finding.UNKNOWN_HOST


def test_a_probe_takes_the_options_of_its_command() -> None:
    def options(function: Callable[..., object]) -> dict[str, object]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.name != "address"}

    assert options(probe) == options(health)
