"""A trainer that reads no results for longer than any network delay.

Run as a program with a server's address, this file is the trainer. It stops itself with
SIGSTOP while the server sends results, until the test continues it. It then pauses
again, but by holding Python's GIL, so that only libzmq's threads run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Final

import numpy as np
import zmq

from envserve.client import BatchEnv
from envserve.client.link.connection import Connection
from tests.envserve.conftest import Serve

NUM_ENVS: Final = 96  # their results exceed a connection's buffers
STOPPED_SECONDS: Final = 1
COMMAND: Final = (sys.executable, "-m", "tests.envserve.test_busy_trainer")


def test_a_trainer_that_stops_reading_for_a_while_gets_all_results(
    serve: Serve,
) -> None:
    server = serve("--allow-kwarg", "space:any", "--max-message-mib", "16")
    command = [*COMMAND, server.address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as trainer:
        try:
            os.waitid(os.P_PID, trainer.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            threading.Event().wait(STOPPED_SECONDS)
            trainer.send_signal(signal.SIGCONT)
            _, errors = trainer.communicate(timeout=60)
        finally:
            trainer.kill()
        assert trainer.returncode == 0, errors


def test_a_client_sends_no_zmtp_heartbeats_and_limits_its_receive_queue(
    sockets: list[zmq.Socket[bytes]],
) -> None:
    """With heartbeats, libzmq 4.3.5 would abort a process that stops reading."""
    connection = Connection("tcp://127.0.0.1:1")
    (socket,) = sockets
    assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
    unread = int(socket.getsockopt(zmq.RCVHWM)) * int(socket.getsockopt(zmq.MAXMSGSIZE))
    assert 0 < unread <= 17 << 20
    connection.close()


def stop() -> None:
    signal.raise_signal(signal.SIGSTOP)


def hold_the_lock() -> None:
    ctypes.PyDLL(None).sleep(STOPPED_SECONDS)


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
