"""Env code that attacks its host can harm its own lease, but no other lease."""

from __future__ import annotations

import operator
import os
import pwd
import resource
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.support.processes import is_running
from envserve.settings import HostSettings
from envserve.slab import Status
from tests.envserve.conftest import Join, Serve, WaitUntil
from tests.envserve.limits import open_descriptors
from tests.envserve.server_process import ServerProcess
from tests.envserve.session_client import SessionClient

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="finds descriptors and processes by /proc"
)

#: Modules with hostile envs, which attack when the action is not 0.
_MODULES = {
    "without_gc": "import gc; gc.disable()",
    "vandals": """
import contextlib, os, socket
import gymnasium, numpy

def truncate(fd):
    for size in (1 << 30, 0):
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
    with contextlib.suppress(OSError):
        open(f"/proc/self/fd/{fd}", "wb").close()

def write(fd):
    os.set_blocking(fd, False)
    os.write(fd, b"\\xff" * 4096)

def shut(fd):
    with socket.socket(fileno=os.dup(fd)) as copy:
        copy.shutdown(socket.SHUT_RDWR)

ATTACKS = [truncate, write, shut, os.close]

class VandalEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(1 + len(ATTACKS))

    def reset(self, *, seed=None, options=None):
        return numpy.zeros(1, "f"), {}

    def step(self, action):
        for name in os.listdir("/proc/self/fd") if action else []:
            with contextlib.suppress(OSError):
                ATTACKS[action - 1](int(name))
        return numpy.ones(1, "f"), 0.0, False, False, {}

gymnasium.register("Vandal-v0", VandalEnv)

class ChattyEnv(VandalEnv):
    def step(self, action):
        info = {"lists": [[1] * 60_000] * 6}
        return numpy.ones(1, "f"), 0.0, False, False, info

gymnasium.register("Chatty-v0", ChattyEnv)
""",
    "spies": """
import contextlib, ctypes, os, pathlib, resource, subprocess
import gymnasium, numpy

def give_up_capabilities():
    # Make root an ordinary user.
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0

def parent_of(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])

def look_at(pid):
    seen = []
    for name in ("mem", "environ", "maps", "auxv"):
        with contextlib.suppress(PermissionError), open(f"/proc/{pid}/{name}", "rb"):
            seen.append(name)
    with contextlib.suppress(PermissionError):
        seen += [os.readlink(f"/proc/{pid}/fd/0")]
    return seen

def linger():
    # Use new sessions, and a second fork whose parent exits.
    sleep = "echo $$; exec sleep 60 >&-"
    lines = [["sh", "-c", sleep], ["sh", "-c", f"setsid sh -c '{sleep}' &"]]
    options = {"stdout": subprocess.PIPE, "start_new_session": True}
    started = [subprocess.Popen(line, **options) for line in lines]
    started[1].wait()
    return [int(each.stdout.readline()) for each in started]

class SpyEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return numpy.zeros(1, "f"), {}

    def step(self, action):
        info = {"left": linger()} if action else {
            "environ": dict(os.environ),
            "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
            "memory": resource.getrlimit(resource.RLIMIT_AS)[0],
            "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
            "oom": int(pathlib.Path("/proc/self/oom_score_adj").read_text()),
            "user": os.geteuid(),
            "groups": os.getgroups(),
            "home": os.path.expanduser("~"),
        }
        if not action:
            give_up_capabilities()
            info["seen"] = look_at(parent_of(os.getppid()))
        return numpy.ones(1, "f"), 0.0, False, False, info

gymnasium.register("Spy-v0", SpyEnv)
""",
}


@pytest.fixture
def serve_hostile(tmp_path: Path, serve: Serve) -> Serve:
    """Return a function that starts servers with the hostile envs."""
    imports = []
    for name, text in _MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
        imports += ["--import", name]
    return partial(serve, *imports, cwd=tmp_path)


@pytest.fixture
def server(serve_hostile: Serve) -> Iterator[ServerProcess]:
    """Start a server; after the test, assert that the server has survived."""
    server = serve_hostile()
    yield server
    assert server.process.poll() is None, server.log


def check_steps(client: SessionClient, num_steps: int = 3) -> None:
    """Step a ledger env, and assert that its rewards equal its actions."""
    for action in range(1, 1 + num_steps):
        assert not any(outcome.faults for outcome in client.step(action))
        np.testing.assert_array_equal(client.session.rows.reward, [action] * 4)


def test_attacks_on_every_descriptor_end_the_attackers_episode_at_most(
    server: ServerProcess, join: Join
) -> None:
    client, vandal = join(server), join(server, 1, "Vandal-v0", session=6)
    client.reset()
    vandal.reset()
    ends = []
    for attack in range(1, 5):
        (outcome,) = vandal.step(attack)
        ends.append([fault.status for fault in outcome.faults])
        check_steps(client)
        assert not vandal.step(0)[0].faults
        assert vandal.session.rows.observation[0].tolist() == [[1.0]]
    assert ends == [[], *[[Status.WORKER_DIED]] * 3]


def test_infos_that_take_long_to_decode_are_omitted(
    server: ServerProcess, join: Join
) -> None:
    chatty = join(server, 1, "Chatty-v0", session=6, infos="all")
    chatty.reset()
    for _ in range(2):
        (outcome,) = chatty.step(0)
        assert outcome.infos == {0: {"omitted": ["lists"]}}


def test_resources_of_a_lease_are_freed_when_it_ends(
    server: ServerProcess, join: Join, wait_until: WaitUntil
) -> None:
    pid = server.process.pid

    def held() -> tuple[int, int]:
        """Return the numbers of open descriptors and of mapped slabs."""
        num_files = len(open_descriptors(pid))
        return num_files, Path(f"/proc/{pid}/maps").read_text().count("envserve-slab")

    before = held()
    for session in (5, 6):
        client = join(server, session=session)
        client.reset()
        check_steps(client)
        assert held()[1] == before[1] + 1
        client.close()
        wait_until(lambda: all(map(operator.le, held(), before)))


def _is_public(path: str) -> bool:
    """Return whether a file exists, in folders that other users may enter."""
    found = Path(path).resolve()
    return found.exists() and all(p.stat().st_mode & 0o001 for p in found.parents)


def spy_report(client: SessionClient, action: int = 0) -> Any:
    """Step a spy env; return its report."""
    (outcome,) = client.step(action)
    assert not outcome.faults
    return outcome.infos[0]


def test_env_can_read_neither_the_servers_memory_nor_its_settings(
    serve_hostile: Serve, join: Join
) -> None:
    secrets = {"ENVSERVE_PLANTED": "0", "PLANTED": "1"}
    limits = (
        *("--worker-env", "OTHER", "--worker-memory-mib", "3000"),
        *("--worker-processes", "4000"),
    )
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    for options, numbers, expected in (
        ((), (resource.RLIM_INFINITY, processes), {"PLANTED"}),
        (limits, (3000 << 20, 4000), set()),
    ):
        server = serve_hostile(*options, environment=secrets)
        spy = join(server, 1, "Spy-v0", infos="all")
        spy.reset()
        found = spy_report(spy)
        assert found["seen"] == []
        assert found["environ"]["PATH"] == os.environ["PATH"]
        assert secrets.keys() & found["environ"].keys() == expected
        assert (found["memory"], found["processes"]) == numbers
        assert found["core"] == 0
        score = Path(f"/proc/{server.process.pid}/oom_score_adj").read_text()
        assert found["oom"] == 500 + int(score)
        assert "envs can read all of its files" in server.log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts others' processes")
def test_workers_run_as_another_user(
    tmp_path: Path, serve_hostile: Serve, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path, *tmp_path.parents):  # pytest has created these folders
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    pythons = (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}")
    public = next(filter(_is_public, pythons), None)
    if public is None:
        pytest.skip("other users of this machine have no Python")
    monkeypatch.setattr(sys, "executable", public)
    packages = [path for path in sys.path if path.endswith("-packages")]
    path = os.pathsep.join([os.environ["PYTHONPATH"], *packages])
    server = serve_hostile("--worker-user", "nobody", environment={"PYTHONPATH": path})
    spy = join(server, 1, "Spy-v0", infos="all")
    spy.reset()
    found = spy_report(spy)
    nobody = pwd.getpwnam("nobody")
    assert found["user"] == nobody.pw_uid
    assert found["groups"] == os.getgrouplist("nobody", nobody.pw_gid)
    assert found["home"] == nobody.pw_dir
    assert found["seen"] == []
    assert "workers run as nobody: envs cannot read" in server.log


@pytest.mark.parametrize(
    ("user", "uid"), [("no-such-user", 0), ("root/x", 0), ("nobody", 1)]
)
def test_unusable_worker_user_is_rejected(
    monkeypatch: pytest.MonkeyPatch, user: str, uid: int
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    with pytest.raises(ValueError, match=f"worker_user: .*'{user}' and uid {uid}"):
        HostSettings(worker_user=user)


def test_processes_that_left_their_group_end_with_their_lease_or_the_server(
    server: ServerProcess, join: Join, wait_until: WaitUntil
) -> None:
    first, second = (join(server, 1, "Spy-v0", session=n, infos="all") for n in (5, 6))
    left = []
    for spy in (first, second):
        spy.reset()
        left.append(spy_report(spy, 1)["left"])
        assert all(map(is_running, left[-1]))
    first.close()
    wait_until(lambda: not any(map(is_running, left[0])))
    assert all(map(is_running, left[1]))
    assert not second.step(0)[0].faults
    server.kill()
    wait_until(lambda: not any(map(is_running, left[1])))
    server.restart()
    server.wait_until_ready()
