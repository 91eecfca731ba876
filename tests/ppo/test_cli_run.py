"""`ppo train` with real workers: stopped by signals, resumed, evaluated, watched."""

import contextlib
import fcntl
import json
import os
import pty
import queue
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from ppo.cli.options import user_command
from ppo.cli.progress import Screen
from tests.envserve.page_client import Browser
from tests.ppo.runs import eagerly, ppo, rows_of

#: Timeout in seconds; TensorFlow starts slowly on a busy machine.
_TIMEOUT = 280
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("one_launcher")]

SMALL = (
    "--num-workers=1",
    *("--set", "num_envs=4", "--set", "horizon=32", "--set", "minibatch_size=32"),
    *("--set", "epochs=1", "--set", "jit_compile=false"),
    *("--set", "evaluation_episodes=5"),
)


COMMAND = (sys.executable, "-c", "from ppo.cli.app import main; main()")


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(words: str, process: subprocess.Popen[str]) -> list[str]:
    """Return the output of a command up to the first line that contains `words`."""
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    while words not in lines[-1]:
        assert lines[-1], lines
        lines.append(process.stdout.readline())
    return lines


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait until a command exits with `code`; return the rest of its output."""
    with process:
        try:
            output, error = process.communicate(timeout=_TIMEOUT)
        finally:
            process.kill()
    assert (process.returncode, error) == (code, "")
    return output


def interrupt(process: subprocess.Popen[str], number: signal.Signals, code: int) -> str:
    """Send a signal to a running `ppo train`; return the rest of its output."""
    process.send_signal(number)
    output = finished(process, code)
    assert "Stopping after this iteration" in output
    assert f"Stopped by {number.name} after" in output
    return output


def error_after_sigterm(words: str, folder: Path, *options: object) -> str:
    """Stop a restartable run once it prints `words`; return what it reports then.

    The run has a process of its own, because the signal may interrupt the creation of
    envs. It then ends the launcher, which all tests share that run in this process.
    """
    arguments = ("CartPole-v1", *options, "--run-dir", folder, "--restartable")
    process = start("train", *arguments)
    try:
        read_until(words, process)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=_TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 3, error
    assert error.startswith("Stopped ")
    return error


def fetched(url: str) -> str:
    """Fetch a URL, with support for cookies."""
    opener = build_opener(HTTPCookieProcessor())
    with opener.open(url, timeout=_TIMEOUT) as response:
        return response.read().decode()


@contextlib.contextmanager
def printed_lines() -> Iterator[queue.Queue[str]]:
    """Provide a queue of the lines that commands print in this process."""
    lines = queue.Queue[str]()
    print_line = Screen.print

    def record(screen: Screen, text: str, *arguments: Any, **named: Any) -> None:
        print_line(screen, text, *arguments, **named)
        lines.put(text)

    with mock.patch.object(Screen, "print", record):
        yield lines


def wait_for(words: str, lines: queue.Queue[str]) -> str:
    """Return the first line that contains `words`."""
    while words not in (line := lines.get(timeout=_TIMEOUT)):
        pass
    return line


class Terminal:
    """A command in a pseudo-terminal, and its output."""

    def __init__(self, width: int, *arguments: object) -> None:
        self._process, self._terminal = pty.fork()
        if self._process == 0:
            os.execv(sys.executable, [*COMMAND, *map(str, arguments)])
        size = struct.pack("HHHH", 24, width, 0, 0)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)
        self.text = ""

    def read_until(self, words: str) -> None:
        while words not in self.text:
            assert self.read(), self.text

    def read(self) -> bool:
        """Read the next output; return False at its end."""
        assert select.select([self._terminal], [], [], _TIMEOUT)[0]
        try:
            more = os.read(self._terminal, 65536)
        except OSError:  # the process has exited
            return False
        self.text += more.decode(errors="replace")
        return True

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def exit_code(self) -> int:
        while self.read():
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])


def test_a_signal_saves_the_run_and_resuming_finishes_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    terminal = Terminal(100, "train", "CartPole-v1", *SMALL, "--run-dir", folder)
    terminal.read_until("compiling")
    # The phase is redrawn.
    assert terminal.text.count("starting TensorFlow") > 3
    terminal.read_until("steps/s")
    terminal.press_ctrl_c()
    assert terminal.exit_code() == 0
    for text in (
        "CartPole-v1, settings of cartpole",
        "4 in 1 local worker process",
        "99,968: whole iterations of 128 within 100,000",
        "starting TensorFlow, ",
        "first iteration, ",
        "Stopped by SIGINT after",
        f"ppo train --resume {folder}",
    ):
        assert text in terminal.text

    # Run the same command again, as a supervisor does.
    again = ("CartPole-v1", *SMALL, "--run-dir", folder, "--restartable")
    monitored = start("train", *again, "--page", "--metrics-port=0")
    lines = read_until("steps/s", monitored)
    urls = dict(re.findall(r"^(Page|Metrics): (\S+)", "".join(lines), re.MULTILINE))
    assert "<!doctype html>" in fetched(urls["Page"])
    assert re.search(r"^ppo_env_steps_total [1-9]", fetched(urls["Metrics"]), re.M)
    interrupt(monitored, signal.SIGTERM, code=3)
    with pytest.raises(OSError, match="refused"):
        fetched(urls["Page"])
    newest = max((folder / "checkpoints").iterdir())
    stopped_at = json.loads((newest / "counters.json").read_text())["steps"]
    # From here on, signals do not matter, so the commands can share this process.
    with eagerly():
        output = resumed(folder, f"total_steps={stopped_at + 256}")
    assert "over 5 episodes" in output
    assert f"Run folder: {folder}" in output
    steps = [row["steps"] for row in rows_of(folder)]
    assert steps == list(range(128, stopped_at + 257, 128))
    assert json.loads((folder / "evaluation.json").read_text())["episodes"] == 5
    code, output, _ = ppo("train", "cartpole", "--resume", folder)
    assert code == 0
    assert f"already at {stopped_at + 256:,} steps; use --set total_steps=" in output
    with eagerly():
        output = resumed(folder, f"total_steps={stopped_at + 384}")
    words = " ".join(output.split())
    assert "increase from 0 % to " in words
    assert "% of their initial values: learning_rate." in words


def resumed(folder: Path, setting: str) -> str:
    """Resume a run with another setting, and return the output."""
    code, output, error = ppo("train", "--resume", folder, "--set", setting)
    assert (code, error) == (0, "")
    return output


def test_a_second_signal_stops_at_once_and_names_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # With a single TensorFlow thread, code that waits for another one would deadlock.
    recurrent = ("--inter-op-threads=1", "--set", "recurrent_size=4")
    sequences = ("--set", "sequence_length=8", "--set", "evaluate_every=1")
    large = ("--set", "horizon=2048", "--set", "minibatch_size=2048")  # takes seconds
    settings = (*SMALL, *large, *recurrent, *sequences)
    with start("train", "cartpole", *settings, "--run-dir", folder) as process:
        read_until("steps/s", process)
        process.send_signal(signal.SIGINT)
        read_until("Stopping after this iteration", process)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=_TIMEOUT)
    assert process.returncode == 130
    assert f"newest checkpoint is {folder / 'checkpoints' / '00000001'}." in error
    assert f"ppo train --resume {folder}" in error
    assert "Stopped by" not in output
    assert "evaluation_return" in rows_of(folder)[0]


def test_an_interrupt_before_the_training_leaves_no_folder(tmp_path: Path) -> None:
    terminal = Terminal(40, "train", "cartpole", "--run-dir", tmp_path / "run")
    terminal.read_until("starting TensorFlow")
    terminal.press_ctrl_c()
    assert terminal.exit_code() == 130
    assert "Stopped before the first checkpoint" in terminal.text
    assert not (tmp_path / "run").exists()


def test_sigterm_before_the_training_is_exit_code_3_for_a_restartable_run(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    error = error_after_sigterm("starting TensorFlow", folder)
    assert "--resume" not in error
    assert not folder.exists()


def test_sigterm_during_the_evaluation_is_exit_code_3_for_a_restartable_run(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    some = ("--set", "total_steps=256", "--set", "evaluation_episodes=100000")
    error = error_after_sigterm("evaluating", folder, *SMALL, *some)
    assert f"Resume with: {user_command('ppo')} train --resume {folder}" in error
    assert folder.exists()


def test_the_page_of_a_finished_run_stays_open_until_ctrl_c(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def watch() -> None:
        url = wait_for("Page: ", lines).removeprefix("Page: ")
        with Browser(url).events() as events:
            # A browser that does not read would be disconnected.
            events.until("run", lambda run: run["row"].get("steps") == 256)
            wait_for("The page stays open", lines)
            assert (folder / "evaluation.json").exists()
            state = events.until("server", lambda state: bool(state["status"]))
            (lease,) = state["status"]["leases"]
            assert (lease["num_envs"], lease["absent"]) == (4, [])
            os.kill(os.getpid(), signal.SIGINT)

    options = (*SMALL, "--set", "total_steps=256", "--run-dir", folder, "--page")
    with eagerly(), printed_lines() as lines, ThreadPoolExecutor() as pool:
        watching = pool.submit(watch)
        code, output, error = ppo("train", "CartPole-v1", *options)
        watching.result()
    assert (code, error) == (0, "")
    assert "The page stays open" in output.splitlines()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="a stopped terminal differs")
def test_a_run_whose_output_is_not_read_finishes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ours, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)  # as Ctrl-S does
    short = ("--set", "total_steps=256", "--run-dir", folder)
    process = subprocess.Popen(
        [*COMMAND, *map(str, ("train", "CartPole-v1", *SMALL, *short))],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    try:
        assert process.wait(_TIMEOUT) == 0
    finally:
        process.kill()
        process.wait()
        for fd in (ours, theirs):
            os.close(fd)
    assert json.loads((folder / "evaluation.json").read_text())["episodes"] == 5
