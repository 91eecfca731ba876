"""Prometheus metrics: their values, and resistance to slow or hostile clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zmq
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from envserve.client import BatchEnv
from envserve.client.link.connection import Connection
from envserve.errors import ServerError
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair
from envserve.monitoring.metrics_port import MetricsPort
from envserve.server.metrics import ServerCollector
from envserve.text import install_command
from envserve.wire.sockets import use_keys
from envserve.wire.status import Histogram, LeaseStatus, ServerStatus
from tests.envserve.conftest import OPENINGS, PATIENCE, Serve, WaitUntil
from tests.envserve.server_process import LEDGER
from tests.oracle.ledger import Ledger

STATUS = ServerStatus(
    version="1.0",
    seconds=9.0,
    steps=70,
    rows={"OK": 70, "TIMEOUT": 4},
    faults={"TIMEOUT": 2},
    refusals={"ENVS_BUSY": 3},
    total_envs=8,
    loop_lag_ms=250,
    is_draining=True,
    batch_seconds=Histogram(bounds=(0.01, 0.1), counts=(5, 2, 1), sum=0.75),
    num_leases=1,
    leases=(LeaseStatus(number=1, user="zoe", client="zoe (x)", absent=(1, 2)),),
)


def test_a_port_whose_thread_cannot_start_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = MetricsPort(0)
    failing = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", failing)
    with pytest.raises(RuntimeError, match="can't start"):
        port.start_serving(mock.Mock())
    port.server_close()


def samples(text: str) -> dict[str, float]:
    """Return values by name and labels, parsed as by Prometheus."""
    return {
        name + "".join(f" {key}={value}" for key, value in labels.items()): number
        for family in text_string_to_metric_families(text)
        for name, labels, number, *_ in family.samples
    }


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        return str(response.read().decode())


def current_samples(address: str) -> dict[str, float]:
    """Read the metrics; after timeouts and other errors, retry for a minute."""
    give_up_at = time.monotonic() + 60
    while True:
        try:
            return samples(read(address))
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            if time.monotonic() > give_up_at:
                raise


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    with MetricsPort(0) as port:
        yield port


def test_metrics_of_a_status_follow_the_conventions_of_prometheus(
    port: MetricsPort,
) -> None:
    port.start_serving(ServerCollector(lambda: STATUS))
    text = read(port.address)
    found = samples(text)
    assert found["envserve_env_steps_total"] == 70
    assert found["envserve_rows_total status=TIMEOUT"] == 4
    assert found["envserve_faults_total kind=TIMEOUT"] == 2
    # The metric is present even before the first fault.
    assert found["envserve_faults_total kind=WORKER_DIED"] == 0
    assert found["envserve_refusals_total code=ENVS_BUSY"] == 3
    assert found["envserve_batch_seconds_bucket le=0.1"] == 7
    assert found["envserve_batch_seconds_bucket le=+Inf"] == 8
    assert found["envserve_batch_seconds_count"] == 8
    assert found["envserve_batch_seconds_sum"] == 0.75
    assert found["envserve_loop_lag_seconds"] == 0.25
    assert (found["envserve_draining"], found["envserve_starting"]) == (1, 0)
    assert (found["envserve_absent_rows"], found["envserve_leases"]) == (2, 1)
    assert "zoe" not in text
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith("."), family.name
        assert family.type != "unknown"


def status_for_host(port: MetricsPort, host: str | None) -> int:
    """Return the HTTP status of a request with this Host header."""
    place = port.address.split("/")[2]
    connection = http.client.HTTPConnection(place, timeout=20)
    with contextlib.closing(connection):
        connection.putrequest("GET", "/metrics", skip_host=True)
        if host is not None:
            connection.putheader("Host", host)
        connection.endheaders()
        return connection.getresponse().status


def test_only_requests_for_this_host_are_answered(
    port: MetricsPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site whose name resolves to this host must not be able to read the metrics."""
    monkeypatch.setattr(socket, "getfqdn", lambda: "Sim1.lab.example")
    port.start_serving(ServerCollector(lambda: STATUS))
    known = ["127.0.0.1", "127.0.0.1:9100", "[::1]:9100", "192.0.2.7", "localhost:1"]
    known += [socket.gethostname(), "sim-1:9100", "sim1.lab.example:9100"]
    for host in (*known, None):
        assert status_for_host(port, host) == 200, host
    for host in ("evil.example", "evil.example:9100", "127.0.0.1.evil.example"):
        assert status_for_host(port, host) == 403, host
    assert status_for_host(port, "evil.example.:9100") == 403


def test_the_metrics_host_is_a_known_name() -> None:
    with MetricsPort(0, "127.1") as port:
        port.start_serving(ServerCollector(lambda: STATUS))
        assert status_for_host(port, "127.1:9100") == 200


def test_the_port_can_listen_on_an_ipv6_address() -> None:
    with MetricsPort(0, "::1") as port:
        port.start_serving(ServerCollector(lambda: STATUS))
        assert "envserve_info" in read(port.address)


class Broken:
    def collect(self) -> list[Metric]:
        raise TimeoutError


def test_a_collector_that_times_out_gets_status_503(port: MetricsPort) -> None:
    port.start_serving(Broken())
    with pytest.raises(urllib.error.HTTPError) as caught:
        read(port.address)
    assert caught.value.code == 503
    caught.value.close()


def test_clients_that_send_or_read_nothing_delay_others_by_only_a_second(
    port: MetricsPort,
) -> None:
    port.start_serving(ServerCollector(lambda: STATUS))
    host, number = port.address.split("/")[2].split(":")
    with (
        socket.create_connection((host, int(number))) as silent,
        socket.create_connection((host, int(number))) as deaf,
    ):
        deaf.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert current_samples(port.address)["envserve_env_steps_total"] == 70
        silent.settimeout(20)
        assert silent.recv(1) == b""  # the port has closed the connection


def test_a_client_that_sends_byte_by_byte_delays_others_by_only_a_second(
    port: MetricsPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserve.monitoring.metrics_port._TIMEOUT_SECONDS", 0.2)
    port.start_serving(ServerCollector(lambda: STATUS))
    host, number = port.address.split("/")[2].split(":")
    with socket.create_connection((host, int(number))) as slow:
        slow.settimeout(0.05)
        end, give_up_at = b"?", time.monotonic() + 60
        while end:
            assert time.monotonic() < give_up_at
            with contextlib.suppress(OSError):
                slow.send(b"G")
            try:
                end = slow.recv(1)
            except TimeoutError:
                continue
            except ConnectionResetError:
                break
        assert current_samples(port.address)["envserve_env_steps_total"] == 70


def test_an_address_that_cannot_be_used_is_an_error(port: MetricsPort) -> None:
    number = int(port.address.split(":")[-1].split("/")[0])
    with pytest.raises(ServerError, match=rf"127.0.0.1:{number}: Address already in"):
        MetricsPort(number)
    with pytest.raises(ServerError, match=r"ü\.\.b:0: encoding of hostname failed"):
        MetricsPort(0, "ü..b")


def test_the_error_about_missing_packages_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ServerError, match=re.escape(install_command("metrics"))):
        MetricsPort(0)


def test_a_server_provides_its_counters(serve: Serve) -> None:
    server = serve("--metrics-port", "0")
    address = server.metrics_address
    assert address.startswith("http://127.0.0.1:")
    before = current_samples(address)
    assert before["envserve_env_steps_total"] == 0
    assert before["envserve_received_messages_total"] == 0
    server.welcome()
    give_up_at = time.monotonic() + 60
    while not (found := current_samples(address))["envserve_received_messages_total"]:
        assert time.monotonic() < give_up_at  # the status is cached for a moment
    assert found["envserve_sent_bytes_total"] > found["envserve_received_bytes_total"]


def test_counts_of_faults_and_rows_match_the_ledger(
    serve: Serve, random_generator: np.random.Generator
) -> None:
    server = serve("--metrics-port", "0", *OPENINGS)
    address = server.metrics_address
    # An exception invalidates one row, and the death of a worker its two rows.
    kinds = {997: ("ENV_ERROR", 1), 998: ("WORKER_DIED", 2)}
    env_kwargs = {"failures": {"raise": {"actions": [997]}, "kill": {"actions": [998]}}}
    faults, lost = Counter[str](), Counter[str]()
    ledger = Ledger(4, 3)
    options: dict[str, Any] = {"seed": 3, "env_kwargs": env_kwargs}
    with BatchEnv.connect(
        LEDGER, [server.address], 4, padding_after=PATIENCE, **options
    ) as batch:
        ledger.reset(batch.reset())
        for turn in range(50):
            actions = random_generator.integers(0, 900, 4)
            if turn % 5 == 4:
                fatal = actions[random_generator.integers(4)] = 997 + turn // 5 % 2
                kind, cost = kinds[fatal]
                faults[kind] += 1
                lost[kind] += cost
            ledger.step(actions, batch.step(actions))
        give_up_at = time.monotonic() + 60
        found = current_samples(address)
        while found["envserve_env_steps_total"] != ledger.num_valid:
            assert time.monotonic() < give_up_at, found
            found = current_samples(address)
    assert {status.name: n for status, n in ledger.losses.items()} == lost
    for kind in ("ENV_ERROR", "WORKER_DIED", "TIMEOUT", "SERVER_LOST"):
        assert found.get(f"envserve_faults_total kind={kind}", 0) == faults[kind]
        assert found.get(f"envserve_rows_total status={kind}", 0) == lost[kind]
    assert found["envserve_rows_total status=OK"] == ledger.num_valid == 200 - 15
    assert found["envserve_worker_restarts_total"] == faults["WORKER_DIED"] == 5


def test_refused_keys_and_reopened_sockets_are_counted(
    serve: Serve, wait_until: WaitUntil
) -> None:
    server = serve("--metrics-port", "0")
    address = server.metrics_address
    keys = KeyFolder().key("server")
    assert keys is not None

    def count(short: str) -> float:
        return current_samples(address)[f"envserve_{short}_total"]

    assert (count("refused_keys"), count("reopened")) == (0, 0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as unknown:
        use_keys(unknown, keys.public, KeyPair.generate())
        unknown.connect(server.address)
        wait_until(lambda: count("refused_keys") == 1)
    with contextlib.closing(Connection(server.address)) as connection:
        connection.wait(PATIENCE, for_writing=True)
        assert connection.send([b""] * 60_000)
        wait_until(lambda: count("reopened") == 1)
    assert count("refused_keys") == 1


def test_a_server_whose_metrics_port_is_in_use_does_not_start(
    serve: Serve, port: MetricsPort
) -> None:
    number = port.address.split(":")[-1].split("/")[0]
    with pytest.raises(
        RuntimeError, match=r"exited with code 1:\n(.*\n)*.*pass another --met"
    ):
        serve("--metrics-port", number)


def test_the_dashboard_alerts_and_documents_name_only_existing_metrics() -> None:
    root = Path(__file__).parents[2]
    families = [*ServerCollector(lambda: STATUS).collect()]
    names = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    names |= {f"{f.name}_bucket" for f in families if f.type == "histogram"}
    texts = [
        (root / "deploy" / name).read_text()
        for name in ("grafana/dashboards/envserve.json", "prometheus/alerts.yml")
    ]
    used = set(re.findall(r"\benvserve_\w+", "".join(texts)))
    assert used <= names, used - names
    document = (root / "docs" / "metrics-of-servers.md").read_text()
    documented = set(re.findall(r"`(envserve_\w+)", document))
    assert documented == {name for name in names if not name.endswith("_bucket")} - {
        "envserve"
    } | {"envserve_info"}
    rows = (root / "docs" / "metrics.md").read_text()
    for name in re.findall(r"\bppo_(\w+)", "".join(texts)):
        assert f"`{name}`" in rows or f"`ppo_{name}" in rows, name
    alerts = re.findall(r"alert: (\w+)", texts[1])
    assert re.findall(r"^\| ((?:Envserve|Ppo)\w+) \|", document, re.M) == alerts
    json.loads(texts[0])


def test_a_server_whose_metrics_are_read_continuously_still_ends_at_once(
    serve: Serve,
) -> None:
    server = serve("--metrics-port", "0")
    address = server.metrics_address
    have_read = threading.Barrier(5)

    def read_until_closed() -> int:
        """Read until the port is closed; return 503 if a request timed out, else 0."""
        current_samples(address)
        have_read.wait(60)
        try:
            while True:
                read(address)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except (OSError, http.client.HTTPException):
            return 0  # the port was closed

    with ThreadPoolExecutor(4) as readers:
        codes = [readers.submit(read_until_closed) for _ in range(4)]
        have_read.wait(60)
        server.signal(signal.SIGINT)
        server.wait()
        assert {code.result() for code in codes} == {0}
