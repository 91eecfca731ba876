"""`envserve status` and `top` with many, silent and old servers, at any width."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import resource
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zmq
from msgspec.structs import replace
from rich.console import Console

from envserve.cli import status as commands
from envserve.cli import top
from envserve.cli.app import PROGRAM
from envserve.monitoring.health_probe import probe
from envserve.monitoring.server_monitor import (
    MonitoredServer,
    monitored_servers,
    poll_servers,
)
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.message import Message, decode, encode
from envserve.wire.status import Histogram, LeaseStatus, ServerStatus
from tests.command_line import invoke
from tests.envserve.session_fakes import make_welcome

LEASE = LeaseStatus(
    number=1,
    user="ann",
    client="ann (trainer-17)",
    env_name="HalfCheetah-v5",
    num_envs=16,
    seconds=7300.0,
    steps=1_234_567,
    faults={"TIMEOUT": 1},
)
STATUS = ServerStatus(
    version="1.2.3",
    host="sim1",
    seconds=90_000.0,
    total_envs=64,
    free_envs=48,
    loop_lag_ms=7,
    steps=1_000,
    faults={"WORKER_DIED": 2, "ENV_ERROR": 1},
    env_step_seconds=Histogram(bounds=(1e-4, 1e-2), counts=(4, 1, 0), sum=0.01),
    num_leases=1,
    leases=(LEASE,),
)


class Servers:
    """Servers that reply to STATUS and HELLO, with a socket each, in one thread."""

    def __init__(self, folder: Path, responsive: int, silent: int = 0, old: int = 0):
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.addresses: list[str] = []
        self.num_requests = 0
        self._poller = zmq.Poller()
        self._old: set[zmq.Socket[bytes]] = set()
        self._silent: list[zmq.Socket[bytes]] = []
        for number in range(responsive + silent + old):
            socket = self.context.socket(zmq.ROUTER)
            self.addresses.append(f"ipc://{folder}/{number}")
            socket.bind(self.addresses[-1])
            if number >= responsive + silent:
                self._old.add(socket)
            if responsive <= number < responsive + silent:
                self._silent.append(socket)
            else:
                self._poller.register(socket, zmq.POLLIN)
        self._must_end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._must_end.is_set():
            for socket, _ in self._poller.poll(20):
                route, *frames = socket.recv_multipart()
                reply = self._reply_to(decode(frames), socket in self._old)
                socket.send_multipart([route, *encode(reply)])

    def _reply_to(self, request: Message, is_old: bool) -> Message:
        kind, body = MessageType.STATUS_RESULT, b""
        if request.type is MessageType.HELLO:
            kind, body = MessageType.WELCOME, make_welcome(total_envs=4).encode()
        elif is_old:
            error = ErrorBody(code=ErrorCode.UNSUPPORTED, text="of type 9 are unknown")
            kind, body = MessageType.ERROR, error.encode()
        else:
            self.num_requests += 1
            fields = {
                "steps": 1000 * self.num_requests,
                "seconds": 1.0 * self.num_requests,
            }
            body = ServerStatus(version="1.2.3", leases=(LEASE,), **fields).encode()  # type: ignore[arg-type]
        return Message(kind, request=request.request, body=body)

    def close(self) -> None:
        self._must_end.set()
        self._thread.join()
        self.context.destroy(linger=0)


@contextlib.contextmanager
def servers(folder: Path, *counts: int) -> Iterator[Servers]:
    with contextlib.closing(Servers(folder, *counts)) as running:
        yield running


def monitor(
    running: Servers,
) -> contextlib.AbstractContextManager[list[MonitoredServer]]:
    return monitored_servers(running.addresses, insecure=False)


def shown(monitored: list[MonitoredServer], width: int) -> list[str]:
    screen = Console(file=io.StringIO(), width=width)
    screen.print(commands.tables(monitored, width))
    return screen.file.getvalue().splitlines()  # type: ignore[attr-defined]


def polled(address: str = "tcp://sim1:5555", **changes: Any) -> MonitoredServer:
    server = MonitoredServer(address, False, changes.pop("error", ""))
    server.status = changes.get("status", STATUS)
    return server


def test_silent_servers_are_polled_concurrently(tmp_path: Path) -> None:
    with servers(tmp_path, 61, 3) as running, monitor(running) as monitored:
        began = time.monotonic()
        poll_servers(monitored, 12.0)
        seconds = time.monotonic() - began
        has_status = [server.status is not None for server in monitored]
    assert has_status == [True] * 61 + [False] * 3
    assert seconds < 3 * 12.0
    assert "no server replied within 12 s" in monitored[-1].error


def test_the_speed_is_measured_between_two_polls(tmp_path: Path) -> None:
    with servers(tmp_path, 1) as running, monitor(running) as monitored:
        poll_servers(monitored, 20.0)
        (server,) = monitored
        assert server.steps_per_second is None
        poll_servers(monitored, 20.0)
        assert server.steps_per_second == 1000.0


def test_the_speed_is_not_known_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observer = mock.Mock()
    observer.return_value.status.side_effect = [
        replace(STATUS, seconds=5.0, steps=900),
        replace(STATUS, seconds=6.0, steps=100),
    ]
    monkeypatch.setattr("envserve.monitoring.server_monitor.Observer", observer)
    server = polled()
    server.poll(1.0)
    server.poll(1.0)
    assert server.steps_per_second is None


def test_servers_without_status_are_shown_with_the_fields_of_welcome(
    tmp_path: Path,
) -> None:
    with servers(tmp_path, 0, 0, 1) as running, monitor(running) as monitored:
        poll_servers(monitored, 20.0)
        header, line, *_ = shown(monitored, 150)
    cells = dict(zip(header.split(), line.replace(" of ", "/").split(), strict=False))
    assert cells["envs"] == "3/4"
    assert line.split().count("-") == 6, line


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_cell_is_truncated_at_usual_widths(width: int) -> None:
    lost = polled("tcp://sim2:5555", status=None, error="lost")
    lines = shown([polled(), lost], width)
    text = "\n".join(lines)
    for part in (
        *("sim1:5555", "16 of 64", "1.04 d", "7 ms", "2 died", "1 raised"),
        *("ann (trainer-17)", "16 HalfCheetah-v5", "1,234,567", "1 hung"),
        *("62.5 us", "sim2:5555: lost"),
    ):
        assert part in text, text
    assert max(map(len, lines)) <= width
    assert "1.2.3" in text


def test_a_narrow_terminal_shows_a_list() -> None:
    lines = [line.strip() for line in shown([polled()], 40)]
    assert {"sim1:5555", "envs: 16 of 64", "p99: 9.51 ms"} <= {*lines}
    assert "faults: 2 died, 1 raised" in lines


def test_names_from_servers_are_not_interpreted_as_markup_or_colours() -> None:
    lease = LeaseStatus(number=1, client="[red]\x1b[31mann", env_name="[/]")
    text = "\n".join(shown([polled(status=ServerStatus(leases=(lease,)))], 120))
    assert "[red]" in text
    assert "[/]" in text
    assert "\x1b" not in text


def test_json_contains_the_whole_status_and_unresolved_addresses_exit_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_GAP_SECONDS", 0.0)
    odd = replace(LEASE, episodes=((1, 0, math.nan, 5),))
    monkeypatch.setitem(globals(), "LEASE", odd)
    with servers(tmp_path, 1) as running:
        words = ["status", "--json", "--timeout", "20", *running.addresses]
        result = invoke(PROGRAM, words)
        with_lost = invoke(PROGRAM, [*words, "nobody.invalid"])
    assert result.exit_code == 0
    (entry,) = json.loads(result.stdout)
    assert entry["status"]["version"] == "1.2.3"
    assert entry["status"]["leases"][0]["env_name"] == "HalfCheetah-v5"
    assert entry["status"]["leases"][0]["episodes"] == [
        {"number": 1, "row": 0, "return": None, "length": 5}
    ]
    assert [*entry["status"]][-1] == "leases"  # after all short fields
    assert entry["steps_per_second"] == 1000.0
    assert with_lost.exit_code == 2
    assert "cannot resolve nobody.invalid" in json.loads(with_lost.stdout)[1]["error"]


def test_all_servers_of_a_file_are_polled_and_health_reports_the_first_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_GAP_SECONDS", 0.0)
    word = f"file://{tmp_path}/servers"
    with servers(tmp_path, 2) as running:
        first, second = running.addresses
        (tmp_path / "servers").write_text(f"{first}\n{second}")
        result = invoke(PROGRAM, ["status", "--json", "--timeout", "20", word])
        healthy = probe(word, timeout=20.0)
        # These addresses have no known key, so no connection is made.
        (tmp_path / "servers").write_text(f"{first}\n192.0.2.1:7\n192.0.2.2:7")
        unhealthy = probe(word, timeout=20.0)
    assert [each["address"] for each in json.loads(result.stdout)] == running.addresses
    assert healthy[0] == 0
    assert re.findall(r"^(\S+): serving", healthy[1], re.MULTILINE) == running.addresses
    assert unhealthy[0] == 1
    assert unhealthy[1].startswith("tcp://192.0.2.1:7: ")


def test_an_error_in_a_pipe_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke(PROGRAM, ["status", "nobody.invalid"])
    text = "nobody.invalid: cannot resolve nobody.invalid; check its spelling and the"
    assert any(
        line.startswith(text) and line.endswith(")")
        for line in result.stdout.splitlines()
    ), result.stdout


@pytest.mark.parametrize("is_dumb_terminal", [False, True])
def test_top_prints_a_table_per_interval_if_stdout_cannot_be_redrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_dumb_terminal: bool
) -> None:
    if is_dumb_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich then assumes a terminal
        monkeypatch.setenv("TERM", "dumb")
    waits: list[float] = []

    @contextlib.contextmanager
    def keys() -> Iterator[Any]:
        def wait(seconds: float) -> str:
            waits.append(seconds)
            if len(waits) == 3:
                raise KeyboardInterrupt
            return ""

        yield wait

    monkeypatch.setattr(top, "keyboard", keys)
    patient = partial(poll_servers, timeout_seconds=20.0)
    name = "envserve.monitoring.server_monitor.poll_servers"
    monkeypatch.setattr(name, lambda servers, _: patient(servers))
    with servers(tmp_path, 1) as running:
        words = ["top", "--interval", "20", *running.addresses]
        result = invoke(PROGRAM, words)
    assert result.exit_code == 0
    assert result.stdout.count("steps/s") == 3
    assert result.stdout.count("1,000 ") == 2  # the first table cannot show a speed
    assert waits == [20.0] * 3


def test_top_does_not_wait_a_long_interval_for_a_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float] = []

    def poll(_: list[MonitoredServer], timeout_seconds: float) -> None:
        timeouts.append(timeout_seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr("envserve.monitoring.server_monitor.poll_servers", poll)
    result = invoke(PROGRAM, ["top", "--interval", "1000", f"ipc://{tmp_path}/silent"])
    assert (result.exit_code, timeouts) == (0, [2.0])


def test_top_exits_at_once_if_no_host_can_be_resolved() -> None:
    result = invoke(PROGRAM, ["top", "nobody.invalid", "sims.invalid"])
    assert result.exit_code == 2
    assert "Error: cannot resolve nobody.invalid" in result.output


@pytest.mark.parametrize("options", [["top", "--interval"], ["demo", "--seconds"]])
def test_times_that_no_timer_can_wait_for_are_errors(options: list[str]) -> None:
    result = invoke(PROGRAM, [*options, "inf"])
    assert result.exit_code == 2
    assert f"{options[1]}: expected a number <= 1" in result.stderr


def test_monitoring_raises_the_limit_of_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    try:
        with monitored_servers([], insecure=False):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
