"""Ways in which an env breaks down, and when it is to do so.

Of each way the first word says what becomes of the process: it raises, ends, is killed
or stopped, sleeps, or holds the interpreter's lock in C, where no signal handler runs.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

import numpy as np

#: Before the action is applied, after it was, or in a reset.
When = Literal["before", "after", "reset"]


def _raise(seconds: float) -> None:
    raise RuntimeError("the simulator lost its balance")


def _hang(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(min(3600.0, until - time.monotonic()))


def _spin(seconds: float) -> None:
    libc = ctypes.PyDLL(None)  # as opposed to CDLL, it keeps the interpreter's lock
    while seconds == math.inf:
        libc.pause()  # returns when a signal is handled, like one that asks for a stack
    libc.usleep(int(seconds * 1e6))


#: What each does; those that last take for how many seconds, the others ignore it.
BREAKDOWNS: Final[Mapping[str, Callable[[float], Any]]] = {
    "raise": _raise,
    "exit": lambda _: os._exit(3),
    "segfault": lambda _: ctypes.string_at(0),
    "abort": lambda _: os.abort(),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
    "spin": _spin,
}


@dataclass(frozen=True, kw_only=True)
class _Trigger:
    """When one way of breaking down comes; each condition by itself suffices."""

    name: str
    #: In each step, or with `when="reset"` in each reset.
    probability: float = 0.0
    #: In steps with one of these actions.
    actions: Collection[int] = ()
    #: In these steps, counted from 1 since the env was seeded.
    steps: Collection[int] = ()
    when: When = "before"
    #: How long a hang or spin lasts.
    seconds: float = math.inf


class BreakdownPlan:
    """When an env breaks down, and how."""

    def __init__(self, breakdowns: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes, by name of `BREAKDOWNS`, what a `_Trigger` says; plain values.

        Raises:
          ValueError: There is no such name or condition.
        """
        known = {field.name for field in fields(_Trigger)} - {"name"}
        self._triggers: dict[str, list[_Trigger]] = {w: [] for w in get_args(When)}
        for name, conditions in breakdowns.items():
            when = conditions.get("when", "before")
            if (
                name not in BREAKDOWNS
                or not known.issuperset(conditions)
                or when not in self._triggers
            ):
                raise ValueError(
                    f"expected breakdowns out of {sorted(BREAKDOWNS)}, with conditions "
                    f"out of {sorted(known)}, when being one of {get_args(When)}; got "
                    f"{name}: {dict(conditions)}"
                )
            self._triggers[when].append(_Trigger(name=name, **conditions))

    def reach(
        self,
        when: When,
        generator: np.random.Generator,
        action: int = -1,
        step: int = 0,
    ) -> None:
        for trigger in self._triggers[when]:
            if (
                action in trigger.actions
                or step in trigger.steps
                or (trigger.probability and generator.random() < trigger.probability)
            ):
                BREAKDOWNS[trigger.name](trigger.seconds)
