"""Ctrl-C at any line of a step: the next ones never see an older one's result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from envserve.client import BatchEnv

from .conftest import MakeBatch

NUM_POINTS = 16
Trace = Callable[[FrameType, str, Any], Any]


def interrupt_at(line: int) -> tuple[Trace, list[int]]:
    """Returns a trace function that raises at the so manieth line, and the count."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if "/envserve/" not in frame.f_code.co_filename.replace("/tests/envserve/", ""):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    return trace, count


def step_traced(batch: BatchEnv, action: int, line: int) -> int:
    """Steps, interrupted at a line; returns how many lines ran."""
    trace, count = interrupt_at(line)
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        batch.step(np.full(batch.num_envs, action))
    except KeyboardInterrupt:
        assert count[0] == line
    finally:
        sys.settrace(previous)
    return count[0]


def test_an_interrupted_step_never_answers_a_later_one(
    make_batch: MakeBatch, lane_kind: str
) -> None:
    # A frame whose sending was interrupted costs its worker the step timeout.
    options = {"step_timeout": 0.5} if lane_kind == "local" else {}
    with make_batch("envserve/Ledger-v0", 4, 2, env_kwargs={"length": 1000}) as probe:
        probe.reset()
        num_lines = step_traced(probe, 1, -1)
    assert num_lines > NUM_POINTS
    for line in np.linspace(1, num_lines, NUM_POINTS, dtype=int).tolist():
        with make_batch(
            "envserve/Ledger-v0", 4, 2, env_kwargs={"length": 1000}, **options
        ) as batch:
            batch.reset()
            step_traced(batch, 50, line)
            for action in (101, 102):
                result = batch.step(np.full(4, action))
                expected = np.where(result.valid, action, 0)
                np.testing.assert_array_equal(result.reward, expected)
            assert result.valid.all()
