"""Cases of other projects' vectorised envs, with the defaults of each project.

All cases use the same actions. A project that is not installed, or does not have the
env, is skipped.
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
from envserve.bench.interleaved import Measure, make_measure
from envserve.bench.workload import Workload
from envserve.text import install_command

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
"""Maps the case of each other project to a short name for column headings."""


def import_peer(module: str) -> Any:
    """Import a module of another project; raise Skip if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Skip(f"{error}; {install_command('bench')}") from error


def sb3_vec_env(load: Workload, kind: str) -> Any:
    """Return Stable-Baselines3's "SubprocVecEnv" or "DummyVecEnv"."""
    module = import_peer("stable_baselines3.common.vec_env")
    # Fork the workers: they run the same loop as spawned workers, but start faster,
    # because they need not import torch.
    is_forked = kind == "SubprocVecEnv" and sys.platform == "linux"
    options = {"start_method": "fork"} if is_forked else {}
    return getattr(module, kind)(load.env_functions(), **options)


@contextlib.contextmanager
def sb3_subprocess(load: Workload) -> Iterator[Measure]:
    """Step SB3's envs: one process per env, rows pickled through pipes."""
    with contextlib.closing(sb3_vec_env(load, "SubprocVecEnv")) as envs:
        envs.seed(0)
        envs.reset()
        yield make_measure(envs.step, load.actions(), load)


@contextlib.contextmanager
def tianshou_shared_memory(load: Workload) -> Iterator[Measure]:
    """Step Tianshou's envs: one process per env, rows in shared memory.

    Tianshou does not reset envs automatically, so each measured step includes the reset
    of envs whose episode has ended.
    """
    envs = import_peer("tianshou.env").ShmemVectorEnv(load.env_functions())

    def step(actions: Any) -> None:
        _, _, terminated, truncated, _ = envs.step(actions)
        ended = np.flatnonzero(terminated | truncated)
        if ended.size:
            envs.reset(ended)

    with contextlib.closing(envs):
        envs.seed(0)
        envs.reset()
        yield make_measure(step, load.actions(), load)


@contextlib.contextmanager
def envpool(load: Workload) -> Iterator[Measure]:
    """Step EnvPool's envs, which are written in C++ and stepped by threads."""
    envs = _envpool_with(load).make_gymnasium(
        load.env_name, num_envs=load.num_envs, num_threads=load.num_workers, seed=0
    )
    with contextlib.closing(envs):
        envs.reset()
        # EnvPool accepts only its own dtypes; the conversion is not measured.
        actions = [batch.astype(envs.action_space.dtype) for batch in load.actions()]
        yield make_measure(envs.step, actions, load)


@contextlib.contextmanager
def served_envpool(load: Workload) -> Iterator[Measure]:
    """Step EnvPool's envs on an envserve server, as one vector env per worker."""
    _envpool_with(load)
    name = f"envpool/{load.env_name}"
    work = replace(load, env_name=name, import_modules=("envserve.envpool",))
    with batch_env(work, BINDS["tcp"], ("--vector", name)) as batch:
        yield make_measure(batch.step, load.actions(), load)


def _envpool_with(load: Workload) -> Any:
    """Return EnvPool's module; raise Skip if it lacks the env."""
    module = import_peer("envpool")
    if load.env_name not in module.list_all_envs() or load.env_kwargs:
        raise Skip(f"EnvPool has no {load.env_name}")
    return module


def peer_cases(load: Workload) -> list[Case]:
    """Return one case per project, and one that runs EnvPool's envs on envserve."""
    work = {"load": load}
    return [
        Case(SYNC, vector_env, {**work, "kind": "SyncVectorEnv"}),
        Case(ASYNC, vector_env, {**work, "kind": "AsyncVectorEnv"}),
        Case(SB3, sb3_subprocess, work),
        Case(TIANSHOU, tianshou_shared_memory, work),
        Case(ENVPOOL, envpool, work),
        Case(SERVED_ENVPOOL, served_envpool, work),
    ]
