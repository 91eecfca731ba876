"""Metrics for Prometheus: what is shown, and what readers can do to who shows it."""

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


def samples(text: str) -> dict[str, float]:
    """Values by name and labels, as Prometheus understands them."""
    return {
        name + "".join(f" {key}={value}" for key, value in labels.items()): number
        for family in text_string_to_metric_families(text)
        for name, labels, number, *_ in family.samples
    }


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return str(answer.read().decode())


def read_soon(address: str) -> str:
    """The same of who is late, and says so or hangs up: it is asked again."""
    give_up_at = time.monotonic() + 60
    while True:
        try:
            return read(address)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            if time.monotonic() > give_up_at:
                raise


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    with MetricsPort(0) as port:
        yield port


def test_a_status_is_shown_under_names_as_prometheus_asks_for(
    port: MetricsPort,
) -> None:
    port.start_serving(ServerCollector(lambda: STATUS))
    text = read(port.address)
    found = samples(text)
    assert found["envserve_env_steps_total"] == 70
    assert found["envserve_rows_total status=TIMEOUT"] == 4
    assert found["envserve_faults_total kind=TIMEOUT"] == 2
    assert found["envserve_faults_total kind=WORKER_DIED"] == 0  # known from the start
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


class Broken:
    def collect(self) -> list[Metric]:
        raise TimeoutError


def test_a_loop_that_does_not_answer_is_said_to_be_late(port: MetricsPort) -> None:
    port.start_serving(Broken())
    with pytest.raises(urllib.error.HTTPError) as caught:
        read(port.address)
    assert caught.value.code == 503
    caught.value.close()


def test_readers_that_say_or_read_nothing_keep_others_waiting_for_a_second(
    port: MetricsPort,
) -> None:
    port.start_serving(ServerCollector(lambda: STATUS))
    host, number = port.address.split("/")[2].split(":")
    with (
        socket.create_connection((host, int(number))) as silent,
        socket.create_connection((host, int(number))) as deaf,
    ):
        deaf.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert samples(read_soon(port.address))["envserve_env_steps_total"] == 70
        silent.settimeout(20)
        assert silent.recv(1) == b""  # it was closed


def test_who_asks_byte_by_byte_keeps_others_waiting_for_a_second(
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
        assert samples(read_soon(port.address))["envserve_env_steps_total"] == 70


def test_a_port_in_use_is_said(port: MetricsPort) -> None:
    number = int(port.address.split(":")[-1].split("/")[0])
    with pytest.raises(ServerError, match=rf"127.0.0.1:{number}: Address already in"):
        MetricsPort(number)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ServerError, match=r"pip install 'envserve\[metrics\]'"):
        MetricsPort(0)


def test_a_server_shows_what_it_has_counted(serve: Serve, join: Any) -> None:
    server = serve("--metrics-port", "0")
    address = server.log.rpartition("metrics are at ")[2].split()[0]
    assert address.startswith("http://127.0.0.1:")
    before = samples(read_soon(address))
    assert before["envserve_env_steps_total"] == 0
    assert before["envserve_received_messages_total"] == 0
    server.welcome()
    give_up_at = time.monotonic() + 60
    while not (found := samples(read_soon(address)))[
        "envserve_received_messages_total"
    ]:
        assert time.monotonic() < give_up_at  # what is shown may be a moment old
    assert found["envserve_sent_bytes_total"] > found["envserve_received_bytes_total"]


def test_faults_and_rows_are_counted_as_by_the_ledger(
    serve: Serve, random_generator: np.random.Generator
) -> None:
    server = serve("--metrics-port", "0", *OPENINGS)
    address = server.log.rpartition("metrics are at ")[2].split()[0]
    # What raises costs its own row, what ends its worker costs two.
    kinds = {997: ("ENV_ERROR", 1), 998: ("WORKER_DIED", 2)}
    env_kwargs = {
        "breakdowns": {"raise": {"actions": [997]}, "kill": {"actions": [998]}}
    }
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
        found = samples(read_soon(address))
        while found["envserve_env_steps_total"] != ledger.num_valid:
            assert time.monotonic() < give_up_at, found
            found = samples(read_soon(address))
    assert {status.name: n for status, n in ledger.losses.items()} == lost
    for kind in ("ENV_ERROR", "WORKER_DIED", "TIMEOUT", "SERVER_LOST"):
        assert found.get(f"envserve_faults_total kind={kind}", 0) == faults[kind]
        assert found.get(f"envserve_rows_total status={kind}", 0) == lost[kind]
    assert found["envserve_rows_total status=OK"] == ledger.num_valid == 200 - 15
    assert found["envserve_worker_restarts_total"] == faults["WORKER_DIED"] == 5


def test_who_knocks_in_vain_and_who_has_all_cut_off_is_counted(
    serve: Serve, wait_until: WaitUntil
) -> None:
    server = serve("--metrics-port", "0")
    address = server.log.rpartition("metrics are at ")[2].split()[0]
    keys = KeyFolder().key("server")
    assert keys is not None

    def count(short: str) -> float:
        return samples(read_soon(address))[f"envserve_{short}_total"]

    assert (count("refused_keys"), count("reopened")) == (0, 0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        use_keys(stranger, keys.public, KeyPair.generate())
        stranger.connect(server.address)
        wait_until(lambda: count("refused_keys") == 1)
    with contextlib.closing(Connection(server.address)) as own:
        own.wait(PATIENCE, for_writing=True)
        assert own.send([b""] * 60_000)
        wait_until(lambda: count("reopened") == 1)
    assert count("refused_keys") == 1


def test_a_server_whose_metrics_port_is_in_use_ends_before_it_serves(
    serve: Serve, port: MetricsPort
) -> None:
    number = port.address.split(":")[-1].split("/")[0]
    with pytest.raises(
        RuntimeError, match=r"exit code 1:\n(.*\n)*.*name another --met"
    ):
        serve("--metrics-port", number)


def test_dashboard_alerts_and_documents_name_what_there_is() -> None:
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
    told = set(re.findall(r"`(envserve_\w+)", document))
    assert told == {name for name in names if not name.endswith("_bucket")} - {
        "envserve"
    } | {"envserve_info"}
    rows = (root / "docs" / "metrics.md").read_text()
    for name in re.findall(r"\bppo_(\w+)", "".join(texts)):
        assert f"`{name}`" in rows or f"`ppo_{name}" in rows, name
    alerts = re.findall(r"alert: (\w+)", texts[1])
    assert re.findall(r"^\| ((?:Envserve|Ppo)\w+) \|", document, re.M) == alerts
    json.loads(texts[0])


def test_a_server_whose_metrics_are_read_all_the_time_ends_at_once(
    serve: Serve,
) -> None:
    server = serve("--metrics-port", "0")
    address = server.log.rpartition("metrics are at ")[2].split()[0]
    have_read = threading.Barrier(5)

    def read_on() -> int:
        """Returns 503 if an answer was waited for that could not come any more."""
        read_soon(address)
        have_read.wait(60)
        try:
            while True:
                read(address)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except (OSError, http.client.HTTPException):
            return 0  # it has ended

    with ThreadPoolExecutor(4) as readers:
        codes = [readers.submit(read_on) for _ in range(4)]
        have_read.wait(60)
        server.signal(signal.SIGINT)
        server.wait()
        assert {code.result() for code in codes} == {0}
