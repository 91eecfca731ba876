"""What becomes of a vectorised env, and of its results, after a fault: by what it does.

Each probe has a process of its own. The reward of a ledger echoes the action, so that a
result that belongs to another action shows.
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
from benchmarks.lab.processes import kill_all, with_descendants
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
_SLOW, _HANG = 900, 901
_SLOW_SECONDS: Final = 0.5
_PATIENCE_SECONDS: Final = 0.2
#: A call that takes longer hangs.
_GIVE_UP_SECONDS: Final = 20.0
_PROBE_SECONDS: Final = 90.0
#: Episodes do not end, so that no row is one of a reset.
_LOAD: Final = Workload(
    "envserve/Ledger-v0",
    *(_NUM_ENVS, _NUM_ENVS, 0.0),
    {
        "length": 10**6,
        "breakdowns": {
            "hang": {"actions": [_HANG], "when": "before"},
            "spin": {"actions": [_SLOW], "when": "before", "seconds": _SLOW_SECONDS},
        },
    },
    (MODULE,),
)


class _Async:
    """A process per env."""

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
    """The same of Stable-Baselines3. Nothing bounds a step."""

    def __init__(self) -> None:
        self._envs = sb3_vec_env(_LOAD, "SubprocVecEnv")
        self._envs.reset()

    def step_within(self, actions: Array, seconds: float) -> tuple[Array, Array]:
        return self.step(actions)


class _Ours:
    """Ours, with a process per env as well."""

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
        if self._batch.num_out:  # of a call that has timed out; the result is its own
            self._batch.recv(self._batch.num_out)
        result = self._batch.step(actions)
        return result.reward, result.valid

    def step_within(self, actions: Array, seconds: float) -> tuple[Array, Array]:
        self._batch.send(actions)
        _, result = self._batch.recv(self._batch.num_envs, timeout=seconds)
        return result.reward, result.valid


#: What is stepped: `step` gives rewards and what is valid of them, `[n]` each;
#: `step_within` the same, with whatever there is to bound it.
PeerBatch = _Async | _Ours


def _all_valid(reward: Any) -> tuple[Array, Array]:
    """Takes every row for what it is given out as: neither peer says more."""
    return np.asarray(reward, np.float64), np.ones(len(reward), np.bool_)


PEERS: Final[dict[str, Callable[[], PeerBatch]]] = {
    ASYNC: _Async,
    SUBPROC: _Subproc,
    OURS: _Ours,
}


class _Hangs(BaseException):
    """A call has taken too long."""


@dataclass(frozen=True)
class Found:
    """What a probe has found.

    Attributes:
      first: What the call that met the fault gave.
      later: How often the calls after it gave what.
      num_wrong: Rows given out as valid with the result of another action.
      has_recovered: Whether the last call gave a right, valid result for each row.
    """

    first: str
    later: Counter[str]
    num_wrong: int
    has_recovered: bool


class _Calls:
    """Steps, and says in a word what each call gave.

    Attributes:
      num_wrong: Rows with the result of another action, given out as valid.
    """

    def __init__(self, batch: PeerBatch, random: np.random.Generator) -> None:
        self.num_wrong = 0
        self.batch = batch
        self._random = random

    def step(self, first_action: int | None = None, within: float = 0.0) -> str:
        """Steps with actions that are drawn, but for that of row 0."""
        actions = self._random.integers(0, _SLOW, _NUM_ENVS)
        if first_action is not None:
            actions[0] = first_action
        try:
            with _patience():
                if within:
                    reward, valid = self.batch.step_within(actions, within)
                else:
                    reward, valid = self.batch.step(actions)
        except _Hangs:
            return "hangs"
        except (Exception, KeyboardInterrupt) as error:
            return type(error).__name__
        return self._judge(actions, reward, valid)

    def _judge(self, actions: Array, reward: Array, valid: Array) -> str:
        wrong = int((valid & (reward != actions)).sum())
        self.num_wrong += wrong
        if wrong:
            return "results of another action"
        return "right" if valid.all() else "right, lost rows marked"


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Ends a call that hangs by an exception."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise _Hangs

    old = signal.signal(signal.SIGALRM, give_up)
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


#: Faults of row 0, by what they are.
FAULTS: Final[dict[str, Callable[[_Calls], str]]] = {
    "a worker is killed": _kill_worker,
    "an env hangs": lambda calls: calls.step(_HANG),
    f"a step takes {_SLOW_SECONDS:g} s, the caller waits {_PATIENCE_SECONDS:g} s": (
        lambda calls: calls.step(_SLOW, within=_PATIENCE_SECONDS)
    ),
    "Ctrl-C during a step": _interrupt,
}


def probe(peer: str, fault: str, seed: int) -> Found | str:
    """Tries a fault in this process.

    Returns:
      What came of it; or, as text, why it could not be tried.
    """
    random = np.random.default_rng(seed)
    try:
        batch = PEERS[peer]()
    except Skip as reason:
        return str(reason)
    try:
        calls = _Calls(batch, random)
        before = {calls.step() for _ in range(5)}
        if before != {"right"}:
            return f"expected right results before the fault; got {before}"
        first = FAULTS[fault](calls)
        later: list[str] = []
        while len(later) < _NUM_LATER and later[-1:] != ["hangs"]:
            later.append(calls.step())
        return Found(first, Counter(later), calls.num_wrong, later[-1] == "right")
    finally:
        # Not closed: that may hang as well.
        kill_all(with_descendants(os.getpid())[1:])


def peer_rows(say: Callable[[str], None], seed: int = 0) -> list[list[str]]:
    """Tries all faults on all peers; returns the cells of a table."""
    rows = []
    for fault in FAULTS:
        for peer in PEERS:
            say(f"{fault}: {peer}")
            try:
                found = run_isolated(probe, peer, fault, seed, seconds=_PROBE_SECONDS)
            except DidNotEnd as error:
                found = str(error)
            rows.append(_cells(peer, fault, found))
    return rows


def _cells(peer: str, fault: str, found: Found | str) -> list[str]:
    name = f"**{peer}**" if peer == OURS else peer
    if isinstance(found, str):
        return [name, fault, f"not tried: {found}", "-", "-", "-"]
    later = ", ".join(f"{text} ({count})" for text, count in found.later.items())
    recovers = "yes" if found.has_recovered else "no"
    return [name, fault, found.first, later, str(found.num_wrong), recovers]
