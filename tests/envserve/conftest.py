"""Fixtures that create servers, pools, and batches on every kind of lane."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from envserve import make_vec
from envserve.client import BatchEnv
from envserve.client.link.remote_lane import RemoteLane
from envserve.client.vector_env import VectorEnv
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from tests.envserve.pool_driver import ODD_ENVS, PoolMaker, attach_lane, launcher_with
from tests.envserve.server_process import ServerProcess
from tests.envserve.session_client import SessionClient
from tests.oracle.probe_envs import MODULE

#: Value of `padding_after` in seconds that prevents padding even on a busy machine.
PATIENCE = 30.0

StartServer = Callable[..., str]
Serve = Callable[..., ServerProcess]
Join = Callable[..., SessionClient]
Attach = Callable[..., RemoteLane]
WaitUntil = Callable[..., None]

#: Server options that allow the test envs' arguments and calls.
OPENINGS = [
    *("--allow-kwarg", "length", "--allow-kwarg", "reset_seconds"),
    *("--allow-kwarg", "space:any", "--allow-kwarg", "fault:any"),
    *("--allow-kwarg", "kind:any"),
    *("--allow-kwarg", "journal:any", "--allow-kwarg", "failures:any"),
    *("--expose", "echo", "--expose", "complain", "--expose", "difficulty"),
    *("--expose", "set:difficulty"),
    *("--expose", "loaded_modules", "--drain-grace", "0"),
]


@contextlib.contextmanager
def servers_in(folder: Path) -> Iterator[StartServer]:
    """Provide a function that starts servers; verify that each exits with 0."""
    with contextlib.ExitStack() as stack:
        servers: list[ServerProcess] = []

        def start(bind: str = "tcp://127.0.0.1:0", *options: str) -> str:
            """Start a server, and return its address once it is ready."""
            server_folder = folder / f"server-{len(servers)}"
            server_folder.mkdir()
            server = ServerProcess(server_folder, *OPENINGS, *options, bind=(bind,))
            servers.append(stack.enter_context(server))
            return server.address

        yield start
        for server in servers:
            server.signal(signal.SIGTERM)
        for server in servers:
            log = server.end()
            assert server.process.returncode == 0, log


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Return a function that starts a server for this test."""
    with servers_in(tmp_path) as start:
        yield start


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a server, which is killed after the test."""
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def start(*options: str, **more: Any) -> ServerProcess:
            folder = tmp_path / f"own-{next(numbers)}"
            folder.mkdir()
            return stack.enter_context(ServerProcess(folder, *options, **more))

        yield start


@pytest.fixture
def join(serve: Serve) -> Iterator[Join]:
    """Return a function that attaches clients that send nothing on their own."""
    with contextlib.ExitStack() as stack:
        yield lambda server, *arguments, **more: stack.enter_context(
            SessionClient(server.address, *arguments, **more)
        )


@pytest.fixture
def attach(serve: Serve) -> Iterator[Attach]:
    """Return a function that creates a lane to a server and resets its envs."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **changes: stack.enter_context(
            contextlib.closing(attach_lane(*arguments, **changes))
        )


def bind_for(lane_kind: str, folder: Path) -> str:
    return f"ipc://{folder}/envs" if lane_kind == "ipc" else "tcp://127.0.0.1:0"


@pytest.fixture(scope="module", params=["local", "tcp"])
def lane_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["local", "ipc", "tcp"])
def local_ipc_or_tcp(request: pytest.FixtureRequest) -> str:
    """Replace `lane_kind` in modules that assign this fixture to that name."""
    return str(request.param)


@pytest.fixture(scope="session")
def shared_servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], str]]:
    """Return a function that returns the address of a server for a kind of lane.

    The server is started by the first call, and shared by the tests of many modules.
    """
    folder = tmp_path_factory.mktemp("servers")
    with servers_in(folder) as start:
        yield functools.cache(lambda kind: start(bind_for(kind, folder)))


@pytest.fixture(scope="module")
def shared_address(lane_kind: str, shared_servers: Callable[[str], str]) -> str:
    """The address of a shared server, or "" for local lanes."""
    # This fixture starts the server before the check for processes left by a test.
    return "" if lane_kind == "local" else shared_servers(lane_kind)


# Like `shared_address`, these fixtures start servers before the check for processes.
@pytest.fixture(scope="module")
def tcp_address(shared_servers: Callable[[str], str]) -> str:
    """The address of a shared server that listens on tcp."""
    return shared_servers("tcp")


@pytest.fixture(scope="module")
def ipc_address(shared_servers: Callable[[str], str]) -> str:
    """The address of a shared server that listens on ipc."""
    return shared_servers("ipc")


@contextlib.contextmanager
def pools_of(launcher: Launcher) -> Iterator[None]:
    """Make local batches share one launcher, because a launcher starts slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("envserve.client.factory.Pool", partial(Pool, launcher=launcher))
        yield


@pytest.fixture
def one_launcher(launcher: Launcher) -> Iterator[None]:
    with pools_of(launcher):
        yield


MakeEnvs = Callable[..., VectorEnv]


@pytest.fixture
def make_envs_here(one_launcher: None) -> Iterator[MakeEnvs]:
    """Return a function that makes local vector envs with a shared launcher."""
    made: list[weakref.ref[VectorEnv]] = []

    def make(env: str, num_envs: int = 4, **options: Any) -> VectorEnv:
        if "addresses" not in options:
            options |= {"num_workers": 2, "import_modules": [MODULE]}
        envs = make_vec(env, num_envs, **options)
        made.append(weakref.ref(envs))
        return envs

    yield make
    for each in made:
        if (envs := each()) is not None:
            envs.close()


@pytest.fixture
def make_envs(make_envs_here: MakeEnvs, shared_address: str) -> MakeEnvs:
    """Run the test with local vector envs, and with vector envs on a server."""
    if not shared_address:
        return make_envs_here
    return partial(make_envs_here, addresses=[shared_address])


class MakeBatch:
    """Creates batches over one kind of lane, and closes the batches."""

    def __init__(
        self, start: Callable[..., str], address: str, launcher: Launcher
    ) -> None:
        """Create batches on the server at an address, or locally without an address."""
        self._start = start
        self._address = address
        self._launcher = launcher
        self._stack = contextlib.ExitStack()

    def __call__(
        self,
        env_name: str,
        num_envs: int = 4,
        num_workers: int = 2,
        *,
        step_timeout: float | None = None,
        **options: Any,
    ) -> BatchEnv:
        options = {"padding_after": PATIENCE, **options}
        if not self._address:
            options["import_modules"] = [MODULE]
            if step_timeout is not None:
                options["step_timeout"] = step_timeout
            with pools_of(self._launcher):
                batch = BatchEnv.local(env_name, num_envs, num_workers, **options)
        else:
            address = self._address
            if step_timeout is not None:
                address = self._start("--step-timeout", str(step_timeout))
            batch = BatchEnv.connect(env_name, [address], num_envs, **options)
        return self._stack.enter_context(batch)

    def and_reset(self, *arguments: Any, **options: Any) -> BatchEnv:
        """Create a batch and reset its envs."""
        batch = self(*arguments, **options)
        batch.reset()
        return batch

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def make_batch(
    lane_kind: str,
    shared_address: str,
    launcher: Launcher,
    start_server: StartServer,
    tmp_path: Path,
) -> Iterator[MakeBatch]:
    """Run the test with local lanes, and with lanes to a server."""
    start = partial(start_server, bind_for(lane_kind, tmp_path))
    with contextlib.closing(MakeBatch(start, shared_address, launcher)) as maker:
        yield maker


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Return a function that polls a condition, for example on a child process."""

    def wait(condition: Callable[[], bool], timeout_seconds: float = 30.0) -> None:
        began = time.monotonic()
        while not condition():
            waited = time.monotonic() - began
            assert waited < timeout_seconds, (
                f"expected the condition to become true within {timeout_seconds:g} s"
            )
            # Leave the cores to what is waited for: a condition may query a server,
            # which takes both processes milliseconds.
            time.sleep(min(0.05, 0.002 + 0.1 * waited))

    return wait


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with launcher_with(
        tmp_path_factory.mktemp("modules"), odd_envs=ODD_ENVS
    ) as launcher:
        yield launcher


@pytest.fixture
def make_pool(launcher: Launcher) -> Iterator[PoolMaker]:
    with contextlib.closing(PoolMaker(launcher)) as maker:
        yield maker


@pytest.fixture
def own_launcher() -> Iterator[Launcher]:
    """A launcher that the test may interrupt, or whose template it may kill."""
    with contextlib.closing(Launcher([MODULE])) as launcher:
        yield launcher


@pytest.fixture
def make_own_pool(own_launcher: Launcher) -> Iterator[PoolMaker]:
    with contextlib.closing(PoolMaker(own_launcher)) as maker:
        yield maker


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> list[zmq.Socket[bytes]]:
    """All ZeroMQ sockets that this process creates, in order of creation."""
    made: list[zmq.Socket[bytes]] = []
    make = zmq.Context.socket

    def note(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> object:
        made.append(make(context, kind))
        return made[-1]

    monkeypatch.setattr(zmq.Context, "socket", note)
    return made
