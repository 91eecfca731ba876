"""Failures of envs, and the conditions under which they occur.

The names describe what happens to the process: it raises, exits, is killed or stopped,
sleeps, holds the interpreter lock in C so that no Python signal handler runs, or
overwrites the memory of all envs of its pool. Three failures make the process
unusable: all later steps raise ("spoil"), memory is used up ("leak"), or a thread that
an import has started is missing ("wait_for_thread").
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

import numpy as np

#: When a failure occurs: before or after the action is applied, or in a reset.
When = Literal["before", "after", "reset"]


def _raise(seconds: float) -> None:
    raise RuntimeError("the simulator lost its balance")


def _hang(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(min(3600.0, until - time.monotonic()))


def _spin(seconds: float) -> None:
    libc = ctypes.PyDLL(None)  # unlike CDLL, it keeps the interpreter lock
    while seconds == math.inf:
        libc.pause()  # returns after each signal, for example a stack dump request
    libc.usleep(int(seconds * 1e6))


def _overwrite(seconds: float) -> None:
    """Overwrite all memory that the worker shares with its pool."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "envserve-slab" in line:
                start, stop = (int(part, 16) for part in line.split()[0].split("-"))
                ctypes.memset(start, 0xFF, stop - start)


#: Bytes that each leak allocates and never frees.
_LEAKED_BYTES: Final = 1 << 28
_leaked: list[Any] = []
_is_spoiled = False


def _spoil(seconds: float) -> None:
    global _is_spoiled
    _is_spoiled = True
    _raise_if_spoiled()


def _raise_if_spoiled() -> None:
    if _is_spoiled:
        raise RuntimeError("CUDA error: device-side assert triggered")


def _wait_for_thread(seconds: float) -> None:
    """Wait for the thread of `import_threads`, which the program must have imported."""
    sys.modules["tests.oracle.import_threads"].wait_for_thread()


#: Implementation of each failure; the argument is the duration in seconds of a hang
#: or spin.
FAILURES: Final[Mapping[str, Callable[[float], Any]]] = {
    "raise": _raise,
    "exit": lambda _: os._exit(3),
    "segfault": lambda _: ctypes.string_at(0),
    "abort": lambda _: os.abort(),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "overwrite": _overwrite,
    "spoil": _spoil,
    "leak": lambda _: _leaked.append(np.zeros(_LEAKED_BYTES, np.uint8)),
    "wait_for_thread": _wait_for_thread,
    "hang": _hang,
    "spin": _spin,
}


@dataclass(frozen=True, kw_only=True)
class _Trigger:
    """The conditions for one failure, which occurs if any of them is met."""

    name: str
    #: Probability per step, or per reset with `when="reset"`.
    probability: float = 0.0
    #: Actions that cause the failure.
    actions: Collection[int] = ()
    #: Steps that cause the failure, counted from 1 since the seed was set.
    steps: Collection[int] = ()
    when: When = "before"
    #: Duration of a hang or spin in seconds.
    seconds: float = math.inf


class FailurePlan:
    """Decides when an env fails, and how."""

    def __init__(self, failures: Mapping[str, Mapping[str, Any]]) -> None:
        """Parse conditions by failure name; see `_Trigger` for their fields.

        Raises:
          ValueError: A failure or condition does not exist.
        """
        known = {field.name for field in fields(_Trigger)} - {"name"}
        self._triggers: dict[str, list[_Trigger]] = {w: [] for w in get_args(When)}
        for name, conditions in failures.items():
            when = conditions.get("when", "before")
            if (
                name not in FAILURES
                or not known.issuperset(conditions)
                or when not in self._triggers
            ):
                raise ValueError(
                    f"expected failures from {sorted(FAILURES)}, with conditions "
                    f"from {sorted(known)} and `when` one of {get_args(When)}; got "
                    f"{name}: {dict(conditions)}"
                )
            self._triggers[when].append(_Trigger(name=name, **conditions))

    def trigger(
        self,
        when: When,
        generator: np.random.Generator,
        action: int = -1,
        step: int = 0,
    ) -> None:
        _raise_if_spoiled()
        for trigger in self._triggers[when]:
            if (
                action in trigger.actions
                or step in trigger.steps
                or (trigger.probability and generator.random() < trigger.probability)
            ):
                FAILURES[trigger.name](trigger.seconds)
