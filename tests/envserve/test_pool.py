"""Pools of real worker processes: operations, calls and rejected requests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from envserve.errors import EnvserveError, EnvStartError, LocalProtocolError
from envserve.lane import Outcome, Reset
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.slab import Status
from tests.envserve.session_fakes import make_call
from tests.oracle.vector_envs import MODES

from .pool_driver import LEDGER, SCRIPT, PoolMaker, call, gather, kill, reset, step

# Ordinary operation.


def test_workers_build_envs_in_parallel(make_pool: PoolMaker, tmp_path: Path) -> None:
    meet = (
        f"folder = {str(tmp_path)!r}\n"
        "open(f'{folder}/{os.getpid()}', 'w').close()\n"
        "while len(os.listdir(folder)) < 3: time.sleep(0.001)"
    )
    pool = make_pool(SCRIPT, 3, 3, env_kwargs={"init": meet})
    assert pool.is_ready


def test_collect_waits_for_the_requested_number_or_all_in_flight(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool.and_reset(LEDGER, 3, 3)
    pool.submit_step([0, 1, 2])
    assert sorted(outcome.block for outcome in pool.collect(20.0, 3)) == [0, 1, 2]
    pool.submit_step([2])
    assert [outcome.block for outcome in pool.collect(20.0, 5)] == [2]
    assert pool.collect(0.0, 5) == []


@pytest.mark.parametrize("slow", [0, 1])
def test_collect_of_all_returns_what_has_ended_at_the_timeout(
    make_pool: PoolMaker, slow: int
) -> None:
    hang = "time.sleep(600) if action else None"
    pool = make_pool.and_reset(SCRIPT, 2, 2, env_kwargs={"step": hang})
    step(pool, 0)
    pool.rows.action[0][slow] = 1
    pool.submit_step([0, 1])
    finished: list[Outcome] = []
    while not finished:  # the first of these calls may time out too early
        finished = pool.collect(0.2, 2)
    assert [outcome.block for outcome in finished] == [1 - slow]


def test_a_starting_pool_has_neither_spec_nor_rows(launcher: Launcher) -> None:
    config = PoolMaker.config(LEDGER, 1, 1)
    with contextlib.closing(Pool(config, launcher=launcher)) as pool:
        for use in (lambda: pool.spec, lambda: pool.rows):
            with pytest.raises(LocalProtocolError, match="is_ready"):
                use()
        with pytest.raises(LocalProtocolError, match="starting"):
            pool.submit_step([0])


def test_worker_imports_no_zmq_asyncio_or_tensorflow(make_pool: PoolMaker) -> None:
    pool = make_pool(LEDGER, 1, 1)
    modules = call(pool, 0, "loaded_modules")["value"]
    assert "gymnasium" in modules
    assert not {"zmq", "asyncio", "tensorflow"} & set(modules)


def test_output_of_envs_goes_to_standard_error(
    make_pool: PoolMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    scripts = {"init": "print('built')", "step": "os.system('echo stepped')"}
    with contextlib.closing(Launcher(["odd_envs"])) as own:
        pool = make_pool.and_reset(SCRIPT, 1, 1, launcher=own, env_kwargs=scripts)
        step(pool, 0)
        pool.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert "built" in err
    assert "stepped" in err


def test_processes_of_envs_inherit_no_descriptors(make_pool: PoolMaker) -> None:
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"info": "{'fds': inheritable_fds()}"})
    reset(pool)
    (outcome,) = step(pool, 0)
    assert set(outcome.infos[0]["fds"]) <= {0, 1, 2}


def test_two_pools_of_a_launcher_do_not_affect_each_other(make_pool: PoolMaker) -> None:
    ours, theirs = make_pool(LEDGER, 2, 2), make_pool(LEDGER, 2, 2)
    reset(ours)
    reset(theirs)
    kill(theirs.worker_pids[0])
    theirs.close()
    assert all(not outcome.faults for outcome in step(ours, 7))
    assert ours.rows.reward.tolist() == [7.0, 7.0]
    make_pool.and_reset(LEDGER, 2, 2)
    assert ours.rows.reward.tolist() == [7.0, 7.0]


# Rejected requests.


def test_block_in_flight_cannot_be_submitted_again(make_pool: PoolMaker) -> None:
    pool = make_pool.and_reset(LEDGER, 2, 2)
    pool.submit_step([0])
    submits: list[Callable[[], None]] = [
        lambda: pool.submit_step([0]),
        lambda: pool.submit_reset([Reset(0)]),
        lambda: pool.submit_call([make_call([0], "get", "difficulty")]),
    ]
    for submit in submits:
        with pytest.raises(LocalProtocolError, match="block 0 is in flight"):
            submit()
    gather(pool, [0])
    assert pool.rows.observation[0][:, 2].tolist() == [1, 0]


@pytest.mark.parametrize(
    "invalid",
    [
        *([0, 0], [0, 2], [0, -1], [1, 0, 1]),
        Reset(0, env_indices=()),
        Reset(0, env_indices=(2,)),
        Reset(1, env_indices=(1,)),
        Reset(0, env_indices=(-1,)),
        Reset(0, env_indices=(0, 1), seeds=(5,)),
        Reset(0, seeds=(5,)),
        Reset(0, seeds=(5, -1)),
        Reset(0, seeds=(5, 2**64)),
        Reset(7),
    ],
    ids=repr,
)
def test_an_invalid_submission_starts_nothing(
    make_pool: PoolMaker, invalid: list[int] | Reset
) -> None:
    pool = make_pool.and_reset(LEDGER, 4, 2)
    with pytest.raises(LocalProtocolError):
        pool.submit_reset([invalid]) if isinstance(invalid, Reset) else (
            pool.submit_step(invalid)
        )
    assert not pool.is_busy
    assert not any(outcome.faults for outcome in step(pool, 1))
    assert pool.rows.observation[0][:, 2].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("vectorized", [False, True])
def test_rows_can_be_reset_in_any_order(make_pool: PoolMaker, vectorized: bool) -> None:
    options = {"vectorized": vectorized, "autoreset": "disabled", "infos": "all"}
    pool = make_pool.and_reset(MODES["disabled"], 4, 1, **options)
    for _ in range(2):
        (outcome,) = reset(pool, Reset(0, (3, 1, 2, 0)))
        assert outcome.infos.keys() == {0, 1, 2, 3}
    assert pool.stats()["restarts"] == 0


def test_rows_beyond_the_limit_are_not_allocated(make_pool: PoolMaker) -> None:
    pool = make_pool(LEDGER, 4, 1, max_row_mib=0)
    assert pool.error is not None
    assert str(pool.error).startswith("the rows of 4 envs need 1 MiB, but only 0 MiB")
    assert pool._workers.slab is None


def test_env_kwargs_that_cannot_be_sent_raise_an_envserve_error() -> None:
    with pytest.raises(EnvserveError, match="builtin_function_or_method"):
        Pool(PoolMaker.config(LEDGER, 1, 1, env_kwargs={"f": print}))
    large = {"data": np.zeros(9_000_000)}
    with pytest.raises(EnvStartError, match="at most 64 MiB of data; got 68 MiB"):
        Pool(PoolMaker.config(LEDGER, 1, 1, env_kwargs=large))


# Calls.


@pytest.mark.parametrize("nbytes", [10_000, 1_000_000, 20_000_000])
def test_large_arguments_and_results_pass(make_pool: PoolMaker, nbytes: int) -> None:
    pool = make_pool.and_reset(LEDGER, 2, 1)
    data = np.arange(nbytes, dtype=np.uint8)
    (echoed,) = call(pool, 0, "echo", data)["value"]
    np.testing.assert_array_equal(echoed, data)
    assert not step(pool, 1)[0].faults


def test_large_env_kwargs_pass(make_pool: PoolMaker) -> None:
    pool = make_pool.and_reset(SCRIPT, 2, 1, env_kwargs={"init": "#" * 1_000_000})
    assert pool.error is None


@pytest.mark.parametrize(
    "script",
    [
        r"raise ValueError('\udc80')",
        "raise type('Mute', (Exception,), {'__str__': None})()",
        "raise ValueError('x' * 100_000_000)",
    ],
    ids=["surrogate", "no text", "endless text"],
)
def test_any_exception_of_an_env_costs_only_its_own_row(
    make_pool: PoolMaker, script: str
) -> None:
    pool = make_pool(SCRIPT, 2, 1, env_kwargs={"step": f"if action: {script}"})
    reset(pool)
    pids = pool.worker_pids
    (outcome,) = step(pool, [1, 0])
    assert list(pool.rows.status) == [Status.ENV_ERROR, Status.OK]
    assert [fault.env_index for fault in outcome.faults] == [0]
    assert pool.worker_pids == pids


@pytest.mark.parametrize(
    "info",
    [
        "{(1, 2): 3}",
        "{'deep': eval('[' * 29 + ']' * 29)}",
        "{'deeper': eval('[' * 40 + ']' * 40)}",
        "{'long': [0] * 70_000}",
        "{'object': object(), 'good': 1}",
        r"{'\udc80': 1}",
        r"{'text': '\udc80'}",
        "{'large': np.zeros(10_000_000)}",
    ],
    ids=lambda info: info[:12],
)
def test_info_that_cannot_be_encoded_costs_nothing(
    make_pool: PoolMaker, info: str
) -> None:
    pool = make_pool.and_reset(SCRIPT, 1, 1, env_kwargs={"info": info})
    pids = pool.worker_pids
    for _ in range(2):
        (outcome,) = step(pool, 0)
        assert not outcome.faults
        assert list(pool.rows.status) == [Status.OK]
    assert pool.worker_pids == pids
    if "good" in info:
        assert outcome.infos[0]["good"] == 1
        assert outcome.infos[0]["omitted"] == ["object"]
