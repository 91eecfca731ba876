"""A trainer that does not read its answers for a while.

Its argument is the server's address. It stops itself when its answers are on their way,
until its parent lets it go on; then it does the same again, but only holds Python's
lock, so that nothing of it runs but libzmq's threads.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable
from typing import Final

import numpy as np

from envserve.client import BatchEnv

NUM_ENVS: Final = 96  # whose results are more than a connection's buffers hold
BUSY_SECONDS: Final = 1


def stop() -> None:
    signal.raise_signal(signal.SIGSTOP)


def hold_the_lock() -> None:
    ctypes.PyDLL(None).sleep(BUSY_SECONDS)


def step(batch: BatchEnv, pause: Callable[[], None]) -> None:
    shape = (NUM_ENVS, *(batch.action_space.shape or ()))
    actions = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    batch.send(actions)
    pause()
    _, result = batch.recv(NUM_ENVS)
    assert result.valid.all()
    np.testing.assert_array_equal(result.observation, actions)


if __name__ == "__main__":
    with BatchEnv.connect(
        "envserve/Echo-v0",
        [sys.argv[1]],
        NUM_ENVS,
        num_splits=4,
        env_kwargs={"space": "image"},
    ) as batch:
        batch.reset()
        step(batch, stop)
        step(batch, hold_the_lock)
