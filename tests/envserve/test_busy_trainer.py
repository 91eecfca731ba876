"""A trainer that reads no answers, for longer than any network would bear."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq

from envserve.client.connection import Connection
from tests.envserve.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
STOPPED_SECONDS = 1.0


def test_a_trainer_that_does_not_read_for_a_while_gets_its_answers(
    tmp_path: Path,
) -> None:
    with (
        ServerProcess(
            tmp_path,
            *("--allow-kwarg", "space"),
            *("--max-message-mib", "16"),
        ) as server,
        subprocess.Popen(
            [sys.executable, "-m", "tests.envserve.busy_trainer", server.address],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        ) as trainer,
    ):
        try:
            os.waitid(os.P_PID, trainer.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            threading.Event().wait(STOPPED_SECONDS)
            trainer.send_signal(signal.SIGCONT)
            _, errors = trainer.communicate(timeout=60)
        finally:
            trainer.kill()
        assert trainer.returncode == 0, errors


def test_a_client_sends_no_zmtp_heartbeats_and_always_has_room_for_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else libzmq 4.3.5 aborts the process once it does not read for a while."""
    sockets: list[zmq.Socket[bytes]] = []
    make = zmq.Context.socket

    def note(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> object:
        sockets.append(make(context, kind))
        return sockets[-1]

    monkeypatch.setattr(zmq.Context, "socket", note)
    connection = Connection("tcp://127.0.0.1:1")
    (socket,) = sockets
    assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
    assert socket.getsockopt(zmq.RCVHWM) == 0
    connection.close()
