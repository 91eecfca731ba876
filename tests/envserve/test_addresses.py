"""Words for servers, and what a probe of one loads."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from envserve.address import complete, resolve
from envserve.client import BatchEnv
from envserve.client.health import probe
from envserve.commands.servers import health
from envserve.errors import AddressError, ConnectError
from envserve.keys.folder import KeyFolder
from envserve.keys.pair import KeyPair


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
    folder.client_key(create=True)
    folder.add_pin(["tcp://sims:7"], server, "me")
    for address in found:
        keys = folder.keys_for(address)
        assert keys is not None
        assert keys[0] == server
    with pytest.raises(ConnectError, match="no key of that server is known"):
        folder.keys_for("tcp://10.0.0.9:7")


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


def test_a_probe_takes_the_options_of_its_command() -> None:
    def options(function: Callable[..., object]) -> dict[str, object]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.name != "address"}

    assert options(probe) == options(health)
