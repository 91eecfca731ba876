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
from typing import Final

import numpy as np

from benchmarks.lab.processes import kill_all, with_descendants
from tests.chaos.isolated import DidNotEnd, run_isolated
from tests.chaos.peer_batches import OURS, PEERS, PeerBatch
from tests.chaos.recoveries import Array
from tests.chaos.trial import Skip

_NUM_ENVS: Final = 4
_NUM_LATER: Final = 20
#: Episodes that do not end, so that no row is one of a reset.
_LENGTH: Final = 10**6
_SLOW, _HANG = 900, 901
_SLOW_SECONDS: Final = 0.5
_PATIENCE_SECONDS: Final = 0.2
#: A call that takes longer hangs.
_GIVE_UP_SECONDS: Final = 5.0
_PROBE_SECONDS: Final = 90.0
_BREAKDOWNS: Final = {
    "hang": {"actions": [_HANG], "when": "before"},
    "spin": {"actions": [_SLOW], "when": "before", "seconds": _SLOW_SECONDS},
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
      batch: What is stepped.
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


def _hang(calls: _Calls) -> str:
    return calls.step(_HANG)


def _time_out(calls: _Calls) -> str:
    return calls.step(_SLOW, within=_PATIENCE_SECONDS)


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
    "an env hangs": _hang,
    f"a step takes {_SLOW_SECONDS:g} s, the caller waits {_PATIENCE_SECONDS:g} s": (
        _time_out
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
        batch = PEERS[peer](
            _NUM_ENVS, {"length": _LENGTH, "breakdowns": dict(_BREAKDOWNS)}
        )
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
