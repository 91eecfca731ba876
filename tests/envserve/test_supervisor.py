"""A worker that dies, hangs or fails costs its blocks one transition."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from envserve.envs.seeding import env_seed
from envserve.errors import CallError
from envserve.lane import Reset
from envserve.slab import Status

from .pool_driver import (
    LEDGER,
    SCRIPT,
    SEED,
    PoolMaker,
    assert_lost,
    call,
    gather,
    kill,
    reset,
    run_once,
    seeds,
    step,
    wait_for,
)

# Death.


def test_death_while_idle_is_detected_and_costs_one_transition_at_the_next_step(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool.and_reset(LEDGER, 4, 2)
    step(pool, 5)
    before = pool.rows.observation[0].copy()
    dead, alive = pool.worker_pids
    kill(dead)
    wait_for(pool, lambda: pool.worker_pids[0] not in (dead, None))
    assert pool.worker_pids[1] == alive
    np.testing.assert_array_equal(pool.rows.observation[0], before)
    assert not pool.rows.status.any()

    mine, others = step(pool, 6)
    assert_lost(pool, mine, "worker 0 (envs 0 to 1)")
    assert not others.faults
    np.testing.assert_array_equal(pool.rows.final_observation[0][:2], before[:2])
    assert seeds(pool) == [env_seed(SEED, row, int(row < 2)) for row in range(4)]
    assert pool.rows.reward.tolist() == [0.0, 0.0, 6.0, 6.0]


def test_dead_workers_blocks_of_all_splits_are_lost(make_pool: PoolMaker) -> None:
    pool = make_pool.and_reset(LEDGER, 8, 2, num_splits=2, first_env_index=100)
    kill(pool.worker_pids[1])
    first, second, third, fourth = step(pool, 1)
    for lost in (second, fourth):
        text = "worker 1 (envs 102 to 103, 106 to 107) was killed by SIGKILL"
        assert_lost(pool, lost, text)
    assert not first.faults
    assert not third.faults


def test_each_death_uses_the_seed_of_the_next_incarnation(make_pool: PoolMaker) -> None:
    pool = make_pool.and_reset(LEDGER, 2, 1)
    for incarnation in range(1, 4):
        kill(pool.worker_pids[0])
        assert_lost(pool, step(pool, 1)[0], "SIGKILL")
        assert seeds(pool) == [env_seed(SEED, row, incarnation) for row in range(2)]
        assert not step(pool, 1)[0].faults


def test_call_that_kills_its_worker_fails_and_is_not_repeated(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    pool = make_pool.and_reset(SCRIPT, 2, 1)
    mark = tmp_path / "calls"
    script = f"open({str(mark)!r}, 'a').write('x'); os.kill(os.getpid(), 9)"
    with pytest.raises(CallError, match=r"worker 0 .*SIGKILL, during a call"):
        call(pool, 0, "run", script)
    assert_lost(pool, step(pool, 0)[0], "SIGKILL")
    assert mark.read_text() == "x"


def test_death_is_detected_although_a_child_keeps_the_socket_open(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    fork = (
        "if action:\n"
        " child = os.fork()\n"
        " if child == 0: os.setsid(); time.sleep(60); os._exit(0)\n"
        f" open({str(tmp_path / 'pid')!r}, 'w').write(str(child))\n"
        " os.kill(os.getpid(), signal.SIGKILL)"
    )
    pool = make_pool.and_reset(SCRIPT, 1, 1, env_kwargs={"step": fork})
    try:
        assert_lost(pool, step(pool, 1)[0], "killed by SIGKILL")
        assert not step(pool, 0)[0].faults
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was killed with its worker
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_worker_that_closes_its_socket_is_killed_before_it_is_replaced(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    deserts = (
        "if action:\n"
        " os.closerange(3, 4096)\n"
        " time.sleep(20)\n"  # longer than a replacement takes
        f" open({str(tmp_path / 'went_on')!r}, 'w').close()"
    )
    pool = make_pool.and_reset(SCRIPT, 1, 1, env_kwargs={"step": deserts})
    (deserter,) = pool.worker_pids
    assert deserter is not None
    (outcome,) = step(pool, 1)
    text = "closed its socket without exiting; it was killed by SIGKILL"
    assert_lost(pool, outcome, text)
    with pytest.raises(ProcessLookupError):
        os.kill(deserter, 0)
    assert not step(pool, 0)[0].faults
    assert not (tmp_path / "went_on").exists()


def test_failed_reset_starts_a_new_incarnation_whose_seed_is_not_used_again(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    raises = run_once(
        tmp_path / "mark", "raise RuntimeError('no level')", "seed is None"
    )
    pool = make_pool.and_reset(SCRIPT, 1, 1, env_kwargs={"reset": raises})
    (outcome,) = reset(pool)
    assert outcome.error is None
    assert seeds(pool) == [env_seed(SEED, 0, 1)]
    kill(pool.worker_pids[0])
    step(pool, 0)
    assert seeds(pool) == [env_seed(SEED, 0, 2)]


def test_env_rebuilt_by_its_worker_and_then_by_its_pool_uses_no_seed_twice(
    make_pool: PoolMaker,
) -> None:
    raises = {"step": "if action: raise RuntimeError('lost')"}
    pool = make_pool.and_reset(SCRIPT, 2, 1, env_kwargs=raises)
    step(pool, [1, 0])
    kill(pool.worker_pids[0])
    step(pool, 0)
    assert seeds(pool) == [env_seed(SEED, 0, 2), env_seed(SEED, 1, 1)]


def test_env_rebuilt_while_its_lost_block_is_reset_uses_no_seed_twice(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    mark = tmp_path / "second reset fails"
    second = (
        "self.resets = getattr(self, 'resets', 0) + 1\n"
        f"mark = {str(mark)!r}\n"
        "if self.resets == 2 and os.path.exists(mark):\n"
        " os.remove(mark); raise RuntimeError('no level')"
    )
    pool = make_pool.and_reset(SCRIPT, 2, 1, env_kwargs={"reset": second})
    kill(pool.worker_pids[0])
    reset(pool, Reset(0, env_indices=(1,)))
    mark.touch()
    assert_lost(pool, step(pool, 0)[0], "SIGKILL")
    assert not mark.exists()
    assert seeds(pool) == [env_seed(SEED, 0, 1), env_seed(SEED, 1, 2)]
    kill(pool.worker_pids[0])
    step(pool, 0)
    assert seeds(pool) == [env_seed(SEED, 0, 2), env_seed(SEED, 1, 3)]


# Hanging.


def test_reset_that_hangs_is_killed_at_its_own_timeout(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    hangs = run_once(tmp_path / "mark", "time.sleep(60)")
    pool = make_pool(
        SCRIPT, 1, 1, env_kwargs={"reset": hangs}, reset_timeout_seconds=2.0
    )
    (outcome,) = reset(pool)
    assert outcome.error is None
    assert seeds(pool) == [env_seed(SEED, 0, 1)]


def test_time_during_which_all_processes_were_suspended_is_no_hang(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    """A long pause between two checks of the heartbeat costs nothing."""
    go_on, paused_seconds = tmp_path / "go_on", [0.0]
    pool = make_pool.and_reset(
        SCRIPT,
        1,
        1,
        clock=lambda: time.monotonic() + paused_seconds[0],
        env_kwargs={"step": f"wait_for({str(go_on)!r})"},
        step_timeout_seconds=40.0,
    )
    go_on.touch()
    step(pool, 0)
    go_on.unlink()
    pool.submit_step([0])
    assert pool.collect(0.5) == []  # detects that the step has begun
    paused_seconds[0] += 3600.0
    assert pool.collect(0.5) == []
    go_on.touch()
    (outcome,) = gather(pool, [0])
    assert not outcome.faults


def test_a_hang_is_detected_although_the_pool_rarely_checks(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    """A trainer that computes for long between its calls does not hide a hang."""
    paused_seconds = [0.0]
    hangs = run_once(tmp_path / "mark", "time.sleep(600)", "action")
    pool = make_pool.and_reset(
        SCRIPT,
        1,
        1,
        clock=lambda: time.monotonic() + paused_seconds[0],
        env_kwargs={"step": hangs},
        step_timeout_seconds=60.0,
    )
    step(pool, 0)
    pool.rows.action[0][:] = 1
    pool.submit_step([0])
    assert pool.collect(0.5) == []
    for _ in range(2):
        paused_seconds[0] += 1000.0
        assert pool.collect(0.0) == []
    (outcome,) = gather(pool, [0])
    assert_lost(pool, outcome, "a step timed out after 60 s", Status.TIMEOUT)
