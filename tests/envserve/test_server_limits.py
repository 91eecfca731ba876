"""A server that runs out of a resource rejects new leases and keeps existing ones."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.support.processes import with_descendants
from envserve.errors import EnvStartError
from envserve.slab import Status
from tests.envserve.conftest import Join, Serve
from tests.envserve.limits import resource_limit
from tests.envserve.server_process import ServerProcess, command
from tests.envserve.session_client import SessionClient

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="sets limits of running processes by prlimit"
)


Rejected = Callable[..., EnvStartError]


@pytest.fixture
def rejected(join: Join) -> Rejected:
    """Request envs, and return the error with which the server rejects the request."""

    def request(
        server: ServerProcess, *arguments: Any, **changes: Any
    ) -> EnvStartError:
        error = join(server, *arguments, session=77, **changes).session.error
        assert isinstance(error, EnvStartError)
        assert server.address in str(error)
        return error

    return request


def check_steps(client: SessionClient, num_steps: int = 3) -> None:
    for action in range(num_steps):
        assert [outcome.faults for outcome in client.step(action)] == [(), ()]
        np.testing.assert_array_equal(client.session.rows.reward, [action] * 4)


def check_that_envs_can_be_leased_again(server: ServerProcess, join: Join) -> None:
    client = join(server, session=78)
    client.reset()
    check_steps(client)
    client.close()
    assert server.process.poll() is None


def test_descriptors_can_run_out(serve: Serve, join: Join, rejected: Rejected) -> None:
    limit = ("sh", "-c", 'ulimit -n 48 && exec "$@"', "sh")
    options = ("--workers", "32", "--max-processes", "64")
    client = join(server := serve(*options, prefix=limit), 2)
    client.reset()
    assert "Too many open files" in str(rejected(server, 30))
    assert [outcome.faults for outcome in client.step(1)] == [(), ()]
    again = join(server, 2, session=78)
    assert [outcome.faults for outcome in again.reset()] == [(), ()]


def test_too_few_descriptors_for_a_server_are_an_error() -> None:
    words = command("--bind", "tcp://127.0.0.1:0", "--insecure-no-auth")
    result = subprocess.run(
        ["sh", "-c", 'ulimit -n 14 && exec "$@"', "sh", *words],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == (
        "Error: a server needs at least 48 open files, but this process may open at "
        "most 14; raise the hard limit (ulimit -n)\n"
    )


def test_shared_memory_can_run_out(
    serve: Serve, join: Join, rejected: Rejected
) -> None:
    client = join(server := serve("--allow-kwarg", "space:any"))
    client.reset()
    images = {"env_name": "envserve/Echo-v0", "env_kwargs": {"space": "image"}}
    with resource_limit(server.process.pid, resource.RLIMIT_FSIZE, 1 << 20):
        assert "cannot allocate shared memory for the rows" in str(
            rejected(server, 16, **images)
        )
        check_steps(client)
    assert join(server, 16, session=79, **images).session.error is None
    check_that_envs_can_be_leased_again(server, join)


#: Process limits do not apply to root, so the template process switches users.
_UNPRIVILEGED = """
import os, resource, signal
_, hard = before = resource.getrlimit(resource.RLIMIT_NPROC)
def limit(number, _):
    wanted = (0, hard) if number == signal.SIGUSR1 else before
    resource.setrlimit(resource.RLIMIT_NPROC, wanted)
if os.getpgid(0) == os.getpid():  # the template leads a process group
    if os.getuid() == 0:
        os.setuid(65534)
    signal.signal(signal.SIGUSR1, limit)
    signal.signal(signal.SIGUSR2, limit)
"""


def test_processes_can_run_out(
    tmp_path: Path, serve: Serve, join: Join, rejected: Rejected
) -> None:
    (tmp_path / "unprivileged_envs.py").write_text(_UNPRIVILEGED)
    client = join(server := serve("--import", "unprivileged_envs", cwd=tmp_path))
    client.reset()
    template = with_descendants(server.process.pid)[1]
    os.kill(template, signal.SIGUSR1)
    assert re.search("Resource temporarily unavailable; .*-u", str(rejected(server)))
    check_steps(client)
    os.kill(template, signal.SIGUSR2)
    check_that_envs_can_be_leased_again(server, join)


_ALLOCATING = """
import gymnasium, numpy
from gymnasium.envs.classic_control import CartPoleEnv
class AllocatingEnv(CartPoleEnv):
    def step(self, action):
        if action:
            numpy.empty(1 << 25)
        return super().step(0)
gymnasium.register("Allocating-v0", AllocatingEnv)
"""


def test_memory_of_a_worker_can_run_out(
    tmp_path: Path, serve: Serve, join: Join
) -> None:
    (tmp_path / "allocating_envs.py").write_text(_ALLOCATING)
    client = join(server := serve("--import", "allocating_envs", cwd=tmp_path))
    client.reset()
    others = set(with_descendants(server.process.pid))
    allocating = join(server, 2, "Allocating-v0", session=6)
    allocating.reset()
    worker, _ = sorted(set(with_descendants(server.process.pid)) - others)
    status = Path(f"/proc/{worker}/statm").read_text().split()
    limit = int(status[0]) * resource.getpagesize() + (1 << 26)
    resource.prlimit(worker, resource.RLIMIT_AS, (limit, limit))
    (fault,) = (fault for outcome in allocating.step(1) for fault in outcome.faults)
    assert fault.status is Status.ENV_ERROR
    assert "MemoryError" in fault.text or "Unable to allocate" in fault.text
    check_steps(client)
    (lost,) = (fault for outcome in allocating.step(0) for fault in outcome.faults)
    assert "ran out of memory" in lost.text  # the worker was replaced
    for _ in range(2):
        assert not any(outcome.faults for outcome in allocating.step(0))


_WITHOUT_DISK_SPACE = (
    "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def test_disk_space_can_run_out(tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    (tmp_path / "precious").write_text("x")
    # In a shared folder, another user can create links for all process ids.
    link = 'ln -s precious "$0/.addresses.$$" && exec "$@"'
    result = subprocess.run(
        [
            *("sh", "-c", link, str(tmp_path)),
            *(sys.executable, "-c", _WITHOUT_DISK_SPACE),
            *command("--bind", "tcp://127.0.0.1:0", "--address-file", str(file)),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 1
    assert f"Error: --address-file {file} cannot be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert (tmp_path / "precious").read_text() == "x"
    assert len(list(tmp_path.iterdir())) == 2
