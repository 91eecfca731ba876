"""Other projects' vectorised envs, each as its users have it by default.

All get the same actions. A peer that is not installed, or lacks the env, is skipped.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.harness import Case, Skip
from envserve.bench.cases import BINDS, batch_env, vector_env
from envserve.bench.interleaved import Measure, stepping
from envserve.bench.workload import Workload

SYNC = "gymnasium SyncVectorEnv"
ASYNC = "gymnasium AsyncVectorEnv"
SB3 = "SB3 SubprocVecEnv"
TIANSHOU = "tianshou ShmemVectorEnv"
ENVPOOL = "EnvPool"
SERVED_ENVPOOL = "envserve tcp, of EnvPool's envs"

PEERS = {
    SYNC: "Sync",
    ASYNC: "Async",
    SB3: "SB3",
    TIANSHOU: "tianshou",
    ENVPOOL: "EnvPool",
}
"""Names of all peers, with the short ones for the heads of columns."""


def import_peer(module: str) -> Any:
    """Imports a module of a peer; raises Skip where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Skip(f"{error}; pip install 'envserve[bench]'") from error


def sb3_vec_env(load: Workload, kind: str) -> Any:
    """Returns envs of Stable-Baselines3 as "SubprocVecEnv" or "DummyVecEnv"."""
    module = import_peer("stable_baselines3.common.vec_env")
    # Forked workers run the same loop as others, but do not each import torch first.
    is_forked = kind == "SubprocVecEnv" and sys.platform == "linux"
    options = {"start_method": "fork"} if is_forked else {}
    return getattr(module, kind)(load.env_functions(), **options)


@contextlib.contextmanager
def sb3_subprocess(load: Workload) -> Iterator[Measure]:
    """Stable-Baselines3: a process per env, rows pickled through pipes."""
    with contextlib.closing(sb3_vec_env(load, "SubprocVecEnv")) as envs:
        envs.seed(0)
        envs.reset()
        yield stepping(envs.step, load.actions(), load)


@contextlib.contextmanager
def tianshou_shared_memory(load: Workload) -> Iterator[Measure]:
    """Tianshou: a process per env, rows in shared memory; resets are the caller's."""
    envs = import_peer("tianshou.env").ShmemVectorEnv(load.env_functions())

    def step(actions: Any) -> None:
        _, _, terminated, truncated, _ = envs.step(actions)
        ended = np.flatnonzero(terminated | truncated)
        if ended.size:
            envs.reset(ended)

    with contextlib.closing(envs):
        envs.seed(0)
        envs.reset()
        yield stepping(step, load.actions(), load)


@contextlib.contextmanager
def envpool(load: Workload) -> Iterator[Measure]:
    """EnvPool: envs rewritten in C++, stepped by threads."""
    envs = _envpool_with(load).make_gymnasium(
        load.env_name, num_envs=load.num_envs, num_threads=load.num_workers, seed=0
    )
    with contextlib.closing(envs):
        envs.reset()
        # Converted beforehand: it takes its own dtypes only.
        actions = [batch.astype(envs.action_space.dtype) for batch in load.actions()]
        yield stepping(envs.step, actions, load)


@contextlib.contextmanager
def served_envpool(load: Workload) -> Iterator[Measure]:
    """The same behind a server of ours, as the one vector env of each worker."""
    _envpool_with(load)
    name = f"envpool/{load.env_name}"
    work = replace(load, env_name=name, import_modules=("envserve.envpool",))
    with batch_env(work, BINDS["tcp"], ("--vector", name)) as batch:
        yield stepping(batch.step, load.actions(), load)


def _envpool_with(load: Workload) -> Any:
    """Returns the module; raises Skip where it lacks the env."""
    module = import_peer("envpool")
    if load.env_name not in module.list_all_envs() or load.env_kwargs:
        raise Skip(f"it has no {load.env_name}")
    return module


def peer_cases(load: Workload) -> list[Case]:
    """Returns a case per peer."""
    work = {"load": load}
    return [
        Case(SYNC, vector_env, {**work, "kind": "SyncVectorEnv"}),
        Case(ASYNC, vector_env, {**work, "kind": "AsyncVectorEnv"}),
        Case(SB3, sb3_subprocess, work),
        Case(TIANSHOU, tianshou_shared_memory, work),
        Case(ENVPOOL, envpool, work),
        Case(SERVED_ENVPOOL, served_envpool, work),
    ]
