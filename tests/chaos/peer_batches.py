"""The same ledgers in other projects' vectorised envs and in ours, for a few faults."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import gymnasium
import numpy as np

from envserve.client import BatchEnv
from envserve.pool.pool import Pool
from tests.chaos.recoveries import Array
from tests.chaos.trial import Skip
from tests.oracle.probe_envs import MODULE

ASYNC: Final = "gymnasium AsyncVectorEnv"
SUBPROC: Final = "SB3 SubprocVecEnv"
OURS: Final = "envserve BatchEnv"
_LEDGER: Final = "envserve/Ledger-v0"
_STEP_TIMEOUT: Final = 1.0


class PeerBatch(Protocol):
    """What the faults need of a vectorised env."""

    @property
    def worker_pids(self) -> list[int]:
        """Process ids, in row order."""

    def step(self, actions: Array) -> tuple[Array, Array]:
        """Steps all; returns rewards and what is valid of them, `[n]` each."""

    def step_within(self, actions: Array, seconds: float) -> tuple[Array, Array]:
        """The same, with whatever there is to bound it."""


class _Async:
    """A process per env."""

    def __init__(self, num_envs: int, env_kwargs: Mapping[str, Any]) -> None:
        functions = _env_functions(num_envs, env_kwargs)
        self._envs: Any = gymnasium.vector.AsyncVectorEnv(functions)
        self._envs.reset(seed=0)

    @property
    def worker_pids(self) -> list[int]:
        return [process.pid for process in self._envs.processes]

    def step(self, actions: Array) -> tuple[Array, Array]:
        return _all_valid(self._envs.step(actions)[1])

    def step_within(self, actions: Array, seconds: float) -> tuple[Array, Array]:
        self._envs.step_async(actions)
        return _all_valid(self._envs.step_wait(timeout=seconds)[1])


class _Subproc:
    """A process per env. Nothing bounds a step."""

    def __init__(self, num_envs: int, env_kwargs: Mapping[str, Any]) -> None:
        try:
            module = importlib.import_module("stable_baselines3.common.vec_env")
        except ModuleNotFoundError as error:
            raise Skip(f"{error}; pip install 'envserve[bench]'") from error
        functions = _env_functions(num_envs, env_kwargs)
        method = "fork" if sys.platform == "linux" else None
        self._envs = module.SubprocVecEnv(functions, start_method=method)
        self._envs.reset()

    @property
    def worker_pids(self) -> list[int]:
        return [process.pid for process in self._envs.processes]

    def step(self, actions: Array) -> tuple[Array, Array]:
        return _all_valid(self._envs.step(actions)[1])

    def step_within(self, actions: Array, seconds: float) -> tuple[Array, Array]:
        return self.step(actions)


class _Ours:
    """Ours, with a process per env as well."""

    def __init__(self, num_envs: int, env_kwargs: Mapping[str, Any]) -> None:
        self._batch = BatchEnv.local(
            _LEDGER,
            num_envs,
            num_envs,
            env_kwargs=dict(env_kwargs),
            import_modules=[MODULE],
            step_timeout=_STEP_TIMEOUT,
        )
        self._batch.reset()

    @property
    def worker_pids(self) -> list[int]:
        (lane,) = self._batch.lanes
        assert isinstance(lane, Pool)
        return [pid for pid in lane.worker_pids if pid is not None]

    def step(self, actions: Array) -> tuple[Array, Array]:
        if self._batch.num_out:  # of a call that has timed out; the result is its own
            self._batch.recv(self._batch.num_out)
        result = self._batch.step(actions)
        return result.reward, result.valid

    def step_within(self, actions: Array, seconds: float) -> tuple[Array, Array]:
        self._batch.send(actions)
        _, result = self._batch.recv(self._batch.num_envs, timeout=seconds)
        return result.reward, result.valid


def _env_functions(
    num_envs: int, env_kwargs: Mapping[str, Any]
) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    def make() -> gymnasium.Env[Any, Any]:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        importlib.import_module(MODULE)
        return gymnasium.make(_LEDGER, disable_env_checker=True, **env_kwargs)

    return [make] * num_envs


def _all_valid(reward: Any) -> tuple[Array, Array]:
    """Takes every row for what it is given out as: neither peer says more."""
    return np.asarray(reward, np.float64), np.ones(len(reward), np.bool_)


PEERS: Final[dict[str, Callable[[int, Mapping[str, Any]], PeerBatch]]] = {
    ASYNC: _Async,
    SUBPROC: _Subproc,
    OURS: _Ours,
}
