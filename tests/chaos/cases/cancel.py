"""Interrupted calls and timeouts: the next call must never return the old result."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

import numpy as np

from envserve.errors import EnvTimeout
from tests.chaos.batches import local_driver, remote_driver, running_servers
from tests.chaos.driver import Driver
from tests.chaos.fault_injector import FaultInjector
from tests.chaos.trial import Trial, chaos_case

_NUM_ENVS: Final = 8
_SIGNAL: Final = signal.SIGUSR1
#: Time limit in seconds for a step that was only partially submitted.
_STEP_TIMEOUT: Final = 0.5
_SHARE_OF_INTERRUPTS: Final = 0.5
#: The number of calls between two cancelled calls is at least 1 and below this limit.
#: Without calls in between, the number of possible states would grow.
_MAX_CALLS_BETWEEN: Final = 3


class _Interrupts:
    """Raises KeyboardInterrupt in this thread on a signal, but only while armed."""

    def __init__(self) -> None:
        self._is_armed = False
        self.num_interrupts = 0
        self._thread = threading.get_ident()
        self._old = signal.signal(_SIGNAL, self._on_signal)

    def arm(self) -> None:
        self._is_armed = True

    def disarm(self) -> None:
        self._is_armed = False

    def send(self) -> None:
        signal.pthread_kill(self._thread, _SIGNAL)

    def close(self) -> None:
        signal.signal(_SIGNAL, self._old)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            self.num_interrupts += 1
            raise KeyboardInterrupt


@chaos_case(
    "calls are interrupted as by Ctrl-C, or time out, in-process and over tcp",
    "the next call never returns the old result",
    seconds=5400.0,
)
def cancel(trial: Trial) -> None:
    num_cancels = trial.count(100_000)
    with (
        running_servers(trial, 1, _NUM_ENVS) as (server,),
        local_driver(trial, _NUM_ENVS, 2, step_timeout=_STEP_TIMEOUT) as local,
        remote_driver(trial, [server.address], _NUM_ENVS) as remote,
        contextlib.closing(_Interrupts()) as interrupts,
        FaultInjector() as injector,
    ):
        longest = {driver: _typical_step_seconds(driver) for driver in (local, remote)}
        costs: dict[bool, list[int]] = {True: [], False: []}
        while trial.result.faults < num_cancels:
            driver = (local, remote)[trial.random.integers(2)]
            before = _num_lost_or_padded(driver)
            is_interrupt = bool(trial.random.random() < _SHARE_OF_INTERRUPTS)
            if is_interrupt:
                with _interrupt_soon(injector, interrupts, trial, longest[driver]):
                    trial.result.faults += _interrupted_step(driver, interrupts)
            else:
                trial.result.faults += _timed_out_receive(driver)
            for _ in range(trial.random.integers(1, _MAX_CALLS_BETWEEN)):
                driver.step()
            costs[is_interrupt].append(_num_lost_or_padded(driver) - before)
    trial.result.check(
        "rows affected by a timeout", max(costs[False], default=0), 0, "=="
    )
    trial.result.check(
        "rows affected by an interrupt", max(costs[True], default=0), _NUM_ENVS
    )
    count, num_costly = interrupts.num_interrupts, sum(map(bool, costs[True]))
    trial.result.notes.append(
        f"{count} calls were interrupted, the others timed out; {num_costly} "
        "interrupts hit the client's bookkeeping and cost each row an episode"
    )


def _num_lost_or_padded(driver: Driver) -> int:
    """Return the number of lost or PENDING rows so far."""
    return sum(driver.ledger.losses.values()) + driver.ledger.num_padding


def _typical_step_seconds(driver: Driver) -> float:
    began = time.monotonic()
    for _ in range(20):
        driver.step()
    return (time.monotonic() - began) / 20


@contextlib.contextmanager
def _interrupt_soon(
    injector: FaultInjector, interrupts: _Interrupts, trial: Trial, longest: float
) -> Iterator[None]:
    """Send the signal during a call; wait until it has been sent."""
    is_sent = threading.Event()

    def send() -> None:
        interrupts.send()
        is_sent.set()

    injector.inject(trial.random.uniform(0.0, longest), send)
    yield
    is_sent.wait()


def _interrupted_step(driver: Driver, interrupts: _Interrupts) -> bool:
    driver.actions[:] = driver.draw()
    began = time.monotonic()
    try:
        interrupts.arm()
        result = driver.batch.step(driver.actions)
        interrupts.disarm()
    except KeyboardInterrupt:
        driver.ledger.mark_unanswered(driver.actions)
        return True
    driver.check(result, None, began)
    return False


def _timed_out_receive(driver: Driver) -> bool:
    """Step, and first receive with a timeout of 0; return whether this timed out."""
    has_timed_out = False
    driver.send(np.arange(_NUM_ENVS))
    while driver.batch.num_in_flight:
        with contextlib.suppress(EnvTimeout):
            driver.receive(0.0 if not has_timed_out else None)
            continue
        has_timed_out = True
    return has_timed_out
