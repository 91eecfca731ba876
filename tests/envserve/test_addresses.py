"""Server addresses, address sources, and health probe options."""

from __future__ import annotations

import inspect
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import envserve.ray
from envserve.address import complete_address, complete_bind
from envserve.cli.health import health
from envserve.client import BatchEnv
from envserve.client.link.discovery import resolve
from envserve.client.link.server_pool import ServerPool
from envserve.client.link.zmq_guards.diagnosis import Finding, diagnose_connection
from envserve.errors import AddressError, ConnectError
from envserve.keys.key_folder import KeyFolder, is_own_address
from envserve.keys.key_pair import KeyPair
from envserve.monitoring.health_probe import probe


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Host names and their addresses."""
    hosts = {"sim1": ["10.0.0.7"], "sims": ["10.0.0.9", "10.0.0.10", "10.0.0.9", "::7"]}

    def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kinds = socket.AF_INET, socket.SOCK_STREAM
        return [(*kinds, 6, "", (ip, 0)) for ip in hosts[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return hosts


@pytest.mark.parametrize(
    ("source", "address"),
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
def test_short_addresses_are_completed(source: str, address: str) -> None:
    assert resolve(source) == (address,)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:5555",
        "tcp://127.9.9.9:5555",
        "tcp://localhost:5555",
        "tcp://[::1]:5555",
        f"tcp://{socket.gethostname()}:5555",
        f"tcp://{socket.getfqdn()}:5555",
        f"tcp://{socket.gethostbyname(socket.gethostname())}:5555",
    ],
)
def test_this_host_is_recognised_by_any_of_its_names_and_addresses(
    address: str,
) -> None:
    assert is_own_address(address)


def test_a_name_with_an_address_of_another_host_is_not_of_this_host(
    known: dict[str, list[str]],
) -> None:
    known |= {"both": ["127.0.0.1", "192.0.2.7"], "mine": ["127.0.0.1", "127.0.0.2"]}
    assert is_own_address("tcp://mine:5555")
    for host in ("both", "sim1", "unknown"):
        assert not is_own_address(f"tcp://{host}:5555")


@pytest.mark.usefixtures("known")
def test_a_dns_name_resolves_to_all_its_addresses_which_share_its_pin(
    tmp_path: Path,
) -> None:
    found = resolve("dns://sims:7")
    assert found == ("tcp://10.0.0.10:7", "tcp://10.0.0.9:7", "tcp://[::7]:7")
    folder = KeyFolder(tmp_path / "keys")
    server = KeyPair.generate().public
    folder.ensure_key("client")
    folder.add_pin(["tcp://sims:7"], server, "me")
    # The trainer's evaluations connect to addresses that were already resolved.
    for address in (*found, *ServerPool(found, insecure=False).addresses):
        keys = folder.keys_for(address)
        assert keys is not None
        assert keys[0] == server
    with pytest.raises(ConnectError, match="no key of this server is known"):
        folder.keys_for("tcp://10.0.0.9:7")


def test_an_address_file_is_read_again_at_each_call(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text("# ours\n\nsim1  # the big one\nipc:///run/envs\nsim1:5555\n")
    assert resolve(f"file://{path}") == ("tcp://sim1:5555", "ipc:///run/envs")
    path.write_text("[::1]:7\n", "utf-8-sig")  # with a byte order mark
    assert resolve(f"file://{path}") == ("tcp://[::1]:7",)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, r"'file://.*servers': expected a file with .*; .*No such file"),
        (b"\xff\xfe", r"expected a file with one address per line; .*decode"),
        (b"# nobody yet\n", r"servers: expected an address per line; .* empty"),
        (b"sim1\na b\n", r"servers:2: expected an address like sim1.*got 'a b'"),
        (b"dns://sims\n", r"servers:1: expected one address; got 'dns://sims'"),
        (b"file:///x\n", r"servers:1: expected an address like .*'file:///x'"),
    ],
)
def test_the_error_about_an_invalid_address_file_names_the_line(
    tmp_path: Path, content: bytes | None, text: str
) -> None:
    path = tmp_path / "servers"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(AddressError, match=text) as raised:
        resolve(f"file://{path}")
    assert "\n" not in str(raised.value)
    assert probe(f"file://{path}") == (2, str(raised.value))


def test_an_error_of_a_signal_handler_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise TimeoutError("raised by a handler of SIGALRM")

    monkeypatch.setattr("envserve.client.link.discovery.open_regular", interrupt)
    with pytest.raises(TimeoutError, match="SIGALRM"):
        resolve("file:///servers")


def test_addresses_are_not_read_from_an_endless_device() -> None:
    with pytest.raises(AddressError, match="not a regular file"):
        resolve("file:///dev/zero")


def test_ray_addresses_resolve_to_the_servers_in_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {("envs", "sims"): ["tcp://10.0.0.9:7", "tcp://10.0.0.10:7"]}
    monkeypatch.setattr(envserve.ray, "addresses", lambda *asked: known[asked])
    found = resolve("ray://envs/sims")
    assert found == ("tcp://10.0.0.9:7", "tcp://10.0.0.10:7")
    assert [getattr(each, "name", None) for each in found] == ["ray://envs/sims"] * 2
    with pytest.raises(AddressError, match="expected ray://namespace/name"):
        resolve("ray://envs")


@pytest.mark.parametrize(
    "source",
    [
        *("", "tcp://", "udp://a:1", "tcp:/x", "a:b", "a:70000", "[::1", "ipc://"),
        *("ipc:///a\0b", "a:\u00b2", f"a:{'9' * 5000}"),
        *("ipc:///a\udcff", "a\udcff", "[::1%\udcff]:5"),  # words that are not UTF-8
        *("[]:5", "[%eth0]:5"),
    ],
)
def test_invalid_addresses_raise_address_error(source: str) -> None:
    with pytest.raises(AddressError, match="expected an address like sim1, sim1:5555"):
        complete_address(source)


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("::1", "in brackets: [::1]:5555"),
        ("tcp://fd00::7", "in brackets: [::1]:5555"),
        ("sim1:70000", "the largest port is 65535"),
    ],
)
def test_the_error_of_an_invalid_address_states_the_remedy(
    address: str, hint: str
) -> None:
    for complete in (complete_address, complete_bind):
        with pytest.raises(ValueError, match=re.escape(f"got '{address}'; ")) as raised:
            complete(address)
        assert str(raised.value).endswith(hint)


def test_only_servers_may_use_port_0() -> None:
    with pytest.raises(AddressError, match="'a:0'; use the port that the server has"):
        complete_address("a:0")
    assert complete_bind("127.0.0.1:0") == "tcp://127.0.0.1:0"


@pytest.mark.usefixtures("known")
def test_an_unknown_host_fails_at_once() -> None:
    text = "cannot resolve sim2; check its spelling"
    with pytest.raises(AddressError, match=text):
        BatchEnv.connect("CartPole-v1", ["sim1", "sim2"], 2, connect_timeout=1e9)
    code, output = probe("sim2", timeout=1e9)
    assert code == 2
    assert output.startswith(text)


@pytest.mark.parametrize("name", ["sim..local", "x" * 64, "sims." + "x" * 64])
def test_an_impossible_host_name_fails_like_an_unknown_host(name: str) -> None:
    for source in (name, f"dns://{name}:7"):
        with pytest.raises(
            AddressError, match=f"cannot resolve {name}; check"
        ) as raised:
            resolve(source)
        assert "\n" not in str(raised.value)
    assert diagnose_connection(f"tcp://{name}:7", None, 60.0) is Finding.UNKNOWN_HOST


def test_probe_and_the_health_command_have_the_same_options() -> None:
    def options(function: Callable[..., object]) -> dict[str, object]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.name != "address"}

    assert options(probe) == options(health)
