"""Batches over every kind of lane, the servers that some need, and pools."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envserve.client import BatchEnv
from envserve.pool.launcher import Launcher
from tests.envserve.pool_driver import PoolMaker, odd_launcher
from tests.envserve.server_process import ServerProcess

__all__ = [
    "MakeBatch",
    "StartServer",
    "launcher",
    "make_batch",
    "make_pool",
    "start_server",
]

#: So long that a loaded machine makes no padding where a test expects none.
PATIENCE = 30.0

MakeBatch = Callable[..., BatchEnv]
StartServer = Callable[..., str]

#: What the contract's envs need to be given and asked through a server.
OPENINGS = [
    *("--allow-kwarg", "length", "--allow-kwarg", "reset_seconds"),
    *("--allow-kwarg", "space", "--allow-kwarg", "fault"),
    *("--allow-kwarg", "journal", "--allow-kwarg", "breakdowns"),
    *("--expose", "echo", "--expose", "complain", "--expose", "difficulty"),
    *("--expose", "loaded_modules", "--drain-grace", "0"),
]


class Servers:
    """Servers that are stopped together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: list[ServerProcess] = []

    def start(self, bind: str = "tcp://127.0.0.1:0", *options: str) -> str:
        """Starts one, and returns its address once it is ready."""
        folder = self._folder / f"server-{len(self._servers)}"
        folder.mkdir()
        patience = ("--padding-after", str(PATIENCE))
        server = ServerProcess(folder, *OPENINGS, *patience, *options, bind=(bind,))
        self._servers.append(server)
        return server.address

    def stop(self) -> None:
        """Stops all, and checks that each ends well."""
        with contextlib.ExitStack() as stack:
            for server in self._servers:
                stack.enter_context(server)
                server.signal(signal.SIGTERM)
            for server in self._servers:
                log = server.end()
                assert server.process.returncode == 0, log


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server of the test's own."""
    servers = Servers(tmp_path)
    yield servers.start
    servers.stop()


def bind_for(lane_kind: str, folder: Path) -> str:
    return f"ipc://{folder}/envs" if lane_kind == "ipc" else "tcp://127.0.0.1:0"


@pytest.fixture(scope="module", params=["local", "ipc", "tcp"])
def lane_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared_address(
    lane_kind: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server that all tests of a module use, one after the other."""
    folder = tmp_path_factory.mktemp("server")
    servers = Servers(folder)
    yield "" if lane_kind == "local" else servers.start(bind_for(lane_kind, folder))
    servers.stop()


@pytest.fixture
def make_batch(
    lane_kind: str, shared_address: str, start_server: StartServer, tmp_path: Path
) -> Iterator[MakeBatch]:
    """Builds a batch over one kind of lane; every test runs over each kind."""
    batches: list[BatchEnv] = []

    def make(
        env_name: str,
        num_envs: int = 4,
        num_workers: int = 2,
        *,
        step_timeout: float | None = None,
        **options: Any,
    ) -> BatchEnv:
        if lane_kind == "local":
            if step_timeout is not None:
                options["step_timeout"] = step_timeout
            batch = BatchEnv.local(
                env_name,
                num_envs,
                num_workers,
                import_modules=["envserve.testing"],
                **{"padding_after": PATIENCE, **options},
            )
        else:
            address = shared_address
            if step_timeout is not None:
                address = start_server(
                    bind_for(lane_kind, tmp_path), "--step-timeout", str(step_timeout)
                )
            batch = BatchEnv.connect(env_name, [address], num_envs, **options)
        batches.append(batch)
        return batch

    yield make
    for batch in batches:
        batch.close()


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Polls what has no event to wait for, such as another process's children."""

    def wait(condition: Callable[[], bool], timeout_seconds: float = 5.0) -> None:
        give_up_at = time.monotonic() + timeout_seconds
        while not condition():
            assert time.monotonic() < give_up_at, "the condition did not come true"
            os.sched_yield()

    return wait


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with odd_launcher(tmp_path_factory.mktemp("modules")) as launcher:
        yield launcher


@pytest.fixture
def make_pool(launcher: Launcher) -> Iterator[PoolMaker]:
    maker = PoolMaker(launcher)
    yield maker
    maker.close()
