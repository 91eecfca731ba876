"""Run the examples unchanged, without envserve, and while workers are killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.envserve.server_process import ROOT, ServerProcess

#: The mean return that each example must reach.
GOALS = {
    "sb3_ppo": 475.0,
    "cleanrl_ppo": 475.0,
    "tianshou_ppo": 475.0,
    "torchrl_ppo": 475.0,
    "rllib_ppo": 400.0,
    "optuna_sweep": 475.0,
}
#: Examples that are also trained while their workers are killed.
TRAINED_WHILE_KILLING = ("sb3_ppo", "cleanrl_ppo", "tianshou_ppo")


_SPEED = "env steps/s:"


class Run(NamedTuple):
    """An example's output, and the numbers in it."""

    lines: list[str]
    steps_per_second: float
    mean_return: float

    @property
    def returns(self) -> list[str]:
        """The lines with returns, which do not depend on the machine."""
        return [line for line in self.lines if "return" in line]


def source_of(name: str) -> str:
    return (ROOT / "examples" / f"{name}.py").read_text()


def original_form(source: str) -> str:
    """Replace the lines that use envserve with the trainer's original ones."""
    source = re.sub(r"# Not in the original\.\n.*\n", "", source)
    return re.sub(r"# Original: (.*\n).*\n", r"\1", source)


def run_example(
    name: str,
    *options: str,
    original: bool = False,
    on_trained: Callable[[], object] = lambda: None,
) -> Run:
    """Run an example until it exits.

    Args:
      name: Name of the example.
      *options: Command-line options of the example.
      original: Whether to run the original code, without envserve.
      on_trained: Called as soon as training has ended, before the evaluation.

    Raises:
      RuntimeError: The example failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.py")
        file.write_text(original_form(source_of(name)) if original else source_of(name))
        process = subprocess.Popen(
            [sys.executable, str(file), *options],
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "HOME": folder,
                "OMP_NUM_THREADS": "1",
                "RAY_TMPDIR": folder,
                "RAY_AUTH_MODE": "disabled",
            },
        )
        with process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line.rstrip())
                if line.startswith(_SPEED):
                    on_trained()
    if process.returncode:
        raise RuntimeError(f"{name}: expected exit code 0; got {process.returncode}")
    speed, score = (line.rpartition(" ")[2] for line in lines[-2:])
    return Run(lines, float(speed), float(score))


@contextlib.contextmanager
def two_servers() -> Iterator[list[ServerProcess]]:
    """Start two servers with two workers each."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for number in range(2):
            (folder / str(number)).mkdir()
            server = ServerProcess(folder / str(number), "--log-level", "error")
            servers.append(stack.enter_context(server))
        yield servers


class Kills(NamedTuple):
    """The pids of the workers killed so far, and an event that stops the killing."""

    pids: list[int]
    is_over: threading.Event


@contextlib.contextmanager
def killing_workers(
    servers: Sequence[ServerProcess], seconds: float
) -> Iterator[Kills]:
    """Kill a random worker every `seconds`."""
    kills = Kills([], threading.Event())

    def kill_workers() -> None:
        while not kills.is_over.wait(seconds):
            if servers and (pids := random.choice(servers).worker_pids):
                with contextlib.suppress(ProcessLookupError):  # it has already exited
                    os.kill(pid := random.choice(pids), signal.SIGKILL)
                    kills.pids.append(pid)

    thread = threading.Thread(target=kill_workers)
    thread.start()
    try:
        yield kills
    finally:
        kills.is_over.set()
        thread.join()
