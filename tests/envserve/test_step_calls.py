"""How many Python functions a step takes in the process that calls it.

Around simulation caches are cold, and what costs is the number of calls; see
docs/decisions.md: "A step makes few Python calls and few copies".
"""

from __future__ import annotations

import sys
from collections import Counter
from types import CodeType, FrameType
from typing import NamedTuple

import numpy as np

from envserve.client import BatchEnv

from .conftest import StartServer

NUM_ENVS = 8
NUM_STEPS = 20


class Calls(NamedTuple):
    """Of one step: different functions, calls of them, and the files they are in."""

    functions: int
    calls: int
    files: int


def fewest_calls(batch: BatchEnv) -> Calls:
    """Counts the calls of some steps; returns those of the cheapest."""
    batch.reset()
    actions = np.zeros(batch.num_envs, np.int64)
    for _ in range(NUM_STEPS):
        batch.step(actions)
    counts = []
    for _ in range(NUM_STEPS):
        called: Counter[CodeType] = Counter()

        def note(frame: FrameType, event: str, argument: object) -> None:
            if event == "call":
                called[frame.f_code] += 1  # noqa: B023

        sys.setprofile(note)
        try:
            batch.step(actions)
        finally:
            sys.setprofile(None)
        files = {code.co_filename for code in called}
        counts.append(Calls(len(called), called.total(), len(files)))
    return min(counts, key=lambda count: count.calls)


def test_a_step_in_this_host_is_few_calls() -> None:
    with BatchEnv.local("CartPole-v1", NUM_ENVS, 2, seed=0) as batch:
        found = fewest_calls(batch)
    assert found.functions <= 28, found
    assert found.calls <= 40, found
    assert found.files <= 9, found


def test_a_step_over_tcp_is_few_calls(start_server: StartServer) -> None:
    address = start_server("tcp://127.0.0.1:0", "--workers", "2")
    with BatchEnv.connect("CartPole-v1", [address], NUM_ENVS, seed=0) as batch:
        found = fewest_calls(batch)
    assert found.functions <= 55, found
    assert found.calls <= 75, found
    assert found.files <= 14, found
