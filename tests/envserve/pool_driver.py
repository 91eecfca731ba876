"""Helpers that drive pools of real workers, and envs that run a test's scripts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from envserve.client.link.remote_lane import RemoteLane
from envserve.lane import Call, Lane, Outcome, Reset
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.session.client.liveness import Timeouts
from envserve.settings import PoolSettings
from envserve.slab import Status
from envserve.spaces import codec
from tests.envserve.server_process import ServerProcess, make_config
from tests.oracle.probe_envs import MODULE

SEED = 11
LEDGER = "envserve/Ledger-v0"
FAULTY = "envserve/Faulty-v0"
SCRIPT = "odd_envs/Script-v0"

ODD_ENVS = '''
import os, signal, subprocess, sys, time
import gymnasium, numpy as np

class ScriptEnv(gymnasium.Env):
    """Runs a line of Python in each of its methods; observes its seed."""

    def __init__(self, init="", reset="", step="", info="{}"):
        self.observation_space = gymnasium.spaces.Box(0, 2**32, (1,), np.int64)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.scripts = {"reset": reset, "step": step}
        self.info = info
        self.value = None
        self.last_seed = -1
        exec(init, globals(), {"self": self})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        exec(self.scripts["reset"], globals(), {"self": self, "seed": seed})
        if seed is not None:
            self.last_seed = seed
        return np.array([self.last_seed]), {}

    def step(self, action):
        exec(self.scripts["step"], globals(), {"self": self, "action": action})
        info = eval(self.info)
        return np.array([self.last_seed]), float(action), False, True, info

    def run(self, script):
        exec(script, globals(), {"self": self})

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.001)

def inheritable_fds():
    """Return the descriptors that a child process inherits across exec."""
    fds = []
    for name in os.listdir("/dev/fd"):
        try:
            if os.get_inheritable(int(name)):
                fds.append(int(name))
        except OSError:
            pass  # the descriptor of the listing itself
    return fds

gymnasium.register("odd_envs/Script-v0", "odd_envs:ScriptEnv")
'''


@contextlib.contextmanager
def launcher_with(folder: Path, **modules: str) -> Iterator[Launcher]:
    """Start a launcher whose workers import the probe envs and the given modules."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        imports = [MODULE, *modules]
        with contextlib.closing(Launcher(imports, ["CartPole-v1"])) as launcher:
            yield launcher


class PoolMaker:
    """Starts pools, waits until they are ready or have failed, and closes them."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._pools: list[Pool] = []

    def __call__(
        self,
        env_name: str,
        num_envs: int,
        num_workers: int,
        launcher: Launcher | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> Pool:
        config = self.config(env_name, num_envs, num_workers, **options)
        pool = Pool(config, launcher=launcher or self.launcher, clock=clock)
        self._pools.append(pool)
        wait_for(pool, lambda: pool.is_ready or pool.error is not None)
        return pool

    def and_reset(self, *arguments: Any, **options: Any) -> Pool:
        """Start a pool and reset its envs."""
        pool = self(*arguments, **options)
        reset(pool)
        return pool

    @staticmethod
    def config(
        env_name: str, num_envs: int, num_workers: int, **options: Any
    ) -> PoolSettings:
        return PoolSettings(
            env_name=env_name,
            num_envs=num_envs,
            num_workers=num_workers,
            seed=SEED,
            **options,
        )

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def wait_for(pool: Pool, condition: Callable[[], bool], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (
            f"expected the condition to become true within {seconds} s; {pool!r}"
        )
        select.select([pool], [], [], 0.02)
        assert pool.collect(0.0) == []


def attach_lane(
    server: ServerProcess | str,
    *args: object,
    patience: Timeouts | None = None,
    **changes: object,
) -> RemoteLane:
    """Attach a lane to a server and reset its envs; pass the rest to `make_config`."""
    lane = RemoteLane(
        server if isinstance(server, str) else server.address,
        make_config(*args, **changes),  # type: ignore[arg-type]
        patience,
        insecure=not isinstance(server, str) and server.is_insecure,
    )
    lane.finish_start(time.monotonic() + 40)
    for outcome in reset(lane):
        assert outcome.error is None
    return lane


def gather(lane: Lane, blocks: Iterable[int], seconds: float = 40.0) -> list[Outcome]:
    """Collect until these blocks have finished, and assert that no others have."""
    awaited = set(blocks)
    finished: dict[int, Outcome] = {}
    deadline = time.monotonic() + seconds
    while missing := awaited - set(finished):
        assert time.monotonic() < deadline, (
            f"expected the outcomes of blocks {missing} within {seconds} s; {lane!r}"
        )
        for outcome in lane.collect(0.2, len(missing)):
            assert outcome.block not in finished
            finished[outcome.block] = outcome
    assert set(finished) == awaited
    return [finished[block] for block in sorted(finished)]


def reset(lane: Lane, *resets: Reset) -> list[Outcome]:
    wanted = resets or [Reset(block.index) for block in lane.blocks]
    lane.submit_reset(wanted)
    return gather(lane, [each.block for each in wanted])


def step(lane: Lane, actions: Any, blocks: Sequence[int] = ()) -> list[Outcome]:
    chosen = blocks or [block.index for block in lane.blocks]
    lane.rows.action[0][:] = actions
    lane.submit_step(chosen)
    return gather(lane, chosen)


def call(lane: Lane, env_index: int, name: str, *arguments: Any) -> Any:
    """Return a call's value, or the text of its fault."""
    block = next(b.index for b in lane.blocks if env_index < b.stop)
    packed = codec.encode([arguments, {}])
    lane.submit_call([Call(block, (env_index,), "call", name, packed)])
    (outcome,) = gather(lane, [block])
    if outcome.error is not None:
        raise outcome.error
    if outcome.faults:
        return {"error": outcome.faults[0].text}
    (value,) = codec.decode(outcome.result, max_bytes=1 << 26)
    return {"value": value}


def run_once(mark: Path, script: str, when: str = "True") -> str:
    """Return a script that creates the file `mark`, so that it runs only once."""
    at = repr(str(mark))
    return f"if {when} and not os.path.exists({at}): open({at}, 'w').close(); {script}"


def seeds(pool: Pool) -> list[int]:
    """Return the seeds in the observations of ledgers or script envs."""
    return [int(seed) for seed in pool.rows.observation[0][:, 0]]


def assert_lost(
    pool: Pool, outcome: Outcome, text: str = "", status: Status = Status.WORKER_DIED
) -> None:
    """Assert that the block's rows are one lost transition: truncated and not OK."""
    block = pool.blocks[outcome.block]
    rows, part = pool.rows, slice(block.start, block.stop)
    assert outcome.error is None
    assert [fault.env_index for fault in outcome.faults] == [
        *range(block.start, block.stop)
    ]
    assert all(text in fault.text for fault in outcome.faults)
    assert {fault.status for fault in outcome.faults} == {status}
    assert set(rows.status[part]) == {status}
    assert rows.truncated[part].all()
    assert not rows.terminated[part].any()
    assert not rows.reward[part].any()


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
