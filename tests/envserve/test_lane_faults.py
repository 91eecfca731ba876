"""The guarantees that every lane gives when envs fail, hang or kill their worker.

Two tests run with and without spare envs on every lane. Other tests with the fixture
`spare_envs` have spare envs on remote lanes only, because workers handle spare envs in
the same way for every lane.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.errors import EnvError, EnvStartError, LocalProtocolError

from .conftest import MakeBatch
from .pool_driver import FAULTY, LEDGER


@pytest.fixture
def spare_envs(lane_kind: str) -> bool:
    return lane_kind != "local"


def actions_of(batch: BatchEnv, failing: int | None = None) -> np.ndarray[Any, Any]:
    """Return actions of 0, but 1 for the row whose env is to fail."""
    actions = np.zeros(batch.num_envs, np.int64)
    if failing is not None:
        actions[failing] = 1
    return actions


@pytest.mark.parametrize("spare_envs", [False, True])
def test_a_worker_that_dies_costs_its_rows_one_invalid_transition(
    make_batch: MakeBatch, spare_envs: bool
) -> None:
    options = {"env_kwargs": {"fault": "kill"}, "spare_envs": spare_envs}
    batch = make_batch.and_reset(FAULTY, 4, 2, **options)
    batch.step(actions_of(batch))
    lost = batch.step(actions_of(batch, failing=1))
    assert lost.valid.tolist() == [False, False, True, True]
    assert lost.truncated.tolist() == [True, True, False, False]
    assert not lost.terminated.any()
    assert lost.reward[:2].tolist() == [0.0, 0.0]
    assert lost.observation[:, 0].tolist() == [0, 0, 2, 2]
    assert lost.final_observation[1].tolist() == [1, 1, 1]
    for row in (0, 1):
        assert lost.infos[row]["fault"]["status"] == "WORKER_DIED"
        assert "was killed by SIGKILL" in lost.infos[row]["fault"]["text"]
    again = batch.step(actions_of(batch))
    assert again.valid.all()
    assert not again.truncated.any()
    assert again.observation[:, 0].tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("spare_envs", [False, True])
def test_an_env_that_raises_affects_only_its_row(
    make_batch: MakeBatch, spare_envs: bool
) -> None:
    batch = make_batch.and_reset(
        FAULTY, 4, 2, env_kwargs={"fault": "raise"}, spare_envs=spare_envs
    )
    if batch.lanes[0].name == "local":
        batch.set_attr("render_mode", range(4))
    lost = batch.step(actions_of(batch, failing=1))
    if batch.lanes[0].name == "local":
        # The rebuilt env also has the attribute.
        assert batch.get_attr("render_mode") == [0, 1, 2, 3]
    assert lost.valid.tolist() == [True, False, True, True]
    assert lost.truncated.tolist() == [False, True, False, False]
    fault = lost.infos[1]["fault"]
    assert fault["status"] == "ENV_ERROR"
    assert "RuntimeError: the simulator lost its balance" in fault["text"]
    again = batch.step(actions_of(batch))
    assert again.valid.all()
    assert again.observation[:, 0].tolist() == [2, 1, 2, 2]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("raise", "the simulator lost its balance"), ("exit", "exited with code 3")],
)
def test_a_fault_can_raise_in_the_caller(
    make_batch: MakeBatch, spare_envs: bool, fault: str, cause: str
) -> None:
    options = {"env_kwargs": {"fault": fault}, "spare_envs": spare_envs}
    batch = make_batch.and_reset(FAULTY, 2, 1, on_fault="raise", **options)
    with pytest.raises(EnvError) as caught:
        batch.step(actions_of(batch, failing=1))
    assert cause in str(caught.value).splitlines()[0]
    if fault == "raise":
        assert caught.value.env_index == 1
        assert "Traceback" in caught.value.remote_traceback
    batch.reset()
    assert batch.step(actions_of(batch)).valid.all()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", r"Env 1 \(.+\): expected observation to be finite; got nan"),
        ("inf_reward", r"Env 1 \(.+\): expected a finite reward; got inf"),
        (
            "wrong_shape",
            r"Env 1 \(.+\): expected observation float32\[3\]; got .*\[2\]",
        ),
        ("wrong_dtype", r"Env 1 \(.+\): expected .* float32\[3\]; got complex128\[3\]"),
    ],
)
def test_a_value_outside_the_spaces_is_an_error_and_the_batch_remains_usable(
    make_batch: MakeBatch, spare_envs: bool, fault: str, message: str
) -> None:
    batch = make_batch(FAULTY, 3, 2, env_kwargs={"fault": fault}, spare_envs=spare_envs)
    batch.reset()
    with pytest.raises(EnvError, match=message):
        batch.step(actions_of(batch, failing=1))
    with pytest.raises(LocalProtocolError, match="reset"):
        batch.step(actions_of(batch))
    batch.reset()
    result = batch.step(actions_of(batch))
    assert result.valid.all()
    assert result.observation[:, 0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("fault", ["nan", "inf_reward"])
def test_values_that_are_not_finite_can_be_masked(
    make_batch: MakeBatch, spare_envs: bool, fault: str
) -> None:
    kwargs = {"fault": fault}
    batch = make_batch.and_reset(
        FAULTY, 3, 2, env_kwargs=kwargs, spare_envs=spare_envs, nonfinite="mask"
    )
    lost = batch.step(actions_of(batch, failing=1))
    assert lost.valid.tolist() == [True, False, True]
    assert lost.truncated.tolist() == [False, True, False]
    assert "finite" in lost.infos[1]["fault"]["text"]
    for array in (lost.observation, lost.final_observation, lost.reward):
        assert np.isfinite(array).all()
    assert batch.step(actions_of(batch)).observation[:, 0].tolist() == [2, 1, 2]


@pytest.mark.parametrize("fault", ["nan", "inf_reward"])
def test_values_that_are_not_finite_can_be_passed_on(
    make_batch: MakeBatch, spare_envs: bool, fault: str
) -> None:
    kwargs = {"fault": fault}
    batch = make_batch.and_reset(
        FAULTY, 3, 2, env_kwargs=kwargs, spare_envs=spare_envs, nonfinite="pass"
    )
    step = batch.step(actions_of(batch, failing=1))
    assert step.valid.all()
    odd = step.reward if fault == "inf_reward" else step.observation[:, 1]
    assert np.isfinite(odd).tolist() == [True, False, True]
    assert batch.step(actions_of(batch)).observation[:, 0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("fault", ["hang", "spin"])
def test_an_env_that_hangs_is_replaced_at_the_step_timeout(
    make_batch: MakeBatch, fault: str
) -> None:
    batch = make_batch(FAULTY, 2, 2, env_kwargs={"fault": fault}, step_timeout=1.0)
    batch.reset()
    batch.step(actions_of(batch))  # the first step has more time
    began = time.monotonic()
    lost = batch.step(actions_of(batch, failing=1))
    assert 1.0 <= time.monotonic() - began < 20.0
    assert lost.valid.tolist() == [True, False]
    assert lost.infos[1]["fault"]["status"] == "TIMEOUT"
    text = "a step timed out after 1 s; raise step_timeout"
    assert text in lost.infos[1]["fault"]["text"]
    assert batch.step(actions_of(batch)).valid.all()


def test_a_slow_reset_is_not_mistaken_for_a_hang(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(
        LEDGER, 2, 2, env_kwargs={"length": 2, "reset_seconds": 1.5}, step_timeout=1.0
    )
    results = [batch.step(actions_of(batch)) for _ in range(3)]
    assert all(result.valid.all() for result in results)
    assert results[1].terminated.all()


@pytest.mark.parametrize("seeds", [None, [3, 4]])
def test_an_env_that_cannot_be_built_or_reset_is_an_error_with_its_traceback(
    make_batch: MakeBatch, seeds: list[int] | None
) -> None:
    with pytest.raises(EnvStartError, match="no simulator licence") as caught:
        make_batch(FAULTY, 2, 2, env_kwargs={"fault": "raise_in_init"})
    assert "in __init__" in caught.value.remote_traceback
    batch = make_batch(FAULTY, 2, 2, env_kwargs={"fault": "raise_in_reset"})
    with pytest.raises(EnvStartError, match="no level to load"):
        batch.reset(seeds=seeds)


def test_an_env_that_always_kills_its_worker_fails(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(FAULTY, 2, 2, env_kwargs={"fault": "exit"})
    for _ in range(5):
        assert not batch.step(actions_of(batch, failing=0)).valid[0]
    for _ in range(2):
        with pytest.raises(EnvStartError, match=r"6 times in a row"):
            batch.step(actions_of(batch, failing=0))


@pytest.mark.parametrize("fault", ["exit", "raise"])
def test_an_env_that_always_fails_is_an_error_with_next_step(
    make_batch: MakeBatch, fault: str, spare_envs: bool
) -> None:
    options = {"env_kwargs": {"fault": fault}, "spare_envs": spare_envs}
    batch = make_batch.and_reset(FAULTY, 1, 1, autoreset="next_step", **options)
    valid = []

    def step_until_it_raises() -> None:
        for _ in range(40):
            valid.append(bool(batch.step([1]).valid[0]))

    with pytest.raises(EnvError, match=r"6 times in a row|every step has failed"):
        step_until_it_raises()
    # Only the steps that reset the env are valid.
    assert True in valid
    assert not any(one and other for one, other in pairwise(valid))


def test_a_process_in_which_every_step_fails_is_replaced(
    make_batch: MakeBatch, spare_envs: bool
) -> None:
    options = {"env_kwargs": {"fault": "spoil"}, "spare_envs": spare_envs}
    batch = make_batch.and_reset(FAULTY, 4, 2, padding_after=60.0, **options)
    batch.step(actions_of(batch))
    results = [batch.step(actions_of(batch, failing=1))]
    results += [batch.step(actions_of(batch)) for _ in range(5)]
    valid = np.array([result.valid for result in results])
    # Row 1 fails twice, and then its worker is lost. Row 0 was stepped before row 1
    # spoiled the process.
    assert valid[:, 1].tolist() == [False, False, False, True, True, True]
    assert valid[:, 0].tolist() == [True, False, False, True, True, True]
    assert valid[:, 2:].all()
    error = "RuntimeError: CUDA error: device-side assert triggered"
    text = results[2].infos[0]["fault"]["text"]
    assert text.endswith(f"was replaced because env 1 failed twice in a row: {error}")
    assert results[-1].observation[:, 0].tolist() == [3, 3, 7, 7]


def test_an_env_that_fails_in_every_step_raises_its_error(
    make_batch: MakeBatch,
) -> None:
    neighbour = make_batch.and_reset(FAULTY, 2, 1)
    batch = make_batch.and_reset(FAULTY, 4, 2, padding_after=60.0)

    def step_until_it_raises() -> None:
        for _ in range(100):
            assert batch.step(actions_of(batch, failing=1)).valid[2:].all()

    with pytest.raises(EnvError, match=r"Env 1\b.*lost its balance") as caught:
        step_until_it_raises()
    assert caught.value.env_index == 1
    assert "probe_envs.py" in caught.value.remote_traceback
    with pytest.raises(EnvError, match="lost its balance"):
        batch.reset()
    assert neighbour.step(actions_of(neighbour)).valid.all()


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize("rows", [None, [0]])
def test_a_worker_is_kept_if_its_env_completes_steps_between_failures(
    make_batch: MakeBatch, rows: list[int] | None, autoreset: str
) -> None:
    options = {"autoreset": autoreset, "padding_after": 60.0}
    batch = make_batch.and_reset(FAULTY, 2, 1, **options)
    for _ in range(10):
        assert batch.step(actions_of(batch, failing=0)).valid.tolist() == [False, True]
        batch.reset(rows)
        assert batch.step(actions_of(batch)).valid.all()


def test_a_worker_that_runs_out_of_memory_is_replaced_at_once(
    make_batch: MakeBatch,
) -> None:
    options = {"env_kwargs": {"fault": "memory"}, "padding_after": 60.0}
    batch = make_batch.and_reset(FAULTY, 1, 1, **options)
    assert not batch.step(actions_of(batch, failing=0)).valid[0]
    lost = batch.step(actions_of(batch))
    assert lost.valid.tolist() == [False]
    assert "ran out of memory" in lost.infos[0]["fault"]["text"]
    assert batch.step(actions_of(batch)).valid.all()
