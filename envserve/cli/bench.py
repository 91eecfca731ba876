"""`envserve bench`: measure the speed of an env in-process and behind a server."""

from __future__ import annotations

import signal
from typing import Final

from envserve.cli.options import Count, Env, Import, Seconds, import_from_here
from envserve.envs.user_envs import name_and_imports
from envserve.host_resources import num_cores

_NUM_CORES: Final = num_cores()


def bench(
    *,
    env: Env = "CartPole-v1",
    import_: Import = (),
    num_envs: Count = 16,
    num_workers: Count = _NUM_CORES,
    seconds: Seconds = 0.6,
    rounds: Count = 5,
) -> None:
    """Compare the speed of an env in-process, behind a server and in Gymnasium.

    Args:
      env: Env to measure: a registered name, FILE.py:CLASS or MODULE:NAME.
      num_envs: Number of envs in the batch.
      num_workers: Number of worker processes; by default, one per core.
      seconds: Seconds per measurement.
      rounds: Number of measurements per case; the cases are measured alternately.
    """
    from envserve.bench.command import bench as measure
    from envserve.bench.workload import Workload

    # Raise KeyboardInterrupt on SIGTERM, too, so that the workers are stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    workers = min(num_workers, num_envs)
    import_from_here(import_, env)
    name, modules = name_and_imports(env, import_)
    load = Workload(name, num_envs, workers, seconds, import_modules=modules)
    measure(load, rounds)
