"""Vector envs between `step_async` and `step_wait`, and resets with masks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
)

from envserve.client import BatchEnv
from envserve.envs.seeding import env_seed
from envserve.errors import CodecError, EnvError, EnvTimeout, LocalProtocolError
from tests.envserve.conftest import MakeEnvs, WaitUntil
from tests.envserve.pool_driver import SCRIPT

FAULTY = "envserve/Faulty-v0"
RESET = "envserve/Reset-v0"


def test_step_async_and_step_wait_equal_step(make_envs: MakeEnvs) -> None:
    ours, others = make_envs("CartPole-v1"), make_envs("CartPole-v1")
    ours.reset(seed=1)
    others.reset_async(seed=1)
    others.reset_wait(timeout=30)
    for step in range(40):
        actions = np.full(4, step % 2)
        ours.step_async(actions)
        later = ours.step_wait(timeout=30)
        for one, other in zip(later[:4], others.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("copy", [True, False])
def test_after_a_timeout_you_can_wait_again(
    make_envs_here: MakeEnvs, tmp_path: Path, copy: bool
) -> None:
    gate = tmp_path / "gate"
    wait = f"while __import__('os').path.exists({str(gate)!r}): time.sleep(0.002)"
    kwargs = {"reset": wait, "step": wait}
    envs = make_envs_here(
        SCRIPT, 2, autoreset_mode="Disabled", copy=copy, env_kwargs=kwargs
    )

    def timed_out(wait_for: Callable[[float], Any]) -> None:
        with pytest.raises(multiprocessing.TimeoutError) as caught:
            wait_for(0.0)
        assert isinstance(caught.value, EnvTimeout)

    gate.touch()
    envs.reset_async(seed=[5, 6])
    timed_out(envs.reset_wait)
    timed_out(envs.reset_wait)
    gate.unlink()
    observation, infos = envs.reset_wait(timeout=30)
    assert observation[:, 0].tolist() == [5, 6]
    assert infos == {}
    for number in range(2):
        gate.touch()
        envs.step_async([0, number])
        timed_out(envs.step_wait)
        gate.unlink()
        observation, reward, _, truncated, _ = envs.step_wait(timeout=30)
        assert observation[:, 0].tolist() == [5, 6]
        assert reward.tolist() == [0, number]
        assert truncated.all()
        envs.reset(seed=[5, 6])


@pytest.mark.parametrize("name", ["reset", "step"])
def test_a_call_out_of_order_is_rejected(make_envs: MakeEnvs, name: str) -> None:
    envs = make_envs("CartPole-v1")
    with pytest.raises(NoAsyncCallError, match=f"without any prior call to `{name}_a"):
        getattr(envs, f"{name}_wait")()
    envs.reset(seed=3)
    start: dict[str, Callable[[], None]] = {
        "reset": partial(envs.reset_async, 3),
        "step": partial(envs.step_async, [0] * 4),
    }
    start[name]()
    calls: list[Callable[[], Any]] = [
        *(envs.reset_async, envs.reset, partial(envs.step_async, [0] * 4)),
        *(envs.render, partial(envs.step, [0] * 4), partial(envs.get_attr, "x")),
    ]
    for call in calls:
        with pytest.raises(AlreadyPendingCallError, match=f"call to `{name}`") as info:
            call()
        assert isinstance(info.value, LocalProtocolError)
        assert info.value.name == name
    other = "step" if name == "reset" else "reset"
    with pytest.raises(NoAsyncCallError):
        getattr(envs, f"{other}_wait")()
    assert getattr(envs, f"{name}_wait")()[0].shape == (4, 4)
    envs.step([0] * 4)


def test_other_threads_get_errors_during_a_step(
    make_envs_here: MakeEnvs, tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    script = f"open({str(begun)!r}, 'w').close()\n"
    script += f"while os.path.exists({str(gate)!r}): time.sleep(0.002)"
    envs = make_envs_here(SCRIPT, 1, env_kwargs={"step": script})
    envs.reset(seed=3)
    gate.touch()
    calls: list[Callable[[], Any]] = [
        *(envs.reset, partial(envs.step, [0]), partial(envs.step_async, [0])),
        *(partial(envs.get_attr, "value"), envs.close),
    ]
    with ThreadPoolExecutor(1) as other:
        step = other.submit(envs.step, [1])
        wait_until(begun.exists)
        for call in calls:
            with pytest.raises(LocalProtocolError, match="another thread is using"):
                call()
        gate.unlink()
        assert step.result()[1].tolist() == [1]
    envs.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.reset()


def test_closing_while_a_call_is_pending_warns(make_envs: MakeEnvs) -> None:
    envs = make_envs("CartPole-v1")
    envs.reset()
    envs.step_async([0] * 4)
    with pytest.warns(UserWarning, match="waiting for a pending call to `step`"):
        envs.close(terminate=True)
    with pytest.raises(ClosedEnvironmentError):
        envs.step_wait()


def test_an_env_that_violates_its_spaces_does_not_block_later_calls(
    make_envs_here: MakeEnvs,
) -> None:
    envs = make_envs_here(FAULTY, 4, env_kwargs={"fault": "wrong_shape"})
    envs.reset()
    with pytest.raises(EnvError, match=r"Env 0 \(local\): expected observation"):
        envs.step([1, 0, 1, 1])
    with pytest.raises(LocalProtocolError, match="reset"):  # row 1 was discarded
        envs.step([0, 0, 0, 0])
    envs.reset()
    envs.step_async([1, 0, 1, 1])
    with pytest.raises(EnvError, match=r"Env 0 \(local\): expected observation"):
        envs.step_wait()
    with pytest.raises(LocalProtocolError, match="reset"):
        envs.step_async([0, 0, 0, 0])
    envs.reset()
    assert envs.step([0, 0, 0, 0])[1].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["send", "send_reset", "recv_reset"])
def test_after_ctrl_c_you_can_wait_again_or_reset(
    make_envs_here: MakeEnvs, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    envs = make_envs_here(RESET, 2)
    envs.reset()
    whole = getattr(BatchEnv, name)

    def cut(batch: BatchEnv, *arguments: Any, **named: Any) -> None:
        if name != "recv_reset":
            whole(batch, *arguments, **named)
        raise KeyboardInterrupt

    call = partial(envs.step_async, [1, 0]) if name == "send" else envs.reset
    with monkeypatch.context() as patch:
        patch.setattr(BatchEnv, name, cut)
        with pytest.raises(KeyboardInterrupt):
            call()
    if name == "send":
        assert envs.step_wait()[1].tolist() == [1, 0]
    else:
        envs.reset()
    assert envs.step([0, 1])[1].tolist() == [0, 1]


def test_infos_of_a_reset_show_the_arguments_that_the_envs_got(
    make_envs: MakeEnvs,
) -> None:
    envs = make_envs(RESET, 3, autoreset_mode="Disabled")
    assert envs.reset()[1]["seed"].tolist() == [None] * 3
    assert envs.reset(seed=4)[1]["seed"].tolist() == [4, 5, 6]
    infos = envs.reset(seed=[7, None, 9], options={"level": 3})[1]
    assert infos["seed"].tolist() == [7, None, 9]
    assert infos["options"]["level"].tolist() == [3, 3, 3]
    options = {"reset_mask": np.array([True, False, True]), "level": 5}
    envs.step([0, 1, 0])
    observation, infos = envs.reset(options=options)
    assert options.keys() == {"reset_mask", "level"}
    assert observation.tolist() == [[0], [1], [0]]
    assert infos["_seed"].tolist() == [True, False, True]
    assert infos["options"]["level"].tolist() == [5, 0, 5]


def test_only_a_batch_with_a_seed_seeds_its_envs(make_envs: MakeEnvs) -> None:
    envs = make_envs(RESET, 2, seed=8)
    assert envs.reset()[1]["seed"].tolist() == [env_seed(8, row, 0) for row in (0, 1)]
    assert envs.reset()[1]["seed"].tolist() == [None, None]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"level": object()}, CodecError),
        ({"level": b"a" * (17 << 10)}, CodecError),
        ({"level": 13}, EnvError),
    ],
)
def test_invalid_options_are_errors(
    make_envs: MakeEnvs, options: dict[str, Any], error: type[Exception]
) -> None:
    envs = make_envs(RESET, 2)
    envs.reset()
    with pytest.raises(error):
        envs.reset(options=options)
    envs.reset(options={"level": 1})
    assert envs.step([1, 0])[1].tolist() == [1, 0]


def test_a_mask_in_the_first_reset_must_select_all_rows(make_envs: MakeEnvs) -> None:
    envs = make_envs(RESET, 2, autoreset_mode="Disabled")
    envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(LocalProtocolError, match="reset\\(\\) for all envs"):
        envs.step([0, 0])
    envs.reset(options={"reset_mask": np.ones(2, np.bool_)})
    envs.step([0, 0])
