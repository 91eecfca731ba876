"""The behaviour of other projects' vectorised envs after faults.

Each probe runs in its own process. The reward of a ledger env equals the action, so a
result of another action is detected.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import gymnasium
import numpy as np

from benchmarks.cases.peers import sb3_vec_env
from benchmarks.harness import Skip
from benchmarks.support.processes import kill_all, with_descendants
from envserve.bench.workload import Workload
from envserve.client import BatchEnv
from envserve.pool.pool import Pool
from tests.chaos.isolated import DidNotEnd, run_isolated
from tests.oracle.journal import Array
from tests.oracle.probe_envs import MODULE

ASYNC: Final = "gymnasium AsyncVectorEnv"
SUBPROC: Final = "SB3 SubprocVecEnv"
OURS: Final = "envserve BatchEnv"
_STEP_TIMEOUT: Final = 1.0
_NUM_ENVS: Final = 4
_NUM_LATER: Final = 20
_MARKED: Final = "correct; lost rows are marked"
#: Seconds after which rows that are still marked as lost count as not recovered.
_RECOVERY_SECONDS: Final = 30.0
_SLOW, _HANG = 900, 901
_SLOW_SECONDS: Final = 0.5
_PATIENCE_SECONDS: Final = 0.2
#: Time limit in seconds after which a call counts as hanging.
_GIVE_UP_SECONDS: Final = 20.0
_PROBE_SECONDS: Final = 90.0
#: The envs; their episodes do not end, so no row is the result of a reset.
_LOAD: Final = Workload(
    "envserve/Ledger-v0",
    *(_NUM_ENVS, _NUM_ENVS, 0.0),
    {
        "length": 10**6,
        "failures": {
            "hang": {"actions": [_HANG], "when": "before"},
            "spin": {"actions": [_SLOW], "when": "before", "seconds": _SLOW_SECONDS},
        },
    },
    (MODULE,),
)


class _Async:
    """Gymnasium's AsyncVectorEnv, with a process per env."""

    def __init__(self) -> None:
        self._envs: Any = gymnasium.vector.AsyncVectorEnv(_LOAD.env_functions())
        self._envs.reset(seed=0)

    @property
    def worker_pids(self) -> list[int]:
        return [process.pid for process in self._envs.processes]

    def step(self, actions: Array) -> tuple[Array, Array]:
        return _all_valid(self._envs.step(actions)[1])

    def step_within(self, actions: Array, seconds: float) -> tuple[Array, Array]:
        self._envs.step_async(actions)
        return _all_valid(self._envs.step_wait(timeout=seconds)[1])


class _Subproc(_Async):
    """Stable-Baselines3's SubprocVecEnv, which has no timeout for a step."""

    def __init__(self) -> None:
        self._envs = sb3_vec_env(_LOAD, "SubprocVecEnv")
        self._envs.reset()

    def step_within(self, actions: Array, seconds: float) -> tuple[Array, Array]:
        return self.step(actions)


class _Ours:
    """envserve's BatchEnv, with a process per env."""

    def __init__(self) -> None:
        self._batch = BatchEnv.local(
            _LOAD.env_name,
            _NUM_ENVS,
            _NUM_ENVS,
            env_kwargs=_LOAD.env_kwargs,
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
        if self._batch.num_in_flight:  # rows of a call that timed out
            self._batch.recv(self._batch.num_in_flight)
        result = self._batch.step(actions)
        return result.reward, result.valid

    def step_within(self, actions: Array, seconds: float) -> tuple[Array, Array]:
        self._batch.send(actions)
        _, result = self._batch.recv(self._batch.num_envs, timeout=seconds)
        return result.reward, result.valid


#: A vector env with two methods: `step` returns rewards and validity, `[n]` each;
#: `step_within` does the same within a timeout.
PeerBatch = _Async | _Ours


def _all_valid(reward: Any) -> tuple[Array, Array]:
    """Mark every row as valid, because the other projects report no validity."""
    return np.asarray(reward, np.float64), np.ones(len(reward), np.bool_)


PEERS: Final[dict[str, Callable[[], PeerBatch]]] = {
    ASYNC: _Async,
    SUBPROC: _Subproc,
    OURS: _Ours,
}


class _Hangs(BaseException):
    """A call exceeded its time limit."""


@dataclass(frozen=True)
class PeerResult:
    """The result of a probe.

    Attributes:
      first: Outcome of the call with the fault.
      later: Number of later calls by outcome.
      num_wrong: Number of rows reported as valid that belong to another action.
      has_recovered: Whether the last call returned a correct, valid result for each
      row.
    """

    first: str
    later: Counter[str]
    num_wrong: int
    has_recovered: bool


class _Calls:
    """Steps a vector env and classifies the outcome of each call.

    Attributes:
      num_wrong: Number of rows reported as valid that belong to another action.
    """

    def __init__(self, batch: PeerBatch, random: np.random.Generator) -> None:
        self.num_wrong = 0
        self.batch = batch
        self._random = random

    def step(self, first_action: int | None = None, within: float = 0.0) -> str:
        """Step with random actions, except for row 0 if `first_action` is given."""
        actions = self._random.integers(0, _SLOW, _NUM_ENVS)
        if first_action is not None:
            actions[0] = first_action
        try:
            with _time_limit():
                if within:
                    reward, valid = self.batch.step_within(actions, within)
                else:
                    reward, valid = self.batch.step(actions)
        except _Hangs:
            return "hangs"
        except (Exception, KeyboardInterrupt) as error:
            return type(error).__name__
        return self._classify(actions, reward, valid)

    def _classify(self, actions: Array, reward: Array, valid: Array) -> str:
        wrong = int((valid & (reward != actions)).sum())
        self.num_wrong += wrong
        if wrong:
            return "results of another action"
        return "correct" if valid.all() else _MARKED


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise _Hangs if the body exceeds the time limit."""

    def raise_hangs(number: int, frame: FrameType | None) -> None:
        raise _Hangs

    old = signal.signal(signal.SIGALRM, raise_hangs)
    signal.setitimer(signal.ITIMER_REAL, _GIVE_UP_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, old)


def _kill_worker(calls: _Calls) -> str:
    os.kill(calls.batch.worker_pids[0], signal.SIGKILL)
    return calls.step()


def _interrupt(calls: _Calls) -> str:
    thread = threading.get_ident()

    def interrupt() -> None:
        time.sleep(_PATIENCE_SECONDS)
        signal.pthread_kill(thread, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    found = calls.step(_SLOW)
    interrupter.join()
    return found


#: Functions that cause a fault of row 0, by description of the fault.
FAULTS: Final[dict[str, Callable[[_Calls], str]]] = {
    "a worker is killed": _kill_worker,
    "an env hangs": lambda calls: calls.step(_HANG),
    f"a step takes {_SLOW_SECONDS:g} s, the caller waits {_PATIENCE_SECONDS:g} s": (
        lambda calls: calls.step(_SLOW, within=_PATIENCE_SECONDS)
    ),
    "Ctrl-C during a step": _interrupt,
}


def probe(peer: str, fault: str, seed: int) -> PeerResult | str:
    """Inject a fault in this process.

    Returns:
      The result, or a text that explains why the probe could not run.
    """
    random = np.random.default_rng(seed)
    try:
        batch = PEERS[peer]()
    except Skip as reason:
        return str(reason)
    try:
        calls = _Calls(batch, random)
        before = {calls.step() for _ in range(5)}
        if before != {"correct"}:
            return f"expected correct results before the fault; got {before}"
        first = FAULTS[fault](calls)
        later: list[str] = []
        deadline = time.monotonic() + _RECOVERY_SECONDS
        while later[-1:] != ["hangs"] and (
            len(later) < _NUM_LATER
            or (later[-1] == _MARKED and time.monotonic() < deadline)
        ):
            later.append(calls.step())
        return PeerResult(
            first, Counter(later), calls.num_wrong, later[-1] == "correct"
        )
    finally:
        # Do not close the env, because that may hang as well.
        kill_all(with_descendants(os.getpid())[1:])


def peer_rows(report: Callable[[str], None], seed: int = 0) -> list[list[str]]:
    """Inject all faults into all vectorised envs; return the cells of a table."""
    rows = []
    for fault in FAULTS:
        for peer in PEERS:
            report(f"{fault}: {peer}")
            try:
                found = run_isolated(probe, peer, fault, seed, seconds=_PROBE_SECONDS)
            except DidNotEnd as error:
                found = str(error)
            rows.append(_cells(peer, fault, found))
    return rows


def _cells(peer: str, fault: str, found: PeerResult | str) -> list[str]:
    name = f"**{peer}**" if peer == OURS else peer
    if isinstance(found, str):
        return [name, fault, f"not tested: {found}", "-", "-", "-"]
    later = ", ".join(f"{text} ({count})" for text, count in found.later.items())
    recovers = "yes" if found.has_recovered else "no"
    return [name, fault, found.first, later, str(found.num_wrong), recovers]
