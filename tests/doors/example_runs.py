"""What runs the examples: as they are, in their trainers' own form, and under fire."""

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

#: By name, with the mean return that each has to reach.
GOALS = {
    "sb3_ppo": 475.0,
    "cleanrl_ppo": 475.0,
    "tianshou_ppo": 475.0,
    "torchrl_ppo": 475.0,
    "rllib_ppo": 400.0,
    "optuna_sweep": 475.0,
}
#: These learn while their workers are killed.
UNDER_FIRE = ("sb3_ppo", "cleanrl_ppo", "tianshou_ppo")


_SPEED = "env steps/s:"


class Run(NamedTuple):
    """What an example printed, and the figures in it."""

    lines: list[str]
    steps_per_second: float
    mean_return: float

    @property
    def told(self) -> list[str]:
        """The lines that do not depend on the machine."""
        return [line for line in self.lines if "return" in line]


def source_of(name: str) -> str:
    return (ROOT / "examples" / f"{name}.py").read_text()


def own_form(source: str) -> str:
    """Puts in the lines that a trainer's users have without us."""
    source = re.sub(r"# Not in the original\.\n.*\n", "", source)
    return re.sub(r"# Original: (.*\n).*\n", r"\1", source)


def run_example(
    name: str,
    *options: str,
    is_own: bool = False,
    on_trained: Callable[[], object] = lambda: None,
) -> Run:
    """Runs an example to its end; raises RuntimeError if it fails.

    It is evaluated after the line with its speed, which is told at once.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.py")
        file.write_text(own_form(source_of(name)) if is_own else source_of(name))
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
        raise RuntimeError(f"{name} failed with exit code {process.returncode}")
    speed, score = (line.rpartition(" ")[2] for line in lines[-2:])
    return Run(lines, float(speed), float(score))


@contextlib.contextmanager
def two_servers() -> Iterator[list[ServerProcess]]:
    """Starts two servers of two workers each."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for number in range(2):
            (folder / str(number)).mkdir()
            server = ServerProcess(folder / str(number), "--log-level", "error")
            servers.append(stack.enter_context(server))
        yield servers


class Fire(NamedTuple):
    """What is shot at servers until it is over: the workers that were killed."""

    killed: list[int]
    is_over: threading.Event


@contextlib.contextmanager
def under_fire(servers: Sequence[ServerProcess], seconds: float) -> Iterator[Fire]:
    """Kills a worker every so many seconds."""
    fire = Fire([], threading.Event())

    def shoot() -> None:
        while not fire.is_over.wait(seconds):
            if servers and (pids := random.choice(servers).worker_pids):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid := random.choice(pids), signal.SIGKILL)
                    fire.killed.append(pid)

    thread = threading.Thread(target=shoot)
    thread.start()
    try:
        yield fire
    finally:
        fire.is_over.set()
        thread.join()
