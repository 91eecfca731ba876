"""The page: access control, buttons, flight records and events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, cast

import pytest
from starlette.applications import Starlette
from starlette.types import Message

from envserve.address import NamedAddress
from envserve.cli.app import PROGRAM
from envserve.errors import ConnectError, ServerError
from envserve.monitoring.observer import Observer
from envserve.monitoring.page.app import build_app
from envserve.monitoring.page.data_feed import DataFeed
from envserve.monitoring.page.serve import finish_page, page_process, page_server
from envserve.python_process import main_command
from envserve.wire.sockets import raise_file_limit
from tests.command_line import invoke
from tests.envserve.page_client import TIMEOUT_SECONDS, Browser, Events, served
from tests.envserve.page_fakes import FakeObserver, FakeServerState

ADDRESS = NamedAddress("tcp://10.0.0.2:5555", "tcp://sim1:5555")


def kill() -> str:
    raise ServerError("there is no worker to kill")


BUTTONS = {"greet": ("Greet", lambda: "hello"), "kill": ("Kill a worker", kill)}


Build = Callable[[str], Starlette]


def build_over(server: FakeServerState, run: Path | None = None) -> Build:
    observe = cast(Any, lambda _: FakeObserver(server))
    feed = DataFeed([ADDRESS], run, observe)
    return lambda token: build_app(feed, token=token, buttons=BUTTONS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with served(build_over(FakeServerState("CartPole-v1"))) as url:
        yield Browser(url)


@pytest.fixture
def server() -> FakeServerState:
    return FakeServerState("CartPole-v1")


@pytest.fixture
def watching(server: FakeServerState, tmp_path: Path) -> Iterator[Browser]:
    """A browser that shows a server and a run that no other test uses."""
    with served(build_over(server, tmp_path)) as url:
        yield Browser(url)


def set_tiles(browser: Browser, name: str, *tiles: tuple[int, int, int, int]) -> int:
    body = json.dumps({"subscriber": name, "tiles": tiles})
    return browser.request("POST", "/tiles", body)[0]


# Access control.


def test_the_token_in_the_url_becomes_a_cookie_of_this_page_alone(
    browser: Browser,
) -> None:
    status, page, headers = browser.request(
        "GET", f"/?token={browser.token}", headers={}
    )
    assert status == 200
    assert "<title>envserve</title>" in page
    cookie, *rest = headers["set-cookie"].split("; ")
    assert cookie == browser.headers["Cookie"]
    assert {"HttpOnly", "SameSite=Strict"} <= {*rest}
    assert browser.request("GET", "/", headers={"Cookie": cookie})[0] == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/?token=wrong"),
        ("GET", "/?token=%C3%A9"),
        ("GET", "/events?token={token}"),
        ("GET", "/record/0/1/2"),
        ("GET", "/nothing"),
        ("POST", "/tiles"),
        ("POST", "/press/greet"),
    ],
)
def test_requests_without_the_token_are_rejected(
    browser: Browser, method: str, path: str
) -> None:
    headers = {"Origin": browser.headers["Origin"]}
    path = path.format(token=browser.token)
    status, text, received = browser.request(method, path, headers=headers)
    assert status == 403
    assert "expected a url with a token" in text.lower()
    assert "set-cookie" not in received


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1234"}, 403),  # the cookie is valid for another port
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "[::1"}, 403),
    ],
)
def test_requests_for_other_host_names_are_rejected(
    browser: Browser, headers: dict[str, str], status: int
) -> None:
    assert browser.request("GET", "/", headers=browser.headers | headers)[0] == status
    path = f"/?token={browser.token}"
    if headers.get("Host", "localhost").startswith("localhost"):
        status = 200
    assert browser.request("GET", path, headers=headers)[0] == status


@pytest.mark.parametrize(
    "origin", [None, "null", "http://evil.example", "http://127.0.0.1:1"]
)
def test_pages_of_other_sites_cannot_press_a_button(
    browser: Browser, origin: str | None
) -> None:
    headers = {"Cookie": browser.headers["Cookie"]}
    headers |= {} if origin is None else {"Origin": origin}
    assert browser.request("POST", "/press/greet", headers=headers)[0] == 403


def test_the_page_allows_only_its_own_script_and_loads_nothing(
    browser: Browser,
) -> None:
    _, page, headers = browser.request("GET", "/")
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page
    assert "innerHTML" not in page
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"


# Buttons and flight records.


def test_a_button_returns_the_result_of_its_function(watching: Browser) -> None:
    assert watching.request("POST", "/press/greet")[:2] == (200, "hello")
    assert watching.request("POST", "/press/kill")[:2] == (
        502,
        "there is no worker to kill",
    )
    assert watching.request("POST", "/press/other")[0] == 404
    assert watching.request("GET", "/press/greet")[0] == 405


def test_a_flight_record_is_downloaded(watching: Browser) -> None:
    *response, headers = watching.request("GET", "/record/0/1/2")
    assert response == [200, "record of 1 2"]
    assert headers["content-type"] == "application/octet-stream"  # not shown as HTML
    status, text, _ = watching.request("GET", "/record/0/1/13")
    assert (status, text.partition(":")[0]) == (502, "env 13 has no flight record")
    assert watching.request("GET", "/record/7/1/2")[0] == 502


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"subscriber": "nobody", "tiles": []}', 404),
        ("", 400),
        ("[" * 1000, 400),
        ('{"subscriber": "x", "tiles": [[0, 1, 2]]}', 400),
        ('{"subscriber": "x", "tiles": [[0, 1, -2, 160]]}', 400),
        ('{"subscriber": "x", "tiles": [[0, 1, 2, 4096]]}', 400),
        (json.dumps({"subscriber": "x", "tiles": [[0, 1, 2, 80]] * 513}), 400),
        (" " * 70_000, 413),
    ],
)
def test_the_tiles_that_a_browser_sends_are_validated(
    browser: Browser, body: str, status: int
) -> None:
    assert browser.request("POST", "/tiles", body)[0] == status


@pytest.mark.parametrize("number", [str(2**70), "9" * 5000, "-1", "x", "1.5", "%00"])
def test_numbers_that_name_no_env_are_not_found(browser: Browser, number: str) -> None:
    for path in (f"{number}/1/2", f"0/{number}/2", f"0/1/{number}"):
        status, _, headers = browser.request("GET", f"/record/{path}")
        assert status == 404
        assert "content-security-policy" in headers


# Events.


def test_browsers_receive_the_state_of_servers_and_run(
    watching: Browser, server: FakeServerState, tmp_path: Path
) -> None:
    rows = [{"steps": k, "mean_return": 2.0 * k, "kl": None} for k in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"steps": 3, "mean')
    server.end_episodes(0, 21.0, 22.0)
    with watching.events() as events:
        run = events.until("run", lambda run: bool(run["row"]))
        assert run["mean_return"] == [[0, 0], [1, 2], [2, 4]]
        assert run["name"] == tmp_path.name
        state = events.until(
            "server", lambda state: state["status"]["leases"][0]["episodes"] != []
        )
        assert (state["address"], state["error"]) == (ADDRESS, "")
        assert state["status"]["host"] == "sim1"
        assert state["status"]["faults"] == {"WORKER_DIED": 2, "TIMEOUT": 1}
        (lease,) = state["status"]["leases"]
        assert [each[2] for each in lease["episodes"]] == [21.0, 22.0]


def test_a_run_in_the_working_directory_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("metrics.jsonl").write_text('{"steps": 1}\n')
    build = build_over(FakeServerState(), Path())
    with served(build) as url, Browser(url).events() as events:
        assert events.until("run")["name"] == tmp_path.name


@pytest.mark.parametrize(
    "line",
    [
        *(b'{"steps": 1, "mean', b"[1]", b"7", b"{}", b'{"steps": null}', b"\xff\x00"),
        b"[" * 100_000 + b"]" * 100_000,
        b'{"steps": 1, "mean_return": %b}' % (b"9" * 400),
        b'{"steps": %b}' % (b"9" * 5000),
        rb'{"steps": 1, "\ud800": 1, "mean_return": NaN}',
        rb'{"steps": Infinity, "mean_return": "\ud800"}',
        b"x" * (9 << 20),
    ],
    ids=lambda line: line[:20].decode(errors="replace"),
)
def test_a_hostile_line_of_metrics_does_not_stop_the_curve(
    watching: Browser, tmp_path: Path, line: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b"\n")
    with watching.events() as events:
        events.until("run")
        with path.open("ab") as file:
            file.write(b'{"steps": 2, "mean_return": 5}\n')
        run = events.until("run", lambda run: [2, 5] in run["mean_return"])
        assert run["row"] == {"steps": 2, "mean_return": 5}


def test_a_folder_in_place_of_metrics_is_reported_until_it_is_a_file(
    watching: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    with watching.events() as events:
        run = events.until("run", lambda run: run["error"] != "")
        assert run["error"] == f"{path}: Is a directory"
        path.rmdir()
        path.write_text('{"steps": 2, "mean_return": 5}\n')
        run = events.until("run", lambda run: run["mean_return"] == [[2, 5]])
        assert run["error"] == ""


def test_the_last_state_of_a_lost_server_is_sent_until_it_replies_again(
    watching: Browser, server: FakeServerState
) -> None:
    with watching.events() as events:
        events.until("server", lambda state: state["status"] is not None)
        server.error = ConnectError("no server replied within 2 s")
        lost = events.until("server", lambda state: state["error"] != "")
        assert lost["error"] == "no server replied within 2 s"
        assert lost["status"]["host"] == "sim1"
        server.error = None
        events.until("server", lambda state: state["error"] == "")


@pytest.mark.parametrize("pid", [4712, 4711], ids=["other pid", "same pid"])
def test_the_counts_of_a_restarted_server_are_added_and_those_of_a_lost_one_are_not(
    watching: Browser, server: FakeServerState, pid: int
) -> None:
    def totals(events: Events, *, faults: int, error: str = "") -> dict[str, float]:
        state = events.until(
            "server",
            lambda state: (
                bool(state["status"])
                and state["error"] == error
                and sum(state["status"]["faults"].values()) == faults
            ),
        )
        counts: dict[str, float] = state["totals"]
        return counts

    with watching.events() as one, watching.events() as other:
        first = totals(one, faults=3)
        assert (first["steps"], first["faults"]) == (1_204_000, 3)
        assert (first["rows"], first["lost"]) == (1_204_028, 28)
        server.error = ConnectError("unreachable")
        assert totals(one, faults=3, error="unreachable") == first
        server.error = None
        assert totals(one, faults=3) == first
        began = {"pid": pid, "seconds": 1.0, "restarts": 0}
        server.replace(**began, steps=10, rows={"OK": 9, "TIMEOUT": 1}, faults={"X": 1})
        second = totals(one, faults=1)
        assert (second["steps"], second["faults"]) == (1_204_010, 4)
        assert (second["rows"], second["lost"]) == (1_204_038, 29)
        server.replace(steps=2_000_000, faults={"X": 2}, seconds=2.0)
        third = totals(one, faults=2)
        assert (third["steps"], third["faults"]) == (3_204_000, 5)
        assert totals(other, faults=2) == third


def test_frames_are_requested_once_for_all_browsers_that_show_them(
    watching: Browser, server: FakeServerState
) -> None:
    with watching.events() as one, watching.events() as other:
        one.until("server")
        assert server.frame_requests == []
        assert set_tiles(watching, one.subscriber, (0, 1, 3, 160)) == 204
        frame = one.until("frame")
        assert frame["tile"] == [0, 1, 3]
        assert frame["jpeg"].startswith("/9j/")
        assert frame["seed"] == str(2**60 + 3)
        # The latest frame of tile 3 is cached, so it is sent without a frame request.
        tiles = ((0, 1, 3, 160), (0, 1, 4, 160))
        assert set_tiles(watching, other.subscriber, *tiles) == 204
        assert other.until("frame")["tile"] == [0, 1, 3]
        assert other.until("frame")["tile"] == [0, 1, 4]
        server.ticks += 1
        both = {tuple(other.until("frame")["tile"]) for _ in range(2)}
        assert both == {(0, 1, 3), (0, 1, 4)}
        assert one.until("frame")["serial"] == 2
    rows = [rows for _, rows, _ in server.frame_requests]
    assert {*rows} == {(3,), (3, 4)}


async def test_a_browser_that_does_not_read_is_disconnected_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envserve.monitoring.page.app._MAX_UNREAD_SECONDS", 0.1)
    observe = cast(Any, lambda _: FakeObserver(FakeServerState("CartPole-v1")))
    feed = DataFeed([ADDRESS], None, observe)
    app = build_app(feed, token="secret")
    async with app.router.lifespan_context(app):
        slow, other = SlowBrowser(), feed.subscribe()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(app(slow.scope, slow.receive, slow.send))
            await slow.is_stuck.wait()
            assert len(feed.subscribers) == 2
        assert len(feed.subscribers) == 1
        await anext(other.events())


class SlowBrowser:
    """A browser that reads its first events and then stops reading."""

    scope: Final = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "GET",
        "path": "/events",
        "query_string": b"",
        "headers": [
            (b"host", b"127.0.0.1:80"),
            (b"cookie", b"envserve_page12700180=secret"),
        ],
    }

    def __init__(self) -> None:
        self.is_stuck = asyncio.Event()

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.is_stuck.set()
            await asyncio.Event().wait()


async def test_newer_events_replace_unsent_ones_with_the_same_key() -> None:
    feed = DataFeed([], None, observe_nothing)
    subscriber = feed.subscribe()
    assert feed.set_tiles(subscriber.name, {(0, 1, 2): 160})
    for number in range(1000):
        feed.publish((0, 1, 2), b"frame %d" % number)
        feed.publish((0, 1, 3), b"of a tile that is not shown")
        feed.publish(0, b"status %d" % number)
    texts = subscriber.events()
    assert [await anext(texts) for _ in range(2)] == [b"frame 999", b"status 999"]
    feed.publish("run", b"run")
    assert await anext(texts) == b"run"


def observe_nothing(address: str) -> Observer:
    raise AssertionError


def test_the_next_free_port_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with served(build_over(FakeServerState()), port) as url:
            browser = Browser(url)
            assert browser.port > port
            assert browser.request("GET", "/")[0] == 200


def test_the_url_of_a_page_on_all_interfaces_can_be_opened() -> None:
    _, listening, url = page_server(build_over(FakeServerState()), "0.0.0.0", 0)
    with listening:
        assert url.startswith(f"http://127.0.0.1:{listening.getsockname()[1]}/?token=")


@pytest.mark.parametrize(
    ("host", "error"),
    [("192.0.2.1", r"192\.0\.2\.1:80: "), ("ü..b", r"ü\.\.b:80: .*label empty")],
)
def test_a_host_that_the_page_cannot_listen_on_raises(host: str, error: str) -> None:
    with pytest.raises(ServerError, match=f"cannot listen on .*{error}"):
        page_server(build_over(FakeServerState()), host, 80)


def test_a_page_process_serves_errors_and_ends_when_its_stdin_is_closed(
    browser: Browser, tmp_path: Path
) -> None:
    at_http = f"127.0.0.1:{browser.port}"
    process, url = page_process([at_http], tmp_path, insecure=True)
    with process:
        with Browser(url).events() as events:
            text = "does not speak ZeroMQ"
            events.until("server", lambda state: text in state["error"])
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(TIMEOUT_SECONDS) == 0


def test_a_page_process_starts_while_many_files_are_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "print('page: http://sim1')"]
    monkeypatch.setattr(
        "envserve.monitoring.page.serve.main_command", lambda *_: command
    )
    raise_file_limit()
    with contextlib.ExitStack() as stack:
        for _ in range(1024):
            stack.callback(os.close, os.dup(0))
        process, url = page_process([], tmp_path)
        with process:
            assert url == "http://sim1"


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves a page, and the page's URL."""
    process, url = page_process(["127.0.0.1:9"], tmp_path, insecure=True)
    with process:
        yield process, url
        assert process.wait(TIMEOUT_SECONDS) == 0


def test_sigterm_ends_a_page_with_exit_code_0(
    serving: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = serving
    with Browser(url).events():
        process.terminate()
        assert process.wait(TIMEOUT_SECONDS) == 0


def test_a_finished_page_closes_when_no_browser_shows_it(
    serving: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = serving
    shown: queue.Queue[str] = queue.Queue()
    with ThreadPoolExecutor() as pool:
        with Browser(url).events() as events:
            finishing = pool.submit(finish_page, process, shown.put)
            assert "open for up to 60 s" in shown.get(timeout=TIMEOUT_SECONDS)
            events.until("finished")
            assert Browser(url).request("GET", "/")[0] == 200
            assert not finishing.done()
        finishing.result(TIMEOUT_SECONDS)
    assert shown.empty()


def test_a_finished_page_without_browsers_closes_at_once(
    serving: tuple[subprocess.Popen[str], str],
) -> None:
    finish_page(serving[0], pytest.fail)


def test_ctrl_c_closes_a_finished_page_that_a_browser_shows(
    serving: tuple[subprocess.Popen[str], str],
) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    process, url = serving
    with Browser(url).events():
        finish_page(process, interrupt)
        assert process.wait(TIMEOUT_SECONDS) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nosuchhost.invalid"], "cannot resolve nosuchhost.invalid"),
        (["sim 1"], "expected an address like sim1"),
        (
            ["127.0.0.1", "--host", "192.0.2.1"],
            "pass an address of this host as --host",
        ),
        (["127.0.0.1", "--run", __file__], "expected a run folder; got the file"),
    ],
)
def test_a_page_that_cannot_be_served_is_an_error_of_one_line(
    arguments: list[str], text: str
) -> None:
    result = invoke(PROGRAM, ["page", *arguments])
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


@pytest.mark.parametrize("name", ["rnus", "x" * 300])
def test_a_page_reports_that_the_run_folder_does_not_exist_yet(
    name: str, tmp_path: Path
) -> None:
    command = main_command("envserve.__main__", "page", "--port", "0", "--insecure")
    command += ["127.0.0.1:9", "--run", str(tmp_path / name)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert f"{name} does not exist yet" in process.stdout.readline()
        assert process.stdout.readline().startswith("Page: http://127.0.0.1:")
        process.terminate()
        assert process.wait(TIMEOUT_SECONDS) == 0


async def test_the_feed_uses_little_cpu_time_without_browsers() -> None:
    server = FakeServerState("CartPole-v1")
    feed = DataFeed([ADDRESS], None, cast(Any, lambda _: FakeObserver(server)))
    await feed.start()
    before = time.process_time()
    await asyncio.sleep(1.0)
    spent = time.process_time() - before
    await feed.close()
    assert spent < 0.25, "expected at most 0.25 s of CPU time per second"
