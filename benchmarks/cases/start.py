"""`start`: startup times, each measured in a new process."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Final

from benchmarks.command import EnvName, NumEnvs, Repetitions, Run, Workers, sub_command
from benchmarks.harness import Case
from benchmarks.result import median, spread
from envserve.bench.interleaved import Measure
from envserve.python_process import main_command, python_command

_SECONDS: Final = "seconds"
_TIMED: Final = """
import time, warnings
warnings.simplefilter("ignore")
started = time.perf_counter()
{code}
print(time.perf_counter() - started)
{after}
"""
_OURS: Final = """
from envserve.client import BatchEnv
batch = BatchEnv.local({env!r}, {num_envs}, {workers}, seed=0)
batch.reset()
"""
_ASYNC: Final = """
import gymnasium
envs = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make({env!r})] * {num_envs})
envs.reset(seed=0)
"""


@sub_command
def start(
    run: Run,
    env: EnvName = "HalfCheetah-v5",
    num_envs: NumEnvs = 64,
    workers: Workers = 16,
    repetitions: Repetitions = 3,
) -> None:
    """Measure the times of imports, the first observation, and a server start."""
    values = {"env": env, "num_envs": num_envs, "workers": workers}
    scripts = {
        "envserve, first observation": (_OURS.format(**values), "batch.close()"),
        "gymnasium AsyncVectorEnv, first observation": (
            _ASYNC.format(**values),
            "envs.close()",
        ),
        "import of BatchEnv": ("from envserve.client import BatchEnv", ""),
        "import gymnasium": ("import gymnasium", ""),
    }
    cases = [
        Case(name, fresh_script, {"code": code, "after": after})
        for name, (code, after) in scripts.items()
    ]
    run.publish(
        title=f"Seconds to start; first observations of {num_envs} {env}, envserve in "
        f"{workers} workers",
        measured=run.measure(
            [*cases, Case("envserve start, ready line", ready_line)], repetitions
        ),
        columns={
            "seconds": median(_SECONDS, ".2f"),
            "lowest - highest": spread(_SECONDS, ".2f"),
        },
        notes=[
            "The time to the first observation is measured from the first line of a "
            "new script and includes imports. The time to the ready line is measured "
            "from the start of the process."
        ],
    )


@contextlib.contextmanager
def fresh_script(code: str, after: str) -> Iterator[Measure]:
    """Time statements in a new interpreter; `after` contains statements to run untimed.

    The startup of the interpreter is not measured.
    """
    script = _TIMED.format(code=code, after=after)
    command = python_command(script)

    def measure() -> Mapping[str, float]:
        finished = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        return {_SECONDS: float(finished.stdout)}

    yield measure


@contextlib.contextmanager
def ready_line() -> Iterator[Measure]:
    """Measure the time until a server prints its ready line."""
    command = main_command("envserve.__main__", "start", "--log-level", "warning")
    command += ["--bind", "tcp://127.0.0.1:0"]

    def measure() -> Mapping[str, float]:
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            elapsed = time.perf_counter() - started
            process.terminate()
        if not line:
            raise RuntimeError(f"expected a ready line of {command}; got none")
        return {_SECONDS: elapsed}

    yield measure
