"""Learners wait for each other before TensorFlow connects them."""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from ppo.errors import ConfigError, LearnerLostError
from ppo.rendezvous import wait_for_learners

SECONDS = 60.0


def addresses_of(count: int) -> list[str]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return [f"127.0.0.1:{port}" for port in ports]


def wait_all(lists: Sequence[tuple[int, list[str]]]) -> list[Future[None]]:
    """Let learners, each with its index and list of addresses, wait for each other."""
    with ThreadPoolExecutor() as threads:
        futures = [
            threads.submit(wait_for_learners, known, index, SECONDS)
            for index, known in lists
        ]
    return futures


def test_learners_meet_in_any_order_beside_other_programs() -> None:
    addresses = addresses_of(3)
    has_met = threading.Event()

    def disturb() -> None:
        """Connect to the chief like a port scanner, until the learners have met."""
        host, port = addresses[0].split(":")
        while not has_met.is_set():
            try:
                with socket.create_connection((host, int(port)), 1) as scanner:
                    scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    scanner.recv(1)
            except OSError:
                has_met.wait(0.01)

    with ThreadPoolExecutor() as threads:
        threads.submit(disturb)
        try:
            found = wait_all([(2, addresses), (1, addresses), (0, addresses)])
        finally:
            has_met.set()
    assert [each.exception() for each in found] == [None] * 3
    port = int(addresses[0].rpartition(":")[2])
    socket.create_server(("127.0.0.1", port)).close()  # TensorFlow can use it


def test_a_line_that_is_nested_too_deeply_is_ignored() -> None:
    addresses = addresses_of(2)
    host, port = addresses[0].split(":")
    with ThreadPoolExecutor() as threads:
        chief = threads.submit(wait_for_learners, addresses, 0, SECONDS)
        while not chief.done():
            try:
                stranger = socket.create_connection((host, int(port)), 1)
            except OSError:  # the chief does not listen yet
                wait([chief], 0.01)
                continue
            with stranger:
                stranger.sendall(b"[" * 50_000 + b"\n")
                stranger.settimeout(SECONDS)
                stranger.recv(1)  # returns when the chief closes the connection
            break
        learner = threads.submit(wait_for_learners, addresses, 1, SECONDS)
    assert [chief.exception(), learner.exception()] == [None, None]


def test_a_learner_ignores_a_reply_that_is_nested_too_deeply() -> None:
    def reply() -> None:
        for line in (b"[" * 50_000 + b"\n", b'"ready"\n'):
            with chief.accept()[0] as learner, learner.makefile("rb") as stream:
                stream.readline()
                learner.sendall(line)

    with socket.create_server(("127.0.0.1", 0)) as chief:
        chief.settimeout(SECONDS)
        port = chief.getsockname()[1]
        with ThreadPoolExecutor() as threads:
            replies = threads.submit(reply)
            wait_for_learners([f"127.0.0.1:{port}", "127.0.0.1:1"], 1, SECONDS)
    assert replies.exception() is None


def test_learners_with_different_lists_name_the_difference() -> None:
    two = addresses_of(3)
    three, two = two, two[:2]
    for error in [each.exception() for each in wait_all([(0, two), (1, three)])]:
        assert isinstance(error, ConfigError)
        assert "lists 2 (" in str(error) or "lists 2 workers (" in str(error)
        assert "lists 3 (" in str(error) or "lists 3 workers (" in str(error)
        assert "\n" not in str(error)


def test_a_missing_learner_is_named() -> None:
    addresses = addresses_of(3)
    with pytest.raises(LearnerLostError, match=rf"^Learner 0: .*1 \({addresses[1]}\)"):
        wait_for_learners(addresses, 0, 0.1)
    expected = r"^Learner 1: expected .* learner 0 .* 0\.1 s \(Connection refused\);"
    with pytest.raises(LearnerLostError, match=expected):
        wait_for_learners(addresses, 1, 0.1)


def test_a_learner_that_has_left_is_missing() -> None:
    addresses = addresses_of(3)
    host, port = addresses[0].split(":")
    with ThreadPoolExecutor() as threads:
        chief = threads.submit(wait_for_learners, addresses, 0, 0.5)
        while not chief.done():
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port)), 1) as learner,
            ):
                learner.sendall(json.dumps([1, addresses]).encode() + b"\n")
                break
    assert re.match(r"Learner 0: expected .* learner 1 .*2 \(", str(chief.exception()))


def test_an_invalid_host_name_is_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"host name for learner 0, got a\.\.b:1 "):
        wait_for_learners(["a..b:1", "c:1"], 1, SECONDS)


def test_an_occupied_port_is_reported_at_once() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LearnerLostError, match=f"cannot listen on port {port}"):
            wait_for_learners([f"127.0.0.1:{port}", "b:1"], 0, SECONDS)
