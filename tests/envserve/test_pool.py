"""Pools of real worker processes: what they do, and what they refuse to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.errors import CallError, EnvserveError, LocalProtocolError
from envserve.lane import Call, Outcome, Reset
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.seeding import env_seed
from envserve.settings import PoolSettings
from envserve.slab import Status

from .pool_driver import (
    LEDGER,
    SCRIPT,
    SEED,
    PoolMaker,
    call,
    gather,
    kill,
    reset,
    step,
)

# When all goes well.


def test_workers_build_their_envs_at_the_same_time(
    make_pool: PoolMaker, tmp_path: Path
) -> None:
    meet = (
        f"folder = {str(tmp_path)!r}\n"
        "open(f'{folder}/{os.getpid()}', 'w').close()\n"
        "while len(os.listdir(folder)) < 3: time.sleep(0.001)"
    )
    pool = make_pool(SCRIPT, 3, 3, env_kwargs={"init": meet})
    assert pool.is_ready


def test_first_reset_uses_the_seeds_of_the_rows_in_the_whole_batch(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(LEDGER, 5, 2, first_env_index=40)
    reset(pool)
    seeds = pool.rows.observation[0][:, 0].tolist()
    assert seeds == [env_seed(SEED, 40 + row, 0) for row in range(5)]


def test_only_submitted_blocks_are_stepped(make_pool: PoolMaker) -> None:
    pool = make_pool(LEDGER, 4, 2, num_splits=2)
    reset(pool)
    step(pool, 3, blocks=[1, 2])
    assert pool.rows.observation[0][:, 2].tolist() == [0, 1, 1, 0]
    assert pool.rows.reward.tolist() == [0.0, 3.0, 3.0, 0.0]


def test_collect_waits_for_as_many_as_asked_or_all_there_are(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(LEDGER, 3, 3)
    reset(pool)
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
    pool = make_pool(SCRIPT, 2, 2, env_kwargs={"step": hang})
    reset(pool)
    step(pool, 0)
    pool.rows.action[0][slow] = 1
    pool.submit_step([0, 1])
    finished: list[Outcome] = []
    while not finished:  # each look is short, the first may come too early
        finished = pool.collect(0.2, 2)
    assert [outcome.block for outcome in finished] == [1 - slow]


def test_some_rows_of_a_block_are_reset_with_their_seeds(make_pool: PoolMaker) -> None:
    pool = make_pool(LEDGER, 4, 1)
    reset(pool)
    step(pool, 3)
    reset(pool, Reset(0, env_indices=(3, 1), seeds=(100, 200)))
    seeds, episodes, steps, _ = pool.rows.observation[0].T.tolist()
    assert seeds == [env_seed(SEED, 0, 0), 200, env_seed(SEED, 2, 0), 100]
    assert episodes == [0, 0, 0, 0]
    assert steps == [1, 0, 1, 0]


def test_pool_that_starts_has_neither_spec_nor_rows(launcher: Launcher) -> None:
    config = PoolSettings(env_name=LEDGER, num_envs=1, num_workers=1, seed=0)
    pool = Pool(config, launcher=launcher)
    try:
        with pytest.raises(LocalProtocolError, match="is_ready"):
            _ = pool.spec
        with pytest.raises(LocalProtocolError, match="is_ready"):
            _ = pool.rows
        with pytest.raises(LocalProtocolError, match="starting"):
            pool.submit_step([0])
    finally:
        pool.close()


def test_worker_has_imported_neither_zmq_nor_asyncio_nor_tensorflow(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool(LEDGER, 1, 1)
    modules = call(pool, 0, "loaded_modules")["value"]
    assert "gymnasium" in modules
    assert not {"zmq", "asyncio", "tensorflow"} & set(modules)


def test_what_envs_print_goes_to_standard_error(
    launcher: Launcher, make_pool: PoolMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    own = Launcher(["odd_envs"])
    try:
        scripts = {"init": "print('built')", "step": "os.system('echo stepped')"}
        pool = make_pool(SCRIPT, 1, 1, launcher=own, env_kwargs=scripts)
        reset(pool)
        step(pool, 0)
        pool.close()
    finally:
        own.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert "built" in err
    assert "stepped" in err


def test_worker_leaves_its_descriptors_to_nobody(make_pool: PoolMaker) -> None:
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"info": "{'fds': inheritable_fds()}"})
    reset(pool)
    (outcome,) = step(pool, 0)
    assert set(outcome.infos[0]["fds"]) <= {0, 1, 2}


def test_two_pools_of_one_launcher_do_not_disturb_each_other(
    make_pool: PoolMaker,
) -> None:
    ours, theirs = make_pool(LEDGER, 2, 2), make_pool(LEDGER, 2, 2)
    reset(ours)
    reset(theirs)
    kill(theirs.worker_pids[0])
    theirs.close()
    assert all(not outcome.faults for outcome in step(ours, 7))
    assert ours.rows.reward.tolist() == [7.0, 7.0]
    again = make_pool(LEDGER, 2, 2)
    reset(again)
    assert ours.rows.reward.tolist() == [7.0, 7.0]


# What is refused.


def test_block_in_flight_cannot_be_submitted_again(make_pool: PoolMaker) -> None:
    pool = make_pool(LEDGER, 2, 2)
    reset(pool)
    pool.submit_step([0])
    submits: list[Callable[[], None]] = [
        lambda: pool.submit_step([0]),
        lambda: pool.submit_reset([Reset(0)]),
        lambda: pool.submit_call(Call(0, "get", "difficulty")),
    ]
    for submit in submits:
        with pytest.raises(LocalProtocolError, match="block 0 is in flight"):
            submit()
    gather(pool, [0])
    assert pool.rows.observation[0][:, 2].tolist() == [1, 0]


@pytest.mark.parametrize("blocks", [[0, 0], [0, 2], [0, -1], [1, 0, 1]])
def test_refused_submission_starts_nothing(
    make_pool: PoolMaker, blocks: list[int]
) -> None:
    pool = make_pool(LEDGER, 2, 2)
    reset(pool)
    with pytest.raises(LocalProtocolError):
        pool.submit_step(blocks)
    assert not pool.is_busy
    step(pool, 1)
    assert pool.rows.observation[0][:, 2].tolist() == [1, 1]


@pytest.mark.parametrize(
    "bad",
    [
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
def test_impossible_reset_is_refused_before_it_costs_anything(
    make_pool: PoolMaker, bad: Reset
) -> None:
    pool = make_pool(LEDGER, 4, 2)
    reset(pool)
    with pytest.raises(LocalProtocolError):
        pool.submit_reset([bad])
    assert all(not outcome.faults for outcome in step(pool, 1))


@pytest.mark.parametrize("env_index", [-1, 2])
def test_call_of_an_env_that_is_not_there_is_refused(
    make_pool: PoolMaker, env_index: int
) -> None:
    pool = make_pool(LEDGER, 2, 1)
    with pytest.raises(LocalProtocolError, match=f"got {env_index}"):
        pool.submit_call(Call(env_index, "get", "difficulty"))


def test_env_kwargs_that_cannot_be_sent_are_an_error_of_ours() -> None:
    config = PoolSettings(
        env_name=LEDGER, num_envs=1, num_workers=1, seed=0, env_kwargs={"f": print}
    )
    with pytest.raises(EnvserveError, match="builtin_function_or_method"):
        Pool(config)


# Calls.


@pytest.mark.parametrize(
    "argument",
    [
        lambda: None,
        [0] * 70_000,
        {(1, 2): 3},
        np.array([object()]),
    ],
    ids=["function", "long list", "tuple key", "object array"],
)
def test_call_with_what_cannot_be_sent_costs_nothing(
    make_pool: PoolMaker, argument: Any
) -> None:
    pool = make_pool(LEDGER, 2, 1)
    reset(pool)
    with pytest.raises(CallError, match="Env 1: echo: "):
        pool.submit_call(Call(1, "call", "echo", (argument,)))
    assert not step(pool, 1)[0].faults


@pytest.mark.parametrize("nbytes", [10_000, 1_000_000, 20_000_000])
def test_large_arguments_and_results_pass(make_pool: PoolMaker, nbytes: int) -> None:
    pool = make_pool(LEDGER, 2, 1)
    reset(pool)
    data = np.arange(nbytes, dtype=np.uint8)
    (echoed,) = call(pool, 0, "echo", data)["value"]
    np.testing.assert_array_equal(echoed, data)
    assert not step(pool, 1)[0].faults


def test_large_env_kwargs_pass(make_pool: PoolMaker) -> None:
    padding = "#" * 1_000_000
    pool = make_pool(SCRIPT, 2, 1, env_kwargs={"init": padding})
    assert pool.error is None
    reset(pool)


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
    ids=[
        *(
            "tuple key",
            "deep",
            "deeper",
            "long",
            "object",
            "surrogate key",
            "surrogate",
        ),
        "large",
    ],
)
def test_info_that_cannot_be_sent_costs_no_transition(
    make_pool: PoolMaker, info: str
) -> None:
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"info": info})
    reset(pool)
    pids = pool.worker_pids
    for _ in range(2):
        (outcome,) = step(pool, 0)
        assert not outcome.faults
        assert list(pool.rows.status) == [Status.OK]
    assert pool.worker_pids == pids
    if "good" in info:
        assert outcome.infos[0]["good"] == 1
        assert outcome.infos[0]["omitted"] == ["object"]
