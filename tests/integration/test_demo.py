"""`envserve demo`: each button on its page is pressed many times, over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

TIMES = 20


class PageOfDemo:
    """A client that sends the page's requests without a browser."""

    def __init__(self, url: str) -> None:
        self.place, self.query = url.removeprefix("http://").split("/", 1)
        with self._ask("GET", f"/{self.query}") as response:
            self.cookie = response.headers["Set-Cookie"].partition(";")[0]

    @contextlib.contextmanager
    def _ask(
        self, method: str, path: str, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.place, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            with connection.getresponse() as response:
                yield response

    def press(self, name: str) -> tuple[int, str]:
        headers = {"Cookie": self.cookie, "Origin": f"http://{self.place}"}
        with self._ask("POST", f"/press/{name}", **headers) as response:
            return response.status, response.read().decode()

    def row(self) -> dict[str, float]:
        """Return the run's current metrics."""
        event = b""
        with self._ask("GET", "/events", Cookie=self.cookie) as events:
            for line in events:
                if line.startswith(b"event: "):
                    event = line.split()[1]
                elif event == b"run" and line.startswith(b"data: "):
                    row: dict[str, float] = json.loads(line[6:])["row"]
                    if "mean_return" in row:
                        return row
        raise AssertionError("expected an event with metrics of the run")


@contextlib.contextmanager
def running_demo(*options: str) -> Iterator[PageOfDemo]:
    """Run a demo and yield its page; check that SIGINT makes the demo exit with 0."""
    command = [sys.executable, "-m", "envserve", "demo", "--no-open", "--port", "0"]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        try:
            found = re.search(r"http://\S+", demo.stdout.readline())
            assert found is not None
            yield PageOfDemo(found[0])
        finally:
            demo.send_signal(signal.SIGINT)
            sums = demo.communicate()[0]
    assert demo.returncode == 0
    assert re.fullmatch(r"[\d,]+ transitions checked, \d+ faults, 0 wrong\n", sums)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("nothing_left_behind")
def test_each_button_can_be_pressed_many_times_without_errors() -> None:
    seconds: dict[str, list[float]] = {}
    with running_demo("--num-envs", "16") as page:
        for _ in range(TIMES):
            for name in ("worker", "env", "server", "network"):
                status, text = page.press(name)
                found = re.search(
                    r": (\d+) envs of server [12] recovered after ([\d,]+) ms", text
                )
                assert status == 200, text
                assert found is not None, text
                assert 1 <= int(found[1]) <= 8
                seconds.setdefault(name, []).append(
                    int(found[2].replace(",", "")) / 1e3
                )
        row = page.row()
        assert page.press("volcano")[0] == 404
    for name, each in seconds.items():
        print(f"{name}: median {np.median(each):.3f} s, longest {max(each):.3f} s")
    print(row)
    assert row["demo_wrong"] == 0
    assert row["rows_checked"] > 4 * TIMES * 16
