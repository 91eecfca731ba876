"""Measure the trainer's CPU time and the bytes on the network per batch step."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.cases import envs
from benchmarks.scaling.simulated_servers import NAME, simulated_servers
from envserve.bench.cases import BINDS, batch_env
from envserve.bench.workload import Workload
from envserve.client import BatchEnv

_CHUNKS: Final = 5
_WARM_UP: Final = 10
#: Maps the size of an observation in bytes to the env that real servers run.
_REAL: Final = {16: "envserve/Sleep-v0", 28224: "envserve/Image-v0"}


class Point(NamedTuple):
    """A batch, and the measured costs of one batch step (medians).

    Attributes:
      servers: Number of servers.
      envs: Envs per server.
      size: Size of an observation in bytes.
      keys: Whether messages are encrypted.
      splits: Number of splits of the batch, which are stepped alternately.
      env_us: Microseconds that the envs of a server take to step.
      delay_ms: Round-trip delay of the network in milliseconds.
      servers_are: "simulated" for simulated servers, "real" for `envserve start`.
      thread: CPU time of the thread that steps the batch, in microseconds.
      process: CPU time of the trainer's process, including ZeroMQ, in microseconds.
      wall: Elapsed time in microseconds.
      wire: Bytes sent and received, including TCP and IP headers.
    """

    servers: int
    envs: int
    size: int
    keys: bool = False
    splits: int = 1
    env_us: float = 0.0
    delay_ms: float = 0.0
    servers_are: str = "simulated"
    thread: float = 0.0
    process: float = 0.0
    wall: float = 0.0
    wire: float = 0.0

    @property
    def num_envs(self) -> int:
        """Number of envs in the batch."""
        return self.servers * self.envs


def measure(point: Point, seconds: float = 0.6) -> Point:
    """Run the servers of a point on this host; return the point with its costs."""
    with _batch(point) as batch:
        return measure_batch(point, batch, seconds)


@contextlib.contextmanager
def _batch(point: Point) -> Iterator[BatchEnv]:
    options: Any = {"num_splits": point.splits, "insecure": not point.keys}
    if point.servers_are == "real":
        modules = (envs.MODULE,)
        name, count = _REAL[point.size], point.servers
        seconds = point.env_us / 1e6 / point.envs
        kwargs = {"step_seconds": seconds} if point.size == 16 else {}
        load = Workload(name, point.num_envs, count, 1.0, kwargs, modules)
        without = () if point.keys else ("--insecure-no-auth",)
        with batch_env(load, BINDS["tcp"] * count, without, **options) as batch:
            yield batch
        return
    arguments = point.servers, point.env_us / 1e6
    with (
        simulated_servers(*arguments, insecure=not point.keys) as addresses,
        BatchEnv.connect(
            f"{NAME}{point.size}", addresses, point.num_envs, seed=0, **options
        ) as batch,
    ):
        batch.reset()
        yield batch


def measure_batch(
    point: Point, batch: BatchEnv, seconds: float, interface: str = "lo"
) -> Point:
    """Step a batch for some seconds; return the point with the measured costs.

    The costs are medians over chunks of the steps.
    """
    step = _stepper(batch, point.splits)
    for _ in range(_WARM_UP):
        step()
    chunks = []
    for _ in range(_CHUNKS):
        before, num_steps = _read_counters(interface), 0
        while time.perf_counter() < before[2] + seconds / _CHUNKS or num_steps < 3:
            step()
            num_steps += 1
        after = _read_counters(interface)
        pairs = zip(before, after, strict=True)
        chunks.append([(b - a) / num_steps for a, b in pairs])
    thread, process, wall, wire = map(statistics.median, zip(*chunks, strict=True))
    times = [round(1e6 * seconds, 1) for seconds in (thread, process, wall)]
    measured = dict(zip(("thread", "process", "wall"), times, strict=True))
    return point._replace(**measured, wire=round(wire, 1))


def _stepper(batch: BatchEnv, num_splits: int) -> Callable[[], object]:
    """Return a function that steps all rows once, one split after the other."""
    actions = np.zeros(batch.num_envs, np.int64)
    if num_splits == 1:
        return lambda: batch.step(actions)
    for rows in batch.splits:
        batch.send(actions[rows], rows, together=True)

    def step() -> None:
        for rows in batch.splits:
            batch.recv(env_indices=rows)
            batch.send(actions[rows], rows, together=True)

    return step


def _read_counters(interface: str) -> Sequence[float]:
    """Return CPU seconds of the thread and the process, elapsed seconds, and bytes.

    The bytes are those that have passed the network interface.
    """
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith(f"{interface}:"))
    numbers = line.partition(":")[2].split()
    # On loopback, every sent byte is also received, so count only one direction.
    wire = int(numbers[0]) + (int(numbers[8]) if interface != "lo" else 0)
    return time.thread_time(), time.process_time(), time.perf_counter(), wire
