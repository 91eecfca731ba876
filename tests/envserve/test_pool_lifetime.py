"""Starting and closing pools, and the exits of their workers."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envserve.envs.seeding import env_seed
from envserve.errors import EnvStartError, LocalProtocolError
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from tests.oracle.probe_envs import MODULE

from .fake_workers import PoolOfFakeWorkers
from .pool_driver import (
    FAULTY,
    LEDGER,
    SCRIPT,
    SEED,
    PoolMaker,
    assert_lost,
    kill,
    launcher_with,
    reset,
    run_once,
    seeds,
    step,
    wait_for,
)
from .stalls import fastest

# Starting.


def test_constructor_that_raises_is_an_error_at_once_with_its_traceback(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    script = (
        f"open({str(tmp_path / 'tries')!r}, 'a').write('x')\n"
        "raise RuntimeError('no simulator licence')"
    )
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"init": script})
    assert isinstance(pool.error, EnvStartError)
    assert "RuntimeError: no simulator licence" in pool.error.remote_traceback
    # Only the frames of the env: its constructor, and the script.
    frames = re.findall(r'  File ".*?([^/"]+)", line', pool.error.remote_traceback)
    assert frames == ["odd_envs.py", "<string>"]
    assert (tmp_path / "tries").read_text() == "x"


def test_constructor_that_always_dies_is_an_error_in_time(make_pool: PoolMaker) -> None:
    script = "os.kill(os.getpid(), signal.SIGSEGV)"
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"init": script}, max_restarts=3)
    assert isinstance(pool.error, EnvStartError)
    text = f"failed 4 times in a row to run {SCRIPT}: it was killed by "
    head, _, tail = str(pool.error).partition("\n")
    assert head.endswith(text + "SIGSEGV while it built its envs")
    assert tail.startswith("The end of its stderr:\nFatal Python error: ")


def test_constructor_that_died_is_retried(make_pool: PoolMaker, tmp_path: Path) -> None:
    dies = run_once(tmp_path / "mark", "os._exit(1)")
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"init": dies})
    assert pool.error is None
    assert pool.is_ready


def test_constructor_that_hangs_is_killed_at_the_reset_timeout(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(
        SCRIPT,
        1,
        1,
        env_kwargs={"init": "time.sleep(60)"},
        reset_timeout_seconds=0.3,
        max_restarts=0,
    )
    assert "took longer than 0.3 s to build an env" in str(pool.error)


def test_worker_that_dies_in_every_step_fails_and_the_others_continue(
    make_pool: PoolMaker,
) -> None:
    options: dict[str, Any] = {"env_kwargs": {"fault": "kill"}, "max_restarts": 1}
    pool = make_pool.and_reset(FAULTY, 2, 2, **options)
    mine, _ = step(pool, [1, 0])
    assert_lost(pool, mine, "SIGKILL")
    mine, others = step(pool, [1, 0])
    assert isinstance(mine.error, EnvStartError)
    assert not others.faults
    mine, others = step(pool, [0, 0])
    assert isinstance(mine.error, EnvStartError)
    assert not others.faults


def test_worker_that_is_killed_repeatedly_while_idle_is_always_restarted(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool.and_reset(LEDGER, 2, 2, max_restarts=1)
    for count in range(4):
        kill(pool.worker_pids[0])
        wait_for(pool, lambda: pool.stats()["restarts"] > count)  # noqa: B023
        wait_for(pool, lambda: pool.next_deadline() == math.inf)
    assert_lost(pool, step(pool, 0)[0], "SIGKILL")
    assert not any(outcome.faults for outcome in step(pool, 0))


def test_missing_module_is_an_error_at_once(make_pool: PoolMaker) -> None:
    with contextlib.closing(Launcher(["no_such_envs"])) as own:
        pool = make_pool(LEDGER, 1, 1, launcher=own)
        assert isinstance(pool.error, EnvStartError)
        assert "no_such_envs" in str(pool.error)
        pool.close()


def test_the_text_of_an_import_error_need_not_be_utf8(tmp_path: Path) -> None:
    fails = r"raise ValueError('no level \udc80')"
    with (
        launcher_with(tmp_path, failing_envs=fails) as own,
        contextlib.closing(PoolMaker(own)) as maker,
    ):
        assert r"no level \udc80" in str(maker(LEDGER, 1, 1).error)


# The template process.


def test_all_workers_recover_from_the_death_of_the_template(
    make_own_pool: PoolMaker,
) -> None:
    pool = make_own_pool.and_reset(LEDGER, 4, 2)
    step(pool, 1)
    before = pool.worker_pids
    kill(make_own_pool.launcher._process.pid)
    wait_for(pool, lambda: not {None, *before} & {*pool.worker_pids})
    for outcome in step(pool, 2):
        assert_lost(pool, outcome, "killed by SIGKILL")
    assert not any(outcome.faults for outcome in step(pool, 3))
    assert seeds(pool) == [env_seed(SEED, row, 1) for row in range(4)]


def test_template_that_dies_just_before_a_restart_costs_one_attempt(
    make_own_pool: PoolMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_own_pool.and_reset(LEDGER, 1, 1)
    own = make_own_pool.launcher
    send = own._send

    def send_too_late(*message: Any) -> None:
        monkeypatch.undo()
        kill(own._process.pid)
        os.waitid(os.P_PID, own._process.pid, os.WEXITED | os.WNOWAIT)
        send(*message)

    kill(pool.worker_pids[0])
    monkeypatch.setattr(own, "_send", send_too_late)
    assert_lost(pool, step(pool, 1)[0])
    assert not step(pool, 1)[0].faults


def test_env_whose_import_hangs_does_not_stall_other_pools(tmp_path: Path) -> None:
    (tmp_path / "stuck_envs.py").write_text("import time; time.sleep(60)")
    offer = "import gymnasium; gymnasium.register('Stuck-v0', 'stuck_envs:Env')"
    with (
        launcher_with(tmp_path, offers_stuck_envs=offer) as own,
        contextlib.closing(PoolMaker(own)) as maker,
        contextlib.closing(Pool(maker.config("Stuck-v0", 1, 1), launcher=own)) as stuck,
    ):
        pool = maker(LEDGER, 1, 1)
        reset(pool)
        kill(pool.worker_pids[0])
        assert_lost(pool, step(pool, 1)[0], "SIGKILL")
        assert not stuck.is_ready
        assert stuck.error is None


# Closing.


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Disable cyclic garbage collection, so only reference counting frees objects."""
    gc.disable()
    yield
    gc.enable()


def test_closing_takes_two_seconds_at_most_if_an_env_hangs(
    make_pool: PoolMaker,
) -> None:
    def attempt() -> float:
        pool = make_pool.and_reset(FAULTY, 2, 2, env_kwargs={"fault": "hang"})
        pool.rows.action[0][:] = [1, 0]
        pool.submit_step([0, 1])
        began = time.monotonic()
        pool.close()
        seconds = time.monotonic() - began
        assert pool.worker_pids == (None, None)
        pool.close()
        return seconds

    assert fastest(attempt, 2.0) < 2.0


def test_an_env_has_time_to_close_after_the_step_in_flight(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    init = f"self.close = lambda: (time.sleep(2.0), open('{tmp_path}/video', 'w'))"
    kwargs = {"init": init, "step": "time.sleep(0.1)"}
    pool = make_pool.and_reset(SCRIPT, 1, 1, env_kwargs=kwargs)
    pool.submit_step([0])
    pool.close()
    assert [*tmp_path.iterdir()] == [tmp_path / "video"]


def test_a_worker_that_is_killed_while_it_closes_its_envs_is_logged(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(FAULTY, 2, 2, env_kwargs={"fault": "hang_in_close"})
    pool.begin_close(2.0)  # exceeds the limit of busy workers
    pool.close()
    text = r"^worker 0 \(env 0\) and 1 more: killed before close\(\) of the envs had"
    assert [re.match(text, message) is not None for message in caplog.messages] == [
        True
    ]


def test_the_deadline_of_closing_can_only_be_shortened(make_pool: PoolMaker) -> None:
    pool = make_pool(FAULTY, 1, 1, env_kwargs={"fault": "hang_in_close"})
    pool.begin_close(3600.0)
    pool.begin_close(0.0)
    pool.begin_close(3600.0)
    wait_for(pool, lambda: pool.is_closed)


def test_closed_pool_keeps_neither_memory_nor_descriptors(
    make_own_pool: PoolMaker, without_gc: None
) -> None:
    def play() -> tuple[Pool, weakref.ref[Any]]:
        pool = make_own_pool.and_reset(LEDGER, 4, 2)
        memory = pool.rows.reward.base
        kill(pool.worker_pids[0])
        assert_lost(pool, step(pool, 1)[0])
        pool.close()
        return pool, weakref.ref(memory)

    play()
    before = {*os.listdir("/dev/fd")}
    pool, memory = play()
    assert memory() is None
    assert {*os.listdir("/dev/fd")} <= before
    assert pool.is_closed
    with pytest.raises(LocalProtocolError, match="closed"):
        _ = pool.rows


def test_pool_can_be_closed_while_it_starts() -> None:
    began = time.monotonic()
    with contextlib.closing(Launcher([MODULE])) as own:
        pool = Pool(PoolMaker.config(LEDGER, 2, 2), launcher=own)
        pool.close()
    assert time.monotonic() - began < 20.0
    assert "closed" in repr(pool)


def test_closing_does_not_wait_for_workers_that_are_not_forked_yet() -> None:
    def attempt() -> float:
        made = PoolOfFakeWorkers()
        made.launcher.can_kill = False
        made.worker.process.pid = None
        began = time.monotonic()
        made.pool.close()
        seconds = time.monotonic() - began
        made.worker.close()
        assert made.worker.was_killed  # it might build its env for a long time
        return seconds

    assert fastest(attempt, 1.0) < 1.0


OWNER = """
import sys
from envserve.settings import PoolSettings
from envserve.pool.pool import Pool
child = "import subprocess; subprocess.Popen(['sleep', '60'])"
config = PoolSettings(
    env_name="odd_envs/Script-v0", num_envs=3, num_workers=3, seed=0,
    import_modules=("odd_envs",),
    env_kwargs={"init": child, "step": "if action: time.sleep(60)"},
)
pool = Pool(config)
while not pool.is_ready:
    pool.collect(1.0)
    assert pool.error is None, pool.error
pool.submit_reset([])
pool.rows.action[0][:] = [1, 0, 0]
pool.submit_step([0])
print("ready", flush=True)
pool.collect(60.0)
"""


def test_kill_of_the_owner_ends_workers_and_their_children(launcher: Launcher) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,  # all processes that the owner starts inherit it
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=30.0)  # at end of file, all of them have exited
