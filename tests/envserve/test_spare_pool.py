"""Pools with spare envs: background resets that fail or hang."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.envs.seeding import env_seed, spare_seed
from envserve.pool.pool import Pool
from envserve.slab import Status
from envserve.worker.spare_row import ResetThreads
from tests.oracle.ledger_env import ledger_hash

from .pool_driver import (
    LEDGER,
    SCRIPT,
    SEED,
    PoolMaker,
    call,
    gather,
    kill,
    reset,
    run_once,
    seeds,
    step,
)
from .stalls import fastest

IS_MAIN = "import threading as t; is_main = t.current_thread() is t.main_thread()\n"


def run_once_in_background(folder: Path, script: str) -> dict[str, str]:
    """Return env arguments that run a script in row 0's first background reset."""
    own = env_seed(SEED, 0, 0)
    when = f"not is_main and seed == {spare_seed(own)}"
    return {"reset": IS_MAIN + run_once(folder / "mark", script, when)}


def test_a_reset_that_failed_in_the_background_costs_its_own_row_one_transition(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    raises = run_once_in_background(tmp_path, "raise RuntimeError('no level to load')")
    pool = make_pool(SCRIPT, 2, 1, env_kwargs=raises, spare_envs=True)
    assert not reset(pool)[0].faults
    (outcome,) = step(pool, 0)
    (fault,) = outcome.faults
    assert (fault.env_index, fault.status) == (0, Status.ENV_ERROR)
    assert "Traceback" in fault.text
    assert fault.text.endswith("RuntimeError: no level to load\n")
    own = [env_seed(SEED, row, 0) for row in range(2)]
    assert seeds(pool) == [env_seed(SEED, 0, 1), spare_seed(own[1])]
    for expected in (own, [env_seed(SEED, 0, 1), spare_seed(own[1])]):
        assert not step(pool, 0)[0].faults
        assert seeds(pool) == expected


def test_a_reset_that_hangs_in_the_background_is_killed_once_its_row_waits_for_it(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    hangs = run_once_in_background(tmp_path, "time.sleep(60)")
    pool = make_pool(
        SCRIPT,
        2,
        2,
        env_kwargs=hangs,
        spare_envs=True,
        step_timeout_seconds=0.7,
        reset_timeout_seconds=1.5,
    )
    assert not any(outcome.faults for outcome in reset(pool))
    began = time.monotonic()
    mine, others = step(pool, 0)
    assert 1.5 <= time.monotonic() - began < 30.0
    (fault,) = mine.faults
    assert fault.status is Status.TIMEOUT
    assert "a reset or call timed out after 1.5 s; raise reset_timeout" in fault.text
    assert not others.faults
    assert not any(outcome.faults for outcome in step(pool, 0))


def test_a_slow_spare_is_not_mistaken_for_a_hang(make_pool: PoolMaker) -> None:
    pool = make_pool.and_reset(
        LEDGER,
        1,
        1,
        env_kwargs={"reset_seconds": 1.5, "length": 1},
        spare_envs=True,
        step_timeout_seconds=0.8,
    )
    for _ in range(2):
        assert not step(pool, 1)[0].faults
    assert pool.rows.observation[0][:, 1].tolist() == [1]


def test_a_process_that_ends_in_a_background_reset_is_replaced_with_both_envs(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"
    exits = run_once_in_background(tmp_path, f"wait_for({str(go_on)!r}); os._exit(5)")
    pool = make_pool.and_reset(SCRIPT, 1, 1, env_kwargs=exits, spare_envs=True)
    go_on.touch()
    (outcome,) = step(pool, 0)
    (fault,) = outcome.faults
    assert fault.status is Status.WORKER_DIED
    assert "exited with code 5" in fault.text
    own = env_seed(SEED, 0, 1)
    assert seeds(pool) == [own]
    for expected in (spare_seed(own), own):
        step(pool, 0)
        assert seeds(pool) == [expected]


def test_envs_that_begin_episodes_together_are_reset_together(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    """Each background reset waits until those for all other rows have begun."""
    meet = (
        f"{IS_MAIN}if not is_main:\n folder = {str(tmp_path)!r}\n"
        " open(f'{folder}/{id(self)}', 'w').close()\n"
        " while len(os.listdir(folder)) < 6: time.sleep(0.001)"
    )
    pool = make_pool(SCRIPT, 6, 1, env_kwargs={"reset": meet}, spare_envs=True)
    reset(pool)
    assert not step(pool, 0)[0].faults


def test_a_spare_with_other_spaces_is_an_error_at_once(make_pool: PoolMaker) -> None:
    grows = (
        "import odd_envs\n"
        "odd_envs.built = getattr(odd_envs, 'built', 0) + 1\n"
        "size = 1 + odd_envs.built // 3\n"
        "self.observation_space = gymnasium.spaces.Box(0, 9, (size,), np.int64)"
    )
    pool = make_pool(SCRIPT, 2, 1, env_kwargs={"init": grows}, spare_envs=True)
    assert "Env 0: its spaces differ from the spaces of env 0" in str(pool.error)


def test_a_pool_closes_both_envs(make_pool: PoolMaker, tmp_path: Path) -> None:
    closes = f"self.close = lambda me=id(self): open(f'{tmp_path}/{{me}}', 'w').close()"
    pool = make_pool(SCRIPT, 3, 1, env_kwargs={"init": closes}, spare_envs=True)
    reset(pool)
    pool.close()
    assert len(list(tmp_path.iterdir())) == 6


def test_closing_does_not_wait_for_a_background_reset_that_hangs(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    def attempt() -> float:
        (tmp_path / "mark").unlink(missing_ok=True)
        hangs = run_once_in_background(tmp_path, "time.sleep(60)")
        pool = make_pool.and_reset(SCRIPT, 2, 1, env_kwargs=hangs, spare_envs=True)
        assert call(pool, 1, "value") == {"value": None}  # does not wait for row 0
        began = time.monotonic()
        pool.close()
        seconds = time.monotonic() - began
        assert pool.worker_pids == (None,)
        return seconds

    assert fastest(attempt, 2.0) < 2.0


class RowLedgers:
    """The test's record of each row's two ledgers."""

    def __init__(self, pool: Pool) -> None:
        reset(pool)
        self.pool = pool
        self.ledgers: list[list[list[int]]] = []
        for row in range(pool.num_envs):
            self.ledgers.append(self.new_ledgers(env_seed(SEED, row, 0)))
        self.incarnations = [0] * pool.num_envs
        self.losses = self.valid = 0

    @staticmethod
    def new_ledgers(own: int) -> list[list[int]]:
        """Return the first observations of the active env and its spare."""
        return [[own, 0, 0, 0], [spare_seed(own), 0, 0, 0]]

    def step(self, actions: Any) -> None:
        rows = self.pool.rows
        rows.action[0][:] = actions
        blocks = [block.index for block in self.pool.blocks]
        self.pool.submit_step(blocks)
        gather(self.pool, blocks)
        for row, action in enumerate(actions.tolist()):
            if rows.status[row] == Status.OK:
                self.check_valid(row, action)
            else:
                self.check_lost(row)

    def check_valid(self, row: int, action: int) -> None:
        rows, ledgers = self.pool.rows, self.ledgers[row]
        self.valid += 1
        active = ledgers[0]
        active[2:] = [active[2] + 1, ledger_hash(active[3], action)]
        assert rows.reward[row] == action
        is_over = active[2] == 5
        assert (rows.terminated[row] or rows.truncated[row]) == is_over
        if is_over:
            assert rows.final_observation[0][row].tolist() == active
            assert rows.terminated[row] == (active[1] % 2 == 0)
            active[1:3] = [active[1] + 1, 0]
            ledgers.reverse()
        assert rows.observation[0][row].tolist() == ledgers[0]

    def check_lost(self, row: int) -> None:
        self.losses += 1
        seed = self.pool.rows.observation[0][row, 0]
        later = range(self.incarnations[row] + 1, self.incarnations[row] + 6)
        (self.incarnations[row],) = [k for k in later if env_seed(SEED, row, k) == seed]
        self.ledgers[row] = self.new_ledgers(int(seed))
        assert self.pool.rows.observation[0][row].tolist() == self.ledgers[row][0]


def test_both_ledgers_of_each_row_balance_while_random_workers_are_killed(
    make_pool: PoolMaker, random_generator: np.random.Generator
) -> None:
    pool = make_pool(
        LEDGER, 6, 3, num_splits=2, env_kwargs={"length": 5}, spare_envs=True
    )
    ledgers = RowLedgers(pool)
    for _ in range(700):
        ledgers.step(random_generator.integers(0, 1000, 6))
        if random_generator.random() < 0.03:
            victim = pool.worker_pids[random_generator.integers(3)]
            if victim is not None:
                kill(victim)
    assert ledgers.losses >= 5
    assert ledgers.valid >= 3500


# Threads.


def test_every_env_has_a_thread_so_that_none_waits_for_another() -> None:
    with ResetThreads(8) as threads:
        together = threading.Barrier(8)
        seats = [threads.submit(together.wait, 10) for _ in range(8)]
        assert {seat.result(10) for seat in seats} == set(range(8))


def test_threads_are_limited_in_number_and_yield_quickly() -> None:
    before = {*threading.enumerate()}
    interval = sys.getswitchinterval()
    together = threading.Barrier(17)
    with ResetThreads(1000) as threads:
        for _ in range(20):
            threads.submit(together.wait, 10)
        assert len({*threading.enumerate()} - before) == 16
        assert sys.getswitchinterval() == pytest.approx(0.5e-3)
        together.abort()
    sys.setswitchinterval(interval)


def test_a_reset_that_exits_raises_in_the_thread_that_waits_for_it() -> None:
    with ResetThreads(1) as threads:
        with pytest.raises(SystemExit):
            threads.submit(sys.exit, 3).result(10)
        assert threads.submit(int, "7").result(10) == 7
