"""What every lane promises, through the eyes of a BatchEnv over it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.errors import (
    ActionError,
    CallError,
    EnvError,
    EnvStartError,
    LocalProtocolError,
    UnknownEnv,
)
from envserve.seeding import env_seed, spare_seed
from envserve.spec import flatten, spaces_equal
from tests.oracle.ledger_env import ledger_hash
from tests.oracle.probe_envs import SPACES

from .conftest import MakeBatch

LEDGER = "envserve/Ledger-v0"
ECHO = "envserve/Echo-v0"
FAULTY = "envserve/Faulty-v0"

#: What holds whether or not each row has a spare env.
either = pytest.mark.parametrize("spare_envs", [False, True], ids=["", "spares"])


def zeros(batch: BatchEnv) -> np.ndarray[Any, Any]:
    return np.zeros(batch.num_envs, np.int64)


def failing(batch: BatchEnv, env_index: int) -> np.ndarray[Any, Any]:
    actions = zeros(batch)
    actions[env_index] = 1
    return actions


# Spaces.


def test_every_kind_of_space_makes_the_round_trip(make_batch: MakeBatch) -> None:
    for name, space in SPACES.items():
        batch = make_batch(ECHO, 2, 1, seed=0, env_kwargs={"space": name})
        assert spaces_equal(batch.observation_space, space), name
        assert spaces_equal(batch.action_space, space), name
        first = batch.reset()
        for leaf, array in zip(
            batch.spec.observation_leaves, flatten(space, first), strict=True
        ):
            assert array.shape == (2, *leaf.shape), name
            assert array.dtype == leaf.dtype, name
        result = batch.step(first)
        assert result.valid.all(), (name, result.infos)
        for sent, seen in zip(
            flatten(space, first), flatten(space, result.observation), strict=True
        ):
            np.testing.assert_array_equal(sent, seen)
            assert sent.dtype == seen.dtype
        batch.close()


def test_dict_observations_keep_the_order_of_their_keys(make_batch: MakeBatch) -> None:
    batch = make_batch(ECHO, 2, 1, env_kwargs={"space": "dict"})
    assert list(batch.reset()) == list(SPACES["dict"].spaces)  # type: ignore[attr-defined]


# Steps and episodes.


def test_rewards_and_hashes_answer_the_actions_of_their_own_row(
    make_batch: MakeBatch, random_generator: np.random.Generator
) -> None:
    batch = make_batch(LEDGER, 5, 2, seed=3, env_kwargs={"length": 7})
    observation = batch.reset()
    hashes = [0] * 5
    for _ in range(30):
        actions = random_generator.integers(0, 1000, 5)
        result = batch.step(actions)
        np.testing.assert_array_equal(result.reward, actions)
        hashes = [ledger_hash(h, int(a)) for h, a in zip(hashes, actions, strict=True)]
        ended = (result.terminated | result.truncated)[:, None]
        last = np.where(ended, result.final_observation, result.observation)
        assert last[:, 3].tolist() == hashes
        np.testing.assert_array_equal(result.observation[:, 0], observation[:, 0])


def test_an_ended_episode_gives_its_last_observation_and_the_next_first_one(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(LEDGER, 3, 2, env_kwargs={"length": 2})
    batch.reset()
    first = batch.step(zeros(batch))
    assert not first.terminated.any()
    assert not first.final_observation.any()
    second = batch.step(zeros(batch))
    assert second.terminated.all()
    assert not second.truncated.any()
    assert second.final_observation[:, 1:3].tolist() == [[0, 2]] * 3
    assert second.observation[:, 1:3].tolist() == [[1, 0]] * 3
    batch.step(zeros(batch))
    fourth = batch.step(zeros(batch))
    assert fourth.truncated.all()
    assert not fourth.terminated.any()


def test_next_step_autoreset_resets_in_the_step_after_the_last(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(LEDGER, 2, 1, env_kwargs={"length": 2}, autoreset="next_step")
    batch.reset()
    batch.step(zeros(batch))
    last = batch.step(zeros(batch))
    assert last.observation[:, 1:3].tolist() == [[0, 2]] * 2
    reset = batch.step(np.full(2, 9))
    assert reset.observation[:, 1:3].tolist() == [[1, 0]] * 2
    assert reset.reward.tolist() == [0.0, 0.0]
    assert not (reset.terminated | reset.truncated).any()


def test_disabled_autoreset_asks_for_the_reset_of_ended_envs(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(LEDGER, 2, 1, env_kwargs={"length": 2}, autoreset="disabled")
    batch.reset()
    batch.step(zeros(batch))
    last = batch.step(zeros(batch))
    assert last.observation[:, 1:3].tolist() == [[0, 2]] * 2
    with pytest.raises(LocalProtocolError, match=r"\[0, 1\] have ended"):
        batch.step(zeros(batch))
    batch.reset([0])
    with pytest.raises(LocalProtocolError, match=r"\[1\] have ended"):
        batch.step(zeros(batch))
    batch.reset([1])
    assert batch.step(zeros(batch)).observation[:, 2].tolist() == [1, 1]


def test_reset_of_a_subset_leaves_the_other_rows_alone(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 5, 2, seed=1)
    batch.reset()
    batch.step(zeros(batch))
    observation = batch.reset([3, 1])
    assert observation[:, 1:3].tolist() == [[1, 0], [1, 0]]
    assert observation[:, 0].tolist() == [env_seed(1, 3, 0), env_seed(1, 1, 0)]
    result = batch.step(zeros(batch))
    assert result.observation[:, 2].tolist() == [2, 1, 2, 1, 2]


def test_first_resets_use_the_seeds_that_follow_from_the_root(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(LEDGER, 5, 2, seed=11)
    assert batch.reset()[:, 0].tolist() == [env_seed(11, i, 0) for i in range(5)]


def test_given_seeds_reach_their_rows(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 4, 2)
    assert batch.reset(seeds=[5, 6, 7, 8])[:, 0].tolist() == [5, 6, 7, 8]
    assert batch.reset([2, 0], seeds=[9, 10])[:, 0].tolist() == [9, 10]


def test_results_are_the_callers_to_keep(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 2, 1)
    batch.reset()
    first = batch.step(np.array([1, 2]))
    kept = first.observation.copy()
    batch.step(np.array([3, 4]))
    np.testing.assert_array_equal(first.observation, kept)
    assert first.reward.tolist() == [1.0, 2.0]


def test_out_receives_the_result(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 2, 1)
    batch.reset()
    out = batch.step(np.array([1, 2]))
    result = batch.step(np.array([3, 4]), out=out)
    assert result.reward is out.reward
    assert out.reward.tolist() == [3.0, 4.0]
    assert out.observation[:, 2].tolist() == [2, 2]


def test_infos_come_at_the_end_of_episodes_unless_all_or_none_are_wanted(
    make_batch: MakeBatch,
) -> None:
    seen = {}
    for mode in ("episode_end", "all", "none"):
        batch = make_batch(LEDGER, 2, 1, env_kwargs={"length": 2}, infos=mode)
        batch.reset()
        seen[mode] = [batch.step(zeros(batch)).infos for _ in range(2)]
        batch.close()
    assert seen["none"] == [{}, {}]
    assert seen["episode_end"][0] == {}
    assert seen["episode_end"][1][1]["step"] == 2
    assert seen["episode_end"][1][0]["reset_info"] == {"reset_of_episode": 1}
    weights = seen["all"][0][0]["weights"]
    assert weights.dtype == np.float32
    assert weights.tolist() == [1.0, 1.0]


def test_splits_group_the_blocks_of_every_worker(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 8, 2, num_splits=2)
    blocks = batch.lanes[0].blocks
    assert [(b.start, b.stop, b.worker, b.split) for b in blocks] == [
        (0, 2, 0, 0),
        (2, 4, 1, 0),
        (4, 6, 0, 1),
        (6, 8, 1, 1),
    ]
    batch.reset()
    assert batch.step(zeros(batch)).observation[:, 2].tolist() == [1] * 8


# Actions.


def test_wrong_actions_step_nothing(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 3, 2)
    batch.reset()
    with pytest.raises(ActionError, match=r"expected shape \[3\]"):
        batch.step(np.zeros((3, 1), np.int64))
    with pytest.raises(ActionError, match=r"Env 2.*in \[0, 999\]; got 1000"):
        batch.step(np.array([0, 999, 1000]))
    with pytest.raises(ActionError, match=r"Env 0.*got -1"):
        batch.step(np.array([-1, 0, 0]))
    with pytest.raises(ActionError, match="expected int64; got float64"):
        batch.step(np.zeros(3))
    result = batch.step(np.array([1, 2, 3]))
    assert result.observation[:, 2].tolist() == [1, 1, 1]
    assert result.observation[:, 3].tolist() == [ledger_hash(0, a) for a in (1, 2, 3)]


def test_step_before_the_first_reset_is_refused(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 2, 1)
    with pytest.raises(LocalProtocolError, match=r"reset\(\)"):
        batch.step(zeros(batch))


# Spare envs.


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_the_two_envs_of_a_row_play_in_turns(
    make_batch: MakeBatch, random_generator: np.random.Generator, autoreset: str
) -> None:
    batch = make_batch(
        LEDGER,
        5,
        2,
        seed=3,
        env_kwargs={"length": 3},
        autoreset=autoreset,
        spare_envs=True,
    )
    own = [env_seed(3, row, 0) for row in range(5)]
    seeds = np.array([own, [spare_seed(seed) for seed in own]])
    hashes = np.zeros((2, 5), object)
    assert batch.reset()[:, 0].tolist() == own
    for episode in range(6):
        env = episode % 2
        for _ in range(3):
            actions = random_generator.integers(0, 1000, 5)
            result = batch.step(actions)
            np.testing.assert_array_equal(result.reward, actions)
            for row, action in enumerate(actions):
                hashes[env, row] = ledger_hash(hashes[env, row], int(action))
            ended = (result.terminated | result.truncated)[:, None]
            last = np.where(ended, result.final_observation, result.observation)
            assert last[:, 3].tolist() == list(hashes[env])
            assert last[:, 0].tolist() == seeds[env].tolist()
            assert (last[:, 1] == episode // 2).all()
        assert ended.all()
        first = result.observation
        if autoreset == "next_step":
            first = batch.step(np.full(5, 9)).observation
        assert first[:, 0].tolist() == seeds[1 - env].tolist()
        assert (first[:, 2] == 0).all()


def test_seeds_that_are_given_seed_the_spares_as_well(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 3, 2, env_kwargs={"length": 1}, spare_envs=True)
    batch.reset()
    batch.step(zeros(batch))
    assert batch.reset([2, 0], seeds=[8, 9])[:, 0].tolist() == [8, 9]
    for expected in ([spare_seed(9), spare_seed(8)], [9, 8]):
        result = batch.step(zeros(batch))
        assert result.observation[[0, 2], 0].tolist() == expected


def test_what_is_set_holds_for_the_episodes_that_begin_after_it(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(LEDGER, 2, 1, env_kwargs={"length": 1}, spare_envs=True)
    batch.reset()
    for _ in range(2):
        batch.set_attr("difficulty", [4, 5])
        batch.step(zeros(batch))
        assert batch.get_attr("difficulty") == [4, 5]
        batch.step(zeros(batch))
        assert batch.get_attr("difficulty") == [4, 5]


# Attributes.


@either
def test_attributes_are_called_read_and_set(
    make_batch: MakeBatch, spare_envs: bool
) -> None:
    batch = make_batch(
        LEDGER, 3, 2, env_kwargs={"render_mode": "rgb_array"}, spare_envs=spare_envs
    )
    batch.reset()
    assert batch.get_attr("render_mode") == ["rgb_array"] * 3
    assert batch.get_attr("difficulty") == [1, 1, 1]
    batch.set_attr("difficulty", [4, 5, 6])
    assert batch.get_attr("difficulty") == [4, 5, 6]
    echo = batch.call(1, "echo", 1, "two", {"three": np.arange(3)}, None)
    assert echo[:2] == [1, "two"]
    assert echo[2]["three"].tolist() == [0, 1, 2]
    assert echo[3] is None
    batch.step(zeros(batch))
    image = batch.render(2)
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, np.ones((2, 3, 3)))


def test_a_remote_exception_brings_its_traceback(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 2, 1)
    with pytest.raises(CallError, match=r"Env 1 \(.+\): complain: too dark") as caught:
        batch.call(1, "complain", "too dark")
    assert "raise ValueError(text)\nValueError: too dark" in str(caught.value)
    assert caught.value.env_index == 1
    batch.reset()
    assert batch.step(zeros(batch)).valid.all()


@pytest.mark.parametrize("name", ["_private", "__class__", "no_such_thing"])
def test_attributes_that_are_not_to_be_had_are_errors(
    make_batch: MakeBatch, name: str
) -> None:
    batch = make_batch(LEDGER, 2, 1)
    with pytest.raises(CallError, match=name):
        batch.call(0, name)


def test_an_env_index_out_of_range_is_an_error(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 2, 1)
    with pytest.raises(IndexError, match=r"\[0, 2\); got \[2\]"):
        batch.call(2, "echo")
    with pytest.raises(IndexError, match="each env once"):
        batch.reset([1, 1])


# Faults.


@pytest.mark.parametrize("fault", ["exit", "segfault", "kill"])
@either
def test_a_worker_that_dies_costs_its_rows_one_invalid_transition(
    make_batch: MakeBatch, spare_envs: bool, fault: str
) -> None:
    batch = make_batch(FAULTY, 4, 2, env_kwargs={"fault": fault}, spare_envs=spare_envs)
    batch.reset()
    batch.step(zeros(batch))
    lost = batch.step(failing(batch, 1))
    assert lost.valid.tolist() == [False, False, True, True]
    assert lost.truncated.tolist() == [True, True, False, False]
    assert not lost.terminated.any()
    assert lost.observation[:, 0].tolist() == [0, 0, 2, 2]
    assert lost.infos[0]["fault"]["status"] == "WORKER_DIED"
    again = batch.step(zeros(batch))
    assert again.valid.all()
    assert again.observation[:, 0].tolist() == [1, 1, 3, 3]


@either
def test_an_env_that_raises_costs_its_row_alone(
    make_batch: MakeBatch, spare_envs: bool
) -> None:
    batch = make_batch(
        FAULTY, 4, 2, env_kwargs={"fault": "raise"}, spare_envs=spare_envs
    )
    batch.reset()
    lost = batch.step(failing(batch, 1))
    assert lost.valid.tolist() == [True, False, True, True]
    assert lost.truncated.tolist() == [False, True, False, False]
    fault = lost.infos[1]["fault"]
    assert fault["status"] == "ENV_ERROR"
    assert "RuntimeError: the simulator lost its balance" in fault["text"]
    again = batch.step(zeros(batch))
    assert again.valid.all()
    assert again.observation[:, 0].tolist() == [2, 1, 2, 2]


@either
def test_an_env_that_raises_can_raise_here(
    make_batch: MakeBatch, spare_envs: bool
) -> None:
    batch = make_batch(
        FAULTY,
        2,
        1,
        env_kwargs={"fault": "raise"},
        on_fault="raise",
        spare_envs=spare_envs,
    )
    batch.reset()
    with pytest.raises(EnvError, match="the simulator lost its balance") as caught:
        batch.step(failing(batch, 1))
    assert caught.value.env_index == 1
    assert "Traceback" in caught.value.remote_traceback
    assert batch.step(zeros(batch)).valid.all()


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("segfault", "was killed by SIGSEGV"), ("exit", "exited with code 3")],
)
def test_an_env_whose_worker_dies_can_raise_here(
    make_batch: MakeBatch, fault: str, cause: str
) -> None:
    batch = make_batch(FAULTY, 2, 1, env_kwargs={"fault": fault}, on_fault="raise")
    batch.reset()
    with pytest.raises(EnvError) as caught:
        batch.step(failing(batch, 1))
    assert cause in str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", r"Env 1 \(.+\): expected observation to be finite; got nan"),
        ("inf_reward", r"Env 1 \(.+\): expected a finite reward; got inf"),
        (
            "wrong_shape",
            r"Env 1 \(.+\): expected observation float32\[3\]; got .*\[2\]",
        ),
        ("wrong_dtype", r"Env 1 \(.+\): expected .* float32\[3\]; got float64\[3\]"),
    ],
)
@either
def test_an_env_that_breaks_its_spaces_is_an_error_and_the_batch_goes_on(
    make_batch: MakeBatch, spare_envs: bool, fault: str, message: str
) -> None:
    batch = make_batch(FAULTY, 3, 2, env_kwargs={"fault": fault}, spare_envs=spare_envs)
    batch.reset()
    with pytest.raises(EnvError, match=message):
        batch.step(failing(batch, 1))
    result = batch.step(zeros(batch))
    assert result.valid.all()
    assert result.observation[:, 0].tolist() == [2, 1, 2]


@pytest.mark.parametrize("fault", ["hang", "spin"])
def test_an_env_that_hangs_is_replaced_at_the_step_timeout(
    make_batch: MakeBatch, fault: str
) -> None:
    batch = make_batch(FAULTY, 2, 2, env_kwargs={"fault": fault}, step_timeout=0.3)
    batch.reset()
    lost = batch.step(failing(batch, 1))
    assert lost.valid.tolist() == [True, False]
    assert lost.infos[1]["fault"]["status"] == "TIMEOUT"
    assert "timed out after 0.3 s" in lost.infos[1]["fault"]["text"]
    assert batch.step(zeros(batch)).valid.all()


def test_a_slow_reset_is_not_taken_for_a_hang(make_batch: MakeBatch) -> None:
    batch = make_batch(
        LEDGER, 2, 2, env_kwargs={"length": 2, "reset_seconds": 0.7}, step_timeout=0.3
    )
    batch.reset()
    results = [batch.step(zeros(batch)) for _ in range(3)]
    assert all(result.valid.all() for result in results)
    assert results[1].terminated.all()


def test_an_env_that_cannot_be_built_is_an_error_with_its_traceback(
    make_batch: MakeBatch,
) -> None:
    with pytest.raises(EnvStartError, match="no simulator licence") as caught:
        make_batch(FAULTY, 2, 2, env_kwargs={"fault": "raise_in_init"})
    assert "in __init__" in caught.value.remote_traceback


def test_an_env_that_cannot_be_reset_is_an_error_with_its_traceback(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(FAULTY, 2, 2, env_kwargs={"fault": "raise_in_reset"})
    with pytest.raises(EnvStartError, match="no level to load"):
        batch.reset()


def test_an_env_whose_process_ends_in_its_constructor_is_an_error(
    make_batch: MakeBatch,
) -> None:
    with pytest.raises(EnvStartError, match=r"6 times in a row.*exited with code 7"):
        make_batch(FAULTY, 2, 2, env_kwargs={"fault": "exit_in_init"})


def test_an_env_whose_every_step_kills_its_process_is_given_up(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(FAULTY, 2, 2, env_kwargs={"fault": "exit"})
    batch.reset()
    for _ in range(5):
        assert not batch.step(failing(batch, 0)).valid[0]
    for _ in range(2):
        with pytest.raises(EnvStartError, match=r"6 times in a row"):
            batch.step(failing(batch, 0))


def test_an_unknown_env_is_an_error_with_near_matches(make_batch: MakeBatch) -> None:
    with pytest.raises(UnknownEnv, match=r"mean .*CartPole-v1"):
        make_batch("CartPol-v1", 2)


@either
def test_a_call_that_was_cut_short_does_not_leak_into_the_next(
    make_batch: MakeBatch, spare_envs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(LEDGER, 3, 2, spare_envs=spare_envs)
    batch.reset()
    lane = batch.lanes[0]
    with monkeypatch.context() as patch:

        def interrupt(*_: Any) -> list[Any]:
            lane.is_waiting = True  # as Ctrl-C finds it
            raise KeyboardInterrupt

        patch.setattr(lane, "collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            batch.step(np.array([1, 2, 3]))
    result = batch.step(np.array([4, 5, 6]))
    assert result.reward.tolist() == [4.0, 5.0, 6.0]
    assert result.observation[:, 2].tolist() == [2, 2, 2]


# Closing.


def test_closing_does_not_wait_for_an_env_that_hangs(make_batch: MakeBatch) -> None:
    batch = make_batch(FAULTY, 2, 2, env_kwargs={"fault": "hang_in_close"})
    batch.reset()
    start = time.monotonic()
    batch.close()
    assert time.monotonic() - start < 2.0
    with pytest.raises(LocalProtocolError, match="closed"):
        batch.step(zeros(batch))
    batch.close()


def test_a_batch_tells_what_it_is(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 3, 2)
    assert repr(batch).startswith("<BatchEnv envserve/Ledger-v0, 3 envs: 3 ")
    batch.close()
    assert "closed" in repr(batch)
