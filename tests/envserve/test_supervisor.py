"""What dying, hanging and failing workers cost: their own blocks one transition."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.errors import CallError, EnvStartError
from envserve.lane import Outcome, Reset
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.seeding import env_seed
from envserve.slab import Status
from tests.oracle.ledger_env import ledger_hash

from .pool_driver import (
    FAULTY,
    LEDGER,
    SCRIPT,
    SEED,
    PoolMaker,
    call,
    gather,
    kill,
    reset,
    step,
    wait_for,
)


def seeds(pool: Pool) -> list[int]:
    return [int(seed) for seed in pool.rows.observation[0][:, 0]]


def assert_lost(pool: Pool, outcome: Outcome, status: Status, text: str) -> None:
    """The block's rows are one made-up transition: truncated, and not OK."""
    block = pool.blocks[outcome.block]
    part = slice(block.start, block.stop)
    assert outcome.error is None
    assert [fault.env_index for fault in outcome.faults] == [
        *range(block.start, block.stop)
    ]
    assert all(text in fault.text for fault in outcome.faults)
    assert {fault.status for fault in outcome.faults} == {status}
    assert set(pool.rows.status[part]) == {status}
    assert pool.rows.truncated[part].all()
    assert not pool.rows.terminated[part].any()
    assert not pool.rows.reward[part].any()


# Death.


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("kill", "was killed by SIGKILL"),
        ("segfault", "was killed by SIGSEGV"),
        ("exit", "exited with code 3"),
    ],
)
def test_death_in_a_step_costs_one_transition_and_says_how_it_died(
    make_pool: PoolMaker, fault: str, text: str
) -> None:
    pool = make_pool(FAULTY, 4, 2, env_kwargs={"fault": fault})
    reset(pool)
    step(pool, 0)
    mine, others = step(pool, [0, 1, 0, 0])
    assert_lost(pool, mine, Status.WORKER_DIED, text)
    assert not others.faults
    assert pool.rows.observation[0][:, 0].tolist() == [0, 0, 2, 2]
    assert pool.rows.final_observation[0][1].tolist() == [1, 1, 1]
    for _ in range(2):
        assert not any(outcome.faults for outcome in step(pool, 0))
    assert pool.rows.observation[0][:, 0].tolist() == [2, 2, 4, 4]
    assert not pool.rows.truncated.any()


def test_env_that_raises_costs_its_own_row_and_no_process(make_pool: PoolMaker) -> None:
    pool = make_pool(FAULTY, 3, 1)
    reset(pool)
    pids = pool.worker_pids
    (outcome,) = step(pool, [0, 1, 0])
    (fault,) = outcome.faults
    assert fault.env_index == 1
    assert fault.status is Status.ENV_ERROR
    assert "RuntimeError: the simulator lost its balance" in fault.text
    assert not fault.is_violation
    assert list(pool.rows.status) == [Status.OK, Status.ENV_ERROR, Status.OK]
    assert pool.rows.truncated.tolist() == [False, True, False]
    assert pool.worker_pids == pids


def test_idle_death_is_noticed_and_costs_one_transition_at_the_next_step(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(LEDGER, 4, 2)
    reset(pool)
    step(pool, 5)
    before = pool.rows.observation[0].copy()
    dead, alive = pool.worker_pids
    kill(dead)
    wait_for(pool, lambda: pool.worker_pids[0] not in (dead, None))
    assert pool.worker_pids[1] == alive
    np.testing.assert_array_equal(pool.rows.observation[0], before)
    assert not pool.rows.status.any()

    mine, others = step(pool, 6)
    assert_lost(pool, mine, Status.WORKER_DIED, "worker 0 (of envs 0 to 1)")
    assert not others.faults
    np.testing.assert_array_equal(pool.rows.final_observation[0][:2], before[:2])
    assert seeds(pool) == [env_seed(SEED, row, int(row < 2)) for row in range(4)]
    assert pool.rows.reward.tolist() == [0.0, 0.0, 6.0, 6.0]


def test_dead_workers_blocks_of_all_splits_are_lost_and_named(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(LEDGER, 8, 2, num_splits=2, first_env_index=100)
    reset(pool)
    kill(pool.worker_pids[1])
    first, second, third, fourth = step(pool, 1)
    for lost in (second, fourth):
        text = "worker 1 (of envs 102 to 103, 106 to 107) was killed by SIGKILL"
        assert_lost(pool, lost, Status.WORKER_DIED, text)
    assert not first.faults
    assert not third.faults


def test_each_death_gives_the_seed_of_the_next_incarnation(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(LEDGER, 2, 1)
    reset(pool)
    for incarnation in range(1, 4):
        kill(pool.worker_pids[0])
        assert_lost(pool, step(pool, 1)[0], Status.WORKER_DIED, "SIGKILL")
        assert seeds(pool) == [env_seed(SEED, row, incarnation) for row in range(2)]
        assert not step(pool, 1)[0].faults


@pytest.mark.parametrize("given", [None, (100, 200)])
def test_reset_of_a_whole_lost_block_leaves_nothing_to_pay(
    make_pool: PoolMaker, given: tuple[int, ...] | None
) -> None:
    pool = make_pool(LEDGER, 2, 1)
    reset(pool)
    kill(pool.worker_pids[0])
    (outcome,) = reset(pool, Reset(0, seeds=given))
    assert not outcome.faults
    expected = list(given or [env_seed(SEED, row, 1) for row in range(2)])
    assert seeds(pool) == expected
    assert not step(pool, 3)[0].faults
    assert pool.rows.reward.tolist() == [3.0, 3.0]
    assert seeds(pool) == expected


def test_reset_of_some_rows_leaves_the_rest_of_a_lost_block_lost(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(LEDGER, 2, 1)
    reset(pool)
    kill(pool.worker_pids[0])
    reset(pool, Reset(0, env_indices=(1,), seeds=(200,)))
    assert_lost(pool, step(pool, 3)[0], Status.WORKER_DIED, "SIGKILL")
    assert not step(pool, 3)[0].faults


def test_call_that_kills_its_worker_fails_and_is_not_repeated(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    pool = make_pool(SCRIPT, 2, 1)
    reset(pool)
    mark = tmp_path / "calls"
    script = f"open({str(mark)!r}, 'a').write('x'); os.kill(os.getpid(), 9)"
    with pytest.raises(CallError, match=r"worker 0 .*SIGKILL, during a call"):
        call(pool, 0, "run", script)
    assert_lost(pool, step(pool, 0)[0], Status.WORKER_DIED, "SIGKILL")
    assert mark.read_text() == "x"


def test_death_is_noticed_though_a_child_holds_the_socket_open(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    fork = (
        "if action:\n"
        " child = os.fork()\n"
        " if child == 0: os.setsid(); time.sleep(60); os._exit(0)\n"
        f" open({str(tmp_path / 'pid')!r}, 'w').write(str(child))\n"
        " os.kill(os.getpid(), signal.SIGKILL)"
    )
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"step": fork})
    reset(pool)
    try:
        assert_lost(pool, step(pool, 1)[0], Status.WORKER_DIED, "killed by SIGKILL")
        assert not step(pool, 0)[0].faults
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_worker_that_closes_its_socket_and_goes_on_is_killed_before_it_is_replaced(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    deserts = (
        "if action:\n"
        " os.closerange(3, 4096)\n"
        " time.sleep(0.6)\n"  # longer than a replacement takes
        f" open({str(tmp_path / 'went_on')!r}, 'w').close()"
    )
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"step": deserts})
    reset(pool)
    (deserter,) = pool.worker_pids
    assert deserter is not None
    (outcome,) = step(pool, 1)
    text = "closed its socket without ending; it was killed by SIGKILL"
    assert_lost(pool, outcome, Status.WORKER_DIED, text)
    with pytest.raises(ProcessLookupError):
        os.kill(deserter, 0)
    assert not step(pool, 0)[0].faults
    assert not (tmp_path / "went_on").exists()


def test_failed_reset_gives_a_new_incarnation_whose_seed_is_not_used_again(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    once = (
        f"mark = {str(tmp_path / 'mark')!r}\n"
        "if seed is None and not os.path.exists(mark):\n"
        " open(mark, 'w').close(); raise RuntimeError('no level')"
    )
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"reset": once})
    reset(pool)
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
    pool = make_pool(SCRIPT, 2, 1, env_kwargs=raises)
    reset(pool)
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
    pool = make_pool(SCRIPT, 2, 1, env_kwargs={"reset": second})
    reset(pool)
    kill(pool.worker_pids[0])
    reset(pool, Reset(0, env_indices=(1,)))
    mark.touch()
    assert_lost(pool, step(pool, 0)[0], Status.WORKER_DIED, "SIGKILL")
    assert not mark.exists()
    assert seeds(pool) == [env_seed(SEED, 0, 1), env_seed(SEED, 1, 2)]
    kill(pool.worker_pids[0])
    step(pool, 0)
    assert seeds(pool) == [env_seed(SEED, 0, 2), env_seed(SEED, 1, 3)]


# Hanging.


@pytest.mark.parametrize("fault", ["hang", "spin"])
def test_hang_in_a_step_is_killed_at_its_timeout(
    make_pool: PoolMaker, fault: str
) -> None:
    options: dict[str, Any] = {
        "env_kwargs": {"fault": fault},
        "step_timeout_seconds": 0.3,
    }
    pool = make_pool(FAULTY, 4, 2, **options)
    reset(pool)
    began = time.monotonic()
    mine, others = step(pool, [1, 0, 0, 0])
    assert 0.3 <= time.monotonic() - began < 2.5
    text = "a step timed out after 0.3 s; raise step_timeout"
    assert_lost(pool, mine, Status.TIMEOUT, text)
    assert not others.faults
    assert not any(outcome.faults for outcome in step(pool, 0))


def test_reset_may_take_longer_than_a_step(make_pool: PoolMaker) -> None:
    pool = make_pool(
        LEDGER,
        2,
        1,
        env_kwargs={"reset_seconds": 0.45, "length": 2},
        step_timeout_seconds=0.2,
        reset_timeout_seconds=10.0,
    )
    assert not reset(pool)[0].faults
    for _ in range(2):  # the second one resets
        assert not step(pool, 1)[0].faults
    assert pool.rows.observation[0][:, 1].tolist() == [1, 1]


def test_reset_that_hangs_is_killed_at_its_own_timeout(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    once = (
        f"mark = {str(tmp_path / 'mark')!r}\n"
        "if not os.path.exists(mark): open(mark, 'w').close(); time.sleep(60)"
    )
    pool = make_pool(
        SCRIPT, 1, 1, env_kwargs={"reset": once}, reset_timeout_seconds=0.3
    )
    (outcome,) = reset(pool)
    assert outcome.error is None
    assert seeds(pool) == [env_seed(SEED, 0, 1)]


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
    assert "odd_envs.py" in pool.error.remote_traceback
    assert (tmp_path / "tries").read_text() == "x"


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("os._exit(7)", "exited with code 7"),
    ],
)
def test_constructor_that_always_dies_is_an_error_after_some_tries(
    make_pool: PoolMaker, script: str, end: str
) -> None:
    began = time.monotonic()
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"init": script}, max_restarts=3)
    assert time.monotonic() - began < 3.0
    assert isinstance(pool.error, EnvStartError)
    assert f"failed 4 times in a row to get its {SCRIPT} running: it {end}" in str(
        pool.error
    )


def test_constructor_that_dies_once_is_tried_again(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    once = (
        f"mark = {str(tmp_path / 'mark')!r}\n"
        "if not os.path.exists(mark): open(mark, 'w').close(); os._exit(1)"
    )
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"init": once})
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


def test_worker_that_dies_in_every_step_is_given_up_and_the_others_go_on(
    make_pool: PoolMaker,
) -> None:
    options: dict[str, Any] = {"env_kwargs": {"fault": "kill"}, "max_restarts": 1}
    pool = make_pool(FAULTY, 2, 2, **options)
    reset(pool)
    mine, _ = step(pool, [1, 0])
    assert_lost(pool, mine, Status.WORKER_DIED, "SIGKILL")
    mine, others = step(pool, [1, 0])
    assert isinstance(mine.error, EnvStartError)
    assert not others.faults
    mine, others = step(pool, [0, 0])
    assert isinstance(mine.error, EnvStartError)
    assert not others.faults


def test_worker_that_is_killed_again_and_again_at_rest_is_not_given_up(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(LEDGER, 2, 2, max_restarts=1)
    reset(pool)
    for count in range(4):
        kill(pool.worker_pids[0])
        wait_for(pool, lambda: pool.stats()["restarts"] > count)  # noqa: B023
        wait_for(pool, lambda: pool.next_deadline() is None)
    assert_lost(pool, step(pool, 0)[0], Status.WORKER_DIED, "SIGKILL")
    assert not any(outcome.faults for outcome in step(pool, 0))


def test_module_that_cannot_be_imported_is_an_error_at_once(
    make_pool: PoolMaker,
) -> None:
    own = Launcher(["no_such_envs"])
    try:
        pool = make_pool(LEDGER, 1, 1, launcher=own)
        assert isinstance(pool.error, EnvStartError)
        assert "no_such_envs" in str(pool.error)
        pool.close()
    finally:
        own.close()


# The template process.


def test_after_the_death_of_the_template_everything_recovers(
    make_pool: PoolMaker,
) -> None:
    own = Launcher(["tests.oracle.probe_envs"])
    try:
        pool = make_pool(LEDGER, 4, 2, launcher=own)
        reset(pool)
        step(pool, 1)
        before = pool.worker_pids
        kill(own._process.pid)
        wait_for(pool, lambda: not {None, *before} & {*pool.worker_pids})
        for outcome in step(pool, 2):
            assert_lost(pool, outcome, Status.WORKER_DIED, "killed by SIGKILL")
        assert not any(outcome.faults for outcome in step(pool, 3))
        assert seeds(pool) == [env_seed(SEED, row, 1) for row in range(4)]
        pool.close()
    finally:
        own.close()


def test_template_that_dies_just_before_a_restart_costs_a_try(
    make_pool: PoolMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Launcher(["tests.oracle.probe_envs"])
    try:
        pool = make_pool(LEDGER, 1, 1, launcher=own)
        reset(pool)
        send = own._send

        def send_too_late(*message: Any) -> None:
            monkeypatch.undo()
            kill(own._process.pid)
            os.waitid(os.P_PID, own._process.pid, os.WEXITED | os.WNOWAIT)
            send(*message)

        kill(pool.worker_pids[0])
        monkeypatch.setattr(own, "_send", send_too_late)
        assert_lost(pool, step(pool, 1)[0], Status.WORKER_DIED, "")
        assert not step(pool, 1)[0].faults
        pool.close()
    finally:
        own.close()


def test_env_whose_import_never_returns_stalls_no_other_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck_envs.py").write_text("import time; time.sleep(60)")
    (tmp_path / "offers_stuck_envs.py").write_text(
        "import gymnasium; gymnasium.register('Stuck-v0', 'stuck_envs:Env')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = Launcher(["tests.oracle.probe_envs", "offers_stuck_envs"])
    maker = PoolMaker(own)
    stuck = Pool(maker.config("Stuck-v0", 1, 1), launcher=own)
    try:
        pool = maker(LEDGER, 1, 1)
        reset(pool)
        kill(pool.worker_pids[0])
        assert_lost(pool, step(pool, 1)[0], Status.WORKER_DIED, "SIGKILL")
        assert not stuck.is_ready
        assert stuck.error is None
    finally:
        maker.close()
        stuck.close()
        own.close()


# Closing.


def test_closing_takes_two_seconds_at_most_with_an_env_that_hangs(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(FAULTY, 2, 2, env_kwargs={"fault": "hang"})
    reset(pool)
    pool.rows.action[0][:] = [1, 0]
    pool.submit_step([0, 1])
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 2.0
    assert pool.worker_pids == (None, None)
    pool.close()


def test_closing_can_be_hastened_but_not_slowed_down(make_pool: PoolMaker) -> None:
    pool = make_pool(FAULTY, 1, 1, env_kwargs={"fault": "hang_in_close"})
    pool.begin_close(3600.0)
    pool.begin_close(0.0)
    pool.begin_close(3600.0)
    wait_for(pool, lambda: pool.is_closed)


def test_closing_takes_two_seconds_at_most_with_an_env_that_will_not_close(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(FAULTY, 1, 1, env_kwargs={"fault": "hang_in_close"})
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 2.0


def test_pool_can_be_closed_while_it_starts(launcher: Launcher) -> None:
    maker = PoolMaker(launcher)
    own = Launcher(["tests.oracle.probe_envs"])
    began = time.monotonic()
    pool = Pool(maker.config(LEDGER, 2, 2), launcher=own)
    pool.close()
    own.close()
    assert time.monotonic() - began < 3.0
    assert "closed" in repr(pool)


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


def test_kill_of_the_owner_ends_workers_and_what_their_envs_started(
    launcher: Launcher,
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,  # held by every process that comes from the owner
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=2.0)  # end of file: nobody is left


# All together.


def test_books_balance_while_random_workers_are_killed(
    make_pool: PoolMaker, random_generator: np.random.Generator
) -> None:
    pool = make_pool(LEDGER, 6, 3, num_splits=2, env_kwargs={"length": 7})
    books = Books(pool)
    for _ in range(1500):
        books.step(random_generator.integers(0, 1000, 6))
        if random_generator.random() < 0.02:
            victim = pool.worker_pids[random_generator.integers(3)]
            if victim is not None:
                kill(victim)
    assert books.losses >= 10
    assert books.valid >= 8000


class Books:
    """A second set of books beside the ledgers: every row must agree with it."""

    def __init__(self, pool: Pool) -> None:
        reset(pool)
        self.pool = pool
        self.incarnations = [0] * pool.num_envs
        self.hashes = [0] * pool.num_envs
        self.losses = self.valid = 0

    def step(self, actions: Any) -> None:
        rows = self.pool.rows
        rows.action[0][:] = actions
        blocks = [block.index for block in self.pool.blocks]
        self.pool.submit_step(blocks)
        faulty = {
            fault.env_index
            for outcome in gather(self.pool, blocks)
            for fault in outcome.faults
        }
        for row, action in enumerate(actions.tolist()):
            is_lost = rows.status[row] != Status.OK
            assert is_lost == (row in faulty)
            if is_lost:
                self.check_lost(row)
            else:
                self.check_valid(row, action)

    def check_lost(self, row: int) -> None:
        rows = self.pool.rows
        self.losses += 1
        self.hashes[row] = 0
        assert rows.status[row] == Status.WORKER_DIED
        assert rows.truncated[row]
        assert not rows.terminated[row]
        seed, episode, steps, ledger = rows.observation[0][row].tolist()
        assert (episode, steps, ledger) == (0, 0, 0)
        later = range(self.incarnations[row] + 1, self.incarnations[row] + 6)
        (self.incarnations[row],) = [k for k in later if env_seed(SEED, row, k) == seed]

    def check_valid(self, row: int, action: int) -> None:
        rows = self.pool.rows
        self.valid += 1
        self.hashes[row] = ledger_hash(self.hashes[row], action)
        is_over = rows.terminated[row] or rows.truncated[row]
        seed, episode, steps, ledger = rows.observation[0][row].tolist()
        assert rows.reward[row] == action
        assert seed == env_seed(SEED, row, self.incarnations[row])
        assert ledger == self.hashes[row]
        assert is_over == (steps == 0)
        if is_over:
            final = rows.final_observation[0][row].tolist()
            assert final == [seed, episode - 1, 7, ledger]
            assert rows.terminated[row] == (episode % 2 == 1)
