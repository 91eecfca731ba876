"""The number of Python function calls per step.

With cold caches, as while a simulation runs, the number of calls determines the time;
see docs/decisions.md: "A step makes few Python calls and few copies".
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from envserve.client import BatchEnv
from envserve.crashes.action_ring import RowRecord
from envserve.settings import EnvRequest
from envserve.slab import Rows, private_heartbeat
from envserve.worker import env_row
from envserve.worker.env_row import EnvRow

NUM_ENVS = 8
NUM_STEPS = 100  # on a busy machine, only some steps need the fewest calls


class Calls(NamedTuple):
    """The numbers of distinct functions, of calls and of files in a step."""

    functions: int
    calls: int
    files: int


def called_by(function: Callable[[], object]) -> Counter[CodeType]:
    """Count the calls of each Python function."""
    called: Counter[CodeType] = Counter()

    def record_call(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called[frame.f_code] += 1

    sys.setprofile(record_call)
    try:
        function()
    finally:
        sys.setprofile(None)
    return called


def fewest_calls(batch: BatchEnv, *, is_in_place: bool = False) -> Calls:
    """Count the calls in some steps; return the counts of the cheapest step."""
    batch.reset()
    actions = np.zeros(batch.num_envs, np.int64)
    out = batch.step(actions) if is_in_place else None
    for _ in range(NUM_STEPS):
        batch.step(actions, out)
    counts = []
    for _ in range(NUM_STEPS):
        called = called_by(partial(batch.step, actions, out))
        files = {code.co_filename for code in called}
        counts.append(Calls(len(called), called.total(), len(files)))
    return min(counts, key=lambda count: count.calls)


def test_a_local_step_makes_few_calls() -> None:
    with BatchEnv.local("CartPole-v1", NUM_ENVS, 2, seed=0) as batch:
        found = fewest_calls(batch)
    assert found.functions <= 24, found
    assert found.calls <= 30, found
    assert found.files <= 9, found


def test_a_local_step_into_arrays_makes_few_calls() -> None:
    with BatchEnv.local("CartPole-v1", NUM_ENVS, 2, seed=0) as batch:
        found = fewest_calls(batch, is_in_place=True)
    assert found.calls <= 34, found


def test_a_step_over_tcp_makes_few_calls(tcp_address: str) -> None:
    with BatchEnv.connect("CartPole-v1", [tcp_address], NUM_ENVS, seed=0) as batch:
        found = fewest_calls(batch)
    assert found.functions <= 45, found
    assert found.calls <= 50, found
    assert found.files <= 14, found


def test_infos_of_more_envs_take_no_more_calls() -> None:
    counts = []
    for num_envs in (4, 64):
        options: Any = {"infos": "all", "env_kwargs": {"is_slippery": False}}
        with BatchEnv.local("FrozenLake-v1", num_envs, 2, **options) as batch:
            counts.append(fewest_calls(batch).calls)
            assert batch.step(np.zeros(num_envs, np.int64)).infos[3] == {"prob": 1.0}
    assert counts[0] == counts[1] <= 80


def test_a_worker_makes_one_call_per_env_and_step() -> None:
    env = EnvRow(EnvRequest(env_name="CartPole-v1", num_envs=1, seed=0), 0)
    rows = Rows.allocate(env.build(), 1)
    env.attach(rows, private_heartbeat(), RowRecord.private())
    env.reset(seed=0)
    env.step(np.int64(0))  # the first step makes another call
    called = called_by(partial(env.step, np.int64(1)))
    assert [code for code in called if code.co_filename == env_row.__file__] == [
        EnvRow.step.__code__
    ]
