"""If a client was suspended for longer than its lease, its steps reach no env."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from envserve.errors import EnvsBusy
from tests.envserve.conftest import Join, Serve, WaitUntil
from tests.envserve.server_process import ServerProcess
from tests.envserve.session_client import SessionClient
from tests.oracle.ledger_env import ledger_hash

NUM_ROUNDS = 2
LEASE_SECONDS = 5.0  # longer than delays on a loaded machine

#: A client that steps until its session is lost, and then violates the protocol by
#: sending another step. It prints the session's error, and that step's error code.
_CLIENT_SCRIPT = f"""
import sys
sys.path[:] = {sys.path!r}
from envserve.wire.constants import MessageType
from envserve.wire.handshake import ErrorBody
from envserve.wire.message import Message, decode, encode
from tests.envserve.session_client import SessionClient
number = int(sys.argv[2])
with SessionClient(sys.argv[1], session=number, client_name="late:1") as client:
    client.reset()
    print("attached", flush=True)
    while not client.is_over:
        client.step(999)
    session, connection = client.session, client.connection
    late = Message(
        type=MessageType.STEP,
        session=number,
        boot=session.requests.boot,
        epoch=session.requests.epoch,
        request=1 << 40,
        entries=tuple((block.index, 1 << 30) for block in session.blocks),
        body=session.rows.action[0].tobytes(),
    )
    assert connection.send(encode(late))
    answer = late
    while answer.type is MessageType.STEP or answer.request != late.request:
        connection.wait(20, for_writing=False)
        while (frames := connection.receive()) is not None:
            answer = decode(frames)
    code = ErrorBody.decode(answer.body).code
    print(type(session.error).__name__, code.name, flush=True)
"""


class LateClient:
    """A client in a subprocess, which tests can suspend."""

    def __init__(self, server: ServerProcess, session: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT_SCRIPT, server.address, str(session)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        assert self.output.readline() == "attached\n"

    @property
    def has_output(self) -> bool:
        return bool(select.select([self.output], [], [], 0)[0])

    def __enter__(self) -> LateClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def server(serve: Serve) -> ServerProcess:
    return serve("--envs-per-worker", "2", "--lease-seconds", str(LEASE_SECONDS))


def test_a_busy_error_names_the_holder_of_the_envs(
    server: ServerProcess, join: Join
) -> None:
    with LateClient(server, 1):
        error = join(server, session=9).session.error
        assert isinstance(error, EnvsBusy)
        assert error.holder == "local (late:1)"  # the same user
        assert error.held_seconds > 0
        assert "4 of envserve/Ledger-v0 by local (late:1) for" in str(error)


def test_a_client_that_was_suspended_for_too_long_steps_no_env(
    server: ServerProcess, join: Join, wait_until: WaitUntil
) -> None:
    for round_ in range(NUM_ROUNDS):
        with LateClient(server, 100 + round_) as late:
            late.process.send_signal(signal.SIGSTOP)
            wait_until(lambda: server.welcome().free_envs == 4)
            successor = join(server, session=200 + round_)
            successor.reset()
            step_and_check_ledger(successor, lambda num_steps: num_steps == 20)
            late.process.send_signal(signal.SIGCONT)
            step_and_check_ledger(successor, lambda _, late=late: late.has_output)  # type: ignore[misc]
            step_and_check_ledger(successor, lambda num_steps: num_steps == 20)
            successor.close()
            assert late.output.readline() == "LeaseLost LEASE_LOST\n"
    log = server.end(signal.SIGTERM)
    assert log.count("its client was silent for") == NUM_ROUNDS


def step_and_check_ledger(
    client: SessionClient, is_done: Callable[[int], bool]
) -> None:
    """Step, and check that the ledger envs have not executed any other step."""
    rows = client.session.rows
    num_steps = 0
    while not is_done(num_steps):
        before = rows.observation[0][:, 3].tolist()
        action = num_steps % 100
        assert client.step(action)[0].error is None
        after = [ledger_hash(value, action) for value in before]
        np.testing.assert_array_equal(rows.observation[0][:, 3], after)
        num_steps += 1
