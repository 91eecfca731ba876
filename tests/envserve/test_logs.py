"""Logs cannot be forged, and unread output does not block a process."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from envserve.cli.logs import TextLines
from envserve.client import BatchEnv
from envserve.monitoring.health_probe import probe
from tests.envserve.conftest import Serve
from tests.envserve.session_client import SessionClient

RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ")
FORGED = "x\n2026-01-05 09:12:44,031 ERROR forged\x1b[2J\x9b31m\u202e\r"


def lines_of(record: logging.LogRecord) -> list[str]:
    return TextLines("%(asctime)s %(levelname)s %(message)s").format(record).split("\n")


def test_control_characters_of_a_record_are_escaped() -> None:
    record = logging.LogRecord("x", logging.DEBUG, "", 1, "%s, %d", (FORGED, 2), None)
    (line,) = lines_of(record)
    assert RECORD.match(line)
    assert line.endswith(r"ERROR forged\x1b[2J\x9b31m\u202e\r, 2")


def test_further_lines_of_a_record_are_escaped_and_indented() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        found = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "", 1, "no %s", (FORGED,), found)
    multiline = logging.LogRecord("x", logging.ERROR, "", 1, "no\n%s", (FORGED,), None)
    multiline.is_multiline = True
    for each in (record, multiline):
        first, *rest = lines_of(each)
        assert RECORD.match(first)
        assert rest
        assert all(line.startswith("  ") for line in rest)
        assert all(line.isprintable() for line in [first, *rest])


@pytest.mark.parametrize("place", ["client_name", "both"])
def test_a_client_cannot_forge_a_line_of_a_server(serve: Serve, place: str) -> None:
    server = serve("--log-level", "debug", "--allow-kwarg", "fault:any")
    name = "envserve/Faulty-v0" if place == "client_name" else FORGED
    with closing(
        SessionClient(
            server.address,
            env_name=name,
            client_name=FORGED,
            env_kwargs={"fault": FORGED},
        )
    ):
        pass
    log = server.end(2)
    assert "forged" in log
    assert all(RECORD.match(line) or line[:2] == "  " for line in log.splitlines())
    assert all(line.isprintable() for line in log.splitlines())


# Output that is not read.

FLOOD = """
import sys
import gymnasium, numpy

class FloodEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return numpy.zeros(1, "f"), {}

    def step(self, action):
        if action:
            sys.stderr.write("spam " * 40_000)
            raise RuntimeError("boom")
        return numpy.ones(1, "f"), 0.0, False, False, {}

gymnasium.register("Flood-v0", FloodEnv)
"""


@pytest.fixture(params=["pipe", "terminal"])
def unread(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return the path of a full, unread pipe, or of a stopped terminal."""
    if request.param == "pipe":
        path = tmp_path / "unread"
        os.mkfifo(path)
        fds = [os.open(path, os.O_RDWR | os.O_NONBLOCK)]
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fds[0], b"." * 512)
    else:
        fds = [*pty.openpty()]
        path = Path(os.ttyname(fds[1]))
        termios.tcflow(fds[1], termios.TCOOFF)  # as Ctrl-S does
    yield path
    for fd in fds:
        os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="a stopped terminal differs")
def test_a_server_whose_output_is_not_read_keeps_serving(
    serve: Serve, tmp_path: Path, unread: Path
) -> None:
    (tmp_path / "flood.py").write_text(FLOOD)
    server = serve(
        *("--import", "flood", "--log-level", "debug"),
        imports=(),
        environment={"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"},
        prefix=("sh", "-c", 'exec "$@" 2>>"$0"', str(unread)),
    )
    with BatchEnv.connect("Flood-v0", [server.address], 4, seed=1) as batch:
        batch.reset()
        for _ in range(30):
            assert not batch.step(np.ones(4, int)).valid.any()
            assert batch.step(np.zeros(4, int)).valid.all()
    code, text = probe(server.address, timeout=20.0)
    assert code == 0, text
    server.signal(15)
    assert server.wait() == 0


CHATTY = """
import logging, sys
from envserve.cli.logs import nonblocking_output, set_up_logs
set_up_logs("info", "text")
with nonblocking_output():
    for number in range(20_000):
        logging.getLogger("envserve").info("line %d %s", number, "." * 40)
        print(number)
    with open(sys.argv[1], "w") as done:
        done.write("done")
"""


@pytest.mark.parametrize("is_blocking", [True, False])
def test_dropped_lines_are_counted(tmp_path: Path, is_blocking: bool) -> None:
    done = tmp_path / "done"
    os.mkfifo(done)
    reader, writer = os.pipe()
    os.set_blocking(writer, is_blocking)
    command = [sys.executable, "-c", CHATTY, str(done)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=writer)
    os.close(writer)
    with process, open(reader) as stderr:
        assert done.read_text() == "done"
        log = stderr.read()
        assert process.wait(60.0) == 0
    lines = log.splitlines()
    numbers = [int(n) for n in re.findall(r" INFO line (\d+) \.{40}$", log, re.M)]
    notes = re.findall(
        r" ERROR (\d+) log lines were dropped because nobody read the output$",
        log,
        re.M,
    )
    assert numbers == sorted(numbers)
    assert len(numbers) + len(notes) == len(lines)
    assert len(numbers) + sum(map(int, notes)) == 20_000
    assert notes
    assert 1 << 20 < len(log) < 2 << 20


def test_a_process_exits_although_its_output_is_not_read(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    run = subprocess.run(
        [sys.executable, "-c", CHATTY, str(tmp_path / "done")],
        stdout=writer,
        stderr=writer,
        timeout=60.0,
        check=False,
    )
    assert run.returncode == 0
    assert (tmp_path / "done").read_text() == "done"
    os.close(reader)
    os.close(writer)


def test_files_are_written_at_once(tmp_path: Path) -> None:
    """A file cannot block, so that its lines are there when a process is killed."""
    script = CHATTY.replace("20_000", "3") + "    import os; os._exit(3)\n"
    with (tmp_path / "log").open("w") as log:
        run = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "done")],
            stderr=log,
            check=False,
        )
    assert run.returncode == 3
    assert (tmp_path / "log").read_text().count("\n") == 3
