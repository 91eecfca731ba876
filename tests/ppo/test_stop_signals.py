"""Signals as requests."""

import os
import signal
import threading

import pytest

from ppo.commands.stop_signals import StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_interrupts(number: int) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop.has_fired()
        os.kill(os.getpid(), number)
        assert stop.has_fired()
        assert stop.received == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_thread_learns_of_signals_while_the_main_thread_runs_no_python() -> None:
    announced = threading.Event()
    with StopSignals(announced.set) as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGINT)
        assert announced.wait(10)
        stop.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    # Leaving has waited for the listener, so both have been counted.
    with pytest.raises(KeyboardInterrupt):
        stop.check()
